"""One look for all figures: one font, few colours, fit for print."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches, as in a paper of two columns.
COLUMN: Final = 3.35
PAGE: Final = 7.0

# Colours that colour-blind readers can tell apart (Okabe and Ito), and greys.
BLUE: Final = "#0072B2"
ORANGE: Final = "#D55E00"
GREEN: Final = "#009E73"
INK: Final = "#222222"
GREY: Final = "#777777"
PALE: Final = "#D9D9D9"
PALE_BLUE: Final = "#DCEAF4"
PALE_ORANGE: Final = "#FBE6D9"
PALE_GREEN: Final = "#DDF0EA"
SHADE: Final = "#F2F2F2"

FONT: Final = "STIXGeneral"  # comes with matplotlib

SETTINGS: Final[dict[str, Any]] = {
    "font.family": FONT,
    "mathtext.fontset": "stix",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.3,
    "lines.solid_capstyle": "round",
    "patch.linewidth": 0.8,
    "figure.facecolor": "white",
    # letters as letters, and names of parts that do not change from run to run
    "svg.fonttype": "none",
    "svg.hashsalt": "dpsur",
    "path.simplify": True,
}


@contextmanager
def common() -> Iterator[None]:
    """Draw in the common style, whatever the machine's own settings are."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        parameters: Any = matplotlib.rcParams
        parameters.update(SETTINGS)
        yield


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of a size in inches, without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that a notebook shows on its own, whatever matplotlib is set to there."""

        def _repr_png_(self) -> bytes:
            image = io.BytesIO()
            self.savefig(image, format="png", dpi=110)
            return image.getvalue()

    figure = Picture(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def label_panel(axes: "Axes", letter: str, text: str = "") -> None:
    axes.set_title(f"({letter}) {text}".strip(), loc="left", pad=6)
