"""ROC curves of attacks on logarithmic axes, where the few that are found for certain show."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from dpsur import figure_style as style
from dpsur.attacks.metrics import CONFIDENCE, Array, Scores, ranks_around, roc_curve, share_between
from dpsur.attacks.suite import SHUFFLED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = tuple[list[float], list[float]]
POINTS = 200
LEAST = 1e-4
ROUNDING = 1e-12  # of rates that are fractions
GAP = "gap"
COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.INK, style.GREY)
DASHES = ("-", "--", ":")


def hits_of(scores: Scores) -> list[int]:
    """How many members are found at so many false positive rates: all that a curve needs."""
    false, true = roc_curve(scores)
    # the highest point that keeps to the rate, never one between two thresholds
    place = np.searchsorted(false, _rates(len(scores.others)) * (1 + ROUNDING), "right") - 1
    return [round(float(y) * len(scores.members)) for y in true[place]]


def gains_of(hits: Sequence[int]) -> list[int]:
    """How many more are found at a rate than at the one before: shorter numbers for a row."""
    return [here - before for before, here in pairwise([0, *hits])]


def hits_from(gains: Sequence[int]) -> list[int]:
    """What `gains_of` was given."""
    return list(accumulate(gains))


def curve_of(hits: Sequence[int], members: int, others: int) -> Curve:
    """A curve in so many points, evenly spaced in the logarithm of the false positive rate."""
    return [float(x) for x in _rates(others)], [found / members for found in hits]


def _rates(others: int) -> Array:
    return np.geomspace(max(LEAST, 1 / others), 1.0, POINTS)


def low_rate_interval(
    hits: Sequence[int], members: int, others: int, rate: float, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """The interval of the true positive rate at a low false positive rate, from points of a curve.

    Formal guarantee: it holds the interval that `measure` gives for the scores themselves. The hits
    of a point are known, and so is the most others that pass its threshold. At the lower end, a
    point that not more pass than `measure` allows has not more hits. At the upper end, a point that
    may be passed by as many has no fewer, unless others of equal scores kept its threshold above
    them; the next point with more hits is then below these.
    """
    passed = np.floor(_rates(others) * (1 + ROUNDING) * others)
    counted = np.array(hits)
    strict, loose = ranks_around(rate, others, confidence)
    within, beyond = counted[passed < strict], counted[passed > loose]
    more = beyond[beyond > beyond.min(initial=members)]
    low = int(within.max(initial=0))
    return share_between(low, int(more.min(initial=members)), members, confidence)


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


def _curve(axes: "Axes", index: int, name: str, false: list[float], true: list[float]) -> None:
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


def _on_axes(true: list[float]) -> Array:
    """Zero has no place on a logarithmic axis, and is drawn below it."""
    return np.maximum(true, LEAST / 10)
