"""The arms of `dpsur bench`: a plain step of PyTorch and a private one, eager or captured."""

import copy

import torch

from dpsur.bench.settings import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MOMENTUM,
    NOISE_MULTIPLIER,
    Cell,
    sgd,
)
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem, drop_weights
from dpsur.functional.records import Examples
from dpsur.functional.tree import Params
from dpsur.mechanism.cuda_graph_loop import CapturedTrial
from dpsur.mechanism.cuda_graphs import capture_graph
from dpsur.mechanism.state import Procedure
from dpsur.mechanism.trial import Progress, make_trial, start, updates_in_place
from dpsur.methods.dpsgd import Dpsgd
from dpsur.methods.dpsur import Dpsur
from dpsur.methods.gradient_method import GradientMethod
from dpsur.per_example import clipped_sum, engine_report
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import SampledGaussian, Test, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import repeated_plan

ENDLESS = 10**9
# Trials between two reads of a captured run; verdicts of later ones overwrite the last row.
BLOCK = 100


def bound_problem(
    cell: Cell, records: Examples, method: GradientMethod, plan: Plan
) -> tuple[Problem, Procedure, Progress]:
    """A problem, its procedure and where it starts, with the memory that `fit` needs for them.

    The weights before training stay on the host, and the engine is chosen before there is a state.
    """
    model = cell.model()
    original = copy.deepcopy(model).cpu()
    problem = Problem(model, cell.loss, records, bf16=cell.bf16, original=original)
    procedure = method.build(problem, plan)
    drop_weights(model)
    engine_report(problem)
    return problem, procedure, start(procedure)


class OwnStep:
    """One trial: draw a candidate, judge it, keep or drop it.

    The batch is all there is, and is drawn at rate 1. So the step works on the very batch that the
    other arms are given, and still pays for drawing a Poisson sample and gathering its rows.
    """

    def __init__(self, cell: Cell, method: GradientMethod, test: Test | None) -> None:
        trial = Trial(SampledGaussian(1.0, NOISE_MULTIPLIER), test)
        # Nothing is released and no record is private: the plan only carries the trial.
        self.plan = repeated_plan(Budget(1.0, 1e-5), "every-trial", trial, trials=ENDLESS)
        self.streams = cell.streams()
        self.problem, self.procedure, self.progress = bound_problem(
            cell, cell.batch, method, self.plan
        )
        self._in_place = updates_in_place(self.procedure)

    def __call__(self) -> None:
        """Make the trial. The ledger asks for every verdict, which waits for the device."""
        self.progress, _ = make_trial(
            self.procedure, self.plan, self.streams, self.progress, self._in_place
        )

    def clipped_sum(self) -> Params:
        """The sum of clipped gradients."""
        params = self.progress.state.params
        return clipped_sum(self.problem, params, self.problem.train, MAX_GRAD_NORM).params


class CapturedOwnStep:
    """The same trial, captured once as a CUDA graph and replayed, as training on CUDA does."""

    def __init__(self, step: OwnStep) -> None:
        self._step = step
        padded = step.procedure.padded()
        if padded is None:
            raise InvalidInputError("layers that draw random numbers are not captured")
        self._trial = CapturedTrial(
            padded, step.plan, step.progress, step.streams, block=BLOCK, owned=True
        )

    def __call__(self) -> None:
        """Replay the trial, as one of a block."""
        self._trial.replay()

    def clipped_sum(self) -> Params:
        """The sum of clipped gradients."""
        return self._step.clipped_sum()


def bench_method(kind: type[Dpsgd] | type[Dpsur], cell: Cell) -> GradientMethod:
    """The method with the settings of every arm."""
    return kind(
        learning_rate=LEARNING_RATE,
        momentum=MOMENTUM,
        schedule="constant",
        batch_size=len(cell.batch),
        max_grad_norm=MAX_GRAD_NORM,
    )


def dpsgd_captured(cell: Cell) -> CapturedOwnStep:
    return CapturedOwnStep(dpsgd_step(cell))


def dpsgd_step(cell: Cell) -> OwnStep:
    return OwnStep(cell, bench_method(Dpsgd, cell), test=None)


class PlainStep:
    """Ordinary PyTorch, without privacy: forward, backward of the mean loss, momentum step."""

    def __init__(self, cell: Cell) -> None:
        self._cell, self._batch = cell, cell.batch
        self._model = cell.model()
        self._optimizer = sgd(self._model)

    def __call__(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        with self._cell.precision():
            outputs = self._model(self._batch.inputs)
        torch.autograd.backward(self._cell.loss(outputs.float(), self._batch.targets))
        self._optimizer.step()


class CapturedPlainStep:
    """The same as one CUDA graph, replayed: plain PyTorch without the cost of launching kernels."""

    def __init__(self, cell: Cell) -> None:
        step = PlainStep(cell)
        self._step = step  # keeps alive the tensors whose addresses the graph replays
        self._replay = capture_graph(step, cell.device)

    def __call__(self) -> None:
        self._replay()
