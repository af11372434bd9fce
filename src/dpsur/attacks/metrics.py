"""How well an attack tells members from others, each figure with an interval."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc, betaincinv, ndtri

from dpsur.errors import InvalidInputError

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
CONFIDENCE = 0.95
LOW_RATES = (0.01, 0.001)


@dataclass(frozen=True)
class Figure:
    """A figure and the interval that holds the true one with the stated confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Scores:
    """Scores of members and of others; larger means member. `threshold` decides a guess."""

    members: Array
    others: Array
    threshold: float

    def __post_init__(self) -> None:
        if not (len(self.members) and len(self.others)):
            raise InvalidInputError("an attack is measured on members and on others: one is empty")
        if not (np.isfinite(self.members).all() and np.isfinite(self.others).all()):
            raise InvalidInputError("the scores of an attack hold NaN or infinity")

    @staticmethod
    def halved(members: Array, others: Array) -> "Scores":
        """Guess the upper half to be members, which needs no knowledge but their share."""
        share = len(members) / (len(members) + len(others))
        threshold = float(np.quantile(np.concatenate([members, others]), 1 - share))
        return Scores(members, others, threshold)

    @staticmethod
    def apart(scores: Array, is_member: Flags, threshold: float | None = None) -> "Scores":
        """Of all records, separated by a flag; without a threshold the upper half is guessed."""
        members, others = scores[is_member], scores[~is_member]
        if threshold is None:
            return Scores.halved(members, others)
        return Scores(members, others, threshold)


@dataclass(frozen=True)
class AttackMetrics:
    """What an attack reached. `members` and `others` say on how many records."""

    accuracy: Figure
    balanced_accuracy: Figure
    auc: Figure
    tpr_at_1_percent: Figure
    tpr_at_01_percent: Figure
    members: int
    others: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(scores: Scores, confidence: float = CONFIDENCE) -> AttackMetrics:
    members, others = scores.members, scores.others
    right = int((members > scores.threshold).sum()), int((others <= scores.threshold).sum())
    percent, tenth = (_rate_at(scores, rate, confidence) for rate in LOW_RATES)
    return AttackMetrics(
        proportion(sum(right), len(members) + len(others), confidence),
        _balanced(right, (len(members), len(others)), confidence),
        area(members, others, confidence),
        percent,
        tenth,
        len(members),
        len(others),
    )


def proportion(hits: int, trials: int, confidence: float = CONFIDENCE) -> Figure:
    """A share with its Clopper-Pearson interval."""
    error = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, trials - hits + 1, error))
    high = 1.0 if hits == trials else float(betaincinv(hits + 1, trials - hits, 1 - error))
    return Figure(hits / trials, low, high)


def _balanced(right: tuple[int, int], sizes: tuple[int, int], confidence: float) -> Figure:
    """The mean of two shares; its interval from theirs, with half of the error each."""
    each = 1 - (1 - confidence) / 2
    parts = [proportion(hits, size, each) for hits, size in zip(right, sizes, strict=True)]
    value, low, high = (
        sum(getattr(part, name) for part in parts) / 2 for name in ("value", "low", "high")
    )
    return Figure(value, low, high)


def _rate_at(scores: Scores, rate: float, confidence: float) -> Figure:
    """Share of members above a threshold that at most this share of the others passes."""
    members, highest = scores.members, np.sort(scores.others)[::-1]
    strict, loose = ranks_around(rate, len(highest), confidence)
    value = float((members > highest[math.floor(rate * len(highest))]).mean())
    low = int((members > highest[strict - 1]).sum()) if strict > 0 else 0
    high = int((members >= highest[loose]).sum()) if loose < len(highest) else len(members)
    return Figure(value, *share_between(low, high, len(members), confidence))


def ranks_around(rate: float, others: int, confidence: float = CONFIDENCE) -> tuple[int, int]:
    """How many of the highest others are surely within the rate, and how many not surely beyond it.

    Few others decide where the threshold lies, so its place is as uncertain as the share above it.
    Formal guarantee: each number errs with probability at most a quarter of 1 - confidence. The
    j-th highest of n others is passed by at most the rate, but for the probability that fewer than
    j of n hits of that rate are made.
    """
    each = (1 - confidence) / 4
    ranks = np.arange(others)  # from 0
    strict = int((bdtr(ranks, others, rate) <= each).sum())
    loose = int((bdtrc(ranks, others, rate) > each).sum())
    return strict, loose


def share_between(
    low: int, high: int, members: int, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """The interval of a share, from the hits at a strict and at a loose threshold.

    Formal guarantee: with thresholds by `ranks_around`, each end errs with probability at most half
    of 1 - confidence, of which one half is the threshold's and one half the share's.
    """
    least, most = (proportion(hits, members, 1 - (1 - confidence) / 2) for hits in (low, high))
    return least.low, most.high


def area(members: Array, others: Array, confidence: float = CONFIDENCE) -> Figure:
    """Area under the ROC curve with DeLong's interval, ties counted half."""
    above_others = _mean_rank_among(members, others)
    below_members = 1 - _mean_rank_among(others, members)
    value = float(above_others.mean())
    variance = float(
        above_others.var(ddof=min(1, len(members) - 1)) / len(members)
        + below_members.var(ddof=min(1, len(others) - 1)) / len(others)
    )
    reach = float(-ndtri((1 - confidence) / 2)) * math.sqrt(variance)
    return Figure(value, max(0.0, value - reach), min(1.0, value + reach))


def _mean_rank_among(values: Array, reference: Array) -> Array:
    """The share of the reference below each value, ties counted half."""
    ordered = np.sort(reference)
    below = np.searchsorted(ordered, values, "left")
    up_to = np.searchsorted(ordered, values, "right")
    return np.asarray((below + up_to) / (2 * len(reference)))


def roc_curve(scores: Scores) -> tuple[Array, Array]:
    """False and true positive rates over all thresholds, both rising."""
    thresholds = np.unique(np.concatenate([scores.members, scores.others]))[::-1]
    rates = [
        np.concatenate([[0.0], 1 - np.searchsorted(np.sort(part), thresholds, "left") / len(part)])
        for part in (scores.others, scores.members)
    ]
    return rates[0], rates[1]
