"""The batches of a trial that is captured as a CUDA graph.

Which batches a trial takes is found out when it is first made. Their records follow from random
numbers alone, so that their sizes are counted before a block of trials is launched: each is made
with padding that holds its batches. Records that stay on the host are put in place before each
replay: the host draws their rows with the bits that the device would draw. Those of the next step
are gathered in the background meanwhile (`HostExamples.fetch`), and a batch is only copied when the
one before has arrived, so that few of them are in the memory of the host.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.functional.records import SEVERAL_SHAPES, Examples, HostExamples
from dpsur.functional.tree import map_tensors, slice_rows, tensors_of
from dpsur.mechanism.cuda_graphs import fill
from dpsur.mechanism.gaussian import (
    MOST_AT_ONCE,
    Batch,
    level_for,
    padded_sizes,
    padded_to,
    poisson_mask,
    poisson_sample,
)
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


@dataclass(frozen=True, eq=False)
class _Source:
    """Poisson samples of one purpose, which a captured trial draws in every step."""

    examples: Examples
    rate: float
    purpose: str
    offset: int
    sizes: tuple[int, ...]  # of the padding, by level


class CapturedBatches:
    """Draws the batches of a captured trial (`batch`), at the `level` of padding that is set.

    There is one level, with room for nearly every batch, or if they are `sized` one for each of
    `padded_sizes`. `cut` says of each batch that was drawn whether it was larger than its padding.
    """

    def __init__(self, streams: Streams, *, sized: bool) -> None:
        self._streams, self._sized = streams, sized
        self._host_streams = streams.on(torch.device("cpu"))
        self._sources: dict[tuple[int, str, int, float], _Source] = {}
        self._feeds: dict[_Source, _Feed] = {}
        self._stream = None
        if streams.device.type == "cuda":
            self._stream = torch.cuda.current_stream(streams.device)
        self.level = 0
        self.cut: list[Tensor] = []

    @property
    def read_from_host(self) -> bool:
        return bool(self._feeds)

    def batch(self, examples: Examples, rate: float, stream: Stream) -> Batch:
        if stream.ranks.size > 1:
            raise InvalidInputError("the trials of several processes are not captured")
        size, offset = len(examples), stream.skip(0)
        source = self._source(examples, rate, stream.purpose, offset)
        room = source.sizes[self.level]
        if isinstance(examples, HostExamples):
            stream.skip(size)
            if source not in self._feeds:  # the first trial, before it is captured
                feed = self._feeds[source] = _Feed(source, self._host_streams)
                # a warm-up has a stream of its own, but the memory is for that of the replays
                with torch.cuda.stream(self._stream):
                    feed.load(int(stream.step), int(stream.step))
                if self._stream is not None:
                    torch.cuda.current_stream(examples.device).wait_stream(self._stream)
            batch, drawn = self._feeds[source].batch(room)
        else:
            mask = poisson_mask(size, rate, stream)
            batch, drawn = padded_to(examples, mask, room, stream.ranks), mask.sum()
        if room < size:
            self.cut.append(drawn > room)
        if not self._sized:
            return batch
        most = math.ceil(MOST_AT_ONCE * rate * size)
        return replace(batch, at_once=math.ceil(len(batch) / math.ceil(len(batch) / most)))

    def _source(self, examples: Examples, rate: float, purpose: str, offset: int) -> _Source:
        key = (id(examples), purpose, offset, rate)
        if key not in self._sources:
            sizes = padded_sizes(len(examples), rate)
            sizes = sizes if self._sized else sizes[-1:]
            self._sources[key] = _Source(examples, rate, purpose, offset, sizes)
        return self._sources[key]

    def levels(self, steps: range) -> list[int]:
        """For every step the least level whose sizes hold its batches.

        The list ends before a batch that is larger than every size.
        """
        levels = [0] * len(steps)
        if not levels:  # a step that is no trial comes next
            return []
        for one in self._sources.values():
            counts = self._streams.counts_below(
                one.rate, len(one.examples), one.purpose, steps, one.offset
            )
            too_large = [place for place, count in enumerate(counts) if count > one.sizes[-1]]
            levels = [
                max(level, level_for(one.sizes, count))
                for level, count in zip(
                    levels, counts[: min(too_large, default=None)], strict=False
                )
            ]
        return levels

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
    """The batches of a source on the host: in fixed memory on the device, one after the other."""

    def __init__(self, source: _Source, streams: Streams) -> None:
        assert isinstance(source.examples, HostExamples)
        self.examples, self._source, self._streams = source.examples, source, streams
        self._capacity = source.sizes[-1]
        self._place: Examples | None = None
        self._loaded: int | None = None
        self._ahead: tuple[int, Tensor] | None = None  # the rows of the next step
        self._copied: torch.cuda.Event | None = None

    def batch(self, rows: int) -> tuple[Batch, Tensor]:
        """The batch in place; its size is read on the device, so that this can be captured."""
        assert self._place is not None
        some = slice(rows)
        batch = Batch(
            Examples(slice_rows(self._place.inputs, some), slice_rows(self._place.targets, some)),
            mask=self._positions[:rows] < self._size,
            total=rows,
        )
        return batch, self._size

    def load(self, step: int, last: int) -> None:
        """Put the batch of a step in place, after all that was launched before has read the last.

        A sample that is larger than all padding is not put there at all. No trial that counts has
        one, and its size would tell.
        """
        if step == self._loaded:
            return
        rows, following = self.sample(step), None
        self._ahead = (step + 1, self.sample(step + 1)) if step < last else None
        if self._ahead is not None and len(self._ahead[1]) <= self._capacity:
            following = self._ahead[1]
        name = f"{self._source.purpose} {self._source.offset} {self._source.rate}"
        taken = rows if len(rows) <= self._capacity else rows[:0]
        self._put(self.examples.fetch(taken, following, name), len(taken))
        self._size.fill_(len(rows))
        self._loaded = step

    def sample(self, step: int) -> Tensor:
        if self._ahead is not None and self._ahead[0] == step:
            return self._ahead[1]
        stream = self._streams.at(step)[self._source.purpose]
        stream.skip(self._source.offset)
        return poisson_sample(len(self.examples), self._source.rate, stream)

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
