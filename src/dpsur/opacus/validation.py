"""`ModuleValidator`: checks and repairs of models under the names of Opacus."""

import logging
from typing import Any

from torch import nn

from dpsur.errors import InvalidInputError, UnsupportedModelError
from dpsur.per_example.check_and_fix import check, fix

_log = logging.getLogger("dpsur.opacus")

# One error stands for all of those of Opacus, so that programs that catch any of them do.
UnsupportedError = UnsupportedModuleError = UnsupportableModuleError = UnsupportedModelError
NotYetSupportedModuleError = ShouldReplaceModuleError = UnsupportedModelError
IllegalModuleConfigurationError = UnsupportedModelError


class ModuleValidator:
    """Checks of a model before training; `dpsur.check` and `dpsur.fix` say more."""

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModelError]:
        """The errors of a model; raises the first one if `strict` is set."""
        errors = [UnsupportedModelError(str(one)) for one in check(module).errors]
        if strict and errors:
            raise errors[0]
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        """Whether nothing is wrong with a model."""
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, **options: Any) -> nn.Module:
        """A repaired copy of a model: GroupNorm for BatchNorm, or `batch_norm="frozen"`.

        Each change is logged.
        """
        for name in options:
            if name != "batch_norm":
                raise InvalidInputError(
                    f"ModuleValidator.fix has no option {name}; BatchNorm becomes GroupNorm, or "
                    'keeps its statistics with batch_norm="frozen": for other layers change the '
                    "model itself"
                )
        repaired, changes = fix(module, **options)
        for change in changes:
            _log.info("dpsur: %s", change)
        return repaired

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **options: Any) -> nn.Module:
        """A repaired copy; raises if something is left that cannot be repaired."""
        repaired = cls.fix(module, **options)
        cls.validate(repaired, strict=True)
        return repaired
