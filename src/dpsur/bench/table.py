"""A row as a line of text."""

from collections.abc import Mapping
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
