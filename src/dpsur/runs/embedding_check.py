"""Refuse records with numbers that an embedding of the model has no row for."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from dpsur.errors import InvalidInputError
from dpsur.functional.problem import EVALUATION_ROWS, call, mode
from dpsur.functional.records import Examples
from dpsur.functional.tree import TensorTree, map_tensors, split_rows, tensors_of

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _BeyondTable(Exception):  # noqa: N818
    """The table that a number was looked up in without a row for it, and the number."""


def check_tokens(model: nn.Module, examples: Examples, name: str) -> None:
    """Refuse records with a number that an embedding of the model has no row for.

    First with synthetic records of the least and largest numbers at each place. Where those do not
    fit, a real record is looked for: a model may combine its inputs before it looks them up.
    """
    inputs, place = examples.inputs, next(model.parameters()).device
    # Tables that are no modules are looked up unwatched, and a bad index breaks the CUDA context.
    looks_up = place.type == "cpu" or _tables(model)
    if all(value.dtype not in _WHOLE for value in tensors_of(inputs)) or not looks_up:
        return
    if _table_fault(model, map_tensors(partial(_extremes, place), inputs)) is None:
        return
    for part in split_rows(inputs, EVALUATION_ROWS):
        fault = _table_fault(model, map_tensors(lambda value: value.to(place), part))
        if fault is not None:
            where, number = fault
            raise InvalidInputError(
                f"the inputs of {name} hold a number that {where}; fix the tokens or enlarge the "
                "table",
                private=number,
            ) from None


def _extremes(place: torch.device, values: Tensor) -> Tensor:
    """Two records: of the least and of the largest whole numbers; of others a first and a last."""
    if values.dtype not in _WHOLE:
        return torch.stack([values[0], values[-1]]).to(place)
    return torch.stack([values.amin(0), values.amax(0)]).to(place)


def _tables(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {name: part for name, part in model.named_modules() if isinstance(part, kinds)}


def _table_fault(model: nn.Module, inputs: TensorTree) -> tuple[str, str] | None:
    """Which lookup fails, and by which number, which is private."""
    with torch.no_grad(), mode(model, training=False), _watched(model):
        try:
            call(model, inputs)
        except _BeyondTable as found:
            where, number = found.args
            return where, number
        except IndexError as found:
            return "the model cannot look up", str(found)
    return None


@contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    """Have every embedding look at its numbers before it looks them up."""

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        table = _tables(model)[name]
        rows = table.num_embeddings

        def look(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            if not given or not given[0].numel():
                return
            low, high = int(given[0].min()), int(given[0].max())
            if low < 0 or high >= rows:
                odd = low if low < 0 else high
                raise _BeyondTable(
                    f"the embedding {name or '(root)'} has no row for: it has {rows} rows "
                    f"(0 to {rows - 1})",
                    f"the number {odd}",
                )

        return table.register_forward_pre_hook(look)

    handles = [watch(name) for name in _tables(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
