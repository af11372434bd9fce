"""How one parameter is used in a forward pass, and what that says about per-example gradients.

A use knows the squared norm of every example's gradient and any weighted sum of these gradients. It
forms the gradients themselves only where their shapes make that the cheaper way.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

# Moving one number to memory and back costs about as much as this many multiplications.
MEMORY_COST = 16

# Below this part of the largest possible value a squared norm is taken to suffer from cancellation.
CANCELLED = 1e-2


@dataclass(frozen=True)
class Factors:
    """What every example's gradient is multiplied by. `keep` None: no example has to be dropped."""

    values: Tensor
    keep: Tensor | None

    def scale(self, rows: Tensor) -> Tensor:
        """Multiply every example by its factor; a dropped one becomes zero whatever it holds."""
        shape = (-1, *[1] * (rows.dim() - 1))
        scaled = rows * self.values.view(shape).to(rows.dtype)
        # zero times infinity is NaN: a dropped example must be replaced, not multiplied
        return scaled if self.keep is None else torch.where(self.keep.view(shape), scaled, 0.0)

    def clean(self, rows: Tensor) -> Tensor:
        """Replace dropped examples by zero and leave the others alone."""
        if self.keep is None:
            return rows
        return torch.where(self.keep.view(-1, *[1] * (rows.dim() - 1)), rows, 0.0)


class Use(ABC):
    """One use of one parameter (or of some of its rows) by a batch of examples."""

    @abstractmethod
    def square_norms(self) -> Tensor:
        """Squared norm of every example's gradient."""

    @abstractmethod
    def weighted_sum(self, factors: Factors) -> Tensor:
        """Sum of the examples' gradients, each times its factor, in the parameter's shape."""

    @abstractmethod
    def per_example(self) -> Tensor:
        """Every example's gradient, one row each."""

    def products(self) -> "Products | None":
        """The same use as a sum of outer products, if it is one."""
        return None

    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What this use keeps in memory."""


@dataclass(frozen=True)
class Rows(Use):
    """Gradients that are simply there, one row per example. `shape` is the parameter's."""

    rows: Tensor

    def square_norms(self) -> Tensor:
        """Add up squares without a copy of the rows."""
        return squares(self.rows)

    def weighted_sum(self, factors: Factors) -> Tensor:
        """One matrix-vector product."""
        flat = factors.clean(self.rows.reshape(len(self.rows), -1))
        return (factors.values.to(flat.dtype) @ flat).view(self.rows.shape[1:])

    def per_example(self) -> Tensor:
        """The rows."""
        return self.rows

    def tensors(self) -> tuple[Tensor, ...]:
        """The rows."""
        return (self.rows,)


@dataclass(frozen=True)
class Products(Use):
    """Gradients that are sums of outer products over positions: outputs^T inputs.

    `inputs` has the shape (examples, positions, in), `outputs` (examples, positions, out).
    """

    inputs: Tensor
    outputs: Tensor

    def square_norms(self) -> Tensor:
        """Norms from inner products alone: |sum_t g_t x_t^T|^2 = sum_st (x_s.x_t)(g_s.g_t)."""
        if self.inputs.shape[1] == 1:
            return squares(self.inputs) * squares(self.outputs)
        inner = torch.bmm(self.inputs, self.inputs.mT)
        outer = torch.bmm(self.outputs, self.outputs.mT)
        terms = self.inputs.shape[2] + self.outputs.shape[2] + self.inputs.shape[1]
        return guarded_square_norms(inner, outer, terms)

    def weighted_sum(self, factors: Factors) -> Tensor:
        """One product of two matrices, the factors folded into the smaller one."""
        inputs, outputs = self.inputs, self.outputs
        if inputs.shape[2] < outputs.shape[2]:
            inputs, outputs = factors.scale(inputs), factors.clean(outputs)
        else:
            inputs, outputs = factors.clean(inputs), factors.scale(outputs)
        return outputs.flatten(0, 1).mT @ inputs.flatten(0, 1)

    def per_example(self) -> Tensor:
        """One small matrix product per example."""
        return torch.bmm(self.outputs.mT, self.inputs)

    def products(self) -> "Products":
        """This one."""
        return self

    def tensors(self) -> tuple[Tensor, ...]:
        """Both factors."""
        return (self.inputs, self.outputs)

    def cheapest(self) -> Use:
        """Form the gradients now where that is cheaper than inner products; shapes decide."""
        positions, width, height = (
            self.inputs.shape[1],
            self.inputs.shape[2],
            self.outputs.shape[2],
        )
        if instantiating_pays(positions, width, height):
            return Rows(self.per_example())
        return self


def instantiating_pays(positions: int, width: int, height: int) -> bool:
    """Whether gradients of width x height cost less than inner products between positions.

    Gradients that are there also give the weighted sum for nothing but reading them once.
    """
    inner_products = positions**2 * (width + height + MEMORY_COST)
    return positions > 1 and MEMORY_COST * width * height < inner_products


def guarded_square_norms(inner: Tensor, outer: Tensor, terms: int) -> Tensor:
    """Squared norms of sum_t g_t x_t^T from inner products x_s.x_t and g_s.g_t, never too small.

    Where large positions nearly cancel, the sum is mostly rounding error and may even come out
    negative: a record made for it would pass the clip unclipped. The error is at most a small
    multiple of the unit in the last place of (sum_t |x_t| |g_t|)^2. Where that could matter it is
    added, so that such a record is clipped harder than it need be, never less. `terms` is how many
    products are added up for one entry.
    """
    square = (inner * outer).flatten(1).sum(1)
    sizes = inner.diagonal(dim1=1, dim2=2) * outer.diagonal(dim1=1, dim2=2)
    whole = sizes.clamp(min=0).sqrt().sum(1).square()
    slack = 8 * torch.finfo(square.dtype).eps * terms**0.5 * whole
    return torch.where(square < CANCELLED * whole, square.clamp(min=0) + slack, square)


def squares(rows: Tensor) -> Tensor:
    """Squared norm of every row."""
    norms: Tensor = torch.linalg.vector_norm(rows.reshape(len(rows), -1), dim=1)
    return norms.square()


def combined(uses: list[Use]) -> Use:
    """Several uses of one parameter as one, for norms: their gradients add up before the norm."""
    if len(uses) == 1:
        return uses[0]
    products = [use.products() for use in uses]
    if all(product is not None for product in products):
        found = [product for product in products if product is not None]
        return Products(
            torch.cat([product.inputs for product in found], 1),
            torch.cat([product.outputs for product in found], 1),
        ).cheapest()
    total = uses[0].per_example()
    for use in uses[1:]:
        total = total + use.per_example().view_as(total)
    return Rows(total)


def wide(values: Tensor) -> Tensor:
    """Norms and sums are never taken in half precision."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def split(values: Tensor, dimension: int, sizes: tuple[int, int]) -> Tensor:
    """View one dimension as two; one of their sizes may be -1."""
    dimension %= values.dim()
    return values.reshape(*values.shape[:dimension], *sizes, *values.shape[dimension + 1 :])
