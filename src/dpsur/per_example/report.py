"""How the gradients of a model are found, and what keeps that from being faster."""

import logging
from dataclasses import dataclass, replace

from torch import nn

from dpsur.functional.problem import Objective, Problem
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.tree import TensorTree
from dpsur.per_example.clipping import make_tape, strategy_for, sum_of_outputs

_log = logging.getLogger("dpsur.engine")
_ONE_BY_ONE = "one-by-one"
SMALL = 2**16  # numbers of a parameter whose gradients for all records are no burden


@dataclass(frozen=True, repr=False)
class EngineReport:
    """How per-record gradients are found; `print` it.

    `name` is the engine: "one-pass" (all records at once) or "one-by-one"; "batch" without privacy.
    `reason` says what keeps it from being faster. `copies` are large parameters that an operation
    without a rule uses: they have a gradient for every record, which takes memory. `not_captured`
    says why the trials of a run on a GPU are not replayed as CUDA graphs; None if they are.
    """

    name: str
    reason: str | None = None
    copies: tuple[str, ...] = ()
    not_captured: str | None = None

    @property
    def is_slow(self) -> bool:
        """Whether the gradients of the records are found one after the other."""
        return self.name == _ONE_BY_ONE

    @property
    def summary(self) -> str:
        """One line: the engine, and why not a faster one."""
        return self.name if self.reason is None else f"{self.name} ({self.reason})"

    def __str__(self) -> str:
        cost = "; this is many times slower, with the same results" if self.is_slow else ""
        lines = [f"engine {self.summary}{cost}"]
        if self.not_captured is not None:
            lines.append(f"  trials are not captured as CUDA graphs: {self.not_captured}")
        lines += [
            f"  {name} is used by an operation without a rule, with a gradient for every record; "
            "layers of torch.nn are faster"
            for name in self.copies
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"EngineReport({self.summary})"


def explain(model: nn.Module, inputs: TensorTree) -> EngineReport:
    """How the gradients of a model's records are found, for inputs like these.

    The inputs are one tensor or a tree of tensors with a row per record. Print the report: it names
    what keeps the engine from being faster, or takes memory.
    """
    return _report(Objective(model, sum_of_outputs), inputs)


def engine_report(problem: Problem) -> EngineReport:
    report, params = _report(problem, problem.train.inputs), problem.initial_params()
    plan = strategy_for(problem, params, problem.train.inputs)
    first = problem.train.part(slice(2)).to(problem.device)
    if report.reason is None:  # then losses may still not be computed at once
        with seeded_globally(0, problem.device):
            try:
                make_tape(problem, params, plan.records, first.inputs, first.targets)
            except Exception as error:  # what is wrong with a loss is for `check_loss` to say
                _log.debug("dpsur: the loss fails on the first records: %s", error)
        if not plan.records.by_construction:
            reason = f"the loss cannot be called for all records at once: {plan.records.why_alone}"
            return replace(report, name=_ONE_BY_ONE, reason=reason)
    return report


def log_engine(report: EngineReport) -> None:
    """Say which engine runs; where it is the slow one, a warning has been given with the reason."""
    _log.info("dpsur: gradients per example: engine %s", report.summary)
    if report.not_captured is not None:
        _log.info("dpsur: trials are not captured as CUDA graphs: %s", report.not_captured)


def _report(objective: Objective, inputs: TensorTree) -> EngineReport:
    params = objective.initial_params()
    plan = strategy_for(objective, params, inputs)
    copies = (name for name in sorted(plan.copied) if name in params)
    large = tuple(name for name in copies if params[name].numel() > SMALL)
    return EngineReport("one-pass" if plan.reason is None else _ONE_BY_ONE, plan.reason, large)
