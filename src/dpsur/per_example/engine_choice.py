"""Which engine is right for a model, found out once on synthetic records.

Layers' rules see calls of modules, and a model can use a weight in other ways (`F.linear(x,
self.embedding.weight)`), fold dimensions into the batch or fail under `torch.func`. So every choice
is tried against plain autograd, row by row, before a record reaches it. The trial uses synthetic
inputs and weights: it costs no privacy, and a head of zeros cannot hide a fault.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dpsur.functional.call import every_module
from dpsur.functional.parameters import Params
from dpsur.functional.problem import Objective
from dpsur.functional.process_settings import precision, seeded_globally
from dpsur.functional.tree import (
    TensorTree,
    device_of,
    map_tensors,
    row_count,
    signature,
    tensors_of,
)
from dpsur.per_example.contributions import Factors, Rows
from dpsur.per_example.generic import batched_gradients, batching_fault, one_at_a_time
from dpsur.per_example.input_cache import channels_last_pays
from dpsur.per_example.kernels.nvrtc import SlowerWarning
from dpsur.per_example.memory_budget import GradientBudget
from dpsur.per_example.mixing_check import numbers_per_record, synthetic
from dpsur.per_example.one_pass import Assignment, Microbatch, assign, fill_tape, watched_outputs
from dpsur.per_example.self_check import compare, rounds_to_tf32
from dpsur.per_example.tape import Layout, NotSupportedError, Slot, Tape

_SIZES = (2, 3)
# Forward passes until it is known which operations see examples; most models need two or three.
_MOST_GUESSES = 40


class Engine(Enum):
    """How gradients are found, fastest first."""

    ONE_PASS = "one-pass"
    BATCHED = "batched"  # torch.func over the whole model
    ONE_BY_ONE = "one-by-one"


@dataclass(frozen=True)
class Attempt:
    """An engine that was tried and failed: why, and in which module, if that is known."""

    engine: Engine
    reason: str
    module: str | None = None


@dataclass(frozen=True)
class Plan:
    """The engine for a model and rows per microbatch; for one pass the rules of its layers too.

    `layouts` tell where the layers hold the examples, and `channels_last` whether inputs are
    better gathered with their channels innermost. `failed` are faster engines that were tried, and
    `repeated` parameters whose operations torch.func repeats per example.
    """

    engine: Engine
    rows: int
    layouts: tuple[Layout | None, ...] = ()
    assignment: Assignment | None = None
    channels_last: bool = False
    failed: tuple[Attempt, ...] = ()
    repeated: frozenset[str] = frozenset()


def explain_error(model: nn.Module, error: Exception) -> tuple[str, str | None]:
    """What went wrong, and in which module: the innermost that the error came through."""
    names = every_module(model)
    found: nn.Module | None = None
    if isinstance(error, NotSupportedError) and error.parameter is not None:
        place = error.parameter.rpartition(".")[0]
        found = next((module for module, name in names.items() if name == place), None)
    trace = None if found is not None else error.__traceback__
    while trace is not None:
        for name in ("self", "module"):
            value = trace.tb_frame.f_locals.get(name)
            if isinstance(value, nn.Module) and value in names:
                found = value
        trace = trace.tb_next
    if found is None:
        return first_line(error), None
    return first_line(error), f"{names[found] or '(root)'} ({type(found).__name__})"


def first_line(error: Exception) -> str:
    """The first line of an error, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


_plans: WeakKeyDictionary[nn.Module, dict[object, Plan]] = WeakKeyDictionary()


def plan_for(
    objective: Objective, params: Params, inputs: TensorTree, budget: GradientBudget
) -> Plan:
    """The plan for a model and inputs of this shape, made once. The inputs may be on the host."""
    device = next(iter(params.values())).device
    key = _key(objective, params, inputs, budget)
    plans = _plans.setdefault(objective.model, {})
    if key not in plans:
        with _silence_warnings(), seeded_globally(0, device):
            plans[key] = _make(
                objective, params, _on(device, synthetic(inputs, max(_SIZES))), budget
            )
    return plans[key]


def plan_with_less_memory(
    objective: Objective, params: Params, inputs: TensorTree, budget: GradientBudget, rows: int
) -> Plan:
    """The same plan for microbatches of so many rows, from now on."""
    plan = replace(plan_for(objective, params, inputs, budget), rows=rows)
    _plans[objective.model][_key(objective, params, inputs, budget)] = plan
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


def _on(device: torch.device, rows: TensorTree) -> TensorTree:
    return map_tensors(lambda value: value.to(device), rows)


@contextmanager
def _silence_warnings() -> Iterator[None]:
    """Keep warnings of trials that may fail to ourselves, but for what is said only once."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield
    for one in heard:
        if issubclass(one.category, SlowerWarning):
            warnings.warn(one.message, stacklevel=4)


def _make(objective: Objective, params: Params, inputs: TensorTree, budget: GradientBudget) -> Plan:
    device = device_of(inputs)
    failed: list[Attempt] = []
    for assignment in _assignments(objective.model, params):
        try:
            full = Objective(objective.model, objective.loss)
            layouts, memory, repeated = _verify(full, params, inputs, assignment)
            if objective.bf16:
                _try_rounded(objective, params, synthetic(inputs, _SIZES[0]), assignment, layouts)
            rows = budget.rows(memory, device)
            channels_last = channels_last_pays(objective, params, inputs)
            copies = any(kind is None for _, kind in assignment.forwards)
            return Plan(
                Engine.ONE_PASS,
                rows,
                tuple(layouts),
                assignment,
                channels_last,
                # rules that were not enough made nothing slower, where operations are followed
                tuple(failed) if copies else (),
                repeated,
            )
        except Exception as error:  # whatever goes wrong, a slower engine may still work
            failed.append(Attempt(Engine.ONE_PASS, *explain_error(objective.model, error)))
    numbers = sum(value.numel() for value in params.values())
    memory = 4 * (3 * numbers + 8 * numbers_per_record(inputs))
    rows = budget.rows(memory, device)
    fault = batching_fault(objective, params, synthetic(inputs, 2))
    if fault is None:
        return Plan(Engine.BATCHED, rows, failed=tuple(failed))
    failed.append(Attempt(Engine.BATCHED, *explain_error(objective.model, fault)))
    return Plan(Engine.ONE_BY_ONE, rows, failed=tuple(failed))


def _assignments(model: nn.Module, params: Params) -> list[Assignment]:
    """Ways to one pass, fastest first: rules, rules and operations, rules and copies."""
    copies = assign(model, params, operations=False)
    operations = assign(model, params, operations=True)
    if any(kind is None for _, kind in copies.forwards):
        return [operations, copies]
    return [copies, operations]


def _verify(
    objective: Objective, params: Params, inputs: TensorTree, assignment: Assignment
) -> tuple[list[Layout | None], int, frozenset[str]]:
    """Layouts, bytes per example and repeated parameters, after a comparison with autograd.

    Where layers round to TF32 the comparison is made in full float32 first, then as they round.
    """
    trial = {n: torch.randn_like(v).mul_(0.05).add_(v.detach()) for n, v in params.items()}
    rows = {size: synthetic(inputs, size) for size in _SIZES}
    layouts: list[Layout | None] = []
    for _ in range(_MOST_GUESSES):
        shapes, tapes = [], []
        for size in _SIZES:
            tape = Tape(trial, size, guesses=layouts)
            with torch.enable_grad():
                watched_outputs(objective, tape, rows[size], assignment)
            shapes.append(tape.shapes)
            tapes.append(tape)
        found = _layouts(*shapes)
        # which operations are followed depends on where examples are, and this on the operations
        if not assignment.operations or found == layouts:
            break
        layouts = found
    else:
        raise NotSupportedError("too many operations on parameters alone")
    rounds = rounds_to_tf32(device_of(inputs))
    if rounds:
        with precision(tf32=False):
            compare(objective, trial, rows[_SIZES[-1]], assignment, found)
    memory = [
        compare(objective, trial, rows[size], assignment, found, alone=not rounds)
        for size in _SIZES
    ]
    return found, memory[1] - memory[0], frozenset(tapes[-1].repeated)


def fault_of_copies(objective: Objective, params: Params, inputs: TensorTree) -> Attempt | None:
    """Why a model may not be called with a copy of its parameters for every example, or None.

    torch.func batches some operations on copies wrongly that it batches rightly on one weight.
    """
    full = Objective(objective.model, objective.loss)
    device = next(iter(params.values())).device
    try:
        with _silence_warnings(), seeded_globally(0, device):
            rows = _on(device, synthetic(inputs, max(_SIZES)))
            _verify(full, params, rows, Assignment([(0, None)]))
    except Exception as error:  # whatever goes wrong, one record at a time is right
        return Attempt(Engine.BATCHED, *explain_error(objective.model, error))
    return None


def _try_rounded(
    objective: Objective,
    params: Params,
    inputs: TensorTree,
    assignment: Assignment,
    layouts: list[Layout | None],
) -> None:
    """Fail where a rule cannot work in bfloat16. The comparison with autograd is made without."""
    tape = Tape(
        {name: value.detach() for name, value in params.items()}, row_count(inputs), layouts
    )
    with torch.enable_grad():
        outputs = watched_outputs(objective, tape, inputs, assignment)
    sums = [value.sum() for value in tensors_of(outputs) if value.is_floating_point()]
    torch.autograd.grad(sums, tape.leaves, allow_unused=True)
    norms = tape.norms()
    for name in params:
        tape.weighted_sum(name, Factors(torch.ones_like(norms), None))


def _layouts(two: list[torch.Size], three: list[torch.Size]) -> list[Layout | None]:
    """Find the examples in every tensor: where its shape grows with the batch."""
    if len(two) != len(three):
        raise NotSupportedError("the number of layers depends on the batch")
    return [_layout(small, large) for small, large in zip(two, three, strict=True)]


def _layout(small: torch.Size, large: torch.Size) -> Layout | None:
    if len(small) != len(large):
        raise NotSupportedError("the rank of an activation depends on the batch")
    changed = [axis for axis in range(len(small)) if small[axis] != large[axis]]
    if not changed:
        return None
    axis, *more = changed
    if more or small[axis] % _SIZES[0] or small[axis] * _SIZES[1] != large[axis] * _SIZES[0]:
        raise NotSupportedError("an activation mixes examples with other dimensions")
    return Layout(axis, small[axis] // _SIZES[0])


def make_tape(objective: Objective, params: Params, microbatch: Microbatch, plan: Plan) -> Tape:
    """What is known about every row's gradient: enough for its norm and for weighted sums.

    Norms and sums are to be taken with `precision(tf32=False)`.
    """
    if plan.assignment is not None:
        try:
            return fill_tape(objective, params, microbatch, plan.assignment, list(plan.layouts))
        except NotSupportedError as error:
            # the model treats these records unlike the synthetic ones of the plan
            _say_once(str(error))
    find = one_at_a_time if plan.engine is Engine.ONE_BY_ONE else batched_gradients
    tape = Tape(params, len(microbatch.batch), [])
    gradients, losses = find(objective, params, microbatch.batch)
    for name, rows in gradients.items():
        tape.add(Slot(name), Rows(rows))
    tape.spoiled = losses.isnan()
    return tape


@cache
def _say_once(reason: str) -> None:
    """Not at the default level: whether it is said at all depends on the records of a batch."""
    logging.getLogger("dpsur.engine").info(
        "dpsur: some batches need a slower engine than planned: %s", reason
    )
