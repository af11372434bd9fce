"""What every example's gradient is multiplied by."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """One factor per example. `keep` None: no example has to be dropped."""

    values: Tensor
    keep: Tensor | None

    @cached_property
    def _dropped(self) -> Tensor | None:
        return None if self.keep is None else ~self.keep

    @cached_property
    def _zero(self) -> Tensor:
        return self.values.new_zeros(())

    def part(self, some: slice) -> "Factors":
        """The factors of some of the examples."""
        return Factors(self.values[some], None if self.keep is None else self.keep[some])

    def scale(self, rows: Tensor) -> Tensor:
        """Multiply every example by its factor; a dropped one becomes zero whatever it holds."""
        shape = (-1, *[1] * (rows.dim() - 1))
        scaled = rows * self.values.view(shape).to(rows.dtype)
        # zero times infinity is NaN: a dropped example must be replaced, not multiplied
        return (
            scaled if self._dropped is None else scaled.masked_fill_(self._dropped.view(shape), 0)
        )

    def clean(self, rows: Tensor) -> Tensor:
        """Replace dropped examples by zero and leave the others alone."""
        if self.keep is None:
            return rows
        keep = self.keep.view(-1, *[1] * (rows.dim() - 1))
        return torch.where(keep, rows, self._zero.to(rows.dtype))


def clip_factors(
    norms: Tensor,
    max_grad_norm: float,
    keep: Tensor | None,
    coins: Tensor | None = None,
) -> Factors:
    """Factor per example: min(1, bound / norm), and 0 where the norm is not finite.

    It is 0 as well where the norm is so large that the factor would be no normal number: rounding
    such a one could double it.
    With `coins`, uniform draws in (0, 1], a clipped gradient is rounded at random to the norm 0 or
    the bound, so that its mean stays what it is.
    """
    number = torch.finfo(norms.dtype)
    most = max_grad_norm / (2 * number.tiny)
    usable = norms < (most if most < number.max else torch.inf)  # with NaN a comparison is false
    usable = usable if keep is None else usable & keep
    clipped = norms.reciprocal().mul_(max_grad_norm)
    if coins is None:
        clipped = clipped.clamp_(max=1.0)
    else:
        usable = usable & (coins * max_grad_norm < norms)
    values = clipped.masked_fill_(~usable, 0.0)
    # Asking whether all are usable costs nothing on the CPU and would stall any other device.
    if usable.device.type == "cpu" and bool(usable.all()):
        return Factors(values, None)
    return Factors(values, usable)
