"""Batches of records on the host, for trials that are captured as CUDA graphs.

A captured trial reads its batches from fixed memory on the device. Which records a step takes
follows from its random numbers alone, so the host draws the rows of the next steps in advance, with
the bits that the device would draw. A background thread gathers them into pinned memory. A second
stream copies the next batch to the device while a trial runs, and the batch is put in its place
before the next replay. Events keep a buffer from being overwritten while it is read.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples, HostExamples
from dpsur.functional.tree import map_tensors, slice_rows, tensors_of
from dpsur.mechanism.gaussian import Batch, padded_sizes, poisson_sample
from dpsur.mechanism.streams import Stream, Streams

# Batches in host memory: one that is copied to the device, the others gathered ahead of it.
SLOTS = 4
# The part of a GPU's free memory that batches may take, each of them twice: in the fixed memory and
# on its way there.
_PART_FOR_BATCHES = 0.25


def capture_obstacle(examples: Examples, sample_rates: Iterable[float]) -> str | None:
    """Why trials that draw from these records cannot be captured; None if they can."""
    if not isinstance(examples, HostExamples):
        return None
    values = tensors_of((examples.inputs, examples.targets))
    if any(value.layout != torch.strided or value.is_nested for value in values):
        return "the records are not dense tensors of one shape"
    if examples.device.type != "cuda":
        return None
    size = len(examples)
    rows = sum(padded_sizes(size, rate)[-1] for rate in sample_rates)
    needed = 2 * rows * examples.nbytes // max(1, size)
    free = torch.cuda.mem_get_info(examples.device)[0]
    if needed > _PART_FOR_BATCHES * free:
        return (
            f"buffers for batches of records on the host would take {needed / 2**30:.1f} GiB, more "
            f"than {_PART_FOR_BATCHES:.0%} of the free memory"
        )
    return None


class HostBatches:
    """Puts the batches of one step after the other where a captured trial reads them.

    Which batches a trial takes is found out when it is first made. Without records on the host
    there are none, and nothing is done.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams.on(torch.device("cpu"))
        self._feeds: dict[tuple[int, str, int, float], _Feed] = {}
        self._stream = None
        if streams.device.type == "cuda":
            self._stream = torch.cuda.current_stream(streams.device)

    @property
    def in_use(self) -> bool:
        """Whether trials take batches of records on the host."""
        return bool(self._feeds)

    def batch(self, examples: HostExamples, rate: float, stream: Stream, rows: int) -> Batch:
        """The batch that is in place, padded to so many rows; the `HostBatch` of sampling."""
        if stream.ranks.size > 1:
            raise InvalidInputError("the trials of several processes are not captured")
        offset = stream.skip(len(examples))
        key = (id(examples), stream.purpose, offset, rate)
        if key not in self._feeds:  # the first trial, before it is captured
            capacity = padded_sizes(len(examples), rate)[-1]
            source = _Source(examples, rate, capacity, self._streams, stream.purpose, offset)
            self._feeds[key] = self._make_feed(source, int(stream.step))
        return self._feeds[key].batch(rows)

    def _make_feed(self, source: "_Source", step: int) -> "_Feed":
        if self._stream is None:
            return _Feed(source, step)
        # a warm-up has a stream of its own, but the memory is for the stream of the replays
        with torch.cuda.stream(self._stream):
            feed = _Feed(source, step)
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return feed

    def load(self, step: int, last: int) -> None:
        """Put the batches of a step in place, and gather those after it up to the `last` step."""
        try:
            for feed in self._feeds.values():
                feed.load(step, last)
        except BaseException:
            self.close()
            raise

    def resolve(self) -> None:
        """Wait for the background thread to have nothing to do."""
        for feed in self._feeds.values():
            feed.resolve()

    def close(self) -> None:
        """Gather nothing more."""
        for feed in self._feeds.values():
            feed.close()


@dataclass(frozen=True)
class _Source:
    """Poisson samples of records on the host: the rows of each step, and where to gather them."""

    examples: HostExamples
    rate: float
    capacity: int  # rows of the largest padded batch
    streams: Streams
    purpose: str
    offset: int

    def blank(self, *, on_device: bool) -> Examples:
        """Memory for a batch, zeros."""
        device = self.examples.device if on_device else torch.device("cpu")
        pinned = self.examples.device.type == "cuda" and not on_device

        def zeros(value: Tensor) -> Tensor:
            shape = (self.capacity, *value.shape[1:])
            return torch.zeros(shape, dtype=value.dtype, device=device, pin_memory=pinned)

        return Examples(
            map_tensors(zeros, self.examples.inputs), map_tensors(zeros, self.examples.targets)
        )

    def gather(self, step: int, place: Examples) -> int:
        """Write the sample of a step to `place` if it fits; return how large it is."""
        stream = self.streams.at(step)[self.purpose]
        stream.skip(self.offset)
        rows = poisson_sample(len(self.examples), self.rate, stream)
        if len(rows) <= self.capacity:
            self.examples.gather_into(rows, place)
        return len(rows)


@dataclass(frozen=True)
class _Slot:
    """Host memory for one batch; `copied` is past when the device has a copy."""

    place: Examples
    copied: torch.cuda.Event | None


class _Gatherer:
    """Gathers the samples of consecutive steps in the background, some ahead."""

    def __init__(self, source: _Source, events: bool) -> None:
        self._source = source
        self._free = deque(
            _Slot(source.blank(on_device=False), _event() if events else None) for _ in range(SLOTS)
        )
        self._pending: deque[tuple[int, _Slot, Future[int]]] = deque()
        self._copying: deque[_Slot] = deque()
        self._next = 0
        self._failed = False

    def take(self, step: int, last: int) -> tuple[_Slot, int]:
        """The sample of a step, and how large it is. Errors of the background thread come up here.

        Its memory is used again after the next sample is taken, as soon as it is copied.
        """
        while self._pending and self._pending[0][0] < step:
            self._drop_first()
        if not self._pending or self._pending[0][0] != step or self._given_up(self._pending[0][2]):
            self._restart(step, last)
        _, slot, found = self._pending[0]
        size = found.result()
        self._pending.popleft()
        self._copying.append(slot)
        return slot, size

    def ahead(self, last: int) -> None:
        """Begin with the next steps, up to the `last` one, as long as there is memory for them."""
        while len(self._copying) > 1:
            self._release(self._copying.popleft())
        while self._free and self._next <= last:
            slot = self._free.popleft()
            found = self._source.examples.submit(self._gather, self._next, slot)
            self._pending.append((self._next, slot, found))
            self._next += 1

    def cancel(self) -> None:
        """Begin with no further sample; one that is being gathered is finished."""
        for _, _, found in self._pending:
            found.cancel()

    def _restart(self, step: int, last: int) -> None:
        """Drop what was gathered and begin with a step."""
        self.cancel()
        while self._pending:
            self._drop_first()
        self._next, self._failed = step, False
        self.ahead(max(step, last))

    def _given_up(self, found: "Future[int]") -> bool:
        """Whether a sample was not gathered because of a cancellation or an earlier error."""
        return found.cancelled() or isinstance(found.exception(), CancelledError)

    def _drop_first(self) -> None:
        _, slot, found = self._pending.popleft()
        if not found.cancel():
            wait([found])
        self._free.append(slot)

    def _release(self, slot: _Slot) -> None:
        if slot.copied is not None:
            slot.copied.synchronize()
        self._free.append(slot)

    def _gather(self, step: int, slot: _Slot) -> int:
        """In the background. After an error nothing more is tried: workers may be gone."""
        if self._failed:
            raise CancelledError
        try:
            return self._source.gather(step, slot.place)
        except BaseException:
            self._failed = True
            raise


class _Feed:
    """The batches of one purpose: in fixed memory on the device, one step after the other."""

    def __init__(self, source: _Source, step: int) -> None:
        device = source.examples.device
        self._source, self._device = source, device
        self._place = source.blank(on_device=True)
        self._positions = torch.arange(source.capacity, device=device)
        self._size = torch.zeros((), dtype=torch.int64, device=device)
        self._loaded: int | None = None
        self._copies: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._arriving = source.blank(on_device=True)
            for value in tensors_of((self._arriving.inputs, self._arriving.targets)):
                value.record_stream(self._copies)  # not given away before its copies are done
            self._placed = _event()
            self._placed.record(torch.cuda.current_stream(device))  # after it was filled
        self._gatherer = _Gatherer(source, events=self._copies is not None)
        self.load(step, last=step)

    def batch(self, rows: int) -> Batch:
        """The batch in place; its size is read on the device, so that this can be captured."""
        some = slice(rows)
        return Batch(
            Examples(slice_rows(self._place.inputs, some), slice_rows(self._place.targets, some)),
            mask=self._positions[:rows] < self._size,
            overflow=self._size > rows if rows < len(self._source.examples) else None,
            total=rows,
        )

    def load(self, step: int, last: int) -> None:
        """Put the batch of a step in place, after all that was launched before has read the last.

        A sample that is larger than all padding is not put there at all. Its size tells the trial,
        whose block is then repeated with exact batches.
        """
        if step != self._loaded:
            slot, size = self._gatherer.take(step, last)
            self._put(slot, size if size <= self._source.capacity else 0)
            self._size.fill_(size)
            self._loaded = step
        self._gatherer.ahead(last)

    def _put(self, slot: _Slot, rows: int) -> None:
        new = slot.place
        if self._copies is not None and slot.copied is not None:
            replays = torch.cuda.current_stream(self._device)
            self._copies.wait_event(self._placed)
            with torch.cuda.stream(self._copies):
                _copy_rows(self._arriving, new, rows)
                slot.copied.record(self._copies)
            replays.wait_event(slot.copied)
            new = self._arriving
        _copy_rows(self._place, new, rows)
        if rows:  # the other rows are masked, but what they hold should be valid for the model
            tree = self._place.inputs, self._place.targets
            map_tensors(lambda value: value[rows:].copy_(value[:1]), tree)
        if self._copies is not None:
            self._placed.record(torch.cuda.current_stream(self._device))

    def resolve(self) -> None:
        """Wait for what is gathered in the background."""
        self._source.examples.submit(lambda: None).result()

    def close(self) -> None:
        """Gather nothing more."""
        self._gatherer.cancel()


def _copy_rows(to: Examples, source: Examples, rows: int) -> None:
    def copy(out: Tensor, values: Tensor) -> Tensor:
        return out[:rows].copy_(values[:rows], non_blocking=True)

    map_tensors(copy, to.inputs, source.inputs)
    map_tensors(copy, to.targets, source.targets)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
