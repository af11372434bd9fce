"""Five small panels: accuracy against each hyper-parameter, the paper's statements marked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpsur.experiments import style
from dpsur.experiments.series import Look, Point, draw, legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {
    "published": Look("Algorithm 1", style.BLUE),
    "released-code": Look("released code", style.ORANGE, "s"),
}
STATED, PRAISED = "paper's figure", "best, says the paper"


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
    """A hyper-parameter: its symbol, scale and ticks, points by arm, the paper's statements."""

    symbol: str
    scale: str
    ticks: Sequence[float]
    lines: Mapping[str, Sequence[Point]]
    claims: Sequence[Claim]


def draw_panels(panels: Sequence[Panel]) -> "Figure":
    """All panels in a row, on one scale of accuracies."""
    figure = style.new_figure(style.PAGE, 2.35)
    places = list(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0])
    for letter, axes, panel in zip("abcde", places, panels, strict=True):
        for arm, points in panel.lines.items():
            draw(axes, points, LOOKS[arm])
        for claim in panel.claims:
            _mark(axes, claim)
        axes.set(xscale=panel.scale, xlabel=panel.symbol)
        axes.set_xticks(panel.ticks, [f"{tick:g}" for tick in panel.ticks])
        axes.minorticks_off()
        style.label_panel(axes, letter)
    places[0].set_ylabel("test accuracy, %")
    legend_below(places, 4)
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
