"""A hockey-stick profile that no block of accepted updates can pass.

The profile of a pair of laws (P, Q) is x -> sup over events S of P(S) - x Q(S); at x = e^epsilon it
is the least delta. For blocks of accepted updates it is bounded one update at a time. With U a
bound on the profile of the updates that follow, convex in x, the bound with one more in front is

    x -> sup over choices of E[num U(x u den / num)] / E[num],        u = E[num] / E[den],      (*)

den = a0 and num = L a1 for `add`, swapped for `remove`; the first U is max(0, 1 - x). The
choice may differ for every x and every update, so adaptive tests are covered (docs/privacy.md).

For a fixed product y = x u let V(t) be the supremum of E[num U(y den / num)] / E[num] over the
choices with E[den] / E[num] = t. It is concave in t, so it lies below lines. A line of slope m
and any height theta with

    E[ max over vertices of num U(y den / num) - m (den - num) - theta num ] <= 0

says V(t) <= theta + m (t - 1) for all t at once. Lines are found at the nodes of a grid of y.
Between two nodes (*) is convex in y for every choice, so that a pair of lines bounds all y between
them, and the largest value along y = x / t bounds the profile at x.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dpsur.privacy.accountants.selective.divergence import COARSE, divergence
from dpsur.privacy.accountants.selective.pair import Array, Choice, Direction, chord, vertices

# Rounding, of the sum of the sizes of what is added up. Logarithms of weights are at most a few
# hundred in size, so that weights are right to 3e-14 of themselves.
ROUND = 1e-13
REACH = 9.5  # standard deviations of noise on the mesh; what lies outside is charged in full
FARTHEST = 60.0  # a log(num / den) beyond this is left to the bound by Rényi divergences


class Effort(NamedTuple):
    """How hard to try; a profile is valid whatever it says."""

    cells: float = 16.0  # of the grid, in one standard deviation of the loss of one update
    stretch: float = 0.02  # by which cells grow with their distance from a loss of 0
    nodes: float = 0.12  # width of the cells of the mesh of z, in standard deviations of noise
    lines: int = 4


USUAL = Effort()


class Profile(NamedTuple):
    """A convex falling function of x: straight between points, from (0, 1) to the first one, and
    constant beyond the last.
    """

    points: Array
    values: Array

    def at(self, x: Array) -> Array:
        points, values = np.append(0.0, self.points), np.append(1.0, self.values)
        found: Array = np.interp(x, points, values)
        return found

    def pieces(self) -> tuple[Array, Array]:
        """Slope and value at 0 of the straight piece before each point, and beyond the last."""
        points, values = np.append(0.0, self.points), np.append(1.0, self.values)
        slope = np.append(np.diff(values) / np.diff(points), 0.0)
        return slope, values - slope * points


class _Grid(NamedTuple):
    """Losses (width / stretch) sinh(stretch i) for whole numbers i from `first` to `last`."""

    width: float
    stretch: float
    first: int
    last: int

    @staticmethod
    def covering(low: float, high: float, width: float, stretch: float) -> "_Grid":
        scale = stretch / width
        first, last = (math.asinh(scale * end) / stretch for end in (low, high))
        return _Grid(width, stretch, math.floor(first), math.ceil(last))

    @property
    def losses(self) -> Array:
        steps = np.arange(self.first, self.last + 1)
        found: Array = self.width / self.stretch * np.sinh(self.stretch * steps)
        return found

    def piece(self, losses: Array) -> Choice:
        """The number of points at or below each loss: 0 before the first one."""
        place = np.floor(np.arcsinh(losses * (self.stretch / self.width)) / self.stretch)
        return np.clip(place.astype(np.intp) - (self.first - 1), 0, self.last - self.first + 1)


class _Programme(NamedTuple):
    """num and den of every vertex and atom, first index the vertex; what is left out; bounds."""

    num: Array
    den: Array
    shift: Array  # log(den / num)
    outside: float  # bounds E[num] and E[den] outside the mesh
    num_floor: float  # E[num] is at least this
    num_sum: float  # and, with E[den], at most this


class _Lines(NamedTuple):
    """V(t) <= height + slope (t - 1), one row per node of the grid, one column per line."""

    height: Array
    slope: Array


def _programme(
    q: float, s: float, q_v: float, r: float, direction: Direction, spacing: float
) -> _Programme:
    ends = np.array([-REACH, -5.0, 5.0, REACH])
    inner = max(math.ceil(10.0 / spacing), 8)
    outer = max(math.ceil((REACH - 5.0) / (3.0 * spacing)), 4)
    z = s * np.concatenate(
        (
            np.linspace(ends[0], ends[1], outer, endpoint=False),
            np.linspace(ends[1], ends[2] + 1.0 / s, inner, endpoint=False),
            np.linspace(ends[2] + 1.0 / s, ends[3] + 1.0 / s, outer + 1),
        )
    )
    pair, mass = chord(q, s, z)
    corner = vertices(r, q_v)
    without = corner.base * pair.weight
    with_record = corner.base * (1.0 + corner.gain) * pair.weighted_ratio
    log_ratio = np.log1p(corner.gain) + pair.log_ratio
    num, den, shift = with_record, without, -log_ratio
    if direction == "remove":
        num, den, shift = without, with_record, log_ratio
    return _Programme(
        num=num[:, None, :], den=den[:, None, :], shift=shift[:, None, :], outside=r * mass,
        num_floor=float(num.min(axis=0).sum()) * (1 - 1e-9),
        num_sum=float((num + den).max(axis=0).sum()),
    )  # fmt: skip


def _pick(options: Array, theta: Array, num: Array) -> tuple[Array, Choice]:
    theta = theta[:, None]
    best: Array = options[0] - theta * num[0]
    choice = np.zeros(best.shape, dtype=np.intp)
    for vertex in range(1, len(options)):
        other = options[vertex] - theta * num[vertex]
        np.copyto(choice, vertex, where=other > best)
        np.maximum(best, other, out=best)
    return best, choice


def _chosen(values: Array, choice: Choice) -> Array:
    _, row, atom = values.shape
    flat = choice * (row * atom) + np.arange(atom)
    if row > 1:
        flat += np.arange(row)[:, None] * atom
    total: Array = values.reshape(-1).take(flat).sum(axis=1)
    return total


def _sup_ratio(options: Array, num: Array, start: Array) -> tuple[Array, Array, Choice]:
    """Dinkelbach: the largest sum(options) / sum(num), what is left above it, and the choice."""
    theta = start
    for _ in range(30):
        best, choice = _pick(options, theta, num)
        left = best.sum(axis=1)
        if not np.any(left > 1e-9 * np.abs(theta) + 1e-18):
            break
        theta = theta + left / _chosen(num, choice)
    return theta, np.maximum(left, 0.0), choice


def _range(p: _Programme) -> tuple[tuple[float, Choice], tuple[float, Choice]]:
    """The ends of the range of t = E[den] / E[num], rounded outward, and what attains them."""
    ends = []
    for sign in (-1.0, 1.0):
        theta, left, choice = _sup_ratio(sign * p.den, p.num, np.array([-2.0 * p.num_sum]))
        size = 1.0 + abs(float(theta[0]))
        slack = (float(left[0]) + p.outside * size + ROUND * p.num_sum * size) / p.num_floor
        ends.append((sign * (float(theta[0]) + slack), choice))
    return ends[0], ends[1]


def _find_lines(
    p: _Programme, rest: Profile, y: Array, piece: Choice, lines: int, edges: tuple[Choice, Choice]
) -> _Lines:
    """Lines at nodes y of the grid, close to each other where the largest value lies.

    The slopes follow a bisection: along y = x / t the supremum rises with t where the slope of V
    exceeds (y / t) dV/dy. Any slopes and any heights that pass the test are valid.
    """
    tilt, level = rest.pieces()
    fall, head = tilt[piece] * p.den, level[piece] * p.num
    worth = head + fall * y[:, None]  # num U(y den / num)
    size = 2.0 * head.max(axis=0).sum(axis=1)
    spread = p.den - p.num

    def attained(choice: Choice) -> tuple[Array, Array, Array]:
        norm = _chosen(p.num, choice)
        t = _chosen(p.den, choice) / norm
        return t, _chosen(worth, choice) / norm, y / t * _chosen(fall, choice) / norm

    # t and value of the choices between which the largest value lies
    left, right = (
        np.stack(attained(np.broadcast_to(edge, (len(y), edge.shape[1])))[:2]) for edge in edges
    )
    heights, slopes = [], []
    for _ in range(lines):
        run = right[0] - left[0]
        slope = np.where(run > 1e-13, (right[1] - left[1]) / np.maximum(run, 1e-13), 0.0)
        start = left[1] - slope * (left[0] - 1.0)
        theta, residual, choice = _sup_ratio(worth - slope[:, None] * spread, p.num, start)
        parts = np.abs(theta) + np.abs(slope)
        lost = residual + p.outside * (1.0 + parts) + ROUND * (size + parts * p.num_sum)
        heights.append(theta + lost / p.num_floor + ROUND * parts)
        slopes.append(slope)
        t, value, balance = attained(choice)
        upwards = slope > balance
        new = np.stack((t, value))
        left, right = np.where(upwards, new, left), np.where(upwards, right, new)
    return _Lines(np.stack(heights, axis=1), np.stack(slopes, axis=1))


def _largest(x: Array, lines: _Lines, low: float, high: float) -> Array:
    """The largest value that the lines allow at each x, over y = x / t with t in [low, high].

    On an interval of y the chord between a line at each end is c0 + c1 / t + c2 t. Its second
    derivative is 2 c1 / t^3, so it exceeds its values at the ends by at most a known amount.
    """
    first = np.searchsorted(x, x / high, side="right") - 1
    last = np.minimum(np.searchsorted(x, x / low, side="left"), len(x) - 1)
    found = np.zeros(len(x))
    for offset in range(int((last - first).max())):
        i = np.maximum(first + offset, 0)
        rows = np.flatnonzero((i < last) & (first >= 0))
        i, here = i[rows], x[rows][:, None]
        below, above = x[i][:, None], x[i + 1][:, None]
        start, end = np.maximum(here / above, low), np.minimum(here / below, high)
        near, far = (_Lines(lines.height[i + k], lines.slope[i + k]) for k in (0, 1))
        curve = here * (far.height - far.slope - near.height + near.slope) / (above - below)
        ends = []
        for t in (start, end):
            share = np.clip((here / t - below) / (above - below), 0.0, 1.0)
            left, right = near.height + near.slope * (t - 1), far.height + far.slope * (t - 1)
            ends.append((1 - share) * left + share * right)
        bulge = np.maximum(end - start, 0.0) ** 2 * np.maximum(-curve, 0.0) / (4 * start**3)
        found[rows] = np.maximum(found[rows], (np.maximum(*ends) + bulge).min(axis=1))
    # Beyond the last node V falls with y, so that its line there holds.
    over = np.flatnonzero(x / low > x[-1])
    t = np.minimum(x[over] / x[-1], high)[:, None]
    height, slope = lines.height[-1], lines.slope[-1]
    beyond = np.maximum(height + slope * (t - 1), height + slope * (low - 1)).min(axis=1)
    found[over] = np.maximum(found[over], beyond)
    # Before the first node nothing is known but that a profile is at most 1.
    return np.where(first < 0, 1.0, found)


def _convex(x: Array, values: Array) -> Profile:
    """The largest convex falling function below the values and (0, 1).

    The true profile is convex and falls, so it lies below that too.
    """
    values = np.minimum.accumulate(np.clip(values, np.maximum(0.0, 1.0 - x), 1.0))
    points, heights = np.append(0.0, x), np.append(1.0, values)
    kept: list[int] = []
    for k in range(len(points)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            over = (heights[b] - heights[a]) * (points[k] - points[a])
            if over < (heights[k] - heights[a]) * (points[b] - points[a]):
                break
            kept.pop()
        kept.append(k)
    return Profile(x, np.interp(x, points[kept], heights[kept]))


def _grid(
    p: _Programme, q: float, s: float, q_v: float, r: float, direction: Direction, updates: int,
    effort: Effort,
) -> _Grid | None:  # fmt: skip
    """A grid for a block: fine where its losses mostly are. It decides tightness, nothing else."""
    chi_square = math.expm1(min(divergence(q, s, q_v, r, 2.0, direction, COARSE).upper, 50.0))
    step = max(math.sqrt(chi_square), 1e-9)
    reach = 9.0 * step * math.sqrt(updates)
    least, most = -float(p.shift.max()), -float(p.shift.min())
    if not max(-least, most) < FARTHEST:
        return None
    # A loss is at most log(num / den) - log u, and u is at most r from 1.
    low = max(updates * (least - math.log(r)), -reach + min(least, 0.0))
    high = min(updates * (most + math.log(r)), reach + max(most, 0.0))
    low, high = min(low, -4.0 * step), max(high, 4.0 * step)
    low, high = max(low, -3.0 * FARTHEST), min(high, 3.0 * FARTHEST)
    return _Grid.covering(low, high, step / effort.cells, effort.stretch)


def _next(p: _Programme, grid: _Grid, updates: int, lines: int) -> list[Profile] | None:
    (low, first), (high, last) = _range(p)
    x = np.exp(grid.losses)
    rest = Profile(x, np.maximum(0.0, 1.0 - x))
    # In parts that fit into a processor's cache.
    parts = np.array_split(np.arange(len(x)), math.ceil(len(x) * p.num.size / 40_000))
    pieces = [grid.piece(grid.losses[part][:, None] + p.shift) for part in parts]
    found = []
    for _ in range(updates):
        by_part = [
            _find_lines(p, rest, x[part], piece, lines, (first, last))
            for part, piece in zip(parts, pieces, strict=True)
        ]
        every = _Lines(*(np.concatenate(column) for column in zip(*by_part, strict=True)))
        values = _largest(x, every, low, high)
        if not (low > 0.0 and np.all(np.isfinite(values))):
            return None
        rest = _convex(x, values)
        found.append(rest)
    return found


@lru_cache(maxsize=64)
def block_profiles(
    q: float,
    s: float,
    q_v: float,
    r: float,
    direction: Direction,
    updates: int,
    effort: Effort = USUAL,
) -> tuple[Profile, ...] | None:
    """Profiles of 1, 2, ... `updates` accepted updates; None where they cannot be computed.

    Formal guarantee: for neighbouring data sets, whatever was accepted before and however the
    tests depend on it, the hockey-stick divergence at x of the next k accepted updates is at most
    that of the k-th profile; with the record against without it for `add`.
    """
    if not (0.05 < s < 1e6 and r < 1e6):  # beyond, logarithms grow large
        return None
    with np.errstate(all="ignore"):
        p = _programme(q, s, q_v, r, direction, effort.nodes)
        grid = _grid(p, q, s, q_v, r, direction, updates, effort)
        found = None if grid is None else _next(p, grid, updates, effort.lines)
    return None if found is None else tuple(found)
