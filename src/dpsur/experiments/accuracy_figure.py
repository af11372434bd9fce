"""The table of accuracies as a picture: a panel per data set, the paper's figures as ticks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpsur.experiments import style
from dpsur.experiments.accuracy_pages import DATA_SETS, LINES, Figures, Record
from dpsur.experiments.series import Look, legend_below
from dpsur.experiments.settings import EPSILONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OPEN = "none"
LOOKS: Mapping[str, Look] = {
    "published": Look("DPSUR, published", style.BLUE, "s"),
    "proven": Look("DPSUR, proven", style.BLUE, "o"),
    "released-code": Look("released code", style.ORANGE, "D"),
    "dpis": Look("DPIS", style.GREEN, "^"),
    "dpsgd-hf": Look("DPSGD-HF", style.INK, "o"),
    "dpsgd-ts": Look("DPSGD-TS", style.INK, "v"),
    "dpagd": Look("DPAGD", style.GREEN, "x"),
    "dpsgd": Look("DPSGD", style.GREY, "s"),
}
# An epsilon that is a claim has an open marker.
CLAIMED = ("published", "released-code")
STEP = 0.095
PAPER, NONPRIVATE = "paper", "without privacy"


def draw_accuracy(records: Sequence[Record], paper: Figures) -> "Figure":
    """Panels of the data sets that have rows, budgets side by side, methods within a budget."""
    tasks = [task for task in DATA_SETS if any(_shown(r) and r["task"] == task for r in records)]
    rows = (len(tasks) + 1) // 2
    columns = min(len(tasks), 2)
    figure = style.new_figure(style.PAGE, 0.7 + 2.3 * rows)
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in places[len(tasks) :]:
        spare.remove()
    for letter, axes, task in zip("abcd", places, tasks, strict=False):
        own = [record for record in records if record["task"] == task]
        _panel(axes, own, paper, task)
        style.label_panel(axes, letter, DATA_SETS[task])
    legend_below(places[: len(tasks)], 5)
    return figure


def has_points(records: Sequence[Record]) -> bool:
    """Whether there is anything to draw."""
    return any(_shown(record) for record in records)


def _shown(record: Record) -> bool:
    return record["arm"] in LOOKS or record["arm"] == "nonprivate"


def _panel(axes: "Axes", records: Sequence[Record], paper: Figures, task: str) -> None:
    for place, (arm, look) in enumerate(LOOKS.items()):
        shift = STEP * (place - (len(LOOKS) - 1) / 2)
        own = [record for record in records if record["arm"] == arm]
        _ticks(axes, [(r["epsilon"] + shift, _stated(paper, task, arm, r)) for r in own])
        if own:
            _points(axes, own, shift, look, hollow=arm in CLAIMED)
    for record in records:
        if record["arm"] == "nonprivate":
            axes.axhline(record["mean"], color=style.GREY, lw=0.8, ls=":", label=NONPRIVATE)
    axes.set(xlim=(0.5, 4.5), xlabel=r"$\varepsilon$", ylabel="test accuracy, %")
    axes.set_xticks(EPSILONS)


def _stated(paper: Figures, task: str, arm: str, record: Record) -> float | None:
    return paper.get((task, LINES[arm][1], record["epsilon"]))


def _ticks(axes: "Axes", stated: Sequence[tuple[float, float | None]]) -> None:
    places: list[Any] = [pair for pair in stated if pair[1] is not None]
    if places:
        x, y = zip(*places, strict=True)
        axes.plot(x, y, "_", color=style.GREY, ms=7, mew=1.2, ls="", zorder=1, label=PAPER)


def _points(
    axes: "Axes", records: Sequence[Record], shift: float, look: Look, hollow: bool
) -> None:
    axes.errorbar(
        [record["epsilon"] + shift for record in records],
        [record["mean"] for record in records],
        yerr=[record["spread"] for record in records],
        color=look.colour,
        marker=look.marker,
        mfc=OPEN if hollow else look.colour,
        linestyle="",
        markersize=3.2,
        elinewidth=0.8,
        label=look.label,
    )
