"""Accuracy against the learning rate that a run starts from, and against the clipping norm."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpsur import figure_style as style
from dpsur.methods.gradient_method import GIVEN
from reproduction.artifacts import Artifact, Column, Picture, Table, table_page
from reproduction.base import Cell, Options, Row
from reproduction.experiments.selection_tuning import tuned_rates
from reproduction.selection_runs import (
    CASES,
    EPSILONS,
    SELECTION_ARMS,
    Case,
    SelectionRuns,
    cell_of,
)
from reproduction.series import Look, Point, legend_below, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STARTS = {-6: "1/64", -3: "1/8", 0: "1", 3: "8", 6: "64"}  # octaves off the tuned rate
CLIPS = {1 / 16: "1/16", 1: "1", 16: "16"}
CLIP_EPSILON = 3
TUNED_PRIVATELY = "mnist-linear"
# What is made first: arms, and by how many octaves the rate is off. Only plain DP-SGD with linear
# decay and the gate block from all starting rates; of others fewer, and no more than three seeds.
OFF_CLIP = "off-clip"  # plain DP-SGD and the gate block with a wrong clipping norm
PASSES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("block-free", (0,)), ("linear", (0,)), ("block", (-6, 0, 6)), ("linear", (-6, -3, 3, 6)),
    ("dog", (0,)), (OFF_CLIP, ()), ("constant", (0,)), ("algorithm-1", (0,)),
    ("constant", (-3, 3)), ("private-tuning", (0,)), ("block", (-3, 3)), ("algorithm-1", (-3, 3)),
)  # fmt: skip
ALL_SEEDS, FEW_SEEDS = ("linear", "block-free"), 3
HALF_RATE = ("constant",)  # the same mean rate as with linear decay
LOWEST = 30.0  # points, where the picture ends
LOOKS = {
    "linear": Look("plain DP-SGD, linear decay", style.INK, "v", "--"),
    "dog": Look("DoG", style.GREY, "", ":"),
    "block-free": Look("gate block, which takes no rate", style.BLUE, ""),
}
TITLE = "Accuracy against the starting rate"
TEXT = """
Mean accuracy in percent on the test set over seeds, last iterate, delta 1e-5, proven accounting. A
starting rate is off the tuned one by the factor at the head of the column; the tuned rate was
chosen on [held-out training records](selection-tuning.md) for linear decay and is not charged. A
constant rate is half of it, which has the same mean. *Gate block* searches by itself; where a rate
is given it is tried in one block more. Plain DP-SGD with linear decay and *gate block* have five
seeds for linear models and MLPs; everything else has three.
"""
COLUMNS = (
    Column("data, network", "case"),
    Column("epsilon", "epsilon", "g"),
    Column("what", "what"),
    *(Column(f"x {name}", f"at{octave}", ".1f") for octave, name in STARTS.items()),
    Column("+-", "spread", ".1f"),
    Column("runs", "runs"),
)
CLIP_COLUMNS = (
    Column("data, network", "case"),
    Column("what", "what"),
    *(Column(f"C x {name}", f"clip{factor}", ".1f") for factor, name in CLIPS.items()),
    Column("runs", "runs"),
)
CLIP_TEXT = f"""
The clipping norm off by a factor, epsilon {CLIP_EPSILON}: DP-SGD with linear decay at the tuned
rate, and the gate block with that norm kept (`clip_norm="given"`). By default the gate block finds
the norm itself, which is the row *gate block* of [the other table](selection-grid.md).
"""


class SelectionGrid(SelectionRuns):
    """One row per case, epsilon, arm, starting rate or clipping norm, and seed."""

    name = "selection-grid"

    def cells(self, options: Options) -> Iterator[Cell]:
        """Arms from all starting rates and clipping norms, the most telling first."""
        tuned = tuned_rates(options.results)
        wanted = [(case, epsilon) for case in CASES.values() for epsilon in EPSILONS]
        for arm, starts in PASSES:
            for case, epsilon in wanted:
                if not options.ask_for(case.name, arm, epsilon):
                    continue
                seeds = options.seeds or range(case.seeds if arm in ALL_SEEDS else FEW_SEEDS)
                if arm != OFF_CLIP:
                    yield from _from_starts(case, arm, epsilon, starts, seeds, tuned)
                elif epsilon == CLIP_EPSILON:
                    yield from _off_clip(case, epsilon, seeds, tuned)

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """A table by starting rate, one by clipping norm, and the picture."""
        table, clips = Table(COLUMNS, by_start(rows)), Table(CLIP_COLUMNS, by_clip(rows))
        picture = Picture(self.name, lambda: _draw(rows))
        return [
            *table_page(self.name, TITLE, TEXT, table, picture),
            *table_page("selection-clip", "Accuracy against the clipping norm", CLIP_TEXT, clips,
                        experiment=self.name),
        ]  # fmt: skip


EXPERIMENT = SelectionGrid()
Tuned = Mapping[tuple[str, int], float]


def _centre(case: Case, arm: str, epsilon: int, tuned: Tuned) -> float:
    found = tuned.get((case.name, epsilon), case.rates[epsilon])
    return found / 2 if arm in HALF_RATE else found


def _from_starts(
    case: Case,
    arm: str,
    epsilon: int,
    starts: Sequence[int],
    seeds: Sequence[int],
    tuned: Tuned,
) -> Iterator[Cell]:
    if arm == "private-tuning" and case.name != TUNED_PRIVATELY:
        return
    if not SELECTION_ARMS[arm].takes_rate:
        for seed in seeds:
            yield cell_of(case, arm, epsilon, seed)
        return
    centre = _centre(case, arm, epsilon, tuned)
    for start in starts:
        for seed in seeds:
            yield cell_of(case, arm, epsilon, seed, centre * 2.0**start, start=start)


def _off_clip(case: Case, epsilon: int, seeds: Sequence[int], tuned: Tuned) -> Iterator[Cell]:
    rate = _centre(case, "linear", epsilon, tuned)
    for factor in CLIPS:
        for seed in seeds:
            if factor != 1:
                yield cell_of(case, "linear", epsilon, seed, rate, clip=factor)
            yield cell_of(case, "block-free", epsilon, seed, clip=factor, clip_norm=GIVEN)


# --- rendering ------------------------------------------------------------------------------------


def _chosen(rows: Sequence[Row], case: str, epsilon: int, arm: str, *, clip: bool) -> list[Row]:
    """Runs of an arm: those with a clipping norm as given, or the others."""
    return [
        row
        for row in rows
        for config in (row["config"],)
        if (config["case"], config["epsilon"], config["arm"]) == (case, epsilon, arm)
        and (config["clip"] != 1 or "clip_norm" in config["options"]) == clip
    ]


def points_of(rows: Sequence[Row], case: str, epsilon: int, arm: str) -> list[Point]:
    """Accuracy against octaves off the tuned rate."""
    found = _chosen(rows, case, epsilon, arm, clip=False)
    return series((row["config"]["start"], row["accuracy"]) for row in found)


def by_start(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A record per case, epsilon and arm. What takes no rate stands in the middle."""
    records = []
    for case in CASES.values():
        for epsilon in EPSILONS:
            for arm, about in SELECTION_ARMS.items():
                points = points_of(rows, case.name, epsilon, arm)
                if points:
                    means: dict[str, float | None] = {f"at{octave}": None for octave in STARTS}
                    means |= {f"at{point.value}": point.mean for point in points}
                    middle = min(points, key=lambda point: abs(point.value))
                    runs = sum(point.seeds for point in points)
                    about_it = {"case": case.label, "epsilon": epsilon, "what": about.label}
                    records.append({**about_it, **means, "spread": middle.spread, "runs": runs})
    return records


def by_clip(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A record per case and arm, by the factor of the clipping norm."""
    records = []
    for case in CASES.values():
        for arm in ("linear", "block-free"):
            found = _chosen(rows, case.name, CLIP_EPSILON, arm, clip=True)
            if arm == "linear":  # the norm that is not off is that of the other table
                right = _chosen(rows, case.name, CLIP_EPSILON, arm, clip=False)
                found += [row for row in right if found and row["config"]["start"] == 0]
            points = series((row["config"]["clip"], row["accuracy"]) for row in found)
            if points:
                means: dict[str, float | None] = {f"clip{factor}": None for factor in CLIPS}
                means |= {f"clip{point.value}": point.mean for point in points}
                runs = sum(point.seeds for point in points)
                what = SELECTION_ARMS[arm].label
                records.append({"case": case.label, "what": what, **means, "runs": runs})
    return records


def _draw(rows: Sequence[Row]) -> "Figure":
    """Points lost against the tuned rate: a thin line for each case, their median bold."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(style.PAGE, 2.9), layout="constrained")
    panels = figure.subplots(1, len(EPSILONS), sharey=True)
    for epsilon, axes in zip(EPSILONS, panels, strict=True):
        for arm, look in LOOKS.items():
            _draw_arm(axes, lost(rows, epsilon, arm), look)
        axes.set_xticks(list(STARTS), [f"x {name}" for name in STARTS.values()], fontsize=7)
        axes.set_xlabel("learning rate against the tuned one")
        axes.set_title(f"epsilon {epsilon}")
        axes.set_ylim(-LOWEST, 3)
    panels[0].set_ylabel("points against the tuned rate")
    legend_below(list(panels), len(LOOKS))
    return figure


def lost(rows: Sequence[Row], epsilon: int, arm: str) -> list[dict[float, float]]:
    """By case, the accuracy against that of plain DP-SGD at the tuned rate, by starting rate.

    What takes no rate has the same at all of them.
    """
    found = []
    for case in CASES:
        tuned = {p.value: p.mean for p in points_of(rows, case, epsilon, "linear")}.get(0)
        points = points_of(rows, case, epsilon, arm)
        if tuned is None or not points:
            continue
        means = {point.value: point.mean - tuned for point in points}
        if not SELECTION_ARMS[arm].takes_rate:
            means = dict.fromkeys(map(float, STARTS), means[0])
        found.append(means)
    return found


def _draw_arm(axes: "Axes", cases: Sequence[Mapping[float, float]], look: Look) -> None:
    places = sorted({place for case in cases for place in case})
    for case in cases:
        at = [place for place in places if place in case]
        axes.plot(
            at, [max(case[place], -LOWEST) for place in at], marker=look.marker, alpha=0.45,
            linestyle=look.dash, color=look.colour, linewidth=0.5, markersize=2,
        )  # fmt: skip
    middle = [
        statistics.median([case[place] for case in cases if place in case]) for place in places
    ]
    if places:
        axes.plot(
            places, [max(value, -LOWEST) for value in middle], marker=look.marker, label=look.label,
            linestyle=look.dash, color=look.colour, linewidth=2, markersize=5,
        )  # fmt: skip
