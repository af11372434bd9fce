"""Which engine is right for a model, found out once on made-up records.

Layers' rules see calls of modules, and a model can use a weight in other ways (`F.linear(x,
self.embedding.weight)`), fold dimensions into the batch or fail under `torch.func`. So every choice
is tried against plain autograd, row by row, before a record reaches it. The trial uses made-up
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
from torch import Tensor, nn

from dpsur.functional.call import every_module
from dpsur.functional.parameters import Params
from dpsur.functional.problem import Problem, example_losses
from dpsur.functional.process_settings import seeded_globally
from dpsur.per_example.contributions import Factors, Rows
from dpsur.per_example.generic import batching_fault, one_at_a_time, per_example_gradients
from dpsur.per_example.input_cache import turning_pays
from dpsur.per_example.kernels.nvrtc import SlowerWarning
from dpsur.per_example.memory_budget import GradientBudget
from dpsur.per_example.model_check import made_up
from dpsur.per_example.modules import Assignment, assign
from dpsur.per_example.one_pass import Piece, filled_tape, taped_outputs
from dpsur.per_example.self_check import compare
from dpsur.per_example.tape import Layout, NotSupportedError, Slot, Tape

_SIZES = (2, 3)


class Engine(Enum):
    """How gradients are found, fastest first."""

    ONE_PASS = "one-pass"
    BATCHED = "batched"  # torch.func over the whole model
    ONE_BY_ONE = "one-by-one"


@dataclass(frozen=True)
class Plan:
    """The engine for a model and rows per piece; for one pass the rules of its layers too.

    `layouts` tell where the layers hold the examples, and `turned` whether inputs are better
    gathered with their channels innermost.
    """

    engine: Engine
    rows: int
    layouts: tuple[Layout | None, ...] = ()
    assignment: Assignment | None = None
    turned: bool = False
    # Why the engine is not a faster one, and the module that it is due to.
    reason: str | None = None
    module: str | None = None


@dataclass(frozen=True, repr=False)
class EngineChoice:
    """How gradients are found: `name`, and why not faster: `reason` and `module`, if known."""

    name: str
    reason: str | None = None
    module: str | None = None

    def __str__(self) -> str:
        where = "" if self.module is None else f"module {self.module}: "
        return self.name if self.reason is None else f"{self.name} ({where}{self.reason})"

    def __repr__(self) -> str:
        return f"EngineChoice({self})"


def engine_choice(problem: Problem) -> EngineChoice:
    """The engine for a problem's records, and what keeps it from being faster."""
    params, inputs = problem.initial_params(), problem.train.inputs
    plan = plan_for(problem, params, inputs, GradientBudget())
    name, reason, module = plan.engine.value, plan.reason, plan.module
    if reason is None:
        fault = _loss_fault(problem, params, inputs)
        reason = fault and f"the loss is called for one example at a time: {fault}"
    return EngineChoice(name, reason, module)


def log_choice(choice: EngineChoice) -> None:
    """Say which engine runs; as a warning where a faster one had to be given up."""
    slower = choice.reason is not None and choice.name in {engine.value for engine in Engine}
    level = logging.WARNING if slower else logging.INFO
    text = {
        Engine.BATCHED.value: "; this is slower, with the same results",
        Engine.ONE_BY_ONE.value: "; this is many times slower, with the same results",
    }.get(choice.name, "")
    _log.log(level, "dpsur: gradients per example: engine %s%s", choice, text)


def _loss_fault(problem: Problem, params: Params, inputs: Tensor) -> str | None:
    """Why the losses of a batch cannot be computed at once, tried on made-up records."""
    device = next(iter(params.values())).device
    with seeded_globally(0, device), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        outputs = problem.outputs(params, made_up(inputs, 2).to(device))
        targets = torch.zeros_like(problem.train.targets[:2], device=device)
        try:
            example_losses(problem.loss, outputs, targets)
        except RuntimeError as error:
            return _first_line(error)
        except Exception:  # not what is asked here: `check_loss` is for that
            return None
    return None


def _why(model: nn.Module, error: Exception) -> tuple[str, str | None]:
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
        return _first_line(error), None
    return _first_line(error), f"{names[found] or '(root)'} ({type(found).__name__})"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


_log = logging.getLogger("dpsur.engine")
_plans: WeakKeyDictionary[nn.Module, dict[object, Plan]] = WeakKeyDictionary()


def plan_for(problem: Problem, params: Params, inputs: Tensor, budget: GradientBudget) -> Plan:
    """The plan for a model and inputs of this shape, made once. The inputs may be on the host."""
    device = next(iter(params.values())).device
    key = (
        budget,
        problem.bf16,
        tuple(inputs.shape[1:]),
        inputs.dtype,
        device,
        tuple((name, value.shape, value.dtype) for name, value in params.items()),
        tuple((type(module), "forward" in vars(module)) for module in every_module(problem.model)),
    )
    plans = _plans.setdefault(problem.model, {})
    if key not in plans:
        with _hushed(), seeded_globally(0, device):
            plans[key] = _make(problem, params, made_up(inputs, max(_SIZES)).to(device), budget)
    return plans[key]


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep warnings of trials that may fail to ourselves, but for what is said only once."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield
    for one in heard:
        if issubclass(one.category, SlowerWarning):
            warnings.warn(one.message, stacklevel=4)


def _make(problem: Problem, params: Params, inputs: Tensor, budget: GradientBudget) -> Plan:
    reason: str | None = None
    module: str | None = None
    for broadcast in (True, False):
        assignment = assign(problem.model, params, broadcast=broadcast)
        if broadcast and not assignment.copied:
            continue
        try:
            layouts, memory = _verified(replace(problem, bf16=False), params, inputs, assignment)
            if problem.bf16:
                _try_rounded(problem, params, made_up(inputs, _SIZES[0]), assignment, layouts)
            rows = budget.rows(memory, inputs.device)
            turned = turning_pays(problem, params, inputs)
            return Plan(Engine.ONE_PASS, rows, tuple(layouts), assignment, turned)
        except Exception as error:  # whatever goes wrong, a slower engine may still work
            reason, module = _why(problem.model, error)
    numbers = sum(value.numel() for value in params.values())
    memory = 4 * (3 * numbers + 8 * inputs[:1].numel())
    rows = budget.rows(memory, inputs.device)
    fault = batching_fault(problem, params, made_up(inputs, 2))
    if fault is None:
        return Plan(Engine.BATCHED, rows, reason=reason, module=module)
    reason, module = _why(problem.model, fault)
    return Plan(Engine.ONE_BY_ONE, rows, reason=reason, module=module)


def _verified(
    problem: Problem, params: Params, inputs: Tensor, assignment: Assignment
) -> tuple[list[Layout | None], int]:
    """Layouts and bytes per example, after a comparison with autograd."""
    trial = {n: v.detach() + 0.05 * torch.randn_like(v) for n, v in params.items()}
    rows = {size: made_up(inputs, size) for size in _SIZES}
    shapes = []
    for size in _SIZES:
        tape = Tape(trial, size)
        taped_outputs(problem, tape, rows[size], assignment)
        shapes.append(tape.shapes)
    layouts = _layouts(*shapes)
    memory = [compare(problem, trial, rows[size], assignment, layouts) for size in _SIZES]
    return layouts, memory[1] - memory[0]


def _try_rounded(
    problem: Problem,
    params: Params,
    inputs: Tensor,
    assignment: Assignment,
    layouts: list[Layout | None],
) -> None:
    """Fail where a rule cannot work in bfloat16. The comparison with autograd is made without."""
    tape = Tape({name: value.detach() for name, value in params.items()}, len(inputs), layouts)
    with torch.enable_grad():
        outputs = taped_outputs(problem, tape, inputs, assignment)
    torch.autograd.grad(outputs.sum(), tape.leaves, allow_unused=True)
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


def tape_of(problem: Problem, params: Params, piece: Piece, plan: Plan) -> Tape:
    """What is known about every row's gradient: enough for its norm and for weighted sums.

    Norms and sums are to be taken with `precision(tf32=False)`.
    """
    if plan.assignment is not None:
        try:
            return filled_tape(problem, params, piece, plan.assignment, list(plan.layouts))
        except NotSupportedError as error:
            # the model treats these records unlike the made-up ones of the plan
            _say_once(str(error))
    find = one_at_a_time if plan.engine is Engine.ONE_BY_ONE else per_example_gradients
    tape = Tape(params, len(piece.batch), [])
    for name, rows in find(problem, params, piece.batch).items():
        tape.add(Slot(name), Rows(rows))
    return tape


@cache
def _say_once(reason: str) -> None:
    """The reason is one of our own sentences and quotes no record."""
    logging.getLogger("dpsur.engine").warning(
        "dpsur: some batches need a slower engine than planned: %s", reason
    )
