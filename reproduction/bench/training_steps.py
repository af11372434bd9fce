"""Steps of ours that only the benchmarks need: DPSUR's trial, and training on Poisson batches."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpsur import PrivacyEngine
from dpsur.functional.records import Examples
from dpsur.functional.tree import tensors_of
from dpsur.mechanism.captured_batches import capture_obstacle
from dpsur.mechanism.cuda_graph_loop import CudaGraphLoop, Loop
from dpsur.mechanism.trial import EagerLoop
from dpsur.methods.dpsgd import Dpsgd, Dpsur
from dpsur.methods.gradient_method import GradientMethod
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import LossTest, SampledGaussian, Trial
from dpsur.privacy.planning import repeated_plan
from reproduction.bench.basic_arms import (
    MAX_GRAD_NORM,
    NOISE_MULTIPLIER,
    CapturedOwnStep,
    Cell,
    OwnStep,
    bench_method,
    bound_problem,
    sgd,
)

VAL_BATCH_SIZE = 256
# The paper's gate; what a test costs in time does not depend on these.
VAL_NOISE_MULTIPLIER, ACCEPT_THRESHOLD = 1.3, -1.0
ENDLESS = 10**9
STEPS_OF_SET_UP = 40
# Where batches are drawn from a data set: how many times as large it is, and how long a block is.
RECORDS_PER_BATCH, BLOCK_SECONDS, LONGEST_BLOCK = 8, 0.5, 100


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
        plan = repeated_plan(Budget(1.0, 1e-5), "every-trial", Trial(update, test), trials=ENDLESS)
        self.problem, procedure, progress = bound_problem(cell, records, method, plan)
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
    return TrainingSteps(cell, bench_method(Dpsgd, cell), tested=False, records=records)


class PrivateLoopStep:
    """A user's own loop around `PrivacyEngine.private_step`, on Poisson batches of made-up records.

    A step draws its batch with a `DataLoader`, from a data set eight times the size of the batch
    that lies on the device. The first steps, which capture a graph for each size of batch, belong
    to the set-up, as they do in `fit`.
    """

    steps = 1

    def __init__(self, cell: Cell) -> None:
        size, loss = len(cell.batch), cell.loss
        records = cell.network.batch(RECORDS_PER_BATCH * size, cell.device, cell.seed)
        tensors = records.inputs, records.targets
        self.data_bytes = sum(value.numel() * value.element_size() for value in tensors)
        engine, model = PrivacyEngine(), cell.model()
        _, _, self._loader = engine.make_private(
            module=model,
            optimizer=sgd(model),
            data_loader=DataLoader(TensorDataset(*tensors), batch_size=size),
            noise_multiplier=NOISE_MULTIPLIER,
            max_grad_norm=MAX_GRAD_NORM,
            steps=ENDLESS,
        )

        def mean_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
            inputs, targets = batch
            with cell.precision():
                outputs = model(inputs)
            return loss(outputs.float(), targets)

        self._step, self._batches = engine.private_step(mean_loss), iter(self._loader)
        for _ in range(STEPS_OF_SET_UP if cell.device.type == "cuda" else 0):
            self()

    def __call__(self) -> None:
        """One update."""
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        self._step(batch)


def dpsur_training(cell: Cell) -> TrainingSteps:
    """DPSUR on Poisson batches, every trial with its test."""
    return TrainingSteps(cell, bench_method(Dpsur, cell), tested=True)


def dpsur_captured(cell: Cell) -> CapturedOwnStep:
    """A captured trial of DPSUR."""
    return CapturedOwnStep(dpsur_trial(cell))


def dpsur_trial(cell: Cell) -> OwnStep:
    """A whole trial of DPSUR: the candidate, the test on its own batch, and the choice."""
    size = len(cell.batch)
    rate = min(VAL_BATCH_SIZE, size) / size
    return OwnStep(
        cell, bench_method(Dpsur, cell), LossTest(rate, VAL_NOISE_MULTIPLIER, ACCEPT_THRESHOLD)
    )
