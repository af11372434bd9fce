"""Attacks on how noise is computed, on a mechanism as it is usually written and on ours.

Each is a guess between two cases that the proof over real numbers cannot tell apart any better than
its epsilon allows. The noise is so large that this is next to nothing: whoever is right more often
than every other time reads the machine, not the sum.

- *last bits* (Mironov 2012): where a floating-point sum can end depends on what is added.
- *precision* (Haney et al. 2022): noise of float32 on a sum of float64, whose last bits stay.
- *repeated seed*: two releases of neighbours, whose noise came from one seed, are subtracted.
- *time*: the rounds of a sampler by rejection tell how large the noise is.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dpsur.mechanism import gaussian
from dpsur.mechanism import streams as random_numbers
from dpsur.mechanism.noise_table import DEVIATION
from dpsur.mechanism.streams import NOISE, Stream, Streams
from dpsur.per_example import ClippedSum
from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Cell, OneByOne, Options, Row

TITLE = "Attacks on the bits of noise"
TRIALS = 2000
NUMBERS, MANY = 20, 2**18  # of a vector; so many for the last bits, of which few are of use
SIGMA = 20.0  # noise over sensitivity
TEXT = """
How often a guess between two neighbouring sums is right, from one release (repeated seed: from two;
time: a guess whether the noise of one number is larger than usual). One half is chance. *Usual* is
the mechanism with floating-point noise, or with a sampler by rejection; *dpsur* the same attack on
`gaussian.add_noise`. Noise is 20 times the sensitivity, so that nobody should be right more often
than 51% of the time.
"""
COLUMNS = (
    Column("attack", "attack"),
    Column("usual", "usual", ".3f"),
    Column("dpsur", "ours", ".3f"),
    Column("guesses", "trials"),
)
Release = Callable[[Tensor, int], Tensor]  # of a sum, in a trial


def ours(total: Tensor, trial: int) -> Tensor:
    """What dpsur releases; without a seed, as a run that is published."""
    streams = Streams(None, torch.device("cpu"))
    return gaussian.add_noise(ClippedSum({"": total}, 1.0), SIGMA, streams.at(trial)[NOISE])[""]


def in_float64(total: Tensor, trial: int) -> Tensor:
    """The usual mechanism: normal numbers of float64, scaled and added."""
    draw = torch.Generator().manual_seed(trial)
    return total + SIGMA * torch.randn(len(total), generator=draw, dtype=torch.float64)


def in_float32(total: Tensor, trial: int) -> Tensor:
    """Noise with fewer bits than the sum."""
    draw = torch.Generator().manual_seed(trial)
    return total + (SIGMA * torch.randn(len(total), generator=draw)).double()


def _guessed(release: Release, ones: Tensor, looks_like_one: Callable[[Tensor], bool]) -> float:
    """How often it is told whether the sum was `ones` or zero."""
    right = 0
    for trial in range(TRIALS):
        truth = trial % 2 == 1
        total = ones if truth else torch.zeros_like(ones)
        right += looks_like_one(release(total, trial + 1)) == truth
    return right / TRIALS


def last_bits(release: Release) -> float:
    """Where noise and record nearly cancel, the result has the last bits of the larger noise.

    Under the record, a number far below its part of 2^-9 is a multiple of 2^-62, as both are that
    it is the difference of. Without it, most numbers as small have finer bits.
    """
    part = 2.0**-9
    ones = torch.full((MANY,), part, dtype=torch.float64)

    def looks(released: Tensor) -> bool:
        scaled = released[released.abs() < part / 2] * 2.0**62
        return len(scaled) > 0 and bool((scaled == scaled.round()).all())

    return _guessed(release, ones, looks)


def precision(release: Release) -> float:
    """The sum differs in a bit that noise of float32 does not reach."""
    ones = torch.full((NUMBERS,), 2.0**-30, dtype=torch.float64)
    return _guessed(release, ones, lambda found: not torch.equal(found.float().double(), found))


def repeated_seed(release: Release) -> float:
    """Two releases of one step: the record is what they differ by, where noise was repeated."""
    right = 0
    for trial in range(TRIALS):
        record = torch.full((NUMBERS,), 0.1 if trial % 2 else 0.0, dtype=torch.float64)
        apart = release(record, trial + 1) - release(torch.zeros_like(record), trial + 1)
        right += (float(apart.mean()) > 0.05) == bool(trial % 2)
    return right / TRIALS


def by_rejection(draw: np.random.Generator, sigma: float = 3.0) -> tuple[int, int]:
    """A discrete Gaussian as Canonne et al. (2020) draw it, and the coins that were tossed."""
    scale, coins = math.floor(sigma) + 1, 0
    while True:
        size = 0
        while True:
            coins += 1
            if draw.random() >= math.exp(-1 / scale):
                break
            size += 1
        coins += 2
        if draw.random() < 0.5:
            if not size:
                continue
            size = -size
        if draw.random() < math.exp(-((abs(size) - sigma**2 / scale) ** 2) / (2 * sigma**2)):
            return size, coins


def usual_times() -> tuple[Sequence[int], Sequence[int]]:
    """Noise, and how long it took."""
    draw = np.random.default_rng(1)
    values, times = zip(*(by_rejection(draw) for _ in range(5 * TRIALS)), strict=True)
    return values, times


def our_times() -> tuple[Sequence[int], Sequence[int]]:
    """The same of our table: how many words were computed for each number."""
    found: list[int] = []
    words: list[int] = []
    real = random_numbers._words

    def counted(*address: object) -> object:
        words[-1] += 1
        return real(*address)  # type: ignore[arg-type]

    random_numbers._words = counted  # type: ignore[assignment]
    try:
        for trial in range(5 * TRIALS):
            words.append(0)
            stream: Stream = Streams(trial, torch.device("cpu")).at(1)[NOISE]
            found.append(round(float(stream.normal(1)) * DEVIATION))
    finally:
        random_numbers._words = real
    return found, words


def time(values: Sequence[int], times: Sequence[int]) -> float:
    """How often noise above the median is told by the time above its median."""
    sizes = np.abs(np.array(values)) + np.linspace(0, 1e-6, len(values))  # ties by their order
    large, late = sizes > np.median(sizes), np.array(times) > np.median(times)
    return float(np.mean(large == late))


ATTACKS: dict[str, Callable[[], tuple[float, float]]] = {
    "last bits": lambda: (last_bits(in_float64), last_bits(ours)),
    "precision": lambda: (precision(in_float32), precision(ours)),
    "repeated seed": lambda: (repeated_seed(in_float64), repeated_seed(ours)),
    "time": lambda: (time(*usual_times()), time(*our_times())),
}


class NoiseAttacks(OneByOne):
    """One row per attack."""

    name = "noise-attacks"

    def cells(self, options: Options) -> Iterator[Cell]:  # noqa: ARG002
        """The attacks."""
        for attack in ATTACKS:
            trials = len(usual_times()[0]) if attack == "time" else TRIALS
            yield {"config": {"attack": attack, "trials": trials}}

    def measure(self, cell: Cell, options: Options) -> Row:  # noqa: ARG002
        """How often the guess is right, on both mechanisms."""
        usual, found = ATTACKS[cell["config"]["attack"]]()
        return {"usual": usual, "ours": found}

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The table."""
        records = [{**row, **row["config"]} for row in rows]
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, records))


EXPERIMENT = NoiseAttacks()
