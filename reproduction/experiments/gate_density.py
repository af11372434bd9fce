"""The noisy loss difference of a better and of a worse candidate, and what a threshold accepts."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dpsur import figure_style as style
from dpsur.privacy.events import LossTest
from reproduction.artifacts import Artifact, Column, Picture, Table, table_page
from reproduction.base import Cell, OneByOne, Options, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS_CLIP = 0.1
SIGMA_V = 1.0
# Z, and what the paper's text says is accepted, where it says so: (better, worse) in percent.
PAPER = {0.0: (69.1, 30.8), -0.1: (50.0, 15.9), -0.2: (None, None)}
SPAN = np.linspace(-0.75, 0.75, 121)
TITLE = "The noisy loss difference under three thresholds"
TEXT = f"""
Densities of the noisy loss difference for C_v = {LOSS_CLIP} and sigma_v = {SIGMA_V:g}, the paper's
example: N(-C_v, (2 C_v sigma_v)²) for a better candidate (blue) and N(+C_v, (2 C_v sigma_v)²) for a
worse one (orange). A candidate is accepted where the noisy difference is below Z; the shaded areas
are the probabilities of that. In the table, in percent: computed, and as the paper's text has it.
"""


class GateDensity(OneByOne):
    """One row per threshold."""

    name = "gate-density"

    def cells(self, options: Options) -> Iterator[Cell]:  # noqa: ARG002
        """The paper's three panels."""
        for threshold in PAPER:
            yield {"config": {"Z": threshold, "loss_clip": LOSS_CLIP, "sigma_v": SIGMA_V}}

    def measure(self, cell: Cell, options: Options) -> Row:  # noqa: ARG002
        """Both densities and both probabilities."""
        config = cell["config"]
        test = LossTest(1.0, config["sigma_v"], config["Z"] / config["loss_clip"])
        spread = 2 * config["loss_clip"] * config["sigma_v"]
        published = PAPER[config["Z"]]
        return {
            "difference": [round(float(x), 6) for x in SPAN],
            "better_density": _normal_density(-config["loss_clip"], spread),
            "worse_density": _normal_density(config["loss_clip"], spread),
            "better": test.accept_max,
            "worse": test.accept_min,
            "paper": {"better": published[0], "worse": published[1]},
        }

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """Three panels and the probabilities."""
        columns = [
            Column("Z", "Z"),
            Column("better, computed", "better", ".1f"),
            Column("better, paper", "better_paper"),
            Column("worse, computed", "worse", ".1f"),
            Column("worse, paper", "worse_paper"),
            Column("difference", "gap", ".1f"),
        ]
        records = [_record(row) for row in rows]
        picture = Picture(self.name, lambda: _draw(rows))
        return table_page(self.name, TITLE, TEXT, Table(columns, records), picture)


EXPERIMENT = GateDensity()


def _normal_density(mean: float, spread: float) -> list[float]:
    values = np.exp(-0.5 * ((SPAN - mean) / spread) ** 2) / (spread * np.sqrt(2 * np.pi))
    return [round(float(value), 5) for value in values]


def _record(row: Row) -> dict[str, float | None]:
    return {
        "Z": row["config"]["Z"],
        "better": 100 * row["better"],
        "better_paper": row["paper"]["better"],
        "worse": 100 * row["worse"],
        "worse_paper": row["paper"]["worse"],
        "gap": 100 * (row["better"] - row["worse"]),
    }


def _draw(rows: Sequence[Row]) -> "Figure":
    figure = style.new_figure(style.PAGE, 2.15)
    panels = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    for letter, axes, row in zip("abc", panels, rows, strict=True):
        _panel(axes, row)
        style.label_panel(axes, letter, f"$Z$ = {_signed(row['config']['Z'])}")
    panels[0].set_ylabel("density")
    return figure


def _panel(axes: "Axes", row: Row) -> None:
    at = np.array(row["difference"])
    threshold = row["config"]["Z"]
    accepted = at <= threshold + 1e-9
    for kind, colour, height in (("better", style.BLUE, 1.82), ("worse", style.ORANGE, 1.58)):
        density = np.array(row[f"{kind}_density"])
        axes.plot(at, density, color=colour)
        axes.fill_between(at, density, where=accepted, color=colour, alpha=0.28, linewidth=0)
        share = f"{kind} {100 * row[kind]:.1f}%"
        axes.text(-0.73, height, share, color=colour, fontsize=8.5)
    axes.axvline(threshold, color=style.INK, linewidth=0.9)
    axes.text(threshold - 0.02, 2.38, "accept", ha="right", va="top", style="italic")
    axes.text(threshold + 0.02, 2.38, "reject", ha="left", va="top", style="italic")
    axes.set(xlim=(-0.75, 0.75), ylim=(0, 2.4), xlabel="noisy loss difference")
    axes.set_xticks([-0.6, -0.3, 0, 0.3, 0.6])


def _signed(value: float) -> str:
    return f"{value:g}".replace("-", "−")
