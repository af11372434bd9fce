"""Gradients of a function of a batch, for each record alone.

The function is written for a batch and called as if for a batch of one record. In the record level
one call serves all records. What PyTorch cannot batch (an operation without a batching rule, an
`if` on a record's values) runs one record at a time. Both give each record's gradient from that
record alone; what one record at a time cannot exclude is Python state that a function keeps
between calls, which is looked for (`check_again`).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from dpsur.errors import (
    CouplingError,
    DpsurError,
    InvalidInputError,
    StepError,
    UnsupportedModelError,
)
from dpsur.functional.problem import (
    EVALUATION_ROWS,
    Attributes,
    CountedData,
    Objective,
    call,
    losses_one_by_one,
    mode,
    output_rows,
    use_weights,
    without_flattening,
    without_side_effects,
)
from dpsur.functional.process_settings import seeded_globally, widen
from dpsur.functional.records import Examples
from dpsur.functional.tree import (
    Params,
    TensorTree,
    concatenate_rows,
    keep,
    map_tensors,
    row_count,
    split_rows,
    tensors_of,
)
from dpsur.per_example.contributions import Rows
from dpsur.per_example.record_level import LIBRARIES, RecordLevel, only_trusted_rules
from dpsur.per_example.tape import KnownInputs, NotSupportedError, Tape

Found = TypeVar("Found")
# What no record's values are to blame for.
_NOT_OF_A_RECORD = (DpsurError, torch.OutOfMemoryError, Warning)
# Where so many records, all of a batch, make a function raise, it is the function that is at fault.
_MOST_TO_BLAME = 4
# What PyTorch says where a function cannot be batched, and what that means.
_KNOWN = {
    "data pointer": "it reads values of a tensor into Python (tolist, numpy, ...)",
    "does not require grad": "it calls torch.autograd.grad; torch.func.grad runs for all at once",
    "stack expects each tensor": "records have sizes of their own inside it, as packed sequences",
}
# Losses of one record that was worked on twice may differ by rounding.
_ROUNDING = 1e-4


# Models that were warned about: each is, once.
_warned: WeakSet[nn.Module] = WeakSet()


class Way(Enum):
    """How a function is run over records, fastest first."""

    LEVEL = "all records at once"
    # the same, where tensors that the code makes itself belong to single records
    OWN_TENSORS = "all records at once, with new tensors for each record"
    ALONE = "one record at a time"


Randomness = Callable[[], AbstractContextManager[Any]]


@dataclass
class RecordFunction:
    """Runs functions of a batch for each record alone, and finds each record's gradient.

    `models` are the modules that a function uses, `trained` the parameters to differentiate by,
    which are theirs. The way that works is found with the first batch of a shape, and remembered.
    `make_tape` makes the tape for a number of records, if it is not the usual one.
    """

    models: tuple[nn.Module, ...]
    trained: Mapping[str, Tensor]
    make_tape: Callable[[int], Tape] | None = None
    ways: dict[object, Way] = field(default_factory=dict)
    why_alone: str | None = None
    _told: bool = field(default=False, init=False)

    @property
    def by_construction(self) -> bool:
        return Way.ALONE not in self.ways.values()

    def in_level(self, kind: str, batch: Any) -> bool:
        """Whether it is known that records of this shape can be worked on in the record level.

        `kind` is "gradients" or "outputs".
        """
        return self.ways.get(_key(kind, batch), Way.ALONE) is not Way.ALONE

    def tape(
        self,
        function: Callable[[Any], Any],
        batch: Any,
        records: int,
        *,
        params: Params | None = None,
        known: KnownInputs | None = None,
        randomness: Randomness = nullcontext,
    ) -> tuple[Tape, Tensor, dict[str, Tensor]]:
        """What is known about every record's gradient, their losses, and other outputs.

        `function(batch)` gets what a collate function makes of one record, and returns a loss, one
        number, or a mapping that holds one under `loss`. Every tensor of `batch` has the records in
        front. `params` are weights to use in the place of the modules' own. `known` says where in a
        data set the records are, if they are rows of one.
        """

        def run(way: Way, given: Any, bad: Tensor | None) -> tuple[Tape, Tensor, dict[str, Tensor]]:
            if way is Way.ALONE:
                return self._tape_alone(function, given, records, params)
            with self._without_side_effects(params):  # a checkpoint runs again in the backward pass
                tape, found, level = self._together(
                    lambda one: _outputs(function(one)), given, records, params, way, known
                )
                losses = widen(found[0].reshape(records))
                figures = {name: value.detach() for name, value in found[1].items()}
                del found  # and with it the graph, once it was used
                if bad is not None:
                    losses = losses.masked_fill(bad, torch.nan)
                tape.once = True
                if losses.requires_grad:
                    self._differentiate(losses, tape)
            losses = losses.detach()
            tape.spoiled = losses.isnan()
            tape.finish()
            level.check_survivors()
            return tape, losses, figures

        with torch.enable_grad():
            return self._first_that_works(
                "gradients",
                function,
                batch,
                records,
                run,
                randomness,
                lambda: self._unusable(batch, records, params),
            )

    def _differentiate(self, losses: Tensor, tape: Tape) -> None:
        own = [value for value in self.trained.values() if value.requires_grad]
        with only_trusted_rules():
            found = torch.autograd.grad(losses.sum(), [*tape.leaves, *own], allow_unused=True)
        if any(value is not None for value in found[len(tape.leaves) :]):
            raise NotSupportedError("uses what was computed from a weight before the step")

    def run(
        self,
        function: Callable[[Any], Any],
        batch: Any,
        records: int,
        *,
        params: Params | None = None,
        randomness: Randomness = nullcontext,
    ) -> tuple[Tape, Any]:
        """Outputs of a function with the records in front, and a tape that waits for gradients.

        Outputs are a tree of tensors; what else is among them becomes None. Those of a record
        whose values make the function raise are NaN.
        """

        def run(way: Way, given: Any, bad: Tensor | None) -> tuple[Tape, Any]:
            if way is Way.ALONE:
                return self._run_alone(function, given, records, params)
            with self._without_side_effects(params):
                tape, found, level = self._together(function, given, records, params, way)
                if torch.is_grad_enabled():  # a loop could read it before its backward pass
                    level.check_survivors()
                    level.as_left = Attributes(self.models).in_place
            level.check_survivors()
            if bad is None:
                return tape, found

            def without(values: Tensor) -> Tensor:
                if not values.is_floating_point():
                    return values
                return values.masked_fill(_rows_like(bad, values), torch.nan)

            return tape, map_tensors(without, found)

        kind = "outputs" if torch.is_grad_enabled() else "values"

        def unusable() -> tuple[Tape, Any]:
            raise InvalidInputError(
                "the model raises for every record of a batch; write the loss as "
                "engine.private_step, where such records count as zero"
            )

        return self._first_that_works(kind, function, batch, records, run, randomness, unusable)

    def _first_that_works(
        self,
        kind: str,
        function: Callable[[Any], Any],
        batch: Any,
        records: int,
        run: Callable[[Way, Any, Tensor | None], Found],
        randomness: Randomness,
        unusable: Callable[[], Found],
    ) -> Found:
        key = _key(kind, batch)
        known = self.ways.get(key)
        errors: list[Exception] = []
        # what worked for other batches may end: a function does something else after some epochs
        ways = list(Way)[0 if known is None else list(Way).index(known) :]
        for way in ways:
            if way is Way.ALONE and known is not Way.ALONE:
                self.why_alone = self._reason(errors[-1])
                if not all(model in _warned for model in self.models):
                    logging.getLogger("dpsur.engine").warning(
                        "dpsur: this model or loss runs one record at a time, which is many times "
                        "slower, with the same results: %s",
                        self.why_alone,
                    )
                _warned.update(self.models)
            given, bad = batch, None
            for _ in range(2):
                try:
                    with randomness():
                        found = run(way, given, bad)
                except _NOT_OF_A_RECORD:
                    raise
                except Exception as error:  # what torch cannot batch, or what a record's values do
                    if torch.cuda.is_available() and (
                        torch.cuda.is_current_stream_capturing()
                        or torch.cuda.get_sync_debug_mode() == 2  # as a capture is tried out
                    ):
                        raise
                    errors.append(error)
                    if bad is not None or way is Way.ALONE:
                        break
                    with randomness():
                        bad = self._raising(function, batch, records, way)
                    if bad is None or bool(bad.all()):
                        break
                    given = _without(batch, bad)
                    continue
                self.ways[key] = way
                return found
            if known is not None and bad is not None and not _is_of_batching(errors[-1]):
                break
        all_raise = way is Way.ALONE or (bad is not None and bool(bad.all()))
        if known is not None and all_raise and records < _MOST_TO_BLAME:
            return unusable()  # it has worked for other records
        if "graph a second time" in str(errors[-1]):
            raise StepError(
                "the function calls backward() on its loss; return the loss, and the private step "
                "finds each record's gradient"
            ) from errors[-1]
        raise errors[-1]

    def _reason(self, error: Exception) -> str:
        """Why a function cannot be batched, and by which module, for a log that everyone may read.

        PyTorch's words about batching, or ours, hold no values. Any other message may quote a
        record, and the line that raised it may depend on one.
        """
        first_line = (str(error).strip().splitlines() or [""])[0]
        text = first_line.partition(". ")[0][:200].rstrip(".")
        known = next((why for words, why in _KNOWN.items() if words in first_line), None)
        if known is not None:
            text = known
        elif not _is_of_batching(error):
            return f"it raises {type(error).__name__} for all records at once"
        frames = [*walk_tb(error.__traceback__)]
        # the user's line; in the record level nothing depends on values before the first such
        own = [
            (Path(frame.f_code.co_filename), line)
            for frame, line in frames
            if not frame.f_code.co_filename.startswith(LIBRARIES)
        ]
        text += f" ({own[-1][0].name}, line {own[-1][1]})" if own else ""
        names = {m: name for model in self.models for name, m in model.named_modules()}
        inner = [
            found
            for frame, _ in frames
            for held in (frame.f_locals.get("self"), frame.f_locals.get("module"))
            if isinstance(held, nn.Module) and (found := names.get(held))
        ]
        if not inner:
            return text
        kind = next(type(m).__name__ for m, name in names.items() if name == inner[-1])
        return f"module {inner[-1]} ({kind}): {text}"

    def _raising(
        self, function: Callable[[Any], Any], batch: Any, records: int, way: Way
    ) -> Tensor | None:
        """Which records make the function raise by their values; None if none does alone.

        Each is tried in a level of its own. A record that stopped the run would be known by that,
        so its gradient counts as zero, like one that is not finite.
        """
        found = []
        for record in range(records):
            one = map_tensors(lambda value: value[record : record + 1], batch, otherwise=keep)  # noqa: B023
            try:
                with torch.no_grad(), self._without_side_effects(None):
                    *_, level = self._together(function, one, 1, None, way)
                level.check_survivors()
                found.append(False)
            except _NOT_OF_A_RECORD:
                raise
            except Exception:
                found.append(True)
        if not any(found):
            return None
        return torch.tensor(found, device=tensors_of(batch)[0].device)

    def _held(self, params: Params | None) -> Params:
        return params or {name: value.detach() for name, value in self.trained.items()}

    def _unusable(
        self, batch: Any, records: int, params: Params | None
    ) -> tuple[Tape, Tensor, dict[str, Tensor]]:
        """Records that all make the function raise: each has the gradient zero."""
        tape = Tape(self._held(params), records, incomplete=True)
        losses = torch.full((records,), torch.nan, device=tensors_of(batch)[0].device)
        tape.spoiled = losses.isnan()
        return tape, losses, {}

    def _together(
        self,
        function: Callable[[Any], Any],
        batch: Any,
        records: int,
        params: Params | None,
        way: Way,
        known: KnownInputs | None = None,
    ) -> tuple[Tape, Any, RecordLevel]:
        if self.make_tape is not None:
            tape = self.make_tape(records)
        else:
            tape = Tape(self._held(params), records, self.trained, known=known)
        level = RecordLevel(tape, self.models, own_tensors=way is Way.OWN_TENSORS)
        with level.entered():
            hidden = map_tensors(level.hide, batch, otherwise=keep)
            found = map_tensors(level.show, function(hidden), otherwise=_none)
            del hidden
        return tape, found, level

    def _run_alone(
        self, function: Callable[[Any], Any], batch: Any, records: int, params: Params | None
    ) -> tuple[Tape, Any]:
        held = self._held(params)
        tape = Tape(held, records)
        tape.incomplete = True  # values of records may decide which experts are called
        copies = {name: value.expand(records, *value.shape) for name, value in held.items()}
        if torch.is_grad_enabled():
            copies = {name: tape.copies(value) for name, value in held.items()}
        # all at once: the gradient of one row of a tensor is as large as the tensor
        views = {name: value.unbind() for name, value in copies.items()}
        draws = _own_draws(batch, records)

        def run(record: int) -> Any:
            own = {name: value[record] for name, value in views.items()}
            with self._calling(own), self._without_side_effects(params), draws[record]():
                return function(slice_records(batch, record))

        outputs = [map_tensors(keep, run(i), otherwise=_none) for i in range(records)]
        with torch.no_grad():
            again = tensors_of(run(0))
        for first, second in zip(tensors_of(outputs[0]), again, strict=True):
            if first.is_floating_point():
                check_again(first.detach().double().norm(), second.double().norm())
        return tape, map_tensors(lambda *each: torch.stack(each), *outputs, otherwise=_none)

    def _tape_alone(
        self, function: Callable[[Any], Any], batch: Any, records: int, params: Params | None
    ) -> tuple[Tape, Tensor, dict[str, Tensor]]:
        """One backward pass per record: slow, and right for every function without state."""
        leaves = dict(self.trained)
        if params is not None:
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        rows: list[Sequence[Tensor]] = []
        losses: list[Tensor] = []
        figures: list[dict[str, Tensor]] = []

        def one(record: int) -> Tensor:
            loss, others = _outputs(function(slice_records(batch, record)))
            figures.append({name: value.detach() for name, value in others.items()})
            return widen(loss.reshape(()))

        values = list(leaves.values())
        errors: list[Exception] = []
        without = 0  # a graph
        with self._calling(None if params is None else leaves):
            draws = _own_draws(batch, records)
            for record in range(records):
                gradients: Sequence[Tensor] = [torch.zeros_like(value) for value in values]
                loss = values[0].new_full((), torch.nan)
                try:
                    with self._without_side_effects(params):
                        with draws[record]():
                            loss = one(record)
                        without += not loss.requires_grad
                        if loss.requires_grad:
                            gradients = torch.autograd.grad(
                                loss, values, allow_unused=True, materialize_grads=True
                            )
                except _NOT_OF_A_RECORD:
                    raise
                except Exception as error:  # of this record's values; see `_raising`
                    errors.append(error)
                    if len(errors) == records:
                        raise
                losses.append(loss.detach())
                rows.append(gradients)
            if not losses[0].isnan():
                with self._without_side_effects(params), draws[0]():
                    check_again(losses[0], one(0).detach())
                figures.pop()
        if without == records >= _MOST_TO_BLAME:
            raise InvalidInputError(
                "the loss has no graph to the model, so that noise alone would train it; return "
                "the tensor that was computed, not a number (.item()) or a copy (.detach())"
            )
        tape = Tape({name: value.detach() for name, value in leaves.items()}, records)
        for name, column in zip(leaves, zip(*rows, strict=True), strict=True):
            tape.add(name, Rows(widen(torch.stack(column))))
        found = torch.stack(losses)
        tape.spoiled = found.isnan()
        figures = figures if len(figures) == records else [{}]
        return tape, found, {name: torch.stack([f[name] for f in figures]) for name in figures[0]}

    @contextmanager
    def _calling(self, own: Mapping[str, Tensor] | None) -> Iterator[None]:
        """The modules outside of a level, perhaps with other weights."""
        names = {id(value): name for name, value in self.trained.items()}

        def weight(_: str, value: Tensor) -> Tensor:
            return (own or {}).get(names.get(id(value), ""), value.detach())

        with ExitStack() as stack:
            stack.enter_context(CountedData())
            for model in self.models:
                stack.enter_context(without_flattening(model.modules()))
                if own is not None:
                    stack.enter_context(use_weights(model, weight))
            yield

    @contextmanager
    def _without_side_effects(self, params: Params | None) -> Iterator[None]:
        """Around what one pass over records does, backwards too; says once what it puts back."""
        with without_side_effects(self.models, params) as changed:
            yield
        if changed and not self._told:
            self._told = True
            named = {m: name for model in self.models for name, m in model.named_modules()}
            where = {
                ".".join(filter(None, (named.get(module), key.lstrip("_"))))
                for module, key in changed
            }
            logging.getLogger("dpsur.engine").warning(
                "dpsur: a step puts attributes of the model back to what they were before it, so "
                "that nothing of a record reaches later steps: %s",
                ", ".join(sorted(where)),
            )


def check_again(first: Tensor, again: Tensor) -> None:
    """Refuse a function that gives a record another loss after it has seen others."""
    same = torch.isclose(
        first.double(), again.double().to(first.device), rtol=_ROUNDING, atol=1e-6, equal_nan=True
    )
    if not bool(same):
        raise CouplingError(
            "the function keeps state between calls: it gives a record another loss after it has "
            "seen other records, so clipping would not bound what one of them can change; compute "
            "everything from the batch and the model, and keep nothing"
        )


def _is_of_batching(error: Exception) -> bool:
    """Whether PyTorch says, or we do, that code cannot be batched, whatever a record holds."""
    text = str(error)
    return isinstance(error, NotSupportedError) or "vmap" in text or "batching" in text


def _key(kind: str, batch: Any) -> object:
    return kind, *((value.shape[1:], value.dtype) for value in tensors_of(batch))


def _outputs(found: Any) -> tuple[Tensor, dict[str, Tensor]]:
    others: dict[str, Tensor] = {}
    if isinstance(found, Mapping):
        if "loss" not in found:
            raise InvalidInputError(
                f"the function returned a mapping without 'loss' ({', '.join(map(str, found))})"
            )
        others = {
            str(name): value
            for name, value in found.items()
            if name != "loss" and isinstance(value, Tensor)
        }
        found = found["loss"]
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise InvalidInputError(
            "the function must return the loss, a tensor of one number, or a mapping with 'loss'; "
            f"it returned {type(found).__name__}{shape}: "
            + (
                "reduce it with .mean() or .sum()"
                if shape
                else "leave out .item(), and return other figures as {'loss': ..., 'accuracy': ...}"
            )
        )
    if not found.is_floating_point():
        raise InvalidInputError(
            f"the function returned a loss in {found.dtype}, which has no gradient; return a real "
            "number, computed from the model's outputs"
        )
    return found, others


def _without(batch: Any, bad: Tensor) -> Any:
    good = int((~bad).int().argmax())
    return map_tensors(
        lambda value: torch.where(_rows_like(bad, value), value[good], value),
        batch,
        otherwise=keep,
    )


def _rows_like(rows: Tensor, values: Tensor) -> Tensor:
    return rows.view(-1, *[1] * (values.dim() - 1))


def slice_records(batch: Any, record: int) -> Any:
    """One record of a batch whose tensors have the records in front, in memory of its own."""
    return map_tensors(lambda value: value[record].clone(), batch, otherwise=keep)


def _none(value: Any) -> None:
    """What is no tensor stays inside, and with it what it holds of records."""
    if isinstance(value, torch.distributions.Distribution):
        raise UnsupportedModelError(
            f"the model returns a {type(value).__name__} of torch.distributions, which cannot be "
            "taken apart into records; return its parameters, or compute the loss in "
            "engine.private_step"
        )


def _own_draws(batch: Any, records: int) -> list[Callable[[], AbstractContextManager[None]]]:
    """Random numbers for each record, which none that came before can have changed."""
    device = tensors_of(batch)[0].device
    seeds = torch.randint(2**62, (records,), device="cpu").tolist()
    return [partial(seeded_globally, seed, device) for seed in seeds]


# --- outputs and losses in evaluation mode -------------------------------------------------------

# Which way works for a model: it is not kept alive by this.
_ways: WeakKeyDictionary[nn.Module, dict[object, Way]] = WeakKeyDictionary()


def record_outputs(objective: Objective, params: Params, inputs: TensorTree) -> TensorTree:
    """Outputs in evaluation mode, each record alone, for tests that add up what records give.

    A model that lets records meet would let one of them change the values of all.
    """
    model = objective.model
    own = dict(model.named_parameters())
    trained = {name: own[name] for name in params}
    records = RecordFunction((model,), trained, ways=_ways.setdefault(model, {}))

    def function(one: TensorTree) -> TensorTree:
        return output_rows(call(model, one))

    parts = []
    with torch.no_grad(), mode(model, training=False):
        for part in split_rows(inputs, EVALUATION_ROWS):
            alone = map_tensors(lambda value: value.unsqueeze(1), part)
            _, found = records.run(function, alone, row_count(part), params=params)
            parts.append(map_tensors(lambda value: value.flatten(0, 1), found))
    return concatenate_rows(parts)


def record_losses(objective: Objective, params: Params, examples: Examples) -> Tensor:
    outputs = record_outputs(objective, params, examples.inputs)
    return losses_one_by_one(objective.loss, outputs, examples.targets)
