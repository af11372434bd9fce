"""Records, during one forward and backward pass, what layers contribute to each example's gradient.

`KnownInputs` is what depends on the data alone, which is computed once: the input of the first
layer is the same in every trial. Inner products between the patches that a convolution sees of it
can be stored for a whole data set and looked up for a batch. Norms that come of other values would
let records pass the clip. So tables belong to one problem: another one, over the same memory too,
makes its own. They are made anew when the data is known to have been written to; writing to it
behind PyTorch's back, through an array of NumPy, while a run is under way is not noticed.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpsur.functional.process_settings import precision, widen
from dpsur.functional.tree import Params, tensors_of, with_tensors
from dpsur.per_example.contributions import (
    Contribution,
    Factors,
    InnerNorms,
    Rows,
    combine,
    split_dimension,
    whole_norms,
)
from dpsur.per_example.memory_budget import has_room


class NotSupportedError(Exception):
    """A layer is used in a way that its rule does not cover; PyTorch's batching takes over."""


@dataclass(frozen=True)
class Layout:
    """Where a batched kernel finds the records: `rows` entries of dimension `axis` for each.

    Without `rows` a layer sees a record without such a dimension: the records take its place.
    """

    axis: int = 0
    rows: int | None = None

    @property
    def fold(self) -> int:
        return self.rows or 1

    def into(self, values: Tensor) -> Tensor:
        """From (records, ...) to what the kernel takes."""
        moved = values.movedim(0, self.axis) if self.axis else values
        return moved if self.rows is None else moved.flatten(self.axis, self.axis + 1)

    def back(self, values: Tensor) -> Tensor:
        """From the kernel's output to a tensor with records in dimension `axis`."""
        return values if self.rows is None else split_dimension(values, self.axis, (-1, self.rows))

    def by_example(self, values: Tensor) -> Tensor:
        """As `split`, in float32 at least."""
        return self.split(widen(values))

    def split(self, values: Tensor) -> Tensor:
        """View with the shape (examples, fold, ...)."""
        return split_dimension(values.movedim(self.axis, 0), 0, (-1, self.fold))


# What one use of parameters, by their names, adds to the gradients of the records.
Uses = Iterable[tuple[str, Contribution]]
Record = Callable[[Tensor], Uses]
# From the uses of a derived weight, and its per-example gradients, to uses of what it is made of.
Carry = Callable[[list[Contribution], Callable[[], Tensor]], Uses]


# Numbers of the data set that are worked on at once, beside a batch that fills the memory. Few, for
# what they take on the way is part of the peak of a small step.
_NUMBERS_AT_ONCE = 2**18

# By name. A table that has no room is None.
Tables = dict[Hashable, Tensor | int | None]


@dataclass(frozen=True)
class KnownInputs:
    """Inputs of a batch that are rows of a data set, and the tables of the problem it is for."""

    data: Tensor
    rows: Tensor
    inputs: Tensor
    tables: Tables

    def __post_init__(self) -> None:
        object.__setattr__(self, "_version", self.inputs._version)

    def holds(self, values: Tensor) -> bool:
        """Whether these are the inputs, perhaps flattened, and nothing has overwritten them."""
        version: int = vars(self)["_version"]
        if self.inputs._version != version:
            return False
        if values.data_ptr() != self.inputs.data_ptr():
            return False
        if values.shape == self.inputs.shape:
            return values.stride() == self.inputs.stride()
        return (
            values.shape == self.inputs.flatten(1).shape
            and values.is_contiguous()
            and self.inputs.is_contiguous()
        )

    @property
    def finite(self) -> bool:
        tables = self._current_tables()
        if "finite" not in tables:
            tables["finite"] = all(bool(part.isfinite().all()) for part in _parts(self.data))
        return bool(tables["finite"])

    def _current_tables(self) -> Tables:
        if self.tables.get("version") != self.data._version:
            self.tables.clear()
            self.tables["version"] = self.data._version
        return self.tables

    def look_up(self, name: Hashable, compute: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Result of `compute` for the batch, from a table that is made on the first call.

        None where a table of the whole set has no room. Only the first call waits for the device,
        so that it must come before a capture.
        """
        tables, data = self._current_tables(), self.data
        if name not in tables:
            one = compute(data[:1])
            tables[name] = None
            if has_room(one.element_size() * one.numel() * len(data), data.device):
                made = tables[name] = one.new_empty(len(data), *one.shape[1:])
                parts = _parts(data)
                for place, part in zip(torch.split(made, len(parts[0])), parts, strict=True):
                    place.copy_(compute(part))
                if data.is_cuda:  # another stream may be the next to read it
                    torch.cuda.current_stream(data.device).synchronize()
        table = tables[name]
        return table.index_select(0, self.rows) if isinstance(table, Tensor) else None


def _parts(data: Tensor) -> tuple[Tensor, ...]:
    return torch.split(data, max(1, _NUMBERS_AT_ONCE // max(1, data[0].numel())))


@dataclass
class Tape:
    """One forward and backward pass of a batch.

    Layers call `watch` on their outputs. During the backward pass each hands in its uses of
    parameters. Where examples are in the tensors of the layer at hand is said in `place`: the
    boundary of the record level has put them there. `params` are detached weights, `own` the
    parameters that code outside may hold.
    """

    params: Params
    examples: int
    own: Mapping[str, Tensor] = field(default_factory=dict)
    place: Layout = field(default_factory=Layout)
    contributions: dict[str, list[Contribution]] = field(default_factory=dict)
    leaves: list[Tensor] = field(default_factory=list)
    recording: bool = True
    # Whether there is one backward pass only: what a layer kept for it is then given back as it
    # goes, as PyTorch gives back what it saved itself. The graph would keep it to the end.
    once: bool = False
    known: KnownInputs | None = None
    # Whether parameters may take no part: no record was usable, or a random number left layers out.
    incomplete: bool = False
    # Examples whose loss is NaN, which count for nothing. Backward passes of some activations turn
    # NaN into a number, another one in the middle of a batch than at its end.
    spoiled: Tensor | None = None
    segment: "Segment | None" = None  # that is under way
    # Whether the modules hold the tape's weights while the record level is entered.
    swaps_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.names = {id(value): name for name, value in self.params.items()}
        self.names |= {id(value): name for name, value in self.own.items()}
        self._own = {id(value): self.params[name] for name, value in self.own.items()}
        self._copies: dict[str, Tensor] = {}
        self.copied: set[str] = set()  # weights of operations without a rule
        self._derived: dict[str, tuple[Tensor, Carry]] = {}
        device = next(iter(self.params.values())).device
        # Weights do not require gradients, so that none are computed; this is what the graph of
        # the activations hangs on instead.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self.leaves.append(self._anchor)

    def slot(self, parameter: Tensor | None) -> str | None:
        """The name of a parameter, or of what was derived of some; None if it is not trained."""
        return self.names.get(id(parameter))

    def with_params(self, args: Any, kwargs: Any) -> tuple[Any, Any, list[Tensor]]:
        """Arguments with weights of the tape for parameters that code outside holds; their tensors.

        A function may use a weight that it got hold of before the step.
        """
        given = tensors_of((args, kwargs))
        if not self._own.keys().isdisjoint(map(id, given)):
            given = [self._own.get(id(value), value) for value in given]
            args, kwargs = with_tensors((args, kwargs), given)
        return args, kwargs, given

    def follows(self, value: Tensor) -> bool:
        return id(value) in self.names

    def trains(self, module: nn.Module) -> bool:
        return any(id(value) in self.names for value in module._parameters.values())

    def finish(self) -> None:
        """Give back what only the backward pass needed."""
        self._copies.clear()
        self.leaves.clear()

    @contextmanager
    def placed(self, place: Layout) -> Iterator[None]:
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    @contextmanager
    def within(self, segment: "Segment") -> Iterator[None]:
        """Layers belong to a segment that is computed again in the backward pass."""
        assert self.segment is None
        self.segment, segment.layers = segment, 0
        try:
            yield
        finally:
            self.segment, segment.again = None, True

    def examples_in(self, values: Tensor, axis: int | None = None) -> Layout:
        """Where the examples are in a tensor (in dimension `axis`, if a rule needs them there)."""
        layout = self.place
        if axis is not None and layout.axis != axis:
            raise NotSupportedError("a layer with the examples in an unusual dimension")
        if values.shape[layout.axis] != layout.fold * self.examples:
            raise NotSupportedError("an output without a row for each record")
        return layout

    def watch(self, output: Tensor, record: Record) -> Tensor:
        """Have `record` called with the gradient of `output` during the backward pass."""
        if self.segment is not None:
            record = self.segment.watch(self._anchor, record)
        kept = [record]

        def note(gradient: Tensor) -> None:
            if self.recording and kept:
                with precision(tf32=False):  # what norms are made of
                    for slot, contribution in kept[0](gradient):
                        self.add(slot, contribution)
                if self.once:
                    kept.clear()

        if not output.requires_grad:
            rooted: Tensor = _Root.apply(self._anchor, (output,), note)  # type: ignore[no-untyped-call]
            return rooted
        # a hook sees the gradient of this value even if a later layer overwrites it in place
        output.register_hook(note)  # type: ignore[no-untyped-call]
        return output

    def add(self, slot: str, contribution: Contribution) -> None:
        self.contributions.setdefault(slot, []).append(contribution)

    def join(self, other: "Tape") -> None:
        """Take over the contributions of another call, whose records are those of this one."""
        for name, kept in other.contributions.items():
            self.contributions.setdefault(name, []).extend(kept)
        other.contributions.clear()
        other.leaves.clear()
        if self.spoiled is not None and other.spoiled is not None:
            self.spoiled = self.spoiled | other.spoiled

    def derive(self, value: Tensor, carry: Carry) -> Tensor:
        """Follow a value that was computed from parameters alone as if it were one itself.

        Rules find a slot for it, and `carry` turns its uses into uses of the parameters once the
        backward pass is over.
        """
        name = f"derived weight {len(self._derived)}"
        value = value.view_as(value) if id(value) in self.names else value
        self._derived[name] = value, carry
        self.names[id(value)] = name
        return value

    def carry_back(self) -> None:
        """Hand on the uses of derived weights, the last one first: some are made of others."""
        for name in reversed(self._derived):
            kept = self.contributions.pop(name, None)
            if kept is None:
                continue
            value, carry = self._derived[name]
            with warnings.catch_warnings():
                # torch says so where it has no batched form of an operation and loops instead
                warnings.filterwarnings("ignore", "There is a performance drop")
                for slot, contribution in carry(kept, partial(self._add_up, value, kept)):
                    self.add(slot, contribution)

    def copies(self, value: Tensor) -> Tensor:
        """A followed weight as one view per record, whose gradient has a row for each of them.

        The views take no memory until then.
        """
        name = self.names[id(value)]
        if name in self._copies:
            return self._copies[name]
        self.copied.add(name)
        copies = value.detach().expand(self.examples, *value.shape).requires_grad_()
        self.leaves.append(copies)

        def note(gradient: Tensor) -> None:
            if self.recording:
                self.add(name, Rows(widen(gradient)))

        copies.register_hook(note)  # type: ignore[no-untyped-call]
        self._copies[name] = copies
        return copies

    def norms(self) -> Tensor:
        """Norm of every example's whole gradient; infinite for an example whose loss is NaN."""
        self.carry_back()
        measures = []
        for name in self.params:
            if kept := self.contributions.get(name):
                use = combine(kept)
                if isinstance(use, Rows):
                    # Used for the sum too: gradients that nearly cancel, added up again in another
                    # way, would be rounded unlike their norm.
                    self.contributions[name] = [use]
                measures.append(use if isinstance(use, InnerNorms) else use.measure())
        if measures:
            norms = whole_norms(measures, sum(value.numel() for value in self.params.values()))
        else:
            first = next(iter(self.params.values()))
            norms = torch.zeros(self.examples, device=first.device, dtype=first.dtype)
        return norms if self.spoiled is None else norms.masked_fill_(self.spoiled, torch.inf)

    @torch.no_grad()
    def weighted_sum(
        self,
        name: str,
        factors: Factors,
        *,
        last: bool = False,
        out: Tensor | None = None,
        add: bool = False,
    ) -> Tensor:
        """Sum of a parameter's per-example gradients, each times its factor.

        What was kept for it is given back if this is the `last` time that it is asked for. `out`
        receives the sum, unless that has another type; with `add`, it is added to what is there.
        """
        self.carry_back()
        kept = self.contributions.get(name, [])
        if last:
            self.contributions.pop(name, None)
        if out is not None and len(kept) == 1 and kept[0].tensors()[0].dtype == out.dtype:
            return kept[0].weighted_sum_into(out, factors, add=add)
        if kept:
            total = kept[0].weighted_sum(factors).view_as(self.params[name])
        else:
            total = torch.zeros_like(self.params[name])
        for one in kept[1:]:
            total = total + one.weighted_sum(factors).view_as(total)
        if out is None or (total.dtype != out.dtype and not add):
            return total
        return out.add_(total) if add else out.copy_(total)

    def per_example(self, name: str) -> Tensor:
        self.carry_back()
        return self._add_up(self.params[name], self.contributions.get(name, []))

    def _add_up(self, value: Tensor, kept: list[Contribution]) -> Tensor:
        whole = value.new_zeros(self.examples, *value.shape)
        for contribution in kept:
            whole += contribution.per_example().view_as(whole)
        return whole


class Segment:
    """A part of a model under gradient checkpointing: what it keeps is dropped and made anew.

    A layer's hook must not keep the layer's input for the whole backward pass. It holds a token
    instead, which PyTorch drops and recomputes like all that is saved in the segment; computing it
    again runs the layer again, which leaves here what its hook needs.
    """

    def __init__(self) -> None:
        self.layers = 0
        self.again = False
        self._records: dict[int, Record] = {}

    def watch(self, anchor: Tensor, record: Record) -> Record:
        """What a layer's hook is to keep."""
        layer, self.layers = self.layers, self.layers + 1
        if self.again:
            self._records[layer] = record  # before the token: nothing after the last one is run
        token = _Token.apply(anchor)  # type: ignore[no-untyped-call]
        if self.again:
            return record

        def recomputed(gradient: Tensor) -> Uses:
            _ = token.grad_fn.saved_tensors
            return self._records.pop(layer)(gradient)

        return recomputed


class _Token(torch.autograd.Function):
    """A node of the graph that saves a number and does nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(anchor)
        return anchor.detach()

    @staticmethod
    def backward(*_: Any) -> Any:
        return None


class _Root(torch.autograd.Function):
    """Lets a graph begin at a tensor that was computed without one."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, output: tuple[Tensor], note: Callable[[Tensor], None]) -> Any:
        ctx.note = note
        return output[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.note(gradients[0])
        return None, None, None
