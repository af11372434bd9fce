"""Rows as text: one as a line, all of them as a table of ratios."""

from collections.abc import Mapping, Sequence
from typing import Any

from dpsur.bench.outcome import OK


def line(row: Mapping[str, Any]) -> str:
    """What a reader wants to see of a row while it is being measured."""
    head = f"{row['network']:<17}{row['batch_size']:>6}  {row['arm']:<15}"
    if row["status"] != OK:
        return f"{head}{row['status']}: {row['reason']}"
    lower, upper = (1e3 * value for value in row["step_seconds_quartiles"])
    parts = [
        f"{1e3 * row['step_seconds']:9.2f} ms [{lower:.2f}, {upper:.2f}]",
        f"{row['peak_memory_bytes'] / 2**20:8.0f} MiB",
        f"{row['samples_per_second']:10.0f} samples/s",
    ]
    for key, label in (("time_over_plain", "x plain"), ("time_over_opacus", "x Opacus")):
        if row[key] is not None:
            parts.append(f"{row[key]:.2f} {label}")
    return head + "  ".join(parts)


OURS = ("dpsgd", "dpsur", "dpsgd-captured", "dpsur-captured")
HEAD = (
    "| network | batch | ours | ms | x plain | x plain captured | Opacus hooks / ours "
    "| Opacus ghost / ours | memory |"
)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Our arms beside the others of their cells, as a table; the last column is over plain."""
    cells: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["network"], row["batch_size"]), {})[row["arm"]] = row
    lines = [HEAD, "|---|--:|---|--:|--:|--:|--:|--:|--:|"]
    for (network, size), arms in cells.items():
        lines += [_line(network, size, arms, arm) for arm in OURS if arm in arms]
    return "\n".join(lines)


def _line(network: str, size: int, arms: Mapping[str, Mapping[str, Any]], arm: str) -> str:
    row = arms[arm]
    if row["status"] != OK:
        return f"| {network} | {size:,} | {arm} | {row['status']} | | | | | |"
    captured = _seconds(arms, "plain-captured")
    opacus = [_seconds(arms, name) for name in ("opacus-hooks", "opacus-ghost")]
    mine = row["step_seconds"]
    figures = [
        f"{1e3 * mine:.2f}",
        _figure(row["time_over_plain"]),
        _figure(None if captured is None else mine / captured),
        *(_figure(None if one is None else one / mine) for one in opacus),
        _figure(row["memory_over_plain"]),
    ]
    return f"| {network} | {size:,} | {arm} | {' | '.join(figures)} |"


def _seconds(arms: Mapping[str, Mapping[str, Any]], arm: str) -> float | None:
    found: float | None = arms[arm]["step_seconds"] if arm in arms else None
    return found


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
