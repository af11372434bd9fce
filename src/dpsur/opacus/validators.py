"""`ModuleValidator`: checks and repairs of models under the names of Opacus."""

from typing import Any

from torch import nn

from dpsur.errors import UnsupportedModelError
from dpsur.per_example.check_and_fix import check, fix


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
    def fix(cls, module: nn.Module, **_: Any) -> nn.Module:
        """A repaired copy of a model, such as with GroupNorm in the place of BatchNorm."""
        return fix(module).model

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **options: Any) -> nn.Module:
        """A repaired copy; raises if something is left that cannot be repaired."""
        repaired = cls.fix(module, **options)
        cls.validate(repaired, strict=True)
        return repaired
