"""Which method finds the gradients of each module, and why it is not a faster one."""

import logging
from dataclasses import dataclass, replace

from torch import Tensor, nn

from dpsur.functional.problem import Objective, Problem, every_module
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.tree import Params, TensorTree
from dpsur.per_example.clipping import (
    BatchSlice,
    Engine,
    GradientStrategy,
    make_tape,
    strategy_for,
)
from dpsur.per_example.memory_budget import GradientBudget
from dpsur.per_example.rules import kind_of, why_no_rule

_log = logging.getLogger("dpsur.engine")
_ALONE_COST = "this is many times slower, with the same results"
COPIES = "copies"
SMALL = 2**16  # numbers of a parameter whose gradients for all records are no burden
_COPIES_COST = (
    "an operation without a rule has a gradient for every record, which takes their memory; layers "
    "of torch.nn are faster"
)


@dataclass(frozen=True)
class ModuleReport:
    """How the gradients of one module with trained parameters are found.

    `method` is "rule" (the layer has a rule: one backward pass for all records), "operations" (the
    same, by the torch functions that use the parameters), "copies" (a gradient for every record),
    or "one-by-one" where the whole model runs so. `reason` says why it is not a rule.
    """

    path: str
    kind: str
    method: str
    reason: str | None = None


@dataclass(frozen=True, repr=False)
class EngineReport:
    """How per-record gradients are found; `print` it to see every module.

    `name` is the engine: "one-pass" (all records at once) or "one-by-one". `reason` says what keeps
    it from being faster. `not_captured` says why the trials of a run on a GPU are not replayed as
    CUDA graphs; None if they are.
    """

    name: str
    reason: str | None = None
    modules: tuple[ModuleReport, ...] = ()
    not_captured: str | None = None

    @property
    def summary(self) -> str:
        """One line: the engine, and why not a faster one."""
        return self.name if self.reason is None else f"{self.name} ({self.reason})"

    def __str__(self) -> str:
        slow = self.name == Engine.ONE_BY_ONE.value
        lines = [f"engine {self.summary}" + (f"; {_ALONE_COST}" if slow else "")]
        if self.not_captured is not None:
            lines.append(f"  trials are not captured as CUDA graphs: {self.not_captured}")
        if any(one.method == COPIES for one in self.modules):
            lines.append(f"  {COPIES}: {_COPIES_COST}")
        columns = [(one.path or "(root)", one.kind, one.method) for one in self.modules]
        widths = [max(map(len, column)) for column in zip(*columns, strict=True)]
        for row, one in zip(columns, self.modules, strict=True):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(f"  {'  '.join(cells)}  {one.reason or ''}".rstrip())
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"EngineReport({self.summary})"


def explain(model: nn.Module, inputs: TensorTree) -> EngineReport:
    """Which per-record method serves each module of a model, for inputs like these.

    The inputs are one tensor or a tree of tensors with a row per record. Print the report to see
    every module with trained parameters, and why a slower method was taken where one was.
    """
    return _report(Objective(model, _no_loss), inputs)


def _no_loss(outputs: TensorTree, targets: TensorTree) -> Tensor:
    raise NotImplementedError("an engine is chosen without a loss")


def engine_report(problem: Problem) -> EngineReport:
    """The report for a problem: its model, its records and its loss."""
    report = _report(problem, problem.train.inputs)
    if report.reason is not None:
        return report
    reason = _loss_fault(problem, problem.initial_params())
    return report if reason is None else replace(report, name="one-by-one", reason=reason)


def log_engine(report: EngineReport) -> None:
    """Say which engine runs; where it is the slow one, a warning has been given with the reason."""
    _log.info("dpsur: gradients per example: engine %s", report.summary)
    if report.not_captured is not None:
        _log.info("dpsur: trials are not captured as CUDA graphs: %s", report.not_captured)


def _report(objective: Objective, inputs: TensorTree) -> EngineReport:
    params = objective.initial_params()
    plan = strategy_for(objective, params, inputs, GradientBudget())
    return EngineReport(plan.engine.value, plan.reason, _modules(objective.model, params, plan))


def _modules(model: nn.Module, params: Params, plan: GradientStrategy) -> tuple[ModuleReport, ...]:
    """Every module that owns trained parameters."""
    trained = {id(value): name for name, value in model.named_parameters() if name in params}
    inside: dict[str, str] = {}  # layers whose weights the rule of another one looks after
    found = []
    for module, path in every_module(model).items():
        if isinstance(module, nn.MultiheadAttention):
            inside[f"{path}.out_proj" if path else "out_proj"] = path
        own = [trained[id(p)] for p in module.parameters(recurse=False) if id(p) in trained]
        if not own:
            continue
        kind, missing = type(module).__name__, why_no_rule(module)
        copied = [name for name in own if name in plan.copied and params[name].numel() > SMALL]
        if plan.engine is Engine.ONE_BY_ONE:
            found.append(ModuleReport(path, kind, plan.engine.value, missing))
        elif copied:
            why = f"{', '.join(copied)}: used by an operation without a rule"
            found.append(ModuleReport(path, kind, COPIES, why))
        elif path in inside:
            found.append(ModuleReport(path, kind, "rule", f"part of {inside[path] or '(root)'}"))
        elif kind_of(module) is not None:
            found.append(ModuleReport(path, kind, "rule"))
        else:
            found.append(ModuleReport(path, kind, "operations", missing))
    return tuple(found)


def _loss_fault(problem: Problem, params: Params) -> str | None:
    """Why the losses of a batch cannot be computed at once, tried on the first records."""
    first = problem.train.part(slice(2)).to(problem.device)
    plan = strategy_for(problem, params, problem.train.inputs, GradientBudget())
    with seeded_globally(0, problem.device):
        try:
            make_tape(problem, params, BatchSlice(first), plan)
        except Exception as error:  # what is wrong with a loss is for `check_loss` to say
            _log.debug("dpsur: the loss fails on the first records: %s", error)
    if plan.records.by_construction:
        return None
    return f"the loss cannot be called for all records at once: {plan.records.why_alone}"
