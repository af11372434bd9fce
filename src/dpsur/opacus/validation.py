"""`ModuleValidator`: checks and repairs of models under the names of Opacus."""

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpsur.errors import InvalidInputError, UnsupportedModelError
from dpsur.per_example.check_and_fix import check, fix

_log = logging.getLogger("dpsur.opacus")

# One error stands for all of those of Opacus, so that programs that catch any of them do.
UnsupportedError = UnsupportedModuleError = UnsupportableModuleError = UnsupportedModelError
NotYetSupportedModuleError = ShouldReplaceModuleError = UnsupportedModelError
IllegalModuleConfigurationError = UnsupportedModelError

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE = {  # what takes the place of a BatchNorm with replace_bn_with_in=True
    nn.BatchNorm1d: nn.InstanceNorm1d,
    nn.BatchNorm2d: nn.InstanceNorm2d,
    nn.BatchNorm3d: nn.InstanceNorm3d,
}
Validator = Callable[[nn.Module], list[UnsupportedModelError]]
Fixer = Callable[..., nn.Module]


class ModuleValidator:
    """Checks of a model before training; `dpsur.check` and `dpsur.fix` say more.

    `VALIDATORS` and `FIXERS` are functions by the class of a module: those of BatchNorm, and what a
    program registers. They are asked before `dpsur.check` and `dpsur.fix`.
    """

    VALIDATORS: dict[type[nn.Module], Validator]
    FIXERS: dict[type[nn.Module], Fixer]

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModelError]:
        errors = []
        if not module.training:
            errors.append(UnsupportedModelError("the model is in evaluation mode; call train()"))
        for part in module.modules():
            if type(part) in cls.VALIDATORS and type(part) not in _NORMS:
                errors += cls.VALIDATORS[type(part)](part)
        errors += _problems(module)
        if strict and errors:
            raise errors[0]
        return errors

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, **options: Any) -> nn.Module:
        """A repaired copy of a model.

        GroupNorm takes the place of BatchNorm; `num_groups` says with how many groups,
        `replace_bn_with_in=True` uses InstanceNorm, `batch_norm="frozen"` keeps the statistics.
        Each change is logged.
        """
        frozen = options.pop("batch_norm", "group")
        model = copy.deepcopy(module)
        for path, part in list(model.named_modules()):
            if type(part) not in cls.FIXERS or (type(part) in _NORMS and not options):
                continue
            new = cls.FIXERS[type(part)](part, **options)
            _log.info("dpsur: Replaced sub_module %s : %s with %s", path, part, new)
            if path:
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, new)
            else:
                model = new
        repaired, changes = fix(model, batch_norm=frozen)
        for change in changes:
            _log.info("dpsur: %s", change)
        return repaired

    @classmethod
    def fix_and_validate(cls, module: nn.Module, **options: Any) -> nn.Module:
        repaired = cls.fix(module, **options)
        cls.validate(repaired, strict=True)
        return repaired


def register_module_validator(
    kinds: type[nn.Module] | Sequence[type[nn.Module]], validator_class: Any = ModuleValidator
) -> Callable[[Validator], Validator]:
    """Have a function find what is wrong with modules of these classes."""

    return partial(_register, validator_class.VALIDATORS, kinds)


def register_module_fixer(
    kinds: type[nn.Module] | Sequence[type[nn.Module]], validator_class: Any = ModuleValidator
) -> Callable[[Fixer], Fixer]:
    """Have a function replace modules of these classes."""

    return partial(_register, validator_class.FIXERS, kinds)


def _register(known: dict[type[nn.Module], Any], kinds: Any, function: Any) -> Any:
    known |= dict.fromkeys(kinds if isinstance(kinds, Sequence) else (kinds,), function)
    return function


def _problems(module: nn.Module) -> list[UnsupportedModelError]:
    return [UnsupportedModelError(str(one)) for one in check(module).errors]


def _norm(
    norm: _BatchNorm,
    *,
    replace_bn_with_in: bool = False,
    num_groups: int | None = None,
    **others: Any,
) -> nn.Module:
    if others:
        raise InvalidInputError(
            f"ModuleValidator.fix has no option {next(iter(others))}; it has num_groups, "
            'replace_bn_with_in and batch_norm="frozen": for other layers change the model itself'
        )
    channels = norm.num_features
    if not replace_bn_with_in:
        if num_groups is None:
            return fix(norm).model
        if channels % num_groups:
            raise InvalidInputError(
                f"num_groups={num_groups} does not divide the {channels} channels of a "
                f"{type(norm).__name__}; leave it out, or use a divisor"
            )
        return _like(norm, nn.GroupNorm(num_groups, channels, norm.eps, norm.affine))
    if num_groups is not None or type(norm) not in _INSTANCE:
        raise InvalidInputError(
            f"replace_bn_with_in=True is not possible for {type(norm).__name__} or together with "
            "num_groups; use num_groups alone, or neither"
        )
    return _like(norm, _INSTANCE[type(norm)](channels, norm.eps, affine=norm.affine))


def _like(norm: _BatchNorm, new: nn.Module) -> nn.Module:
    if norm.affine:
        new.load_state_dict({"weight": norm.weight, "bias": norm.bias})
        new.to(norm.weight.device, norm.weight.dtype)
    return new.train(norm.training)


ModuleValidator.VALIDATORS = dict.fromkeys(_NORMS, _problems)
ModuleValidator.FIXERS = dict.fromkeys(_NORMS, _norm)
