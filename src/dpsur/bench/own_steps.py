"""Our own arms: what `dpsur.mechanism.loop.train` does in one turn, on a batch of known size."""

import copy
import time

import torch

from dpsur.bench.settings import LEARNING_RATE, MAX_GRAD_NORM, MOMENTUM, NOISE_MULTIPLIER, Cell
from dpsur.errors import InvalidInputError
from dpsur.functional.parameters import Params
from dpsur.functional.problem import Problem, drop_weights
from dpsur.functional.records import Examples
from dpsur.functional.tree import tensors_of
from dpsur.mechanism.cuda_graph_loop import CapturedTrial, CudaGraphLoop
from dpsur.mechanism.host_batches import capture_obstacle
from dpsur.mechanism.loop import EagerLoop, Loop, Progress, make_trial, start
from dpsur.mechanism.state import Procedure
from dpsur.mechanism.trial import updates_in_place
from dpsur.methods.dpsgd import Dpsgd
from dpsur.methods.dpsur import Dpsur
from dpsur.methods.gradient_method import GradientMethod
from dpsur.per_example import clipped_sum, engine_report
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import LossTest, SampledGaussian, Test, Trial
from dpsur.privacy.plans import Plan

VAL_BATCH_SIZE = 256
# The paper's gate; what a test costs in time does not depend on these.
VAL_NOISE_MULTIPLIER, ACCEPT_THRESHOLD = 1.3, -1.0
ENDLESS = 10**9
# Where batches are drawn from a data set: how many times as large it is, and how long a block is.
RECORDS_PER_BATCH, BLOCK_SECONDS, LONGEST_BLOCK = 8, 0.5, 100
# Trials between two reads of a captured run; verdicts of later ones overwrite the last row.
BLOCK = 100


def _bound(
    cell: Cell, records: Examples, method: GradientMethod, plan: Plan
) -> tuple[Problem, Procedure, Progress]:
    """A problem, its procedure and where it starts, with the memory that `fit` needs for them.

    The weights before training stay on the host, and the engine is chosen before there is a state.
    """
    model = cell.model()
    original = copy.deepcopy(model).cpu()
    problem = Problem(model, cell.loss, records, bf16=cell.bf16, original=original)
    procedure = method.bind(problem, plan)
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
        self.plan = Plan(Budget(1.0, 1e-5), "every-trial", trial, trials=ENDLESS)
        self.streams = cell.streams()
        self.problem, self.procedure, self.progress = _bound(cell, cell.batch, method, self.plan)
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


class TrainingSteps:
    """Trials as `fit` makes them: Poisson batches of a data set, in the loop that the device has.

    The data set is made up, unless it is given, and has eight times the size of the batch. A call
    makes a block of `steps` trials. Records that are not on the device are copied there, batch by
    batch.
    """

    def __init__(
        self,
        cell: Cell,
        method: GradientMethod,
        *,
        tested: bool,
        records: Examples | None = None,
    ) -> None:
        if records is None:
            count = RECORDS_PER_BATCH * len(cell.batch)
            records = cell.network.batch(count, cell.device, cell.seed)
        size = len(records)
        # what the data set takes beside the batch that every arm is charged for
        self.data_bytes = sum(
            value.numel() * value.element_size()
            for value in tensors_of((records.inputs, records.targets))
        )
        rate = min(VAL_BATCH_SIZE, len(cell.batch)) / size
        test = LossTest(rate, VAL_NOISE_MULTIPLIER, ACCEPT_THRESHOLD) if tested else None
        update = SampledGaussian(len(cell.batch) / size, NOISE_MULTIPLIER)
        plan = Plan(Budget(1.0, 1e-5), "every-trial", Trial(update, test), trials=ENDLESS)
        self.problem, procedure, progress = _bound(cell, records, method, plan)
        streams = cell.streams()
        rates = [update.sample_rate, rate] if tested else [update.sample_rate]
        captured = cell.device.type == "cuda" and capture_obstacle(records, rates) is None
        padded = procedure.padded() if captured else None
        self.steps = 1
        self._loop: Loop = EagerLoop(procedure, plan, streams, progress, owned=True)
        del progress  # now the loop's, which may replace its tensors
        if padded is not None:
            self.steps = self._block(cell.device)
            loop = CudaGraphLoop(
                procedure, padded, plan, streams, self._loop.progress, self.steps, owned=True
            )
            loop.prepare()
            self._loop = loop

    def _block(self, device: torch.device) -> int:
        """As many trials as take about BLOCK_SECONDS, by one that is not captured."""
        seconds = 0.0
        for _ in range(2):  # the first one plans
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            self()
            torch.cuda.synchronize(device)
            seconds = time.perf_counter() - begin
        return max(2, min(LONGEST_BLOCK, round(BLOCK_SECONDS / seconds)))

    def __call__(self) -> None:
        """Make a block of trials and read what became of them."""
        self._loop.launch()
        self._loop.collect()


def dpsgd_training(cell: Cell, records: Examples | None = None) -> TrainingSteps:
    """DP-SGD on Poisson batches."""
    return TrainingSteps(cell, _method(Dpsgd, cell), tested=False, records=records)


def dpsur_training(cell: Cell) -> TrainingSteps:
    """DPSUR on Poisson batches, every trial with its test."""
    return TrainingSteps(cell, _method(Dpsur, cell), tested=True)


def _method(kind: type[Dpsgd] | type[Dpsur], cell: Cell) -> GradientMethod:
    return kind(
        learning_rate=LEARNING_RATE,
        momentum=MOMENTUM,
        schedule="constant",
        batch_size=len(cell.batch),
        max_grad_norm=MAX_GRAD_NORM,
    )


def dpsgd_captured(cell: Cell) -> CapturedOwnStep:
    """A captured step of DP-SGD."""
    return CapturedOwnStep(dpsgd_step(cell))


def dpsur_captured(cell: Cell) -> CapturedOwnStep:
    """A captured trial of DPSUR."""
    return CapturedOwnStep(dpsur_trial(cell))


def dpsgd_step(cell: Cell) -> OwnStep:
    """A step of DP-SGD."""
    return OwnStep(cell, _method(Dpsgd, cell), test=None)


def dpsur_trial(cell: Cell) -> OwnStep:
    """A whole trial of DPSUR: the candidate, the test on its own batch, and the choice."""
    size = len(cell.batch)
    rate = min(VAL_BATCH_SIZE, size) / size
    return OwnStep(
        cell, _method(Dpsur, cell), LossTest(rate, VAL_NOISE_MULTIPLIER, ACCEPT_THRESHOLD)
    )
