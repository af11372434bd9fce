"""The processes of a run, and what they exchange.

Every process (rank) holds all weights and computes the same random numbers, which have addresses
(`mechanism/streams.py`). A Poisson batch is drawn over the whole data set by every rank alike; each
takes its share of the rows that were drawn. Sums over a batch are added up over the ranks before
anything is divided, clipped as a whole, or given noise. So there is one batch, one noise vector and
one verdict, whatever the number of ranks.

The collectives are the same on all backends. Nothing here relies on a wrapper's averaging.
"""

import atexit
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpsur.errors import DistributedError, DpsurError, InvalidInputError

Value = TypeVar("Value")

DEFAULT_TIMEOUT: Final = 600.0  # seconds that a rank waits for the others
# Clipped sums travel in buckets of about this size, while later ones are still computed.
BUCKET_BYTES: Final = 2**24
_FAILURE = "dpsur/failure"  # where a rank that fails leaves a line for the others
_NO_DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Ranks:
    """This process among the `size` processes of a run. `device` is where it computes."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default=_NO_DEVICE, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes files and prints."""
        return self.rank == 0

    # --- work -----------------------------------------------------------------------------------

    def own(self, rows: Tensor) -> Tensor:
        """This rank's share of the rows of a batch: every `size`-th, so that shares are even."""
        return rows if self.size == 1 else rows[self.rank :: self.size]

    # --- sums -----------------------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """A small tensor added up over the ranks, with the same bits on each of them.

        The terms are added in the order of the ranks, whatever algorithm the backend has.
        """
        if self.size == 1:
            return values
        return torch.stack(self.gather(values)).sum(0)

    def gather(self, values: Tensor) -> list[Tensor]:
        """A tensor of every rank, in their order; shapes and types must agree."""
        if self.size == 1:
            return [values]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        with self._collective():
            dist.all_gather(parts, values.contiguous())
        return parts

    # --- agreement ------------------------------------------------------------------------------

    def from_main(self, make: Callable[[], bytes]) -> bytes:
        """What rank 0 makes, on every rank. What it raises ends the others too."""
        if self.size == 1:
            return make()
        content, error = b"", None
        if self.is_main:
            try:
                content = make()
            except Exception as raised:  # told to the others first, then raised
                error = raised
        length = torch.tensor([-1 if error else len(content)], dtype=torch.int64)
        length = self._broadcast(length.to(self.device))
        if error is not None:
            raise error
        if int(length) < 0:
            raise DistributedError("rank 0 has stopped before this run could start; see its error")
        buffer = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if self.is_main and content:
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
        return self._broadcast(buffer).cpu().numpy().tobytes()

    def broadcast_module(self, module: nn.Module) -> None:
        """Give all ranks rank 0's parameters and buffers, in place."""
        if self.size == 1:
            return
        with torch.no_grad():
            for value in (*module.parameters(), *module.buffers()):
                value.copy_(self._broadcast(value.detach().to(self.device, copy=True)))

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Refuse to start where ranks differ; `facts` are digests or short texts by name."""
        if self.size == 1:
            return
        content = json.dumps(facts, sort_keys=True).encode()
        sizes = self.gather(torch.tensor([len(content)], dtype=torch.int64, device=self.device))
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8)
        found = [
            json.loads(part.cpu().numpy().tobytes()) for part in self.gather(padded.to(self.device))
        ]
        for rank, other in enumerate(found):
            names = [
                name for name in {**found[0], **other} if found[0].get(name) != other.get(name)
            ]
            if names:
                raise DistributedError(
                    f"rank {rank} has other {' and '.join(names)} than rank 0; start every rank "
                    "with the same script, settings and data"
                )

    def decided(self, decide: Callable[[], bool]) -> bool:
        return self.from_main(lambda: b"1" if decide() else b"") == b"1"

    def wait_for_all(self) -> None:
        self.any(False)

    def any(self, flag: bool) -> bool:
        if self.size == 1:
            return flag
        own = torch.tensor([int(flag)], dtype=torch.int64, device=self.device)
        return bool(self.sum(own).item())

    def check_state(self, tensors: Mapping[str, Tensor], when: str) -> None:
        """End the run where ranks hold different states, by a checksum of all bits."""
        if self.size == 1:
            return
        sums = self.gather(checksum(tensors, self.device))
        if any(not torch.equal(each, sums[0]) for each in sums):
            raise DistributedError(
                f"the ranks no longer hold the same state ({when}); nothing is released. Use the "
                "same devices and versions of torch on all ranks, and resume from the checkpoint"
            )

    def _broadcast(self, values: Tensor) -> Tensor:
        values = values.contiguous()
        with self._collective():
            dist.broadcast(values, src=0)
        return values

    # --- failures -------------------------------------------------------------------------------

    @contextmanager
    def ends_together(self) -> Iterator[None]:
        """Tell the other ranks why this one stops, so that they stop too and can say why."""
        if self.size == 1:
            yield
            return
        try:
            yield
        except BaseException as error:
            if not isinstance(error, DistributedError):
                said = str(error) if isinstance(error, DpsurError) else type(error).__name__
                with suppress(Exception):
                    _store().set(_FAILURE, f"rank {self.rank} has stopped: {said}")
            _close()  # closed connections end the ranks that wait for this one
            raise

    @contextmanager
    def _collective(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise DistributedError(self._what_happened(error)) from error

    def _what_happened(self, error: RuntimeError) -> str:
        with suppress(Exception):
            store = _store()
            if store.check([_FAILURE]):
                return str(store.get(_FAILURE).decode())
        reason = " ".join(str(error).split())[:160]
        return (
            f"rank {self.rank} cannot reach the other ranks: one of them has died or hangs "
            f"({reason}); nothing is released. Start the run again to resume from its checkpoint"
        )


ALONE: Final = Ranks()


class Reduction:
    """Sums of named tensors over all ranks, in buckets that travel while later ones are computed.

    Every rank must add the same names in the same order, those without records zeros.
    """

    def __init__(self, ranks: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._ranks, self._limit = ranks, bucket_bytes
        self._names: list[list[tuple[str, Tensor]]] = [[]]
        self._sent: list[tuple[Tensor, Any]] = []
        self._bytes = 0

    @property
    def begun(self) -> bool:
        """Whether something was sent: nothing can be computed again."""
        return bool(self._sent) or bool(self._names[0])

    def add(self, name: str, value: Tensor) -> None:
        bucket = self._names[-1]
        if self._ranks.size > 1 and bucket and bucket[0][1].dtype != value.dtype:
            self._send()
        self._names[-1].append((name, value))
        self._bytes += value.nbytes
        if self._ranks.size > 1 and self._bytes >= self._limit:
            self._send()

    def result(self) -> dict[str, Tensor]:
        if self._ranks.size == 1:
            return dict(self._names[0])
        if self._names[-1]:
            self._send()
        found: dict[str, Tensor] = {}
        for bucket, (vector, work) in zip(self._names, self._sent, strict=False):
            with self._ranks._collective():
                work.wait()
            parts = torch.split(vector, [value.numel() for _, value in bucket])
            for (name, value), part in zip(bucket, parts, strict=True):
                found[name] = part.view(value.shape)
        return found

    def _send(self) -> None:
        vector = torch.cat([value.reshape(-1) for _, value in self._names[-1]])
        with self._ranks._collective():
            self._sent.append((vector, dist.all_reduce(vector, async_op=True)))
        self._names.append([])
        self._bytes = 0


def checksum(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """A number that differs, but for accidents, if any bit of the tensors or their order does."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors.values():
        flat = tensor.detach().reshape(-1)
        for part in torch.split(flat, _CHECKED_AT_ONCE):
            words = part.view(_INTEGERS[part.element_size()]).to(torch.int64)
            places = torch.arange(len(words), device=flat.device) * 2 + 1
            total = total * 1000003 + (words * places).sum().to(device)
    return total


_CHECKED_AT_ONCE: Final = 2**22
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside `DistributedDataParallel`, which is kept from averaging gradients.

    The sums of clipped gradients are added up here, so that nothing is left for the wrapper to do.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module.require_backward_grad_sync = False
        return unwrap(module.module)
    return module


# --- joining and leaving --------------------------------------------------------------------------


def is_distributed() -> bool:
    """Whether this process is one of several, by `torchrun` or a process group that is there."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    given = os.environ.get("WORLD_SIZE", "1")
    return given.isdecimal() and int(given) > 1


def restarted() -> bool:
    """Whether `torchrun` has started this process again after a failure."""
    given = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return given.isdecimal() and int(given) > 0


def local_device(device: torch.device) -> torch.device:
    """The CUDA device of this process among those of its machine; a CPU is as it is."""
    if str(device) != "cuda" or not is_distributed():
        return device
    place = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if place >= count:
        raise InvalidInputError(
            f"LOCAL_RANK is {place}, but this machine has {count} CUDA devices; start at most as "
            "many processes per machine"
        )
    return torch.device("cuda", place)


def connect(device: torch.device, timeout: float = DEFAULT_TIMEOUT) -> Ranks:
    """Join the other processes of this run, if there are any.

    A process group that exists is used as it is; otherwise one is made from what `torchrun` has
    put into the environment, with gloo on a CPU and NCCL on CUDA.
    """
    if not is_distributed():
        return ALONE
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _join("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout)
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


_made_here = False


def _join(backend: str, timeout: float) -> None:
    global _made_here
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise InvalidInputError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {name} is not set; start several "
                "processes with torchrun, or unset WORLD_SIZE"
            )
    try:
        limit = timedelta(seconds=timeout)
        store, rank, size = next(dist.rendezvous("env://", timeout=limit))  # type: ignore[attr-defined]
        # After an elastic restart the store may still hold the addresses of ranks that have died.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"dpsur/attempt-{attempt}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
        raise DistributedError(
            f"rank {os.environ['RANK']} cannot join the {os.environ['WORLD_SIZE']} ranks of this "
            f"run ({reason})"
        ) from error
    _made_here = True
    atexit.register(_close)


def _close() -> None:
    """Leave the process group, if `connect` made it."""
    global _made_here
    if _made_here and dist.is_initialized():
        _made_here = False
        with suppress(Exception):
            dist.destroy_process_group()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
