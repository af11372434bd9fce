"""What attacks find: accuracies and rates with intervals, and the ROC curve."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc, betaincinv, ndtri

from dpsur import figure_style as style
from dpsur.errors import InvalidInputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
SHUFFLED = ", shuffled"
CONFIDENCE = 0.95
LOW_RATES = (0.01, 0.001)


@dataclass(frozen=True)
class Estimate:
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

    def of_persons(self, members: Array, others: Array) -> "Scores":
        """The same attack on persons, by the mean score of each one's records.

        `members` and `others` number the person of every record. An attacker who holds several
        records of somebody is surer than with one, unless the person was the unit of privacy.
        """
        return Scores.halved(_means(self.members, members), _means(self.others, others))


def _means(scores: Array, persons: Array) -> Array:
    if len(scores) != len(persons):
        raise InvalidInputError(
            f"{len(scores)} records have {len(persons)} persons; name one person per record"
        )
    numbers = np.unique(persons, return_inverse=True)[1].reshape(-1)
    means: Array = np.bincount(numbers, weights=scores) / np.bincount(numbers)
    return means


@dataclass(frozen=True)
class AttackMetrics:
    """What an attack reached. `members` and `others` say on how many records."""

    accuracy: Estimate
    balanced_accuracy: Estimate
    auc: Estimate
    tpr_at_1_percent: Estimate
    tpr_at_01_percent: Estimate
    members: int
    others: int


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


def proportion(hits: int, trials: int, confidence: float = CONFIDENCE) -> Estimate:
    """A share with its Clopper-Pearson interval."""
    error = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, trials - hits + 1, error))
    high = 1.0 if hits == trials else float(betaincinv(hits + 1, trials - hits, 1 - error))
    return Estimate(hits / trials, low, high)


def _balanced(right: tuple[int, int], sizes: tuple[int, int], confidence: float) -> Estimate:
    """The mean of two shares; its interval from theirs, with half of the error each."""
    each = 1 - (1 - confidence) / 2
    parts = [proportion(hits, size, each) for hits, size in zip(right, sizes, strict=True)]
    value, low, high = (
        sum(getattr(part, name) for part in parts) / 2 for name in ("value", "low", "high")
    )
    return Estimate(value, low, high)


def _rate_at(scores: Scores, rate: float, confidence: float) -> Estimate:
    """Share of members above a threshold that at most this share of the others passes."""
    members, highest = scores.members, np.sort(scores.others)[::-1]
    strict, loose = ranks_around(rate, len(highest), confidence)
    value = float((members > highest[math.floor(rate * len(highest))]).mean())
    low = int((members > highest[strict - 1]).sum()) if strict > 0 else 0
    high = int((members >= highest[loose]).sum()) if loose < len(highest) else len(members)
    return Estimate(value, *share_between(low, high, len(members), confidence))


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


def area(members: Array, others: Array, confidence: float = CONFIDENCE) -> Estimate:
    """Area under the ROC curve with DeLong's interval, ties counted half."""
    above_others = _mean_rank_among(members, others)
    below_members = 1 - _mean_rank_among(others, members)
    value = float(above_others.mean())
    variance = float(
        above_others.var(ddof=min(1, len(members) - 1)) / len(members)
        + below_members.var(ddof=min(1, len(others) - 1)) / len(others)
    )
    reach = float(-ndtri((1 - confidence) / 2)) * math.sqrt(variance)
    return Estimate(value, max(0.0, value - reach), min(1.0, value + reach))


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


# Rates of false and of true positives, both rising.
Curve = tuple[Sequence[float] | Array, Sequence[float] | Array]
LEAST = 1e-4
GAP = "gap"
COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.INK, style.GREY)
DASHES = ("-", "--", ":")


def draw_roc(panels: Mapping[str, Mapping[str, Curve]]) -> "Figure":
    """A panel per target, with the line of guessing and one legend for all.

    The gap attack has no curve: its only threshold is a point, which is marked. All shuffled
    controls look the same, and should lie on the line of guessing.
    """
    figure = style.new_figure(style.COLUMN * (len(panels) + 0.45), style.COLUMN)
    places = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    every = dict.fromkeys(name for curves in panels.values() for name in curves)
    names = [name for name in every if not name.endswith(SHUFFLED)]
    for axes, (title, curves) in zip(places, panels.items(), strict=True):
        for name in names:
            if name in curves:
                _curve(axes, names.index(name), name, *curves[name])
        controls = [curve for name, curve in curves.items() if name not in names]
        for index, (false, true) in enumerate(controls):
            label = "shuffled" if index == 0 else None
            axes.plot(false, _on_axes(true), color=style.PALE, linewidth=0.8, zorder=1, label=label)
        axes.plot([LEAST, 1], [LEAST, 1], color=style.PALE, linewidth=1, zorder=0)
        axes.set(xscale="log", yscale="log", xlim=(LEAST, 1), ylim=(LEAST, 1), title=title)
        axes.set_xlabel("false positive rate")
    places[0].set_ylabel("true positive rate")
    handles, labels = places[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=7)
    return figure


def _curve(axes: "Axes", index: int, name: str, false: Any, true: Any) -> None:
    colour = COLOURS[index % len(COLOURS)]
    if name == GAP:
        rise = next((i for i, y in enumerate(true) if y > 0), len(true) - 1)
        # whole, also on the edge of the panel
        axes.plot(
            false[rise], true[rise], "o", color=colour, label=name, markersize=4, clip_on=False
        )
        return
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    axes.plot(false, _on_axes(true), dash, color=colour, label=name)


def _on_axes(true: Sequence[float] | Array) -> Array:
    """Zero has no place on a logarithmic axis, and is drawn below it."""
    return np.maximum(true, LEAST / 10)
