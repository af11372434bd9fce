"""Padded records must not depend on the length of the others: tried on synthetic padded ones.

A model that cuts a batch to its longest text gives a short text another output when a long one is
beside it. To see this, synthetic records have to be padded the way that the model expects. So their
padding is made of the numbers that the model compares its inputs with, that it holds, or that stand
in its code; of zeros and ones; and of each record's own last value. A model that finds its padding
in yet another way is not seen through.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpsur.errors import UnsupportedModelError
from dpsur.functional.call import every_module
from dpsur.functional.parameters import Params
from dpsur.functional.problem import mode
from dpsur.functional.process_settings import precision
from dpsur.functional.side_effects import constants
from dpsur.functional.tree import TensorTree, device_of, slice_rows, tensors_of, with_tensors
from dpsur.per_example.mixing_check import (
    call_watched,
    judge,
    numbers_per_record,
    perturb,
    random_rows,
)

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "isin", "sub", "rsub", "where")
_FEW = 16  # numbers in a tensor that a model may compare its inputs with
_LARGEST = 1e3  # of numbers that fractions are padded with
# How many kinds of padding are tried, and fewer where layers return more numbers than this in all.
_MOST_VALUES, _MOST_KINDS, _LEAST_KINDS, _NUMBERS = 24, 64, 6, 2**22
_MODULES = 1000  # calls of modules that all kinds of padding may take
_TABLES = (nn.Embedding, nn.EmbeddingBag)
REMEDY = (
    "read every example to its own end, such as with nn.utils.rnn.pack_padded_sequence, a mask, or "
    "states[range(len(x)), lengths - 1], and do not cut the batch to its longest example"
)


def check_padding(model: nn.Module, inputs: TensorTree) -> None:
    """Refuse a model for which the output of a padded record depends on the other records.

    Of several inputs each is padded in turn. Those of the same length, such as masks, are padded
    along with it, and left as they are.
    """
    columns = tensors_of(inputs)
    places = [i for i, v in enumerate(columns) if v.dim() > 1 and not v.is_complex()]
    if not places:
        return
    with ExitStack() as stack:
        for context in (torch.no_grad(), precision(tf32=False), _inside_tables(model)):
            stack.enter_context(context)
        stack.enter_context(_without_dropout(model))
        weights = perturb(dict(model.named_parameters()))
        for place in places:
            _check_column(model, weights, inputs, place)


def _check_column(model: nn.Module, weights: Params, inputs: TensorTree, place: int) -> None:
    values, likely = _values(model, inputs, tensors_of(inputs)[place])
    for training in (True, False):
        with mode(model, training=training):
            first = call_watched(model, random_rows(inputs, 2, seed=0))
            if first.drew:
                continue  # other lengths would mean other draws, whatever the model does
            size = numbers_per_record(inputs) + sum(v[0].numel() for v in first.seen.values())
            most = min(_MOST_KINDS, _MODULES // max(1, len(first.seen)))
            kinds = max(_LEAST_KINDS, min(most, _NUMBERS // (4 * size)))
            padded = _padded(inputs, place, values, likely)
            for _, rows in zip(range(kinds), padded, strict=False):
                _compare(model, weights, rows)


def _compare(model: nn.Module, weights: Params, rows: TensorTree) -> None:
    """Compare the shorter of two records with itself alone."""
    try:
        together = call_watched(model, rows, weights).seen
        alone = call_watched(model, slice_rows(rows, slice(1)), weights).seen
    except (IndexError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        if isinstance(error, UnsupportedModelError):
            raise
        return  # such padding is nothing that the model can take
    judge(model, alone, together, torch.tensor([0], device=device_of(rows)), REMEDY)


def _padded(
    inputs: TensorTree, place: int, values: list[float], likely: int
) -> Iterator[TensorTree]:
    """Two synthetic records of different lengths, padded with a value or with their own last one.

    The first values are tried on both sides.
    """
    columns = tensors_of(random_rows(inputs, 2, seed=6))
    base, dims = columns[place], columns[place].dim()
    for value in (*values, None):
        for axis in range(1, dims):
            size = base.shape[axis]
            if size < 2:
                continue
            lengths = torch.tensor([max(1, size // 3), max(2, size - 1)], device=base.device)
            beyond = _beyond(base, axis, lengths)
            if value is None:
                last = (lengths - 1).view(2, *[1] * (dims - 1))
                last = last.expand_as(base.narrow(axis, 0, 1))
                rows = torch.where(beyond, base.take_along_dim(last, axis), base)
            else:
                filling, other = (torch.tensor(v).to(base) for v in (value, float(value == 0)))
                rows = torch.where(beyond, filling, torch.where(base == filling, other, base))
            both_sides = value in values[:likely]
            for others in _beside(columns, place, axis, lengths):
                whole = [*others[:place], rows, *others[place + 1 :]]
                yield with_tensors(inputs, whole)
                if both_sides:
                    yield with_tensors(inputs, [_flip(one, axis, size) for one in whole])


def _beyond(values: Tensor, axis: int, lengths: Tensor) -> Tensor:
    """Which entries lie behind the end of their record."""
    size, dims = values.shape[axis], values.dim()
    place = torch.arange(size, device=values.device)
    along = place.view(1, *[size if a == axis else 1 for a in range(1, dims)])
    return along >= lengths.to(values.device).view(2, *[1] * (dims - 1))


def _beside(
    columns: list[Tensor], place: int, axis: int, lengths: Tensor
) -> Iterator[list[Tensor]]:
    """The other inputs: those of the same length padded like a mask, then all as they are.

    A column with one number per record may hold the lengths, so it is tried with them too.
    """
    size = columns[place].shape[axis]

    def pad(values: Tensor) -> Tensor:
        inside = values if values.is_floating_point() else torch.ones_like(values)
        return torch.where(_beyond(values, axis, lengths), torch.zeros_like(values), inside)

    padded = [
        pad(values) if i != place and values.dim() > axis and values.shape[axis] == size else values
        for i, values in enumerate(columns)
    ]
    if any(one is not other for one, other in zip(padded, columns, strict=True)):
        yield padded
    told = [
        lengths.to(values) if values.dim() == 1 and values.dtype != torch.bool else values
        for values in padded
    ]
    if any(one is not other for one, other in zip(told, padded, strict=True)):
        yield told
    yield columns


def _flip(values: Tensor, axis: int, size: int) -> Tensor:
    same_length = values.dim() > axis and values.shape[axis] == size
    return values.flip(axis) if same_length else values


def _values(model: nn.Module, inputs: TensorTree, column: Tensor) -> tuple[list[float], int]:
    """What records may be padded with, the likeliest first, and how many are likely."""
    tables = [module for module in every_module(model) if isinstance(module, _TABLES)]
    likely = [float(t.padding_idx) for t in tables if t.padding_idx is not None]
    if column.is_cuda and not tables and not column.is_floating_point():
        return [0, 1], 2  # a table that is no module is looked up unwatched
    compared = _Compared()
    for training in (True, False):
        with mode(model, training=training), suppress(Exception), compared:
            call_watched(model, random_rows(inputs, 2, seed=0))
    every = dict.fromkeys([*compared.found, *likely, 0.0])
    both_sides = sum(_fits(value, column.dtype) for value in every)
    if not column.is_floating_point():  # tokens, which are looked at in plain Python too
        ends = [float(table.num_embeddings - 1) for table in tables]
        held = sorted(constants(model), key=lambda value: (abs(value), value))
        every |= dict.fromkeys([1.0, *ends, *held])
    values = [value for value in every if _fits(value, column.dtype)]
    return values[:_MOST_VALUES], both_sides


def _fits(value: float, kind: torch.dtype) -> bool:
    if kind == torch.bool:
        return value in (0, 1)
    if kind.is_floating_point:
        return abs(value) <= _LARGEST
    bounds = torch.iinfo(kind)
    return value == value // 1 and bounds.min <= value <= bounds.max


class _Compared(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the numbers that tensors are compared with."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled here, and asking for it imports the compiler, which is slow."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[float, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _COMPARISONS:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, (int, float)):
                    self._note(value)
                elif isinstance(value, Tensor) and value.numel() <= _FEW:
                    for one in value.flatten().tolist():
                        self._note(one)
        return func(*args, **(kwargs or {}))

    def _note(self, value: Any) -> None:
        if isinstance(value, (int, float)):
            # beside it, for what is larger or smaller than a number
            self.found.update(dict.fromkeys((float(value), value - 1.0, value + 1.0)))


@contextmanager
def _inside_tables(model: nn.Module) -> Iterator[None]:
    """Have tables refuse numbers that they have no row for: a GPU would end the process."""

    def look(table: Any, given: tuple[Any, ...]) -> None:
        words = given[0] if given else None
        if isinstance(words, Tensor) and bool(
            ((words < 0) | (words >= table.num_embeddings)).any()
        ):
            raise IndexError("beyond the table")

    tables = [module for module in every_module(model) if isinstance(module, _TABLES)]
    handles = [table.register_forward_pre_hook(look) for table in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """Layers that draw nothing in training mode either."""
    changed: list[tuple[nn.Module, str, float]] = []
    for module in every_module(model):
        name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
        kinds = (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention)
        if isinstance(module, kinds) and getattr(module, name):
            changed.append((module, name, getattr(module, name)))
            setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
