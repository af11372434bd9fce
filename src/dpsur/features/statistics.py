"""Private means and variances of features, per channel, and a private bound to clip them by.

Features are normalised with statistics of the records, so the statistics must be paid for. So must
the bound that they are clipped by: a median read off the records is itself a function of them, and
moves every clipped vector when it moves.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.features.table import grid, levels_of
from dpsur.mechanism import gaussian
from dpsur.mechanism.streams import Stream
from dpsur.per_example import ClippedSum
from dpsur.privacy.events import Event, Gaussian

# Variances are noisy and may come out negative; a channel is scaled by at least this.
LEAST_VARIANCE = 1e-6
# The norm that rows are clipped to for their mean.
MEAN_BOUND = 1.0
# Records that are worked on at once.
MICROBATCH = 2048


@dataclass(frozen=True)
class ChannelStatistics:
    """Noisy mean and variance of each channel, and what releasing them cost."""

    mean: Tensor
    variance: Tensor
    events: tuple[Event, ...]
    variance_noise: float = 0.0

    @property
    def deviation(self) -> Tensor:
        """What a channel is to be divided by.

        A variance below its own noise may have come out as anything, and dividing by its root
        would blow the channel up. So the noise, which is public, is the least that is used.
        """
        return self.variance.clamp(min=max(self.variance_noise, LEAST_VARIANCE)).sqrt()


def clipped_rows_sum(rows: Tensor, bound: float) -> ClippedSum:
    """Sum of row vectors, each scaled down to the norm bound; a row that is not finite is zero.

    Formal guarantee: adding or removing one row moves the sum by at most `bound` in L2 norm,
    provided `bound` was not computed from the rows.
    """
    norms = rows.norm(dim=1)
    scales = (bound / norms).clamp(max=1.0)
    scales = torch.where(norms.isfinite(), scales, torch.zeros_like(scales))
    safe = rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return ClippedSum({"sum": (scales.unsqueeze(1) * safe).sum(0)}, sensitivity=bound)


def channel_moments(features: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Spatial mean and spatial mean square of each record's channels, on its own."""
    means, squares = [], []
    for rows in torch.split(features, MICROBATCH):
        flat = rows.to(device).double().reshape(len(rows), features.shape[1], -1)
        means.append(flat.mean(2))
        squares.append(flat.square().mean(2))
    return torch.cat(means), torch.cat(squares)


def channel_statistics(
    features: Tensor,
    *,
    mean_bound: float,
    square_bound: float,
    noise_multiplier: float,
    stream: Stream,
) -> ChannelStatistics:
    """Noisy mean and variance per channel over all records and positions.

    Every record is reduced to the spatial mean and the spatial mean square of its channels; each of
    the two vectors is clipped in L2 norm to a bound that must be public or privately estimated.

    Formal guarantee: two Gaussian mechanisms of the given noise multiplier, which are the events of
    the result. The number of records is public.
    """
    checks.positive("mean_bound", mean_bound)
    checks.positive("square_bound", square_bound)
    checks.positive("noise_multiplier", noise_multiplier)
    if features.dim() < 2 or len(features) == 0:
        raise InvalidInputError(
            f"features must have the shape (records, channels, ...), got {tuple(features.shape)}"
        )
    means, squares = channel_moments(features, stream.device)
    mean, square = (
        gaussian.add_noise(clipped_rows_sum(rows, bound), noise_multiplier, stream)["sum"]
        / len(features)
        for rows, bound in ((means, mean_bound), (squares, square_bound))
    )
    events = (Gaussian(noise_multiplier), Gaussian(noise_multiplier))
    variance = (square - mean.square()).clamp(min=LEAST_VARIANCE)
    noise = noise_multiplier * square_bound / len(features)
    return ChannelStatistics(mean, variance, events, noise)


def private_mean(features: Tensor, noise_multiplier: float, stream: Stream) -> tuple[Tensor, Event]:
    """A noisy mean of rows of features, each clipped to norm 1.

    Formal guarantee: one Gaussian mechanism of the given noise multiplier, which is the event of
    the result: a record moves the sum of the rows by at most 1. The number of records is public.
    """
    checks.positive("noise_multiplier", noise_multiplier)
    if features.dim() != 2 or len(features) == 0:
        raise InvalidInputError(
            f"features must have the shape (records, features), got {tuple(features.shape)}"
        )
    total = torch.zeros(features.shape[1], dtype=torch.float64, device=stream.device)
    for rows in torch.split(features, MICROBATCH):
        total += clipped_rows_sum(rows.to(stream.device).double(), MEAN_BOUND).params["sum"]
    noisy = gaussian.add_noise(ClippedSum({"sum": total}, MEAN_BOUND), noise_multiplier, stream)
    return noisy["sum"] / len(features), Gaussian(noise_multiplier)


def private_levels(
    values: Tensor, noise_multiplier: float, stream: Stream, weights: Tensor | None = None
) -> tuple[Tensor, Event]:
    """Noisy quantiles of columns of numbers in [-1, 1] at the edges of a public grid.

    Formal guarantee: one Gaussian mechanism of the given noise multiplier, which is the event of
    the result. A record is in one bin of each column, so that the counts of all m columns together
    have sensitivity sqrt(m), and the noise is in proportion to that. With `weights`,
    which add up to 1 for each person, the same holds for a person.
    """
    checks.positive("noise_multiplier", noise_multiplier)
    edges, columns = grid().to(stream.device), values.shape[1]
    bins = len(edges) - 1
    places = torch.searchsorted(edges, values.to(stream.device).double().contiguous())
    places = (places - 1).clamp(0, bins - 1) + bins * torch.arange(columns, device=stream.device)
    if weights is None:
        counts = torch.bincount(places.flatten(), minlength=bins * columns).double()
    else:
        each = weights.to(stream.device).double()[:, None].expand(places.shape)
        counts = torch.bincount(places.flatten(), each.flatten(), minlength=bins * columns)
    sensitivity = math.sqrt(columns)
    noisy = gaussian.add_noise(
        ClippedSum({"counts": counts}, sensitivity), noise_multiplier, stream
    )
    found = noisy["counts"].reshape(columns, bins)
    return levels_of(found, noise_multiplier * sensitivity), Gaussian(noise_multiplier)


def private_quantile(
    values: Tensor,
    quantile: float,
    *,
    least: float,
    most: float,
    noise_multiplier: float,
    stream: Stream,
    steps: int = 64,
) -> tuple[float, Event]:
    """A noisy upper estimate of a quantile of non-negative values, on a public geometric grid.

    Formal guarantee: a Gaussian mechanism of the given noise multiplier. One record lies in one bin
    of the histogram, so that the vector of counts has sensitivity 1.
    """
    checks.positive("least", least)
    checks.positive("noise_multiplier", noise_multiplier)
    if not (0 < quantile < 1 and least < most):
        raise InvalidInputError(
            f"need 0 < quantile < 1 and least < most, got {quantile}, {least} and {most}"
        )
    grid = torch.logspace(0, 1, steps, base=most / least, dtype=torch.float64) * least
    values = values.double().nan_to_num(nan=most, posinf=most).to(stream.device)
    bins = torch.searchsorted(grid.to(values.device), values).clamp(max=steps - 1)
    counts = torch.bincount(bins, minlength=steps).double()
    noisy = gaussian.add_noise(ClippedSum({"counts": counts}, 1.0), noise_multiplier, stream)
    below = noisy["counts"].cumsum(0)
    reached = (below >= quantile * len(values)).nonzero()
    index = int(reached[0]) if len(reached) else steps - 1
    return float(grid[index]), Gaussian(noise_multiplier)
