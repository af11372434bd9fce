"""Embeddings: a gradient that touches only the rows of an example's own tokens."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsur.functional.process_settings import widen
from dpsur.per_example.contributions import (
    Contribution,
    Factors,
    InnerNorms,
    Products,
    Rows,
    part_norms,
    rounding,
)
from dpsur.per_example.tape import NotSupportedError, Tape, Uses


@dataclass(frozen=True)
class Lookups(Contribution):
    """Rows of a table read by `tokens` (examples, positions), with gradients of what was read.

    Those of a token that an example reads several times are added up in one of the positions
    (`add_up_repeats`), so that what is summed is what was measured: positions that cancel have no
    norm, and added one by one to a table of all examples they would take others' digits away.
    """

    tokens: Tensor
    outputs: Tensor
    table_rows: int

    def measure(self) -> Tensor:
        """No two positions touch the same row."""
        return part_norms(self.outputs)

    def weighted_sum(self, factors: Factors) -> Tensor:
        table = self.outputs.new_empty(self.table_rows, self.outputs.shape[2])
        return self.weighted_sum_into(table, factors)

    def weighted_sum_into(self, place: Tensor, factors: Factors, *, add: bool = False) -> Tensor:
        scaled = factors.scale(self.outputs).flatten(0, 1)
        place = place if add else place.zero_()
        return place.index_add_(0, self.tokens.flatten(), scaled)

    def per_example(self) -> Tensor:
        """One table per example: only for a table shared with a layer that has no rule."""
        return torch.bmm(self._chosen().mT, self.outputs)

    def products(self) -> Products:
        """Reading row v is multiplying by unit vector v: for a table that is a linear layer too."""
        return Products(self.outputs, self._chosen())

    def beside(self, other: Contribution) -> Rows | InnerNorms | None:
        """With a linear layer over the same table, as in a language model whose ends are tied."""
        if isinstance(other, Products) and other.inputs.shape[1] > 1:
            return self._tied_norms(other)
        if isinstance(other, Rows):
            examples, width = len(self.tokens), self.outputs.shape[-1]
            first = torch.arange(examples, device=self.tokens.device).unsqueeze(1)
            places = (self.tokens + first * self.table_rows).flatten()
            total = widen(other.rows).reshape(examples * self.table_rows, width)
            total = total.index_add(0, places, self.outputs.flatten(0, 1))
            return Rows(total.view_as(other.rows))
        return None

    def _tied_norms(self, linear: Products) -> InnerNorms:
        """Squared norms of both uses and twice their inner product.

        With x_t and g_t the inputs and output gradients of the linear layer and e_s the gradient of
        what token v_s read, the gradient is sum_t g_t x_t^T + sum_s 1_{v_s} e_s^T. The inner
        product of its two parts is sum_st g_t[v_s] (x_t . e_s), so no vector as long as the table
        is made.
        """
        own = InnerNorms.of_factors(linear.inputs, linear.outputs)
        chosen = self.tokens.unsqueeze(1).expand(-1, linear.outputs.shape[1], -1)
        inputs, read = widen(linear.inputs), widen(linear.outputs.gather(2, chosen))
        sizes = torch.linalg.vector_norm(self.outputs, dim=2)
        alone = sizes.square().sum(1)
        between = torch.bmm(inputs, self.outputs.mT).mul_(read)
        squares = own.squares + alone + 2 * between.sum((1, 2))
        norms = torch.linalg.vector_norm(inputs, dim=2, keepdim=True)
        most = torch.bmm(norms.mT, torch.bmm(read.abs_(), sizes.unsqueeze(2)))[:, 0, 0]
        terms = own.terms + self.tokens.shape[1]
        errors = own.errors + rounding(terms, squares.dtype) * (alone + 2 * most)
        return InnerNorms(squares, errors, terms)

    def _chosen(self) -> Tensor:
        tokens = torch.arange(self.table_rows, device=self.tokens.device)
        return (self.tokens.unsqueeze(-1) == tokens).to(self.outputs.dtype)


def first_places(tokens: Tensor) -> Tensor:
    """For every position of an example, the first one that holds the same token."""
    ordered, order = tokens.sort(dim=1, stable=True)
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    starts = torch.arange(tokens.shape[1], device=tokens.device).expand_as(order)
    starts = starts.masked_fill(repeated, 0).cummax(1).values
    return torch.empty_like(order).scatter_(1, order, order.gather(1, starts))


def add_up_repeats(outputs: Tensor, places: Tensor) -> Tensor:
    """Gradients of the same token, added up in its first position; zero in the others."""
    examples, positions, width = outputs.shape
    places = places + torch.arange(examples, device=places.device).unsqueeze(1) * positions
    sums = outputs.new_zeros(examples * positions, width)
    return sums.index_add_(0, places.flatten(), outputs.flatten(0, 1)).view_as(outputs)


def embedding_map(
    tape: Tape,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001  of max_norm
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """A table of vectors, as `F.embedding` reads it; the row at `padding_idx` is never trained."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NotSupportedError("embedding with max_norm, scale_grad_by_freq or sparse gradients")
    output = F.embedding(input, weight, padding_idx)
    layout, slot = tape.examples_in(output), tape.slot(weight)
    if slot is None:
        return output
    table_rows = len(weight)
    padding = None if padding_idx is None else padding_idx % table_rows

    def record(gradient: Tensor) -> Uses:
        tokens = layout.by_example(input).reshape(tape.examples, -1)
        outputs = layout.by_example(gradient).reshape(*tokens.shape, gradient.shape[-1])
        if padding is not None:
            outputs = torch.where((tokens == padding).unsqueeze(-1), 0.0, outputs)
        yield slot, Lookups(tokens, add_up_repeats(outputs, first_places(tokens)), table_rows)

    return tape.watch(output, record)


def embedding_bag_map(
    tape: Tape,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,  # noqa: ARG001  of offsets
    padding_idx: int | None = None,
) -> Tensor:
    """Look rows up and reduce them, as `F.embedding_bag` does for bags of one length."""
    if offsets is not None or input.dim() != 2:
        raise NotSupportedError("bags of different lengths in one row; pad them to a matrix")
    rows = embedding_map(tape, input, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
    kept = None
    if padding_idx is not None:
        kept = (input != padding_idx % len(weight)).unsqueeze(-1)
    if mode == "max":
        if kept is None:
            return rows.max(1).values
        most = rows.masked_fill(~kept, -torch.inf).max(1).values
        return torch.where(kept.any(1), most, torch.zeros_like(most))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    total = (rows if kept is None else torch.where(kept, rows, torch.zeros_like(rows))).sum(1)
    if mode == "sum":
        return total
    return total / (rows.shape[1] if kept is None else kept.sum(1).clamp(min=1))
