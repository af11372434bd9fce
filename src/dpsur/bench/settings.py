"""What every arm is given, and how it is measured: the grid, the arms and the machine."""

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

from dpsur.functional.records import Examples
from dpsur.functional.tree import device_of
from dpsur.mechanism.streams import Streams

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
