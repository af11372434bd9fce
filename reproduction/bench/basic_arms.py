"""The arms without peers, and what all arms share: plain and private steps, eager or captured."""

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem, drop_weights
from dpsur.functional.records import Examples
from dpsur.functional.tree import Params, device_of
from dpsur.mechanism.cuda_graph_loop import CudaGraphLoop
from dpsur.mechanism.cuda_graphs import capture_graph
from dpsur.mechanism.state import Procedure
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import Progress, make_trial, start, updates_in_place
from dpsur.methods.dpsgd import Dpsgd, Dpsur
from dpsur.methods.gradient_method import GradientMethod
from dpsur.per_example import clipped_sum, engine_report
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import SampledGaussian, Test, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import repeated_plan

_STAT = Path("/proc/stat")
# user, nice, system, idle, iowait, irq, softirq, steal
_FIELDS, _IDLE = 8, (3, 4)
# One setting for all arms. Steps are small, so that thousands of them leave the weights tame.
LEARNING_RATE, MOMENTUM = 0.01, 0.9
MAX_GRAD_NORM, NOISE_MULTIPLIER = 0.1, 1.0


Loss = Callable[[Tensor, Tensor], Tensor]


class NotInstalledError(Exception):
    """The arm needs a package that is not there."""


class Network(Protocol):
    """A network to measure, and batches that it can be trained on."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> int: ...

    def model(self, device: torch.device, seed: int = 0) -> nn.Module:
        """A freshly initialised network: the same seed gives every arm the same weights."""
        ...

    def batch(self, size: int, device: torch.device, seed: int = 0) -> Examples:
        """A batch of this size. Speed depends on shapes and types alone."""
        ...


@dataclass(frozen=True)
class Cell:
    """A network and a batch: what every arm of one comparison is given."""

    network: Network
    batch: Examples
    seed: int = 0
    bf16: bool = False

    @property
    def loss(self) -> Loss:
        """The network's loss, by default cross entropy: a mean over the batch."""
        found: Loss = getattr(self.network, "loss", F.cross_entropy)
        return found

    def precision(self) -> AbstractContextManager[object]:
        """For the forward pass of arms that are not ours: autocast where bf16 is asked for."""
        if not self.bf16:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    @property
    def device(self) -> torch.device:
        return device_of(self.batch.inputs)

    def model(self) -> nn.Module:
        """A copy of the network, in training mode."""
        return self.network.model(self.device, self.seed).train()

    def streams(self) -> Streams:
        """Random numbers of our own steps."""
        return Streams(self.seed, self.device)

    def generator(self) -> torch.Generator:
        """Noise of the steps that ours are compared with."""
        return torch.Generator(self.device).manual_seed(self.seed)


# A private step also has `clipped_sum()`, so that a test can check that all compute the same thing.
Step = Callable[[], None]
MakeArm = Callable[[Cell], Step]


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The optimizer of every arm but ours, which computes the same."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


@dataclass(frozen=True)
class Settings:
    """How to measure. `grid` pairs names of networks with batch sizes.

    `networks` is the import path, as `module:function`, of the function that finds a network by its
    name: a process that measures memory has to find it too.
    `memory_limit` is in bytes: on a GPU what this process may take of it, on a CPU what the
    process that makes a first step may add to what it has when it starts. `tf32` None leaves
    PyTorch's own settings, which round convolutions on CUDA.
    """

    networks: str
    grid: Sequence[tuple[str, int]]
    arms: Sequence[str]
    device: torch.device
    repetitions: int
    threads: int
    tf32: bool | None = False
    memory_limit: int | None = None

    def network(self, name: str) -> Network:
        return network_named(self.networks, name)


def network_named(networks: str, name: str) -> Network:
    """Find a network with the function that `networks` names."""
    module, _, function = networks.partition(":")
    found: Network = getattr(import_module(module), function)(name)
    return found


@contextmanager
def machine(settings: Settings) -> Iterator[None]:
    """Threads, precision and memory for all arms alike, put back afterwards; no warnings."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_num_threads(), matmul.allow_tf32, cudnn.allow_tf32
    try:
        torch.set_num_threads(settings.threads)
        if settings.tf32 is not None:
            matmul.allow_tf32 = cudnn.allow_tf32 = settings.tf32
        _limit_gpu(settings, settings.memory_limit)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(before[0])
        matmul.allow_tf32, cudnn.allow_tf32 = before[1:]
        _limit_gpu(settings, None)


def _limit_gpu(settings: Settings, limit: int | None) -> None:
    """Let this process take so many bytes of a GPU, or all of it."""
    if settings.memory_limit is not None and settings.device.type == "cuda":
        whole = torch.cuda.mem_get_info(settings.device)[1]
        fraction = 1.0 if limit is None else min(1.0, limit / whole)
        index = settings.device.index
        # by its number: "the current GPU" is not accepted here
        number = torch.cuda.current_device() if index is None else index
        torch.cuda.set_per_process_memory_fraction(fraction, number)


class CpuContention:
    """Counts, from its creation on, the cores that other processes kept busy.

    Threads of one step wait for each other, so a neighbour on one core delays all of them, steadily
    enough for the quartiles to stay close. Hence this figure; load averages are too slow for it.
    """

    def __init__(self) -> None:
        self._start = self._read()

    def cores(self) -> float | None:
        """The mean number of cores in use by others; None where the system does not say."""
        if self._start is None:
            return None
        now = self._read()
        assert now is not None
        wall, others = (late - early for late, early in zip(now, self._start, strict=True))
        return max(0.0, others / wall) if wall > 0 else 0.0

    @staticmethod
    def _read() -> tuple[float, float] | None:
        if not _STAT.exists():
            return None
        ticks = [
            int(word)
            for word in _STAT.read_text(encoding="utf-8").splitlines()[0].split()[1 : _FIELDS + 1]
        ]
        busy = sum(ticks) - sum(ticks[place] for place in _IDLE)
        own = os.times()
        seconds = busy / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), seconds - own.user - own.system


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
        self._loop = CudaGraphLoop(
            step.procedure, padded, step.plan, step.streams, step.progress, BLOCK, owned=True
        )

    def __call__(self) -> None:
        """Replay the trial, as one of a block."""
        self._loop.replay()

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


@dataclass(frozen=True)
class Arm:
    """A way to make a training step: `make` builds it, what it returns makes one step a call.

    An arm that `gathers` makes a copy of the batch, as training on a data set does.
    """

    name: str
    summary: str
    make: MakeArm
    needs_cuda: bool = False
    largest_batch: int | None = None
    gathers: bool = False

    def refusal(self, batch_size: int, device: torch.device) -> str | None:
        """Why the arm is not even tried; None if it is."""
        if self.needs_cuda and device.type != "cuda":
            return "needs a CUDA device"
        if self.largest_batch is not None and batch_size > self.largest_batch:
            return f"measured up to a batch of {self.largest_batch}; its time grows in proportion"
        return None


PLAIN, OPACUS = "plain", "opacus-hooks"  # the arms that the others are compared with
ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(PLAIN, "PyTorch without privacy", PlainStep),
        Arm(
            "plain-captured",
            "PyTorch without privacy, as a CUDA graph",
            CapturedPlainStep,
            needs_cuda=True,
        ),
        Arm("dpsgd", "DP-SGD step", dpsgd_step, gathers=True),
        Arm(
            "dpsgd-captured",
            "DP-SGD step, as a CUDA graph",
            dpsgd_captured,
            needs_cuda=True,
            gathers=True,
        ),
    )
}


def arm_named(name: str) -> Arm:
    try:
        return ARMS[name]
    except KeyError:
        raise InvalidInputError(f"unknown arm {name!r}; choose from {', '.join(ARMS)}") from None
