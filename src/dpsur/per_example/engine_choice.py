"""How the gradients of a model are found, and for how many records at once: decided once.

The model is called on the first records of the inputs, in the record level, and what the pass holds
on to is measured. Nothing of it is kept but the decision.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Objective, call, every_module, mode, output_rows
from dpsur.functional.process_settings import seeded_globally, widen
from dpsur.functional.records import Examples
from dpsur.functional.tree import (
    Params,
    TensorTree,
    map_tensors,
    row_count,
    signature,
    slice_rows,
    tensors_of,
)
from dpsur.per_example.augmentation import augmented, repeat_rows
from dpsur.per_example.input_cache import KnownInputs
from dpsur.per_example.memory_budget import GradientBudget
from dpsur.per_example.record_function import RecordFunction
from dpsur.per_example.record_level import LevelTape
from dpsur.per_example.tape import Tape


class Engine(Enum):
    """How gradients are found, fastest first."""

    ONE_PASS = "one-pass"
    ONE_BY_ONE = "one-by-one"


@dataclass(frozen=True)
class GradientStrategy:
    """The engine for a model and records per microbatch.

    `reason` says why the engine is not the fast one, `copied` which parameters are used by
    operations without a rule, with a gradient for every record.
    """

    engine: Engine
    rows: int
    records: RecordFunction = field(compare=False)
    reason: str | None = None
    copied: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BatchSlice:
    """Some rows of a batch, which of them count, and where they stand in a data set, if known.

    `coins`, a uniform draw per row, round its gradient at random to the norm 0 or the bound.
    """

    batch: Examples
    keep: Tensor | None = None
    known: KnownInputs | None = None
    coins: Tensor | None = None


_strategies: WeakKeyDictionary[nn.Module, dict[object, GradientStrategy]] = WeakKeyDictionary()


def strategy_for(
    objective: Objective, params: Params, inputs: TensorTree, budget: GradientBudget
) -> GradientStrategy:
    """The plan for a model and inputs of this shape, made once. The inputs may be on the host."""
    device = next(iter(params.values())).device
    key = _key(objective, params, inputs, budget)
    plans = _strategies.setdefault(objective.model, {})
    if key not in plans:
        first = map_tensors(lambda value: value.to(device), slice_rows(inputs, slice(2)))
        with seeded_globally(0, device):
            plans[key] = _make(objective, params, first, budget)
    return plans[key]


def plan_with_less_memory(
    objective: Objective, params: Params, inputs: TensorTree, budget: GradientBudget, rows: int
) -> GradientStrategy:
    """The same plan for microbatches of so many rows, from now on."""
    plan = replace(strategy_for(objective, params, inputs, budget), rows=rows)
    _strategies[objective.model][_key(objective, params, inputs, budget)] = plan
    logging.getLogger("dpsur.engine").warning(
        "dpsur: out of memory: continuing with microbatches of %d; the result is the same", rows
    )
    return plan


def _key(
    objective: Objective, params: Params, inputs: TensorTree, budget: GradientBudget
) -> tuple[object, ...]:
    """What a plan depends on, the model aside."""
    device = next(iter(params.values())).device
    return (
        budget,
        objective.bf16,
        signature(inputs),
        device,
        tuple((name, value.shape, value.dtype) for name, value in params.items()),
        tuple(
            (type(module), "forward" in vars(module)) for module in every_module(objective.model)
        ),
    )


def _make(
    objective: Objective, params: Params, inputs: TensorTree, budget: GradientBudget
) -> GradientStrategy:
    own = dict(objective.model.named_parameters())
    records = RecordFunction((objective.model,), {name: own[name] for name in params})
    held, copied = [], frozenset[str]()
    most = row_count(inputs)
    for rows in range(1, most + 1):
        saved: list[Tensor] = []
        part = slice_rows(inputs, slice(rows))
        try:
            with _saved() as saved:
                tape = _tape(objective, params, records, part, _total)
        except RuntimeError:  # torch.func in a model allows no such hooks
            tape = _tape(objective, params, records, part, _total)
        saved += [
            value
            for uses in tape.contributions.values()
            for several in uses.values()
            for one in several
            for value in one.tensors()
        ]
        storages = {value.untyped_storage()._cdata: value.untyped_storage() for value in saved}
        held.append(sum(storage.nbytes() for storage in storages.values()))
        copied = frozenset(tape.copied) if isinstance(tape, LevelTape) else frozenset()
    alone = not records.by_construction
    memory = held[-1] - (held[-2] if most > 1 else 0)
    if alone:
        memory = 8 * sum(value.numel() for value in params.values())
    return GradientStrategy(
        Engine.ONE_BY_ONE if alone else Engine.ONE_PASS,
        budget.rows(memory, next(iter(params.values())).device),
        records,
        records.why_alone if alone else None,
        copied,
    )


@contextmanager
def _saved() -> Iterator[list[Tensor]]:
    """What autograd saves meanwhile."""
    found: list[Tensor] = []

    def hold(value: Tensor) -> Tensor:
        found.append(value.detach())  # a graph that holds its own outputs is never given back
        return found[-1]

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda value: value):
        yield found


def _total(outputs: TensorTree, _: TensorTree) -> Tensor:
    """A loss that every number of the outputs matters to."""
    sums = [value.sum() for value in tensors_of(outputs) if value.is_floating_point()]
    if not sums:
        raise InvalidInputError("the model returns no tensor of numbers to compute a loss from")
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def make_tape(
    objective: Objective, params: Params, microbatch: BatchSlice, plan: GradientStrategy
) -> Tape:
    """What is known about every record's gradient: enough for its norm and for weighted sums.

    Norms and sums are to be taken with `precision(tf32=False)`.
    """
    batch = microbatch.batch
    return _tape(
        objective,
        params,
        plan.records,
        batch.inputs,
        objective.loss,
        batch.targets,
        known=microbatch.known,
    )


def _tape(
    objective: Objective,
    params: Params,
    records: RecordFunction,
    inputs: TensorTree,
    loss: Any,
    targets: TensorTree = None,
    *,
    known: KnownInputs | None = None,
) -> Tape:
    views, augment = objective.views, objective.augment

    def function(one: tuple[TensorTree, TensorTree]) -> Tensor:
        given, wanted = one
        if augment is not None:
            given = augmented(augment, repeat_rows(given, views))
        with objective.training_precision():
            outputs = output_rows(call(objective.model, given))
        outputs = map_tensors(widen, outputs)
        if views == 1:
            return _number(loss(outputs, wanted))
        each = [_number(loss(slice_rows(outputs, slice(i, i + 1)), wanted)) for i in range(views)]
        return torch.stack(each).mean()

    alone = map_tensors(lambda value: value.unsqueeze(1), (inputs, targets))
    with mode(objective.model, training=True):
        tape, _, _ = records.tape(function, alone, row_count(inputs), params=params, known=known)
    return tape


def _number(loss: Tensor) -> Tensor:
    return loss.reshape(())
