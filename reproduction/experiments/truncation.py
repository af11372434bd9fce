"""A Gaussian answer before and after selective release (the paper's Algorithm 2)."""

import math
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtr

from dpsur import figure_style as style
from reproduction.artifacts import Artifact, Column, Picture, Table, table_page
from reproduction.base import Cell, OneByOne, Options, Row
from reproduction.paper_theorems import selective_gaussian, truncated_gaussian_rdp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MU = 1.0
SIGMA = 1.0
BELOW = 0.5
# Where the interval starts: None is minus infinity, which is the case of the theorem.
STARTS = (-1.5, None)
ORDERS = (2, 4, 8, 16, 32)
DRAWS = 40_000
SPAN = np.linspace(-3.5, 3.5, 141)
BINS = np.linspace(-3.5, 3.5, 29)
ANSWERS = {"zero": 0.0, "mu": MU}
COLOURS = {"zero": style.BLUE, "mu": style.ORANGE}
TITLE = "Before and after truncation"
TEXT = f"""
The answers N(0, (mu sigma)²) and N(mu, (mu sigma)²) on two neighbouring data sets (mu = {MU:g},
sigma = {SIGMA:g}), and what Algorithm 2 of the paper releases: noise is drawn again until the
answer falls into [a, b], which raises the density there and leaves nothing outside. Dots: shares of
{DRAWS:,} releases of each by the library's own `selective_gaussian`. The table has the Rényi
divergence between the two truncated laws, in both orders, beside the alpha / (2 sigma²) of the
untruncated ones: it is never above. This holds for a number f(D) that is fixed while the noise is
drawn again. In Algorithm 1 the candidate is drawn again as well, and the theorem does not carry
over ([privacy](../privacy.md)).
"""


class Truncation(OneByOne):
    """One row per interval."""

    name = "truncation"

    def cells(self, options: Options) -> Iterator[Cell]:  # noqa: ARG002
        """An interval bounded on both sides, and one bounded above."""
        for start in STARTS:
            config = {"mu": MU, "sigma": SIGMA, "a": start, "b": BELOW, "draws": DRAWS, "seed": 0}
            yield {"config": config}

    def measure(self, cell: Cell, options: Options) -> Row:  # noqa: ARG002
        """Both laws before and after, by formula and by drawing, and their divergences."""
        config = cell["config"]
        return {
            "x": [round(float(x), 6) for x in SPAN],
            "before": {name: _density(config, mean) for name, mean in ANSWERS.items()},
            "kept": {name: _mass(config, mean) for name, mean in ANSWERS.items()},
            "bins": [round(float(edge), 6) for edge in BINS],
            "released": {name: _released(config, mean) for name, mean in ANSWERS.items()},
            "divergence": [_divergences(config, order) for order in ORDERS],
        }

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """Three panels and the divergences."""
        columns = [
            Column("interval", "interval"),
            Column("order alpha", "order"),
            Column("before", "before", ".4f"),
            Column("after, 0 first", "zero_first", ".4f"),
            Column("after, mu first", "shifted_first", ".4f"),
        ]
        records = [
            {"interval": _interval(row), **figures} for row in rows for figures in row["divergence"]
        ]
        picture = Picture(self.name, lambda: _draw(rows))
        return table_page(self.name, TITLE, TEXT, Table(columns, records), picture)


EXPERIMENT = Truncation()


def _start(config: dict[str, Any]) -> float:
    return -math.inf if config["a"] is None else float(config["a"])


def _density(config: dict[str, Any], mean: float) -> list[float]:
    spread = config["mu"] * config["sigma"]
    values = np.exp(-0.5 * ((SPAN - mean) / spread) ** 2) / (spread * np.sqrt(2 * np.pi))
    return [round(float(value), 5) for value in values]


def _mass(config: dict[str, Any], mean: float) -> float:
    spread = config["mu"] * config["sigma"]
    high, low = (ndtr((end - mean) / spread) for end in (config["b"], _start(config)))
    return float(high - low)


def _released(config: dict[str, Any], mean: float) -> list[int]:
    gauss = random.Random(config["seed"]).gauss
    draws = [
        selective_gaussian(
            mean,
            config["mu"],
            config["sigma"],
            config["b"],
            lambda: gauss(0.0, 1.0),
            above=_start(config),
        )
        for _ in range(config["draws"])
    ]
    return [int(count) for count in np.histogram(draws, BINS)[0]]


def _divergences(config: dict[str, Any], order: int) -> dict[str, float]:
    def after(direction: Any) -> float:
        return truncated_gaussian_rdp(
            order, config["sigma"], direction, config["b"], _start(config), config["mu"]
        )

    return {
        "order": order,
        "before": order / (2 * config["sigma"] ** 2),
        "zero_first": after("zero-first"),
        "shifted_first": after("shifted-first"),
    }


def _interval(row: Row) -> str:
    start, end = row["config"]["a"], row["config"]["b"]
    return f"(-inf, {end:g}]" if start is None else f"[{start:g}, {end:g}]"


def _draw(rows: Sequence[Row]) -> "Figure":
    figure = style.new_figure(style.PAGE, 2.2)
    panels = figure.subplots(1, 1 + len(rows), sharey=True)
    _before(panels[0], rows[0])
    style.label_panel(panels[0], "a", "before")
    for letter, axes, row in zip("bc", panels[1:], rows, strict=True):
        _after(axes, row)
        where = "$[a, b]$" if row["config"]["a"] is not None else r"$(-\infty, b]$"
        style.label_panel(axes, letter, f"released in {where}")
    panels[0].set_ylabel("density")
    return figure


def _before(axes: "Axes", row: Row) -> None:
    at = np.array(row["x"])
    inside = (at >= _start(row["config"])) & (at <= row["config"]["b"])
    for name, label, place in (("zero", "$f(D_0) = 0$", -0.6), ("mu", r"$f(D_1) = \mu$", 1.8)):
        density = np.array(row["before"][name])
        axes.plot(at, density, color=COLOURS[name])
        axes.fill_between(at, density, where=inside, color=COLOURS[name], alpha=0.2, linewidth=0)
        axes.text(place, 0.44, label, color=COLOURS[name], ha="center")
    _mark_interval(axes, row)


def _after(axes: "Axes", row: Row) -> None:
    at, bins = np.array(row["x"]), np.array(row["bins"])
    inside = (at >= _start(row["config"])) & (at <= row["config"]["b"])
    centres = (bins[:-1] + bins[1:]) / 2
    for name, colour in COLOURS.items():
        law = np.array(row["before"][name])[inside] / row["kept"][name]
        axes.plot(at[inside], law, color=colour)
        axes.fill_between(at[inside], law, color=colour, alpha=0.2, linewidth=0)
        shares = np.array(row["released"][name]) / (row["config"]["draws"] * np.diff(bins))
        axes.plot(centres[shares > 0], shares[shares > 0], "o", color=colour, markersize=2.2)
    _mark_interval(axes, row)


def _mark_interval(axes: "Axes", row: Row) -> None:
    for name in ("a", "b"):
        end = row["config"][name]
        if end is not None:
            axes.axvline(end, color=style.INK, linewidth=0.7, linestyle=(0, (4, 2)))
            axes.text(end, 1.22, f" {name}", style="italic", va="top")
    axes.set(xlim=(-3.5, 3.5), ylim=(0, 1.25), xlabel="noisy answer")
    axes.set_xticks([-3, -1.5, 0, 1.5, 3])
