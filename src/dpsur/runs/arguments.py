"""What a run is asked to do, checked before its records are looked at."""

import math
import os
from numbers import Integral
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from dpsur.errors import InvalidInputError, UnsupportedModelError
from dpsur.methods import METHODS, Method, Nonprivate
from dpsur.privacy.budget import Budget
from dpsur.runs.session import Pace, Speed


def check_single_process() -> None:
    """Refuse to be one of several processes: each would train, and spend, by itself."""
    given = os.environ.get("WORLD_SIZE", "1")
    if given.isdecimal() and int(given) > 1:
        raise InvalidInputError(
            f"WORLD_SIZE is {given}: a run takes one process, and several (torchrun) would each "
            "spend the budget on a model of its own; start it without torchrun, or unset WORLD_SIZE"
        )


def check_options(pace: Any, speed: Any, observers: Any, out: Any) -> None:
    """Refuse options of `fit` that are of another kind."""
    for name, value, kind in (("pace", pace, Pace), ("speed", speed, Speed)):
        if value is not None and not isinstance(value, kind):
            raise InvalidInputError(
                f"{name} must be a dpsur.{kind.__name__}, got {_told(value)}; "
                f"write dpsur.{kind.__name__}()"
            )
    if out is not None and not isinstance(out, (str, os.PathLike)):
        raise InvalidInputError(f"out must be a path, got {_told(out)}; write out='folder'")
    if not isinstance(observers, (list, tuple)):
        raise InvalidInputError(f"observers must be a list, got {_told(observers)}; write [it]")
    for observer in observers:
        missing = [
            name
            for name in ("started", "trials", "evaluated")
            if not callable(getattr(observer, name, None))
        ]
        if isinstance(observer, type) or missing:
            raise InvalidInputError(
                f"observers must have the methods started, trials and evaluated, got "
                f"{_told(observer)}; pass an instance of a class like dpsur.Observer"
            )


def _told(value: Any) -> str:
    """A value in a message: classes by their names, and nothing long."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__


def check_arguments(model: Any, loss: Any, budget: Any, method: Any, seed: Any) -> None:
    """Refuse what is not of the kind that is asked for, and name the remedy."""
    _check_method(method)
    _check_budget(budget, method)
    _check_loss(loss)
    if seed is not None and not isinstance(seed, Integral):
        raise InvalidInputError(
            f"seed must be a whole number or None, got {seed!r} ({type(seed).__name__})"
        )
    check_module(model)


def _check_method(method: Any) -> None:
    if isinstance(method, Method):
        return
    known = ", ".join(f"dpsur.{kind.__name__}()" for kind in METHODS.values())
    given = _told(method)
    raise InvalidInputError(
        f"method must be an instance of a method, got {given}; choose one of {known}"
    )


def _check_budget(budget: Any, method: Method) -> None:
    if not isinstance(budget, Budget):
        raise InvalidInputError(
            f"budget must be a dpsur.Budget, got {_told(budget)}; "
            "write dpsur.Budget(epsilon=3.0, delta=1e-5)"
        )
    if math.isinf(budget.epsilon) and not isinstance(method, Nonprivate):
        raise InvalidInputError(
            f"epsilon {budget.epsilon} is no budget that method {method.name} could be fitted to; "
            f"give a finite one, or choose the method {Nonprivate.name}"
        )


def _check_loss(loss: Any) -> None:
    example = "a function such as F.cross_entropy or a module such as nn.CrossEntropyLoss()"
    if isinstance(loss, type):
        raise InvalidInputError(
            f"loss is the class {loss.__name__}, not a loss; make one of it: {loss.__name__}()"
        )
    if not callable(loss):
        raise InvalidInputError(f"loss must be {example}, got {_told(loss)}")


def check_module(model: Any) -> None:
    """Refuse what is no network, or one whose weights are not there or have sparse gradients."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise UnsupportedModelError(
            f"the model must be a torch.nn.Module, got {given}; build the network and pass it in"
        )
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise UnsupportedModelError(
                f"{name} has no shape yet, as in lazy modules; call the model once on inputs of "
                "the right shape before it is passed in"
            )
        if value.is_meta:
            raise UnsupportedModelError(
                f"{name} is on the device meta and holds no numbers; build the model on the cpu, "
                "or use model.to_empty(device='cpu') and initialise it"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UnsupportedModelError(
                f"module {name or '(root)'} ({type(module).__name__}) makes sparse gradients, to "
                "which noise cannot be added; build it with sparse=False"
            )
