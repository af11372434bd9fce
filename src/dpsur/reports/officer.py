"""The part of a report for a data protection officer: who, what for, from when, and how strong.

Purpose, controller and earlier releases are what the user says; nothing here is private.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpsur.privacy.statement import PERSON, unit_of

# Epsilons on the scale, and the ends of the scale.
MARKS = (0.1, 0.3, 1.0, 3.0, 10.0)
LOW, HIGH = 0.05, 20.0
WIDTH, HEIGHT, SIDE = 400, 92, 20


@dataclass(frozen=True)
class Notes:
    """What the user adds to a report. `earlier` are releases from the same records before this."""

    purpose: str | None = None
    controller: str | None = None
    date: str | None = None
    test_origin: str | None = None
    earlier: str | None = None


def epsilon_text(epsilon: float) -> str:
    """Three digits, rounded up: a guarantee must not look better than it is."""
    if epsilon <= 0 or not math.isfinite(epsilon):
        return f"{epsilon:g}"
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 2)
    rounded = math.ceil(epsilon / unit - 1e-9) * unit
    return f"{rounded:.{max(0, -math.floor(math.log10(unit) + 1e-9))}f}"


def right_guesses(epsilon: float) -> float:
    """How often the best guess about one record is right, at even odds, for epsilon alone."""
    return 1 / (1 + math.exp(-epsilon))


def officer_section(notes: Notes, statement: Mapping[str, Any]) -> str:
    """Who answers for the model, and a scale that places its epsilon."""
    not_said = "not stated"
    rows = [
        ("Purpose", notes.purpose or not_said),
        ("Controller", notes.controller or not_said),
        ("Date of this report", notes.date or not_said),
        (
            "Who is protected",
            statement["unit"]
            + (
                ""
                if unit_of(statement) == PERSON
                else "; of a person with k records, epsilon is k times as large, and delta "
                "grows too"
            ),
        ),
        ("Origin of the test records", notes.test_origin or not_said),
        (
            "Earlier releases from the same records",
            notes.earlier
            or f"{not_said}; if there are any, the epsilons and deltas of all of them add up",
        ),
    ]
    body = "".join(f"<tr><th>{_text(a)}</th><td>{_text(b)}</td></tr>" for a, b in rows)
    epsilon = statement["guarantee"]["epsilon"]
    scale = "" if epsilon is None or math.isinf(epsilon) else _scale(epsilon)
    return (
        f'<section><h2>For the record</h2><div class="scroll"><table>{body}</table></div>{scale}'
        '<p class="sign">Reviewed by: <span></span> Date: <span></span></p></section>'
    )


def _scale(epsilon: float) -> str:
    """A logarithmic scale of epsilon, with how often a guess can be right below it."""
    baseline = 46

    def place(value: float) -> float:
        share = math.log(value / LOW) / math.log(HIGH / LOW)
        return SIDE + min(1.0, max(0.0, share)) * (WIDTH - 2 * SIDE)

    parts = [
        f'<line class="axis" x1="{SIDE}" x2="{WIDTH - SIDE}" y1="{baseline}" y2="{baseline}"/>'
    ]
    for mark in MARKS:
        at = place(mark)
        parts.append(
            f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{baseline - 5}" '
            f'y2="{baseline + 5}"/>'
            f'<text x="{at:.1f}" y="{baseline + 21}" text-anchor="middle">{mark:g}</text>'
            f'<text x="{at:.1f}" y="{baseline + 38}" text-anchor="middle">'
            f"{_percent(right_guesses(mark))}</text>"
        )
    here = place(epsilon)
    anchor = "middle" if 60 < here < WIDTH - 60 else ("start" if here <= 60 else "end")
    parts.append(
        f'<circle class="dot" cx="{here:.1f}" cy="{baseline}" r="6"/>'
        f'<text class="here" x="{here:.1f}" y="{baseline - 16}" text-anchor="{anchor}">'
        f"this model: {epsilon_text(epsilon)}</text>"
    )
    words = (
        "Epsilon, and below it how often someone who knows everything else can guess rightly "
        "whether a given record was used, at even odds; 50% is no information. The limit for this "
        "model is often lower and stands above."
    )
    return (
        f'<svg class="scale" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="epsilon {epsilon:.3g} on a scale from {LOW:g} to {HIGH:g}">'
        f"{''.join(parts)}</svg>"
        f'<p class="small soft">{words}</p>'
    )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share < 0.99 else f"{math.floor(share * 1000) / 10:g}%"


def declared_rows(public: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the user declared to be public, in words."""
    rows = []
    for name, value in public.items():
        title = f"{name.replace('_', ' ').capitalize()} (declared public)"
        if name == "schema":
            for part in ("columns", "target"):
                shown = "; ".join(f"{key}: {_column(one)}" for key, one in value[part].items())
                rows.append((f"{part.capitalize()} (declared public)", shown))
        elif name == "inputs":
            size = value.get("shape") or [value.get("dimension")]
            rows.append((title, f"{value['kind']} of {' x '.join(map(str, size))} numbers"))
        else:
            rows.append((title, ", ".join(map(str, value)) if _listed(value) else str(value)))
    return rows


def _listed(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _column(column: Mapping[str, Any]) -> str:
    if "values" in column:
        shown = [str(one) for one in column["values"][:6]]
        return "one of " + ", ".join(shown) + (", ..." if len(column["values"]) > 6 else "")
    if "low" in column:
        return f"{column['low']:g} to {column['high']:g}"
    return str(column.get("kind"))


def _text(value: object) -> str:
    return html.escape(str(value))
