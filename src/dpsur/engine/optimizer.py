"""A `torch.optim` optimizer whose `step` is a private step."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

from dpsur.errors import InvalidInputError

if TYPE_CHECKING:
    from dpsur.engine.steps import PrivateLoop

_REFUSED = {
    LBFGS: "evaluates the loss several times per step, so that one batch would be used repeatedly",
    SparseAdam: "takes sparse gradients, to which noise cannot be added",
}


SCHEDULED = (
    "{} sets the learning rate, which a BlockGate searches for and lets decay by itself; leave "
    "that out, or train without a BlockGate"
)


class PrivateOptimizer(Optimizer):
    """What is mixed into the class of an optimizer by `make_private_optimizer`."""

    engine: "PrivateLoop"

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over `max_grad_norm`."""
        return self.engine.noise_multiplier

    @property
    def max_grad_norm(self) -> float:
        """The norm that each record's gradient is clipped to."""
        return self.engine.max_grad_norm

    @property
    def expected_batch_size(self) -> float:
        """What the sum of clipped gradients is divided by."""
        return self.engine.expected_batch_size

    @property
    def original_optimizer(self) -> Optimizer:
        """The optimizer itself, which is not wrapped."""
        return self

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip, add noise, charge, and step; nothing for a microbatch that is not the last."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.make_step()
        return loss

    def plain_step(self) -> None:
        """The step of the original class, along what stands in `.grad`."""
        super().step()


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is no optimizer, or one that cannot make private steps."""
    if not isinstance(optimizer, Optimizer):
        raise InvalidInputError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    for kind, why in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise InvalidInputError(f"{kind.__name__} {why}; use torch.optim.SGD, Adam or AdamW")
    if isinstance(optimizer, PrivateOptimizer):
        raise InvalidInputError(
            "this optimizer is private already; build a new one for another make_private"
        )


def make_private_optimizer(optimizer: Optimizer, engine: "PrivateLoop") -> Optimizer:
    """Make an optimizer private in place: the same object, groups, state and schedulers."""
    kind = type(optimizer)
    private = type(f"Private{kind.__name__}", (PrivateOptimizer, kind), {})
    wrapped = vars(optimizer).pop("step", None)  # by a scheduler that was built before
    optimizer.__class__ = private
    optimizer.engine = engine  # type: ignore[attr-defined]
    # `torch.optim` has its hooks and profiler around the step of the original class
    private.step.hooked = True  # type: ignore[attr-defined]
    _wrap_schedulers(LRScheduler)
    if getattr(wrapped, "_wrapped_by_lr_sched", False):
        _let_schedulers_know(optimizer)
    return optimizer


def _wrap_schedulers(kind: type[LRScheduler]) -> None:
    """Let schedulers of a private optimizer do nothing after a step that was skipped or undone."""
    plain = vars(kind).get("step")
    if plain is not None and not hasattr(plain, "asks_the_engine"):

        @functools.wraps(plain)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = getattr(self, "optimizer", None)
            if isinstance(optimizer, PrivateOptimizer) and optimizer.engine.sets_learning_rate:
                raise InvalidInputError(SCHEDULED.format(type(self).__name__))
            if (
                isinstance(optimizer, PrivateOptimizer)
                and not optimizer.engine.scheduler_due
                and not getattr(self, "_is_initial", False)
            ):
                return None
            return plain(self, *args, **kwargs)

        step.asks_the_engine = True  # type: ignore[attr-defined]
        kind.step = step  # type: ignore[method-assign]
    for child in kind.__subclasses__():
        _wrap_schedulers(child)


def _let_schedulers_know(optimizer: Optimizer) -> None:
    """Wrap the step as schedulers do, so that they know that it was called before theirs."""
    private = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return private(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
