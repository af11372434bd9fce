"""What a layer contributes to the gradient of each example, in factored form, and norms of it.

A layer hands in either norms or, where gradients are never formed, inner products. What remains to
be done for the latter is done for all layers at once: for small networks the number of operations
counts, not their size.

Norms are never too small. A record is free to choose numbers whose squares vanish in floating point
and whose products with other numbers do not: every norm has what can be lost that way added to it,
which leaves ordinary norms as they are, to the last bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dpsur.functional.process_settings import widen
from dpsur.per_example.kernels import products as tensor_cores
from dpsur.per_example.kernels.fused import product_norms, weighted_rows
from dpsur.per_example.kernels.products import batched_product, weighted_product

# From this part of a squared norm on its error is taken into account.
TOLERATED = 4e-3


@dataclass(frozen=True)
class InnerNorms:
    """Squared norms of sum_t g_t x_t^T as sums of inner products, one per example.

    `errors` bounds what rounding may have done to them: an error of x_s.x_t, relative to
    |x_s| |x_t|, is multiplied by g_s.g_t, and the other way round. `terms` is how many products
    were added up for one entry: the widths of x and g and the number of positions t, together.
    """

    squares: Tensor
    errors: Tensor
    terms: int

    @staticmethod
    def of(inner: Tensor, outer: Tensor, terms: int) -> "InnerNorms":
        """From x_s.x_t and g_s.g_t: |sum_t g_t x_t^T|^2 = sum_st (x_s.x_t)(g_s.g_t).

        Let d, h be the widths, T the positions and m the smallest normal number. Underflow takes at
        most d m from x_s.x_t, h m from g_s.g_t and m from their product: from the whole sum at most
        m (d (sum_t |g_t|)^2 + h (sum_t |x_t|)^2 + T^2), but for terms in m^2. The squares of sums
        are at most T sum_t |g_t|^2 and T sum_t |x_t|^2, and (d + h) T <= terms^2 / 4. This is added
        here; m T^2, and what vanishes on the way, is left to `whole_norms`.
        """
        lost = lost_to_underflow(terms**2, inner.dtype) ** 2
        squares = (inner * outer).sum((1, 2))
        inputs, outputs = inner.diagonal(dim1=1, dim2=2), outer.diagonal(dim1=1, dim2=2)
        squares.add_((inputs + outputs).sum(1), alpha=lost)
        scale = _between(inner, outputs) + _between(outer, inputs)
        return InnerNorms(squares, scale.mul_(rounding(terms, inner.dtype)), terms)

    @staticmethod
    def of_factors(inputs: Tensor, outputs: Tensor) -> "InnerNorms":
        """From x_t and g_t, (examples, positions, width) each."""
        terms = inputs.shape[2] + outputs.shape[2] + inputs.shape[1]
        kind = widen(inputs[:0]).dtype
        lost = lost_to_underflow(terms**2, kind) ** 2
        found = product_norms(inputs, outputs, lost, rounding(terms, kind))
        if found is not None:
            return InnerNorms(*found, terms)
        inner = batched_product(inputs, inputs.mT)
        return InnerNorms.of(inner, batched_product(outputs, outputs.mT), terms)

    @staticmethod
    def concatenate(parts: "Sequence[InnerNorms]") -> "InnerNorms":
        if len(parts) == 1:
            return parts[0]
        return InnerNorms(
            torch.cat([part.squares for part in parts]),
            torch.cat([part.errors for part in parts]),
            parts[0].terms,
        )


Measure = Tensor | InnerNorms


def whole_norms(measures: Sequence[Measure], entries: int) -> Tensor:
    """Norm of every example's whole gradient, whose disjoint parts were measured.

    `entries` is the number of parameters. What underflow took from the parts, squares of entries in
    norms and squares of whole positions in inner products, is added once: norms of parts that are
    each short by some amount are together short by at most the norm of these amounts.
    """
    norms = [measure for measure in measures if isinstance(measure, Tensor)]
    inner = [measure for measure in measures if isinstance(measure, InnerNorms)]
    parts = torch.stack(norms) if norms else None
    if inner:
        squares = torch.stack([one.squares for one in inner])
        roots = guard(squares, torch.stack([one.errors for one in inner])).sqrt_()
        parts = roots if parts is None else torch.cat([parts, roots])
    assert parts is not None
    if parts.device.type == "cpu":  # where `vector_norm` is slow
        total = parts.square_().sum(0).sqrt_()
    else:
        total = torch.linalg.vector_norm(parts, dim=0)
    positions = sum(one.terms**2 for one in inner)
    return total.add_(lost_to_underflow(entries + len(parts) + positions, total.dtype))


def _between(products: Tensor, squares: Tensor) -> Tensor:
    """sum_st |products_st| |v_s| |v_t|, from the squared norms of v."""
    norms = squares.sqrt().unsqueeze(2)
    return torch.bmm(norms.mT, torch.bmm(products.abs(), norms))[:, 0, 0]


def rounding(terms: int, dtype: torch.dtype) -> float:
    """A bound on the relative error of an inner product: a few dozen units in the last place."""
    return float(8 * torch.finfo(dtype).eps * terms**0.5)


def guard(squares: Tensor, errors: Tensor) -> Tensor:
    """Squared norms that are never too small by more than a fraction of a percent.

    Where large positions nearly cancel, the sum is mostly rounding error and may even come out
    negative: a record made for it would pass the clip unclipped. Where an error could matter it is
    added, so that such a record is clipped harder than it need be, never less.
    """
    # A negative sum is rounding error too, or an overflow, which has to stay one. So has an error
    # that is not a number (zero times an overflow): only what is known to be small is left out.
    return torch.where(errors <= TOLERATED * squares, squares, squares.abs() + errors)


def part_norms(rows: Tensor) -> Tensor:
    """Norm of every row, for `whole_norms`: what underflow takes from it is added there."""
    flat = rows.reshape(len(rows), -1)
    if flat.shape[1] == 1:  # would not be squared, and so not overflow where others do
        return widen(flat[:, 0]).square().sqrt_()
    norms: Tensor = torch.linalg.vector_norm(flat, dim=1, dtype=widen(flat[:0]).dtype)
    return norms


def row_norms(rows: Tensor) -> Tensor:
    """Norm of every row, never too small: safe to multiply by another."""
    norms = part_norms(rows)
    return norms.add_(lost_to_underflow(rows[:1].numel(), norms.dtype))


def lost_to_underflow(count: int, dtype: torch.dtype) -> float:
    """The most that the norm of so many numbers can lack because squares vanished.

    A square below the smallest normal number m is rounded, or flushed to zero: either way less than
    m is lost. The sum of n squares lacks at most n m, and its root at most sqrt(n m).
    """
    return float((count * torch.finfo(dtype).tiny) ** 0.5)


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
    max_grad_norm: float | Tensor,
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
    if not isinstance(most, Tensor):  # one on the device becomes infinite by itself
        most = most if most < number.max else torch.inf
    usable = norms < most  # with NaN a comparison is false
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


# Outputs of so many numbers are worth a kernel of their own, which takes a second to compile.
LARGE_OUTPUT = 2**18
# Moving one number to memory and back costs about as much as this many multiplications.
MEMORY_COST = 16


class Contribution(ABC):
    """One use of one parameter by a batch of examples."""

    @abstractmethod
    def measure(self) -> Measure:
        """The norms of the examples' gradients, or the inner products that give them."""

    @abstractmethod
    def weighted_sum(self, factors: Factors) -> Tensor:
        """Sum of the examples' gradients, each times its factor, in the parameter's shape."""

    def weighted_sum_into(self, place: Tensor, factors: Factors, *, add: bool = False) -> Tensor:
        """The same sum, in memory of the parameter's shape and type, or added to what is there."""
        found = self.weighted_sum(factors).view_as(place)
        return place.add_(found) if add else place.copy_(found)

    @abstractmethod
    def per_example(self) -> Tensor:
        """Every example's gradient, one row each."""

    def products(self) -> "Products | None":
        """The same use as a sum of outer products, if it is one."""
        return None

    def beside(self, other: "Contribution") -> "Rows | InnerNorms | None":  # noqa: ARG002
        """Gradients or norms of this use and another one, if there is a better way than adding."""
        return None

    def tensors(self) -> list[Tensor]:
        held = [one.values if isinstance(one, Output) else one for one in vars(self).values()]
        return [one for one in held if isinstance(one, Tensor)]


@dataclass(frozen=True)
class Rows(Contribution):
    """Gradients that are simply there, one row per example; `squares`: norms, if known already.

    Rows may be stored in bfloat16. Their norms and sums are those of what is stored, in float32.
    """

    rows: Tensor
    squares: Tensor | None = None

    def measure(self) -> Tensor:
        return part_norms(self.rows) if self.squares is None else self.squares.sqrt()

    def weighted_sum(self, factors: Factors) -> Tensor:
        flat = self.rows.reshape(len(self.rows), -1)
        found = weighted_rows(flat, factors.values)
        if found is not None:
            return found.view(self.rows.shape[1:])
        flat = factors.clean(widen(flat))
        return (factors.values.to(flat.dtype) @ flat).view(self.rows.shape[1:])

    def per_example(self) -> Tensor:
        return widen(self.rows)


@dataclass(frozen=True)
class Products(Contribution):
    """Gradients that are sums of outer products over positions: outputs^T inputs.

    `inputs` has the shape (examples, positions, in), `outputs` (examples, positions, out). Either
    may be in bfloat16, as a layer under autocast has seen it. Products of such numbers are exact in
    float32, which they are added up in.
    """

    inputs: Tensor
    outputs: Tensor

    def measure(self) -> Measure:
        if self.inputs.shape[1] == 1:
            return row_norms(widen(self.inputs)) * row_norms(widen(self.outputs))
        return InnerNorms.of_factors(self.inputs, self.outputs)

    def weighted_sum(self, factors: Factors) -> Tensor:
        """One product of two matrices, the factors folded into the smaller one."""
        shape = self.outputs.shape[2], self.inputs.shape[2]
        kind = widen(self.inputs[:0]).dtype
        return self.weighted_sum_into(self.inputs.new_empty(shape, dtype=kind), factors)

    def weighted_sum_into(self, place: Tensor, factors: Factors, *, add: bool = False) -> Tensor:
        inputs, outputs = self.inputs, self.outputs
        matrix = place.view(outputs.shape[2], inputs.shape[2])
        if inputs.device.type == tensor_cores.DEVICE and weighted_product(
            outputs.flatten(0, 1), inputs.flatten(0, 1), factors.values, matrix, add=add
        ):
            return place
        inputs, outputs = widen(inputs), widen(outputs)
        if inputs.shape[2] < outputs.shape[2]:
            inputs, outputs = factors.scale(inputs), factors.clean(outputs)
        else:
            inputs, outputs = factors.clean(inputs), factors.scale(outputs)
        _multiply_into(matrix, outputs.flatten(0, 1).mT, inputs.flatten(0, 1), add=add)
        return place

    def per_example(self) -> Tensor:
        return batched_product(self.outputs.mT, self.inputs)

    def products(self) -> "Products":
        return self

    def cheapest(self) -> Contribution:
        """Form the gradients now where that is cheaper than inner products; shapes decide."""
        positions, width, height = (
            self.inputs.shape[1],
            self.inputs.shape[2],
            self.outputs.shape[2],
        )
        if self.inputs.device.type != "cuda":
            pays = instantiating_pays(positions, width, height)
        else:
            narrow = torch.bfloat16 in (self.inputs.dtype, self.outputs.dtype)
            pays = gpu_instantiating_pays(positions, width, height, narrow=narrow)
        if not pays:
            return self
        if self.inputs.is_cuda and self.inputs.dtype == self.outputs.dtype == torch.bfloat16:
            return Rows(torch.bmm(self.outputs.mT, self.inputs))  # measured as they are stored
        return Rows(self.per_example())


# Products of so many numbers are written to where they belong, whatever that does to their bits.
_LARGE = 2**20
# Where memory on a CPU begins. Products that are written elsewhere are rounded otherwise.
_ALIGNMENT = 64


def _multiply_into(place: Tensor, one: Tensor, other: Tensor, *, add: bool) -> None:
    """Write a product, or add it to what is there; a large one takes no memory of its own.

    Small ones on a CPU have the same bits wherever they are written to.
    """
    large = place.numel() >= _LARGE
    if add and large:
        place.addmm_(one, other)
    elif add:
        place.add_(one @ other)
    elif large or place.device.type != "cpu" or place.data_ptr() % _ALIGNMENT == 0:
        torch.mm(one, other, out=place)
    else:
        place.copy_(one @ other)


class Output:
    """Gradient of a layer's output (examples, width), shared by the layer's weight and bias."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._scaled: tuple[Factors, Tensor] | None = None

    @cached_property
    def norms(self) -> Tensor:
        return row_norms(widen(self.values))

    def scaled(self, factors: Factors) -> Tensor:
        if self._scaled is None or self._scaled[0] is not factors:
            self._scaled = factors, factors.scale(widen(self.values))
        return self._scaled[1]


@dataclass(frozen=True)
class Outer(Contribution):
    """Gradients that are one outer product each."""

    inputs: Tensor
    output: Output

    def measure(self) -> Tensor:
        return row_norms(widen(self.inputs)) * self.output.norms

    def weighted_sum(self, factors: Factors) -> Tensor:
        shape = self.output.values.shape[1], self.inputs.shape[1]
        kind = widen(self.inputs[:0]).dtype
        return self.weighted_sum_into(self.inputs.new_empty(shape, dtype=kind), factors)

    def weighted_sum_into(self, place: Tensor, factors: Factors, *, add: bool = False) -> Tensor:
        values, inputs = self.output.values, self.inputs
        matrix = place.view(values.shape[1], inputs.shape[1])
        if inputs.device.type != tensor_cores.DEVICE or not weighted_product(
            values, inputs, factors.values, matrix, add=add
        ):
            scaled = self.output.scaled(factors)
            _multiply_into(matrix, scaled.mT, factors.clean(widen(inputs)), add=add)
        return place

    def per_example(self) -> Tensor:
        return widen(self.output.values).unsqueeze(2) * widen(self.inputs).unsqueeze(1)

    def products(self) -> Products:
        return Products(self.inputs.unsqueeze(1), self.output.values.unsqueeze(1))


@dataclass(frozen=True)
class Shift(Contribution):
    """A bias that is added once per example: its gradient is the output's."""

    output: Output

    def measure(self) -> Tensor:
        return self.output.norms

    def weighted_sum(self, factors: Factors) -> Tensor:
        """A sum of rows. What is scaled serves the layer's weight too, unless that is large."""
        values = self.output.values
        found = weighted_rows(values, factors.values) if values.numel() >= LARGE_OUTPUT else None
        return self.output.scaled(factors).sum(0) if found is None else found

    def per_example(self) -> Tensor:
        return widen(self.output.values)


def instantiating_pays(positions: int, width: int, height: int) -> bool:
    """Whether gradients of width x height cost less than inner products between positions.

    Gradients that are there also give the weighted sum for nothing but reading them once.
    """
    inner_products = positions**2 * (width + height + MEMORY_COST)
    return positions > 1 and MEMORY_COST * width * height < inner_products


# The same on a GPU, where numbers move as fast as this many multiplications are made; gradients
# are written and read twice. What they take beyond the factors is worth a fifth of the time.
GPU_MEMORY_COST = 24
_MORE_MEMORY, _LESS_TIME = 2.0, 0.8


def gpu_instantiating_pays(
    positions: int, width: int, height: int, *, narrow: bool = False
) -> bool:
    """Whether to form gradients on a GPU: they are faster, and not much larger than the factors.

    Factors have to be kept until the norms of all layers are known, gradients too. Of narrow
    factors gradients are formed on tensor cores, which no sum of scaled factors could be.
    """
    size, kept = width * height, positions * (width + height)
    if narrow and positions > 1 and size <= _MORE_MEMORY * kept:
        return True
    common = positions * size  # the gradients, or afterwards their sum
    formed = common + 3 * GPU_MEMORY_COST * size
    between = common + positions**2 * (width + height + 2 * GPU_MEMORY_COST)
    limit = 1.0 if size <= _MORE_MEMORY * kept else _LESS_TIME
    return positions > 1 and formed < limit * between


def combine(contributions: list[Contribution]) -> Contribution | InnerNorms:
    """Several uses of one parameter as one, for norms: their gradients add up before the norm."""
    if len(contributions) == 1:
        return contributions[0]
    if len(contributions) == 2:
        one, other = contributions
        both = one.beside(other) or other.beside(one)
        if both is not None:
            return both
    products = [contribution.products() for contribution in contributions]
    if all(product is not None for product in products):
        found = [product for product in products if product is not None]
        return Products(
            torch.cat([product.inputs for product in found], 1),
            torch.cat([product.outputs for product in found], 1),
        ).cheapest()
    total = contributions[0].per_example()
    for contribution in contributions[1:]:
        total = total + contribution.per_example().view_as(total)
    return Rows(total)


def split_dimension(values: Tensor, dimension: int, sizes: tuple[int, int]) -> Tensor:
    """View one dimension as two; one of their sizes may be -1."""
    dimension %= values.dim()
    return values.reshape(*values.shape[:dimension], *sizes, *values.shape[dimension + 1 :])
