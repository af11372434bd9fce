"""The sampled Gaussian mechanism: Poisson batches, and noise on sums of bounded sensitivity.

Batches of the training records are exact or padded to a static shape, with the same rows from the
same draws. `add_noise` is the one place where noise is added. Call it as `gaussian.add_noise`, by
the name of the module, so that a test which watches or breaks the mechanism reaches all uses of it.
"""

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dpsur.distributed import ALONE, Ranks
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples, HostExamples
from dpsur.functional.tree import Params, elementwise, parts, tensors_of
from dpsur.mechanism.noise_table import DEVIATION
from dpsur.mechanism.streams import Stream
from dpsur.per_example import ClippedSum, clipped_sum

# A padded batch holds this many standard deviations more than is expected. More are drawn about
# once in a million trials; that is detected, and the trial is repeated with the exact batch.
SPARE_DEVIATIONS = 5.0
# Where a batch may have one of several sizes, they are so many standard deviations from what is
# expected.
_DEVIATIONS = (-1.5, -1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
EXPECTED_LEVEL, LEVELS = _DEVIATIONS.index(0.0), len(_DEVIATIONS) + 1

# What rounding a number to the grid moves two sums apart by, in standard deviations of the noise:
# half a step each, and a little for the division that finds it.
_ROUNDING = 1.001 / DEVIATION
_LEAST_LEFT = 0.5  # at most as much noise again is added for rounding
# What norms, factors and sums in floating point may add to a sensitivity, by the type of the sum;
# docs/privacy.md says for which sums this is proved, and for which it is tested.
FLOATING_POINT: dict[torch.dtype, float] = {torch.float32: 2.0**-7, torch.float64: 2.0**-8}

# A sample that is larger than expected by more than this is worked on in parts, so that memory
# does not follow the largest sample: at 32 expected records there is one of 48 now and then.
MOST_AT_ONCE = 1.125


@dataclass(frozen=True)
class Batch:
    """Rows that were drawn, perhaps among rows that were not.

    `data` is what was drawn from and `rows` says which of it; None means all. `mask` tells the
    drawn rows; None means all. Where there are several `ranks`, these are the rows of this one, and
    `total` counts the rows of all. Gradients of at most `at_once` rows are computed at the same
    time, None: of as many as memory allows.
    """

    data: Examples
    mask: Tensor | None = None
    rows: Tensor | None = None
    ranks: Ranks = ALONE
    total: int | None = None
    at_once: int | None = None

    def __len__(self) -> int:
        return len(self.data) if self.rows is None else len(self.rows)

    @cached_property
    def examples(self) -> Examples:
        """The rows themselves, gathered when they are first asked for."""
        return self.data.part(slice(None)) if self.rows is None else self.data.select(self.rows)

    def own_sum(self, values: Tensor) -> Tensor:
        """Sum over the rows of this rank that were drawn, which are the last dimension."""
        if self.mask is None:
            return values.sum(-1)
        # Replaced, not multiplied: what is not finite outside the sample must not matter.
        return values.masked_fill(~self.mask, 0.0).sum(-1)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the rows of all ranks that were drawn; zero where none was."""
        total, count = self.own_sum(values), self._own_count(values)
        if self.ranks.size > 1:
            both = torch.cat([total.reshape(-1), count.reshape(1).to(total.dtype)])
            both = self.ranks.sum(both)
            total, count = both[:-1].view(total.shape), both[-1]
        return total / count.clamp(min=1)

    def count(self) -> Tensor:
        first = tensors_of(self.data.inputs)[0]
        return self.ranks.sum(self._own_count(first).reshape(1))[0]

    def _own_count(self, like: Tensor) -> Tensor:
        if self.mask is not None:
            return self.mask.sum()
        return torch.full((), len(self), dtype=torch.int64, device=like.device)


Draw = Callable[[Examples, float, Stream], Batch]


def poisson_mask(size: int, rate: float, stream: Stream) -> Tensor:
    """Who joins a sample: every record independently with probability `rate`.

    Draws are in double precision, so that the rate that happens is the rate that is accounted for
    to within 2^-53.
    """
    return stream.uniform(size) < rate


def poisson_sample(size: int, rate: float, stream: Stream) -> Tensor:
    """Rows of a Poisson sample. Their number is random and may be zero."""
    return poisson_mask(size, rate, stream).nonzero(as_tuple=True)[0]


def exact_batch(examples: Examples, rate: float, stream: Stream) -> Batch:
    return _batch(examples, rate, stream, ())


def steady_batch(examples: Examples, rate: float, stream: Stream) -> Batch:
    """A Poisson sample for steps that are not captured: padded on CUDA, exact elsewhere.

    Kernels there are chosen anew for every shape that has not been seen, which takes longer than
    running them.
    """
    sizes: tuple[int, ...] = ()
    if stream.device.type == "cuda":
        on_host = isinstance(examples, HostExamples)
        size = len(examples)
        sizes = (padded_size(size, rate),) if on_host else padded_sizes(size, rate)
    return _batch(examples, rate, stream, sizes)


def _batch(examples: Examples, rate: float, stream: Stream, sizes: tuple[int, ...]) -> Batch:
    """A sample, and of records that stay on the host the rows; those of the next step are begun."""
    following = stream.ahead()
    batch = _sized(examples, poisson_mask(len(examples), rate, stream), sizes, stream.ranks)
    if not isinstance(examples, HostExamples) or batch.rows is None:
        return batch
    mask = poisson_mask(len(examples), rate, following)
    ahead = _sized(examples, mask, sizes, following.ranks).rows
    return replace(batch, data=examples.fetch(batch.rows, ahead, stream.purpose), rows=None)


def _sized(examples: Examples, mask: Tensor, sizes: tuple[int, ...], ranks: Ranks) -> Batch:
    """The share of this rank, padded to the least size that holds the sample, whole if none does.

    All ranks have drawn the same sample.
    """
    count = int(mask.sum()) if sizes else 0
    if not sizes or count > sizes[-1]:
        rows = mask.nonzero()[:, 0]
        return Batch(examples, rows=ranks.own(rows), ranks=ranks, total=len(rows))
    return padded_to(examples, mask, sizes[level_for(sizes, count)], ranks)


def padded_size(size: int, rate: float) -> int:
    """Room for a Poisson sample, rounded up to a multiple of 32."""
    spread = math.sqrt(size * rate * (1 - rate))
    room = math.ceil((size * rate + SPARE_DEVIATIONS * spread + SPARE_DEVIATIONS) / 32) * 32
    return min(size, room)


def padded_sizes(size: int, rate: float) -> tuple[int, ...]:
    """Padded sizes of Poisson samples, one for every level; the last is `padded_size`.

    A sample that is padded to the smallest size that holds it has few rows that count for nothing:
    about two in a hundred at 512 rows, where one size for all would have twenty-five.
    """
    spread, most = math.sqrt(size * rate * (1 - rate)), padded_size(size, rate)
    # rounded to what suits kernels, but by much less than samples differ
    unit = next(unit for unit in (16, 8, 4, 2, 1) if unit == 1 or 2 * unit <= spread)
    sizes = (math.ceil((size * rate + some * spread) / unit) * unit for some in _DEVIATIONS)
    return (*(min(max(unit, size), most) for size in sizes), most)


def level_for(sizes: tuple[int, ...], count: int) -> int:
    """The level of the smallest size that holds this many rows; the last where none does."""
    last = len(sizes) - 1
    return next((level for level, size in enumerate(sizes) if size >= count), last)


# Draws the padded batches of a trial while it is captured (`mechanism/captured_batches.py`).
captured_batch: ContextVar[Draw | None] = ContextVar("captured_batch", default=None)


def padded_batch(examples: Examples, rate: float, stream: Stream) -> Batch:
    """The same sample from the same draws, in a shape that does not depend on them.

    In a captured trial nothing waits for the device. Elsewhere a sample that is larger than its
    padding is taken whole.
    """
    captured = captured_batch.get()
    if captured is not None:
        return captured(examples, rate, stream)
    mask = poisson_mask(len(examples), rate, stream)
    return _sized(examples, mask, (padded_size(len(examples), rate),), stream.ranks)


def padded_to(examples: Examples, mask: Tensor, room: int, ranks: Ranks) -> Batch:
    """The rows of a sample among so many. The others are copies of one record, and masked out."""
    room = math.ceil(room / ranks.size) * ranks.size  # every rank has as many
    own = ranks.own(torch.nonzero_static(mask, size=room, fill_value=-1)[:, 0])
    return Batch(examples, own >= 0, own.clamp(min=0), ranks, room)


# Sees every sum before its noise, and says which one gets it (`audits/neighbour.py`).
before_noise: ContextVar[Callable[[ClippedSum], ClippedSum] | None] = ContextVar(
    "before_noise", default=None
)


def add_noise(total: ClippedSum, noise_multiplier: float | Tensor, stream: Stream) -> Params:
    """Gaussian mechanism on a sum of bounded sensitivity (Alg. 1, L7), in integers.

    Formal guarantee: with Poisson sampling at rate q, a sampled Gaussian mechanism of rate q and
    this noise multiplier, also for whoever reads the last bits (docs/privacy.md). The scale comes
    from the sensitivity that the sum itself reports, and from what rounding it to the grid of the
    noise adds. Each number of a vector has its own address, so that shards on several ranks
    together get the noise that one process would draw.
    """
    seen = before_noise.get()
    total = total if seen is None else seen(total)
    if not isinstance(noise_multiplier, Tensor) and not noise_multiplier:
        return total.params  # training without privacy
    scale = noise_deviation(total, noise_multiplier)
    offsets = total.offsets
    if offsets is not None:
        return {
            name: stream.add_normal(value.reshape(-1), scale, offsets[name]).view(value.shape)
            for name, value in total.params.items()
        }

    def noisy(value: Tensor) -> Tensor:
        flat = value.reshape(-1)
        if total.scratch:
            return stream.add_normal(flat, scale, in_place=True).view(value.shape)
        return stream.add_normal(flat, scale).view(value.shape)

    return elementwise(noisy, total.params)


def noise_deviation(total: ClippedSum, noise_multiplier: float | Tensor) -> float | Tensor:
    """The standard deviation s that a sum of this sensitivity needs once it is on a grid.

    The grid has s / `DEVIATION` between its points. Rounding n numbers to it moves two sums apart
    by at most its root of n, so that s = multiplier (sensitivity + s sqrt(n) / `DEVIATION`). The
    sensitivity is that over the real numbers plus what floating point may add to it.
    """
    kinds = {value.dtype for value in total.params.values()}
    sensitivity = total.sensitivity * (1 + max(FLOATING_POINT[kind] for kind in kinds))
    lost = noise_multiplier * math.sqrt(total.count) * _ROUNDING
    if isinstance(lost, Tensor):
        return noise_multiplier * sensitivity / (1 - lost).clamp(min=_LEAST_LEFT)
    if lost > 1 - _LEAST_LEFT:
        raise InvalidInputError(
            f"noise of multiplier {noise_multiplier:g} on {total.count} numbers is too coarse a "
            f"grid for a sum of this sensitivity; train at most "
            f"{int(((1 - _LEAST_LEFT) / (noise_multiplier * _ROUNDING)) ** 2)} weights, or ask for "
            "less noise"
        )
    return noise_multiplier * sensitivity / (1 - lost)


def noisy_mean(
    total: ClippedSum,
    noise_multiplier: float | Tensor,
    expected_size: float,
    stream: Stream,
    places: Params | None = None,
) -> Params:
    """A clipped sum with noise, over the expected batch size.

    The drawn size is private, and dividing by it would change the sensitivity. The mean is written
    into `places`, or else into the memory of the sum, which is as large as the model.
    """
    noisy = add_noise(replace(total, scratch=True), noise_multiplier, stream)
    places = noisy if places is None else places
    for value, place in parts(noisy, places, most=total.count):
        torch.div(value, expected_size, out=place)
    return places


def dp_mean_gradient(
    problem: Problem,
    params: Params,
    batch: Batch,
    sample_rate: float,
    noise_multiplier: float | Tensor,
    max_grad_norm: float | Tensor,
    noise: Stream,
    *,
    coins: Tensor | None = None,
) -> Params:
    """Clip each record's gradient, add them up, add noise, divide by the expected size (L4-8).

    Formal guarantee: if `batch` was drawn from the training records at this rate, this is a sampled
    Gaussian mechanism of the rate and the noise multiplier, which may be a number on the device.
    `coins` are those of `clipped_sum`.
    """
    total = clipped_sum(
        problem,
        params,
        batch.data,
        max_grad_norm,
        mask=batch.mask,
        rows=batch.rows,
        coins=coins,
        ranks=batch.ranks,
        at_once=batch.at_once,
    )
    return noisy_mean(total, noise_multiplier, sample_rate * problem.size, noise)
