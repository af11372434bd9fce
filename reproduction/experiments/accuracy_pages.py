"""The table of accuracies as a figure, in short, and against the paper."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpsur import figure_style as style
from reproduction.artifacts import TABLES, WIDTH, Artifact, Column, Page, Table, table_page
from reproduction.presets.settings import EPSILONS
from reproduction.series import Look, legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
# by data set, method and epsilon
Figures = Mapping[tuple[str, str, int], float]

NAME, SHORT, AGREEMENT = "accuracy", "accuracy_short", "accuracy_agreement"
DATA_SETS = {"fmnist": "Fashion-MNIST", "mnist": "MNIST", "cifar10": "CIFAR-10", "imdb": "IMDb"}
SHORT_EPSILON = 3
# arm -> what a line of the short table is called, and the method that the paper has beside it
LINES = {
    "published": ("DPSUR as printed, epsilon as the paper counts it", "dpsur"),
    "proven": ("DPSUR as printed, proven epsilon", "dpsur"),
    "released-code": ("DPSUR as its released code runs, claimed epsilon", "dpsur"),
    "dpis": ("DPIS (a reconstruction)", "dpis"),
    "dpsgd-hf": ("DPSGD-HF", "dpsgd-hf"),
    "dpsgd-ts": ("DPSGD-TS", "dpsgd-ts"),
    "dpagd": ("DPAGD, improved, proven epsilon", "dpagd"),
    "released-dpagd": ("DPAGD as its released code runs, claimed epsilon", "dpagd"),
    "dpsgd": ("DPSGD", "dpsgd"),
    "nonprivate": ("without privacy", "nonprivate"),
}
# whose rows a line has where they were made
TIGHTER = {"proven": "proven-pld"}
NOT_RUN = "–"
SHORT_TITLE = "Accuracy at epsilon 3, in short"
SHORT_TEXT = f"""
Test accuracy in percent at epsilon {SHORT_EPSILON}, mean over seeds, last iterate (DPIS on
CIFAR-10: an average of weights); in brackets the paper's figure. {NOT_RUN}: no rows. DPSGD-HF has
no figure for IMDb, since text has no scattering features. Lines that do not say otherwise are
charged by a proven accounting. The whole table, with spreads and seeds:
[accuracy](accuracy.md).
"""
TOLERANCE = 0.7
# The arm that works as the released code does; on reviews also with the validation batch of its
# commands, and with its network too.
RELEASED, COMMANDS, NETWORK = "released-code", "released-commands", "released-network"
# Validation batches: the paper's text has 256 on images and 128 on reviews, its commands have 256.
STATED = {"fmnist": 256, "mnist": 256, "cifar10": 256, "imdb": 128}
COMMANDED = 256
AGREEMENT_TITLE = "The released code against the paper's figures"
AGREEMENT_COLUMNS = (
    Column("data set", "task"),
    Column("epsilon", "epsilon"),
    Column("B_v", "val_batch"),
    Column("network", "network"),
    Column("released code", "mean", ".2f"),
    Column("+-", "spread", ".2f"),
    Column("seeds", "seeds"),
    Column("paper", "paper", ".2f"),
    Column("difference", "difference", "+.2f"),
    Column(f"within {TOLERANCE}", "within"),
)


def extra_pages(records: Sequence[Record], paper: Figures) -> list[Artifact]:
    """The short table and the agreement, from the summary of the rows."""
    return [short_page(records, paper), *agreement_page(records, paper)]


def short_page(records: Sequence[Record], paper: Figures) -> Page:
    """Methods by data sets at one epsilon."""
    parts = [
        f"# {SHORT_TITLE}",
        textwrap.fill(SHORT_TEXT.strip() + _single_seeds(records), WIDTH),
        short_table(records, paper).markdown(),
        f"Rendered by `python -m reproduction {NAME}` from its rows.",
    ]
    return Page(f"{TABLES}/{SHORT}.md", "\n\n".join(parts) + "\n")


def _single_seeds(records: Sequence[Record]) -> str:
    """A sentence on the cells of the short table that are no mean."""
    single: dict[str, list[str]] = {}
    for record in records:
        shown = record["arm"] in LINES and record["epsilon"] in (SHORT_EPSILON, None)
        if shown and record["seeds"] == 1:
            single.setdefault(record["arm"], []).append(DATA_SETS[record["task"]])
    cells = "; ".join(f"{LINES[arm][0]}: {', '.join(data)}" for arm, data in single.items())
    return f" Cells with one seed only: {cells}." if cells else ""


def short_table(records: Sequence[Record], paper: Figures) -> Table:
    """A line per method, a column per data set, ours and the paper's in one cell."""
    means = {
        (record["task"], record["arm"]): record["mean"]
        for record in records
        if record["epsilon"] in (SHORT_EPSILON, None)
    }
    columns = [Column("", "line"), *(Column(name, task) for task, name in DATA_SETS.items())]
    lines: list[dict[str, str]] = []
    for arm, (line, method) in LINES.items():
        epsilon = 0 if method == "nonprivate" else SHORT_EPSILON
        ours = {**_by_task(means, arm), **_by_task(means, TIGHTER.get(arm, ""))}
        cells = {
            task: _cell(ours.get(task), paper.get((task, method, epsilon))) for task in DATA_SETS
        }
        lines.append({"line": line, **cells})
    return Table(columns, lines)


def _by_task(means: Mapping[tuple[str, str], float], arm: str) -> dict[str, float]:
    return {task: mean for (task, name), mean in means.items() if name == arm}


def _cell(ours: float | None, theirs: float | None) -> str:
    if ours is None and theirs is None:  # the method is not for this data set
        return ""
    shown = NOT_RUN if ours is None else f"{ours:.2f}"
    return shown if theirs is None else f"{shown} ({theirs:.2f})"


def agreement_page(records: Sequence[Record], paper: Figures) -> list[Artifact]:
    """The sixteen cells of DPSUR, with the count of those that agree."""
    cells, commanded, as_built = (
        agreement(records, paper, arm) for arm in (RELEASED, COMMANDS, NETWORK)
    )
    run = [cell for cell in cells if cell["mean"] is not None]
    near, near_commanded, near_as_built = (
        sum(cell["within"] == "yes" for cell in found) for found in (cells, commanded, as_built)
    )
    text = (
        f"The mean accuracy of the arm that works as the released code does, and its distance from "
        f"the paper's figure for DPSUR at the same claimed epsilon. {near} of {len(cells)} "
        f"cells are within {TOLERANCE} points; {len(run)} have rows. On IMDb the paper's text has "
        f"a validation batch of {STATED['imdb']} and the released commands have {COMMANDED}: with "
        f"that, at the budgets where it was run, it is {near_commanded} of {len(cells)}. The "
        f"released network for IMDb has an activation before its LSTM, which the paper's table of "
        f"layers does not mention: "
    )
    if any(cell["arm"] == NETWORK for cell in as_built):
        text += f"with that too, where it was run, it is {near_as_built} of {len(cells)}."
    else:
        text += "with that DPSUR was not run."
    reviews = [
        cell
        for arm, found in ((COMMANDS, commanded), (NETWORK, as_built))
        for cell in found
        if cell["arm"] == arm
    ]
    table = Table(AGREEMENT_COLUMNS, [*cells, *reviews])
    return table_page(AGREEMENT, AGREEMENT_TITLE, text, table, experiment=NAME)


def agreement(
    records: Sequence[Record], paper: Figures, reviews: str = RELEASED
) -> list[dict[str, Any]]:
    """Every cell of the paper's column for DPSUR, beside the released-code arm where it was run.

    `reviews` is the arm for IMDb, where text and commands of the paper differ, at the budgets that
    it was run at.
    """
    ours = {(r["task"], r["epsilon"]): r for r in records if r["arm"] == RELEASED}
    for arm in (COMMANDS, NETWORK) if reviews == NETWORK else (reviews,):
        ours |= {(r["task"], r["epsilon"]): r for r in records if r["arm"] == arm}
    blank: dict[str, Any] = {"mean": None, "spread": None, "seeds": None, "difference": None}
    found = []
    for task in DATA_SETS:
        for epsilon in EPSILONS:
            record = ours.get((task, epsilon), blank)
            difference = record["difference"]
            within = "no" if difference is not None else None
            if difference is not None and abs(difference) <= TOLERANCE:
                within = "yes"
            cell = {field: record[field] for field in blank}
            if record["seeds"] == 1:
                cell["spread"] = None
            made_by = record.get("arm")
            cell |= {"task": task, "epsilon": epsilon, "within": within, "arm": made_by}
            cell["val_batch"] = COMMANDED if made_by in (COMMANDS, NETWORK) else STATED[task]
            cell["network"] = "as released" if made_by == NETWORK else None
            found.append({**cell, "paper": paper[task, "dpsur", epsilon]})
    return found


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
