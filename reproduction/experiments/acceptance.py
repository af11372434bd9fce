"""How often the paper's gate accepts better and worse candidates, against its threshold beta."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dpsur import figure_style as style
from dpsur.mechanism.streams import SETUP, VAL_NOISE, Streams
from dpsur.mechanism.trial import LossRule
from dpsur.privacy.events import LossTest
from reproduction.artifacts import Artifact, Column, Picture, Table, table_page
from reproduction.base import Cell, OneByOne, Options, Row
from reproduction.paper_theorems import acceptance_gap, best_threshold

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIGMAS = (0.8, 1.0, 1.3)
PAPER_BETA = -1.0
LOSS_CLIP = 0.001
# The paper draws -3.5 to 0.5, which hides that the difference falls again to the right of 0.
BETAS = np.linspace(-3.5, 1.5, 101)
PROBES = (-3.0, -2.0, -1.0, 0.0, 1.0)
DRAWS = 100_000
COLOURS = dict(zip(SIGMAS, (style.BLUE, style.GREEN, style.ORANGE), strict=True))
BETA_AXIS = r"threshold $\beta$ (in units of $C_v$)"
TITLE = "Acceptance probability against beta"
TEXT = f"""
Left: the probability that the gate accepts a candidate whose clipped loss difference is -C_v
(solid: better) or +C_v (dashed: worse), Phi((beta ± 1) / (2 sigma_v)). Dots: how often the gate of
this library did, in {DRAWS:,} draws each. Right: the difference of the two. The paper reads its
maximum off at beta = -1; computed, it is at beta = 0 for every sigma_v. At -1 the gate rejects half
of the better candidates. What -1 does raise is the ratio of the two probabilities, and with it the
proven cost of an accepted update.
"""


class Acceptance(OneByOne):
    """One row per noise multiplier of the test."""

    name = "acceptance"

    def cells(self, options: Options) -> Iterator[Cell]:  # noqa: ARG002
        """The three that the paper draws."""
        for sigma in SIGMAS:
            yield {"config": {"sigma_v": sigma, "loss_clip": LOSS_CLIP, "draws": DRAWS, "seed": 0}}

    def measure(self, cell: Cell, options: Options) -> Row:  # noqa: ARG002
        """The curves by formula, the optimum by search, and the gate itself at a few points."""
        config = cell["config"]
        sigma = config["sigma_v"]
        tests = [LossTest(1.0, sigma, float(beta)) for beta in BETAS]
        best = best_threshold(sigma)
        return {
            "beta": _rounded(BETAS),
            "better": _rounded([test.accept_max for test in tests]),
            "worse": _rounded([test.accept_min for test in tests]),
            "best_beta": best,
            "at_best": _at(sigma, best),
            "at_paper": _at(sigma, PAPER_BETA),
            "measured": _measured(config),
        }

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The two panels, and a table of the two thresholds."""
        columns = [Column("sigma_v", "sigma_v"), Column("best beta", "best_beta", ".2f")]
        for where, name in (("best", "best"), ("paper", "-1")):
            columns += [
                Column(f"better, at {name}", f"{where}_better", ".3f"),
                Column(f"worse, at {name}", f"{where}_worse", ".3f"),
                Column(f"difference, at {name}", f"{where}_gap", ".3f"),
                Column(f"ratio, at {name}", f"{where}_ratio", ".2f"),
            ]
        records = [_record(row) for row in rows]
        picture = Picture(self.name, lambda: _draw(rows))
        return table_page(self.name, TITLE, TEXT, Table(columns, records), picture)


EXPERIMENT = Acceptance()


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 6) for value in values]


def _at(sigma: float, beta: float) -> dict[str, float]:
    test = LossTest(1.0, sigma, beta)
    return {
        "better": test.accept_max,
        "worse": test.accept_min,
        "gap": acceptance_gap(beta, sigma),
        "ratio": test.accept_max / test.accept_min,
    }


def _measured(config: dict[str, Any]) -> list[dict[str, float]]:
    """How often the gate accepted a better and a worse candidate."""
    noise = Streams(config["seed"], torch.device("cpu")).at(SETUP)[VAL_NOISE]
    bound = config["loss_clip"]
    found = []
    for beta in PROBES:
        gate = LossRule(bound, config["sigma_v"], beta)
        rates = [
            gate.decide(torch.full((config["draws"],), difference), noise).double().mean().item()
            for difference in (-bound, bound)
        ]
        found.append({"beta": beta, "better": rates[0], "worse": rates[1]})
    return found


def _record(row: Row) -> dict[str, float]:
    # The search ends within 1e-9 of 0; adding 0.0 makes a negative zero positive.
    best = round(row["best_beta"], 6) + 0.0
    record = {"sigma_v": row["config"]["sigma_v"], "best_beta": best}
    for where in ("best", "paper"):
        record |= {f"{where}_{name}": value for name, value in row[f"at_{where}"].items()}
    return record


def _draw(rows: Sequence[Row]) -> "Figure":
    figure = style.new_figure(style.PAGE, 2.5)
    left, right = figure.subplots(1, 2)
    for row in rows:
        sigma = row["config"]["sigma_v"]
        colour = COLOURS[sigma]
        left.plot(row["beta"], row["better"], color=colour)
        left.plot(row["beta"], row["worse"], color=colour, linestyle=(0, (4, 2)))
        for kind in ("better", "worse"):
            points = [(probe["beta"], probe[kind]) for probe in row["measured"]]
            left.plot(*zip(*points, strict=True), "o", color=colour, markersize=2.6)
        gap = np.subtract(row["better"], row["worse"])
        right.plot(row["beta"], gap, color=colour, label=rf"$\sigma_v$ = {sigma}")
        right.plot(row["best_beta"], row["at_best"]["gap"], "o", color=colour, markersize=3.5)
    style.label_panel(left, "a", "acceptance probability")
    style.label_panel(right, "b", "difference, better − worse")
    _finish_left(left)
    _finish_right(right)
    return figure


def _finish_left(axes: "Axes") -> None:
    axes.set(ylim=(0, 1), xlabel=BETA_AXIS)
    axes.axvline(PAPER_BETA, color=style.GREY, linewidth=0.7, linestyle=":")
    axes.text(-2.0, 0.6, "better candidate\n($\\Delta E < 0$)", ha="center", va="center")
    axes.text(0.85, 0.17, "worse candidate\n($\\Delta E > 0$)", ha="center", va="center")


def _finish_right(axes: "Axes") -> None:
    axes.set(ylim=(0, 0.6), xlabel=BETA_AXIS)
    for beta, text, side in ((PAPER_BETA, "paper: −1 ", "right"), (0.0, " largest: 0", "left")):
        axes.axvline(beta, color=style.GREY, linewidth=0.7, linestyle=":")
        axes.text(beta, 0.59, text, ha=side, va="top")
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.92))
