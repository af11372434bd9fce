"""What stands in `.grad` in a custom loop: only the private gradient may reach the optimizer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpsur.engine.sharding import Sharding
from dpsur.errors import StepError
from dpsur.functional.tree import Params


class Gradients:
    """What stands in `.grad`: zeros after a backward pass, the private gradient after a step."""

    def __init__(self, trained: dict[str, nn.Parameter]) -> None:
        self._trained = trained
        self._grads: dict[str, tuple[Tensor, int]] = {}

    def mark(self, unwatched: str | None) -> None:
        """Put zeros into `.grad`, where other code that clips or adds gradients leaves a trace."""
        self.check(unwatched, cleared=True)
        self._put(torch._foreach_zero_)

    def check(self, unwatched: str | None, *, cleared: bool = False) -> None:
        """Refuse gradients that do not come from the clipped sum, or that were changed."""
        for name, value in self._trained.items():
            grad = value.grad
            if grad is None:
                if cleared:
                    continue
                raise StepError(
                    "gradients were cleared between backward() and step(); call zero_grad() "
                    "before the forward pass"
                )
            ours, version = self._grads.get(name, (None, 0))
            if grad is not ours:
                raise StepError(
                    f"parameter {name} has a gradient that was not clipped per record: "
                    + (unwatched or "it was used outside of the model's own call")
                )
            if not cleared and grad._version != version:
                raise StepError(
                    f"the gradient of {name} was changed between backward() and step() (by "
                    "clip_grad_norm_, a GradScaler or another library); remove that: the private "
                    "gradient is made in step() and is clipped per record already"
                )

    def check_others(self, optimizer: Optimizer) -> None:
        """Refuse gradients of parameters that are not trained here: they have no noise."""
        trained = {id(value) for value in self._trained.values()}
        for group in optimizer.param_groups:
            for value in group["params"]:
                if id(value) in trained or value.grad is None or not value.grad.any():
                    continue
                raise StepError(
                    f"the optimizer has a parameter of shape {tuple(value.shape)} that was added "
                    "or frozen, with a gradient that is neither clipped nor noisy; give it another "
                    "optimizer, or build the model first, then call make_private"
                )

    def write(self, gradients: Params, sharding: Sharding | None) -> None:
        """Hand the private gradient to the optimizer."""

        def copy(grads: list[Tensor]) -> None:
            if sharding is None:
                torch._foreach_copy_(grads, [gradients[name] for name in self._trained])
                return
            for name, grad in zip(self._trained, grads, strict=True):
                grad.copy_(sharding.distribute(name, gradients[name]))

        self._put(copy)

    def _put(self, fill: Callable[[list[Tensor]], None]) -> None:
        """Fill all gradients at once, and note what they are now."""
        grads = [
            self._grads[name][0] if name in self._grads else torch.zeros_like(value)
            for name, value in self._trained.items()
        ]
        fill(grads)
        for (name, value), grad in zip(self._trained.items(), grads, strict=True):
            if value.grad is not grad:
                value.grad = grad
            self._grads[name] = grad, grad._version
