"""Which method finds the gradients of each module, and why it is not a faster one."""

import logging
import warnings
from dataclasses import dataclass

import torch
from torch import nn

from dpsur.functional.call import every_module
from dpsur.functional.parameters import Params
from dpsur.functional.problem import Objective, Problem, example_losses
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.tree import TensorTree, map_tensors
from dpsur.per_example.engine_choice import Attempt, Engine, Plan, first_line, plan_for
from dpsur.per_example.memory_budget import GradientBudget
from dpsur.per_example.mixing_check import synthetic
from dpsur.per_example.rules import kind_of, why_no_rule

_log = logging.getLogger("dpsur.engine")
_COSTS = {
    Engine.BATCHED.value: "this is slower, with the same results",
    Engine.ONE_BY_ONE.value: "this is many times slower, with the same results",
}


COPIES = "copies"
_COPIES_COST = (
    "torch.func differentiates with a copy of the parameters per example, in about the time and "
    "memory of Opacus's functorch mode; layers of torch.nn are several times faster"
)


@dataclass(frozen=True)
class ModuleReport:
    """How the gradients of one module with trained parameters are found.

    `method` is "rule" (the layer has a rule: one backward pass for all examples), "operations"
    (the same, by the torch functions that use the parameters), "copies" (torch.func, with a copy
    of the parameters for every example), or the engine of the whole model. `reason` says why it is
    not a rule.
    """

    path: str
    kind: str
    method: str
    reason: str | None = None


@dataclass(frozen=True, repr=False)
class EngineReport:
    """How per-example gradients are found; `print` it to see every module.

    `name` is the engine: "one-pass", "batched" (torch.func over the whole model) or "one-by-one".
    `reason` and `module` say what keeps it from being faster, and `failed` which faster engines
    were tried. `not_captured` says why the trials of a run on a GPU are not replayed as CUDA
    graphs; None if they are.
    """

    name: str
    reason: str | None = None
    module: str | None = None
    modules: tuple[ModuleReport, ...] = ()
    failed: tuple[Attempt, ...] = ()
    not_captured: str | None = None

    @property
    def summary(self) -> str:
        """One line: the engine, and why not a faster one."""
        where = "" if self.module is None else f"module {self.module}: "
        return self.name if self.reason is None else f"{self.name} ({where}{self.reason})"

    def __str__(self) -> str:
        cost = _COSTS.get(self.name)
        lines = [f"engine {self.summary}" + (f"; {cost}" if cost else "")]
        lines += [
            f"  tried {one.engine.value}: {_place(one.module)}{one.reason}" for one in self.failed
        ]
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


def _place(module: str | None) -> str:
    return "" if module is None else f"module {module}: "


def explain(model: nn.Module, inputs: TensorTree) -> EngineReport:
    """Which per-example method serves each module of a model, for inputs like these.

    The inputs are one tensor or a tree of tensors with a row per record; only their structure,
    shapes and types are used. Print the report to see every module with trained parameters, and why
    a slower method was taken where one was.
    """
    objective = Objective(model, _no_loss)
    return _report(objective, inputs)


def _no_loss(outputs: TensorTree, targets: TensorTree) -> torch.Tensor:
    raise NotImplementedError("an engine is chosen without a loss")


def engine_report(problem: Problem) -> EngineReport:
    """The report for a problem: its model, its records and its loss."""
    report = _report(problem, problem.train.inputs)
    if report.reason is not None:
        return report
    fault = _loss_fault(problem, problem.initial_params())
    reason = fault and f"the loss is called for one example at a time: {fault}"
    return EngineReport(report.name, reason, None, report.modules, report.failed)


def log_engine(report: EngineReport) -> None:
    """Say which engine runs; as a warning where a faster one had to be given up."""
    slower = report.reason is not None and report.name in {engine.value for engine in Engine}
    cost = _COSTS.get(report.name)
    _log.log(
        logging.WARNING if slower else logging.INFO,
        "dpsur: gradients per example: engine %s%s",
        report.summary,
        f"; {cost}" if cost else "",
    )
    if report.not_captured is not None:
        _log.info("dpsur: trials are not captured as CUDA graphs: %s", report.not_captured)


def _report(objective: Objective, inputs: TensorTree) -> EngineReport:
    params = objective.initial_params()
    plan = plan_for(objective, params, inputs, GradientBudget())
    last = plan.failed[-1] if plan.failed else None
    return EngineReport(
        plan.engine.value,
        None if last is None else last.reason,
        None if last is None else last.module,
        _modules(objective.model, params, plan),
        plan.failed,
    )


def _modules(model: nn.Module, params: Params, plan: Plan) -> tuple[ModuleReport, ...]:
    """Every module that owns trained parameters."""
    trained = {id(value): name for name, value in model.named_parameters() if name in params}
    ruled: dict[int, bool] = {}
    if plan.assignment is not None:
        ruled = {place: kind is not None for place, kind in plan.assignment.forwards}
    found = []
    parents: list[tuple[str, bool]] = []  # modules that are served with all that is inside them
    for place, (module, path) in enumerate(every_module(model).items()):
        if place in ruled:
            parents.append((path, ruled[place]))
        own = [trained[id(p)] for p in module.parameters(recurse=False) if id(p) in trained]
        if not own:
            continue
        kind, missing = type(module).__name__, why_no_rule(module)
        if plan.assignment is None:
            found.append(ModuleReport(path, kind, plan.engine.value, missing))
            continue
        by = next((parent for parent in parents if _inside(path, parent[0])), None)
        repeated = [name for name in own if name in plan.repeated]
        if by is None and repeated:
            why = f"{', '.join(repeated)}: used by an operation without a rule"
            found.append(ModuleReport(path, kind, COPIES, why))
        elif by is None:
            found.append(ModuleReport(path, kind, "operations"))
        elif by[0] == path:
            rule = kind_of(module)
            method = "rule" if by[1] and rule is not None else COPIES
            found.append(ModuleReport(path, kind, method, missing))
        else:
            method = "rule" if by[1] else COPIES
            found.append(ModuleReport(path, kind, method, f"part of {by[0] or '(root)'}"))
    return tuple(found)


def _inside(path: str, parent: str) -> bool:
    return not parent or path == parent or path.startswith(f"{parent}.")


def _loss_fault(problem: Problem, params: Params) -> str | None:
    """Why the losses of a batch cannot be computed at once, tried on synthetic records."""
    device = problem.device

    def nothing(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(values[:2], device=device)

    with seeded_globally(0, device), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        rows = map_tensors(lambda value: value.to(device), synthetic(problem.train.inputs, 2))
        outputs = problem.outputs(params, rows)
        try:
            example_losses(problem.loss, outputs, map_tensors(nothing, problem.train.targets))
        except RuntimeError as error:
            return first_line(error)
        except Exception as error:  # what is wrong with a loss is for `check_loss` to say
            _log.debug("dpsur: the loss fails on synthetic targets: %s", first_line(error))
    return None
