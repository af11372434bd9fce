"""Embeddings: a gradient that touches only the rows of an example's own tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.core.gradients.factors import Factors
from dpsur.core.gradients.layout import NotSupportedError, Slot
from dpsur.core.gradients.norms import part_norms
from dpsur.core.gradients.tape import Tape
from dpsur.core.gradients.uses import Products, Use


@dataclass(frozen=True)
class Lookups(Use):
    """Rows of a table read by `tokens` (examples, positions), with gradients of what was read."""

    tokens: Tensor
    outputs: Tensor
    table_rows: int
    places: Tensor | None = None

    def measure(self) -> Tensor:
        """Gradients of the same token add up: each position adds its own to the first such one."""
        examples, positions, width = self.outputs.shape
        place = first_places(self.tokens) if self.places is None else self.places
        place = place + torch.arange(examples, device=place.device).unsqueeze(1) * positions
        sums = self.outputs.new_zeros(examples * positions, width)
        sums.index_add_(0, place.flatten(), self.outputs.flatten(0, 1))
        return part_norms(sums.view(examples, -1))

    def weighted_sum(self, factors: Factors) -> Tensor:
        """Add scaled gradients into an empty table."""
        scaled = factors.scale(self.outputs).flatten(0, 1)
        table = scaled.new_zeros(self.table_rows, scaled.shape[1])
        return table.index_add_(0, self.tokens.flatten(), scaled)

    def per_example(self) -> Tensor:
        """One table per example: only for a table shared with a layer that has no rule."""
        return torch.bmm(self._chosen().mT, self.outputs)

    def products(self) -> Products:
        """Reading row v is multiplying by unit vector v: for a table that is a linear layer too."""
        return Products(self.outputs, self._chosen())

    def tensors(self) -> tuple[Tensor, ...]:
        """Tokens and gradients."""
        return (self.tokens, self.outputs)

    def _chosen(self) -> Tensor:
        tokens = torch.arange(self.table_rows, device=self.tokens.device)
        return (self.tokens.unsqueeze(-1) == tokens).to(self.outputs.dtype)


def first_places(tokens: Tensor) -> Tensor:
    """A number for every different token of an example; its own in all places where it occurs."""
    ordered, order = tokens.sort(dim=1, stable=True)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(order).scatter_(1, order, new.cumsum(1) - 1)


def embedding(module: nn.Embedding, tape: Tape, input: Tensor) -> Tensor:
    """A table of vectors; the row at `padding_idx` is never trained."""
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise NotSupportedError("embedding with max_norm, scale_grad_by_freq or sparse gradients")
    output = F.embedding(input, module.weight, module.padding_idx)
    layout, slot = tape.examples_in(output), tape.slot(module.weight)
    if slot is None:
        return output
    table_rows, padding = module.num_embeddings, module.padding_idx
    known = tape.known_inputs(input) if input.dim() == 2 else None

    def record(gradient: Tensor) -> Iterable[tuple[Slot, Use]]:
        tokens = layout.by_example(input).reshape(tape.examples, -1)
        outputs = layout.by_example(gradient).reshape(*tokens.shape, gradient.shape[-1])
        if padding is not None:
            outputs = torch.where((tokens == padding).unsqueeze(-1), 0.0, outputs)
        places = None if known is None else known.look_up("places", first_places)
        yield slot, Lookups(tokens, outputs, table_rows, places)

    return tape.watch(output, record)
