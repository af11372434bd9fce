"""One hyper-parameter of DPSUR varied at a time, on CIFAR-10 at epsilon 3, as in the paper."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from dpsur import figure_style as style
from reproduction.arms import ARMS
from reproduction.artifacts import Artifact, Column, Picture, Table, table_page
from reproduction.base import Row
from reproduction.experiments.paper_figures import committed_results
from reproduction.presets.settings import paper_setting
from reproduction.series import Look, Point, best_of, draw, legend_below, series
from reproduction.training import TrainingCell, TrainingGrid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TASK, EPSILON, SEEDS = "cifar10", 3, (0, 1, 2)
RELEASED = "released-code"
ARMS_SHOWN = ("published", RELEASED)


@dataclass(frozen=True)
class Factor:
    """A hyper-parameter, its symbol in the paper and the values that are tried.

    Values are those of the paper's figure as far as its text and the plots of the released code
    tell them, and some to either side.
    """

    name: str
    symbol: str
    values: tuple[float, ...]
    scale: str = "linear"
    labelled: tuple[float, ...] = ()

    @property
    def ticks(self) -> tuple[float, ...]:
        """The values that an axis has room for."""
        return self.labelled or self.values


LOOKS = {
    "published": Look("Algorithm 1", style.BLUE),
    "released-code": Look("released code", style.ORANGE, "s"),
    "other-base": Look(r"released code, $B_v$ 128", style.GREEN, "^", "--"),
}
STATED, PRAISED = "paper's figure", "best, says the paper"
COMMITTED = "authors' run"


@dataclass(frozen=True)
class Claim:
    """What the paper's text says of a value, or of a range of values."""

    low: float
    high: float
    accuracy: float | None
    says: str

    @property
    def praises(self) -> bool:
        """Whether it names the best values without giving a figure."""
        return self.accuracy is None and ("best" in self.says or "better" in self.says)


@dataclass(frozen=True)
class Panel:
    """A hyper-parameter: its symbol, scale and ticks, points by look, the paper's statements."""

    symbol: str
    scale: str
    ticks: Sequence[float]
    lines: Mapping[str, Sequence[Point]]
    claims: Sequence[Claim]
    authors: Mapping[float, float]


FACTORS = (
    Factor("learning_rate", r"$\eta$", (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)),
    Factor(
        "val_noise_multiplier",
        r"$\sigma_v$",
        (0.8, 0.9, 1.0, 1.1, 1.2, 1.3),
        labelled=(0.8, 1.0, 1.2),
    ),
    Factor(
        "loss_clip",
        r"$C_v$",
        (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0),
        "log",
        (1e-5, 1e-2, 10.0),
    ),
    Factor(
        "accept_threshold",
        r"$\beta$",
        (-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0),
        labelled=(-3.0, -1.0, 1.0),
    ),
    Factor("val_batch_size", r"$B_v$", (32, 64, 128, 256, 512, 1024), "log", (32, 256, 1024)),
)
# The paper's section on the ablation has a validation batch of 128, its settings have 256.
BATCH, DEFAULT_BASE, OTHER_BASE = "val_batch_size", 256, 128
TITLE = "One hyper-parameter at a time"
TEXT = """
CIFAR-10 at epsilon 3 as the paper counts it: one hyper-parameter of the preset `paper` is changed,
the others stay. The validation batch is 256, as in the paper's settings, and in lines that say so
128, as in its section on the ablation. Accuracy in percent of the last iterate on the public test
set, mean and standard deviation over three seeds; of a single run there is no deviation. Algorithm
1 is as printed; the released code is the arm that works as the code released with the paper does,
and its epsilon is a claim. The paper draws curves and gives few of their figures in its text; those
stand beside ours (diamonds, and a dotted line where it speaks of a range), and what it calls best
without a figure is shaded. *authors' run* is the accuracy at the end of a single run that the
authors committed ([all of those](accuracy_committed.md)); crosses in the figure. They are there for
the validation batch alone. [What the paper says of each curve](ablation_claims.md) is set against
the rows.
"""
CLAIMS_TITLE = "What the paper says of each hyper-parameter, and what the rows say"
CLAIMS_TEXT = """
Every statement of the paper's text about a value or a range of values, with the mean accuracies of
our runs at the tried values within that range (lowest and highest), and the best of the tried
values outside of it. A statement such as *highest* is borne out where *highest within* is above
*best elsewhere* by more than the spread. Means of three seeds tell differences of about half a
point.
"""
COLUMNS = (
    Column("parameter", "parameter"),
    Column("value", "value", "g"),
    Column("B_v", "base"),
    Column("what", "what"),
    Column("accuracy", "mean", ".2f"),
    Column("+-", "spread", ".2f"),
    Column("seeds", "seeds"),
    Column("paper", "paper", ".2f"),
    Column("authors' run", "authors", ".2f"),
)
CLAIM_COLUMNS = (
    Column("parameter", "parameter"),
    Column("from", "low", "g"),
    Column("to", "high", "g"),
    Column("paper says", "says"),
    Column("paper", "paper", ".2f"),
    Column("what", "what"),
    Column("lowest within", "least", ".2f"),
    Column("highest within", "most", ".2f"),
    Column("+-", "spread", ".2f"),
    Column("best elsewhere", "elsewhere", ".2f"),
    Column("at", "elsewhere_at", "g"),
)


class Ablation(TrainingGrid):
    """One row per arm, changed value and seed; the preset itself is one run for all five."""

    name = "ablation"

    def runs(self, seeds: tuple[int, ...] | None) -> Iterator[TrainingCell]:
        """The preset, then value by value."""
        for arm in ARMS_SHOWN:
            preset = ARMS[arm].preset(TASK, EPSILON).options
            changes: list[dict[str, Any]] = [{}]
            for factor in FACTORS:
                others = [value for value in factor.values if value != preset[factor.name]]
                changes += [{factor.name: value} for value in others]
            for change in changes:
                for seed in seeds or SEEDS:
                    yield TrainingCell(TASK, arm, EPSILON, seed, change)
        for change in changes:
            if change and BATCH not in change:
                for seed in seeds or SEEDS:
                    both = {BATCH: OTHER_BASE, **change}
                    yield TrainingCell(TASK, RELEASED, EPSILON, seed, both)

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The five panels, the values, and the paper's statements beside them."""
        picture = Picture(self.name, lambda: draw_panels(panels(rows)))
        values = Table(COLUMNS, list(_value_records(rows)))
        claims = Table(CLAIM_COLUMNS, list(claim_records(rows)))
        return [
            *table_page(self.name, TITLE, TEXT, values, picture),
            *table_page("ablation_claims", CLAIMS_TITLE, CLAIMS_TEXT, claims, experiment=self.name),
        ]


EXPERIMENT = Ablation()


def paper_claims(parameter: str) -> list[Claim]:
    """What the paper's text says of a hyper-parameter."""
    text = (files("reproduction.experiments") / "paper_ablation.csv").read_text(encoding="utf-8")
    return [
        Claim(
            float(row["low"]),
            float(row["high"]),
            float(row["accuracy"]) if row["accuracy"] else None,
            row["says"],
        )
        for row in csv.DictReader(text.splitlines())
        if row["parameter"] == parameter
    ]


def measured(rows: Sequence[Row], arm: str, factor: Factor, base: int | None = None) -> list[Point]:
    """Accuracy against one hyper-parameter; the run of the preset belongs to all of them.

    `base` is the validation batch that the others are varied around, if not the preset's.
    """
    around = {} if base is None else {BATCH: base}
    return series(
        (row["config"]["options"][factor.name], row["accuracy"])
        for row in rows
        if row["config"]["arm"] == arm and _is_around(row["config"]["tried"], around, factor.name)
    )


def _is_around(tried: Mapping[str, Any], around: Mapping[str, Any], name: str) -> bool:
    """Whether what was changed is what is varied around, and at most this setting."""
    return around.items() <= tried.items() and set(tried) - set(around) <= {name}


def around_other_base(rows: Sequence[Row], factor: Factor) -> list[Point]:
    """The released code around the other validation batch, where something else was varied."""
    points = [] if factor.name == BATCH else measured(rows, RELEASED, factor, OTHER_BASE)
    return points if len(points) > 1 else []  # one alone is the preset's


def panels(rows: Sequence[Row]) -> list[Panel]:
    """A panel for every hyper-parameter, with the arms that have rows."""
    found = []
    for factor in FACTORS:
        lines = {arm: measured(rows, arm, factor) for arm in ARMS_SHOWN}
        lines["other-base"] = around_other_base(rows, factor)
        claims = paper_claims(factor.name)
        shown = {arm: points for arm, points in lines.items() if points}
        authors = committed(factor.name)
        found.append(Panel(factor.symbol, factor.scale, factor.ticks, shown, claims, authors))
    return found


def committed(parameter: str) -> dict[float, float]:
    """Accuracies at the end of the authors' committed runs; only validation batches were varied."""
    if parameter != BATCH:
        return {}
    setting = paper_setting(TASK, EPSILON)
    return {
        float(row["val_batch"]): float(row["last"])
        for row in committed_results()
        if (row["dataset"], row["method"], int(row["epsilon"])) == (TASK, "dpsur", EPSILON)
        and float(row["sigma_t"]) == setting.noise_multiplier
        and float(row["sigma_v"]) == setting.val_noise_multiplier
    }


def _value_records(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for factor in FACTORS:
        stated = {c.low: c.accuracy for c in paper_claims(factor.name) if c.low == c.high}
        authors = committed(factor.name)
        for arm in ARMS_SHOWN:
            for point in measured(rows, arm, factor):
                yield {
                    "parameter": factor.name,
                    "what": ARMS[arm].label,
                    "base": None if factor.name == BATCH else DEFAULT_BASE,
                    "paper": stated.get(point.value),
                    "authors": authors.get(point.value),
                    **vars(point),
                    "spread": _spread(point),
                }
        for point in around_other_base(rows, factor):
            yield {
                "parameter": factor.name,
                "what": ARMS[RELEASED].label,
                "base": OTHER_BASE,
                "paper": stated.get(point.value),
                "authors": None,
                **vars(point),
                "spread": _spread(point),
            }


def _spread(point: Point) -> float | None:
    """One seed has none."""
    return point.spread if point.seeds > 1 else None


def claim_records(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Each statement of the paper beside each arm; blank where there are no rows."""
    for factor in FACTORS:
        for claim in paper_claims(factor.name):
            for arm in ARMS_SHOWN:
                points = measured(rows, arm, factor)
                inside = [p for p in points if claim.low <= p.value <= claim.high]
                outside = [p for p in points if p not in inside]
                top = best_of(inside) if inside else None
                other = best_of(outside) if outside else None
                yield {
                    "parameter": factor.name,
                    "low": claim.low,
                    "high": claim.high,
                    "says": claim.says,
                    "paper": claim.accuracy,
                    "what": ARMS[arm].label,
                    "least": min((p.mean for p in inside), default=None),
                    "most": top.mean if top else None,
                    "spread": _spread(top) if top else None,
                    "elsewhere": other.mean if other else None,
                    "elsewhere_at": other.value if other else None,
                }


def draw_panels(panels: Sequence[Panel]) -> "Figure":
    """All panels in a row, on one scale of accuracies."""
    figure = style.new_figure(style.PAGE, 2.6)
    places = list(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0])
    for letter, axes, panel in zip("abcde", places, panels, strict=True):
        for look, points in panel.lines.items():
            draw(axes, points, LOOKS[look])
        for claim in panel.claims:
            _mark(axes, claim)
        if panel.authors:
            places_of, accuracies = zip(*sorted(panel.authors.items()), strict=True)
            axes.plot(places_of, accuracies, "x", color=style.INK, ms=4.5, ls="", label=COMMITTED)
        axes.set(xscale=panel.scale, xlabel=panel.symbol)
        axes.set_xticks(panel.ticks, [f"{tick:g}" for tick in panel.ticks])
        axes.minorticks_off()
        style.label_panel(axes, letter)
    places[0].set_ylabel("test accuracy, %")
    legend_below(places, 3)
    return figure


def _mark(axes: "Axes", claim: Claim) -> None:
    alone = claim.low == claim.high
    if claim.accuracy is None:
        if claim.praises and alone:
            axes.axvline(claim.low, color=style.PALE, linewidth=4, zorder=0, label=PRAISED)
        elif claim.praises:
            axes.axvspan(claim.low, claim.high, color=style.SHADE, zorder=0)
    elif alone:
        axes.plot(
            claim.low, claim.accuracy, "D", color=style.INK, mfc="none", ms=4, ls="", label=STATED
        )
    else:
        ends = (claim.low, claim.high)
        axes.plot(ends, (claim.accuracy,) * 2, color=style.INK, linewidth=0.8, linestyle=":")
