"""Batches of records on the host, for trials that are captured as CUDA graphs.

A captured trial reads its batches from fixed memory on the device. Which records a step takes
follows from its random numbers alone, so the host draws its rows with the bits that the device
would draw, and puts the batch in place before the replay. The records of the next step are gathered
in the background meanwhile (`HostExamples.fetch`), and a batch is only copied when the one before
has arrived, so that few of them are in the memory of the host.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.functional.records import SEVERAL_SHAPES, Examples, HostExamples
from dpsur.functional.tree import map_tensors, slice_rows, tensors_of
from dpsur.mechanism.cuda_graphs import fill
from dpsur.mechanism.gaussian import Batch, padded_sizes, poisson_sample
from dpsur.mechanism.streams import Stream, Streams

# The part of a GPU's free memory that batches may take.
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
    needed = rows * examples.nbytes // max(1, size)
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
        return bool(self._feeds)

    def batch(self, examples: HostExamples, rate: float, stream: Stream, rows: int) -> Batch:
        """The batch that is in place, padded to so many rows; the `HostBatch` of sampling."""
        if stream.ranks.size > 1:
            raise InvalidInputError("the trials of several processes are not captured")
        offset = stream.skip(len(examples))
        key = (id(examples), stream.purpose, offset, rate)
        if key not in self._feeds:  # the first trial, before it is captured
            feed = _Feed(examples, rate, self._streams, stream.purpose, offset)
            if self._stream is None:
                feed.load(int(stream.step), int(stream.step))
            else:
                # a warm-up has a stream of its own, but the memory is for that of the replays
                with torch.cuda.stream(self._stream):
                    feed.load(int(stream.step), int(stream.step))
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._feeds[key] = feed
        return self._feeds[key].batch(rows)

    def load(self, step: int, last: int) -> None:
        """Put the batches of a step in place; begin with those after it, up to the `last` step."""
        try:
            for feed in self._feeds.values():
                feed.load(step, last)
        except BaseException:
            self.close()
            raise

    def resolve(self) -> None:
        """Wait for the background thread to have nothing to do."""
        for feed in self._feeds.values():
            feed.examples.resolve()

    def close(self) -> None:
        for feed in self._feeds.values():
            feed.examples.forget()


class _Feed:
    """Poisson samples of one purpose: in fixed memory on the device, one step after the other."""

    def __init__(
        self, examples: HostExamples, rate: float, streams: Streams, purpose: str, offset: int
    ) -> None:
        self.examples, self._rate, self._streams = examples, rate, streams
        self._purpose, self._offset = purpose, offset
        self._capacity = padded_sizes(len(examples), rate)[-1]
        self._place: Examples | None = None
        self._loaded: int | None = None
        self._ahead: tuple[int, Tensor] | None = None  # the rows of the next step
        self._copied: torch.cuda.Event | None = None

    def batch(self, rows: int) -> Batch:
        """The batch in place; its size is read on the device, so that this can be captured."""
        assert self._place is not None
        some = slice(rows)
        return Batch(
            Examples(slice_rows(self._place.inputs, some), slice_rows(self._place.targets, some)),
            mask=self._positions[:rows] < self._size,
            overflow=self._size > rows if rows < len(self.examples) else None,
            total=rows,
        )

    def load(self, step: int, last: int) -> None:
        """Put the batch of a step in place, after all that was launched before has read the last.

        A sample that is larger than all padding is not put there at all. Its size tells the trial,
        whose block is then repeated with exact batches.
        """
        if step == self._loaded:
            return
        rows, following = self.sample(step), None
        self._ahead = (step + 1, self.sample(step + 1)) if step < last else None
        if self._ahead is not None and len(self._ahead[1]) <= self._capacity:
            following = self._ahead[1]
        source = f"{self._purpose} {self._offset} {self._rate}"
        taken = rows if len(rows) <= self._capacity else rows[:0]
        self._put(self.examples.fetch(taken, following, source), len(taken))
        self._size.fill_(len(rows))
        self._loaded = step

    def sample(self, step: int) -> Tensor:
        if self._ahead is not None and self._ahead[0] == step:
            return self._ahead[1]
        stream = self._streams.at(step)[self._purpose]
        stream.skip(self._offset)
        return poisson_sample(len(self.examples), self._rate, stream)

    def _put(self, found: Examples, count: int) -> None:
        device = self.examples.device

        def zeros(value: Tensor) -> Tensor:
            shape = (self._capacity, *value.shape[1:])
            return torch.zeros(shape, dtype=value.dtype, device=device)

        if self._place is None:
            self._place = Examples(
                map_tensors(zeros, self.examples.inputs), map_tensors(zeros, self.examples.targets)
            )
            self._positions = torch.arange(self._capacity, device=device)
            self._size = torch.zeros((), dtype=torch.int64, device=device)
        if self._copied is not None:
            self._copied.synchronize()

        def write(place: Tensor, values: Tensor) -> Tensor:
            if values.shape != (count, *place.shape[1:]):
                raise InvalidInputError(SEVERAL_SHAPES)
            # the other rows are masked, but what they hold should be valid for the model
            return fill(place, values, count)

        map_tensors(write, self._place.inputs, found.inputs)
        map_tensors(write, self._place.targets, found.targets)
        if self._size.is_cuda:
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self._size.device))
