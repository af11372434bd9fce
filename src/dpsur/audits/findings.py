"""What findings amount to: the most that an audit could have shown, and a figure of them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpsur import figure_style as style
from dpsur.audits.bounds import CONTRADICTED, largest_bound
from dpsur.audits.one_run import epsilon_of_guesses
from dpsur.audits.training import ONE_RUN, each_confidence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABEL = (
    "ε: bar, lower bound; dot, exact; tick, claimed\n"
    "orange: contradicted, by the bound, the exact ε or the p-value"
)


def ceiling(finding: Mapping[str, Any]) -> float | None:
    """The lower bound if every run or guess had spoken for it; None where a law was computed.

    Where it is below the claim, the audit could not have contradicted it.

    `finding` is a row of `Finding`.
    """
    details, delta, confidence = finding["details"], finding["delta"], finding["confidence"]
    if finding["audit"] == ONE_RUN:
        tried = details["guesses"]
        each = each_confidence(confidence, len(tried))
        return max(
            epsilon_of_guesses(details["canaries"], made, made, delta, each) for made, _ in tried
        )
    if "repetitions" in details:
        return largest_bound(details["repetitions"], delta, confidence)
    return None


def is_idle(finding: Mapping[str, Any]) -> bool:
    """Whether the claim was out of reach, whatever the training does.

    A p-value of the whole claimed curve reaches further than the bound, and is not judged here.
    """
    most = ceiling(finding)
    exact, p_value = finding["exact"], finding["p_value"]
    return exact is None and p_value is None and most is not None and most < finding["claimed"]


def draw_findings(records: Sequence[dict[str, Any]]) -> "Figure":
    """Claims and bounds, a line each; what is contradicted is orange."""
    figure = style.new_figure(style.PAGE, 0.6 + 0.17 * len(records))
    axes = figure.subplots()
    for place, record in enumerate(reversed(list(records))):
        broken = CONTRADICTED in record["verdict"] and "not" not in record["verdict"]
        colour = style.ORANGE if broken else style.BLUE
        axes.plot([0, record["lower"]], [place, place], color=colour, linewidth=2.5)
        axes.plot([record["claimed"]] * 2, [place - 0.35, place + 0.35], color=style.INK)
        if record["exact"] is not None:
            axes.plot(record["exact"], place, "o", color=colour, markersize=3)
    axes.set_yticks(
        range(len(records)),
        [f"{r['subject']} ({r['accounting']})" for r in reversed(list(records))],
        fontsize=6.5,
    )
    axes.set(xlabel=LABEL, xlim=(0, None))
    axes.set_ylim(-0.8, len(records) - 0.2)
    return figure
