"""What the tests of selective release share: settings, high-precision oracles, an empty cache."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mpmath as mp
import numpy as np
import pytest

from dpsur.privacy.accountants import proven
from dpsur.privacy.accountants.proven import DIRECTIONS, SelectiveUpdate
from dpsur.privacy.accountants.rdp import epsilon_at
from dpsur.privacy.accountants.selective.divergence import FINE, Interval, divergence
from dpsur.privacy.events import LossTest

DELTA = 1e-5


def paper_update(
    records: int, batch: int, noise: float, val_batch: int, val_noise: float
) -> SelectiveUpdate:
    test = LossTest(val_batch / records, val_noise, accept_threshold=-1.0)
    return SelectiveUpdate.of(batch / records, noise, test)


# setting, updates, (lower, upper) of the reference note, attained value at integer orders up to 32
REFERENCE = [
    (paper_update(60000, 2048, 4.0, 256, 1.3), 651, (1.320, 1.322), 1.320),
    (paper_update(60000, 2048, 2.15, 256, 0.8), 1076, (4.271, 4.288), 4.281),
    (paper_update(50000, 8192, 5.67, 256, 1.1), 493, (4.042, 4.046), 4.042),
]
ROW = REFERENCE[1][0]


@contextmanager
def empty_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Results are looked up and stored in this folder only, and nothing is remembered after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    proven.known.cache_clear()
    yield folder / "dpsur"
    proven.known.cache_clear()


def worse_direction(update: SelectiveUpdate, order: float) -> Interval:
    """Attained and certified divergence of one update, the worse direction at this order."""
    both = [divergence(*update, order, direction) for direction in DIRECTIONS]
    return Interval(max(b.lower for b in both), max(b.upper for b in both))


def epsilon_over(update: SelectiveUpdate, updates: int, orders, directions=DIRECTIONS) -> Interval:
    """Epsilon with the orders given: best order per direction, then the worse direction."""
    best = []
    for direction in directions:
        found = [(a, divergence(*update, float(a), direction, FINE)) for a in orders]
        values = [[epsilon_at(a, updates * x, DELTA) for x in pair] for a, pair in found]
        best.append([min(column) for column in zip(*values, strict=True)])
    lower, upper = (max(column) for column in zip(*best, strict=True))
    return Interval(lower, upper)


def coarse_problem(q: float, s: float, cells: int):
    """Masses under P0 and P1 of a few cells: an adversary who learns the cell only."""
    edges = [-mp.inf, *[mp.mpf(x) for x in np.linspace(-2.5 * s, 1 + 3.5 * s, cells - 1)], mp.inf]
    m0 = [mp.ncdf(b / s) - mp.ncdf(a / s) for a, b in itertools.pairwise(edges)]
    n1 = [mp.ncdf((b - 1) / s) - mp.ncdf((a - 1) / s) for a, b in itertools.pairwise(edges)]
    return m0, [(1 - q) * x + q * y for x, y in zip(m0, n1, strict=True)]


def step_functions(x, q_v: float, r: float):
    """a0 and a1, one value per cell, from numbers in [0, 1]; the first half is a0's."""
    half = len(x) // 2
    a0 = [1 + (r - 1) * mp.mpf(float(t)) for t in x[:half]]
    other = [1 + (r - 1) * mp.mpf(float(t)) for t in x[half:]]
    return a0, [(1 - q_v) * a + q_v * b for a, b in zip(a0, other, strict=True)]


def num_and_den(m0, m1, a0, a1, direction):
    num = [m * a for m, a in zip(m1, a1, strict=True)]
    den = [m * a for m, a in zip(m0, a0, strict=True)]
    return (num, den) if direction == "add" else (den, num)


def moment_of(m0, m1, a0, a1, order, direction):
    """log of the moment of given step functions, by definition and in high precision."""
    num, den = num_and_den(m0, m1, a0, a1, direction)
    top = mp.fsum(n**order * d ** (1 - order) for n, d in zip(num, den, strict=True))
    return mp.log(top * mp.fsum(den) ** (order - 1) / mp.fsum(num) ** order)


def exact_moment(q: float, s: float, power: float, lo=-mp.inf, hi=mp.inf):
    """E[L^power] under P0 by adaptive quadrature in high precision."""
    with mp.workdps(30):
        q, s = mp.mpf(q), mp.mpf(s)

        def integrand(z):
            ell = mp.exp((2 * z - 1) / (2 * s * s))
            return mp.npdf(z, 0, s) * (1 - q + q * ell) ** power

        knots = sorted({0, 1, float(power), float(power) / 2})
        knots = [mp.mpf(k) + j * s for k in knots for j in (-9, -4, -2, 0, 2, 4, 9)]
        inside = sorted({k for k in knots if lo < k < hi})
        return mp.quad(integrand, [lo, *inside, hi])
