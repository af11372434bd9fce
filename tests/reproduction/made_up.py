"""Rows as runs would make them, without the runs."""

from reproduction.base import Options
from reproduction.runner import Filled, render

FIGURES = {
    "loss": 0.5,
    "updates": 10,
    "trials": 20,
    "epsilon": {"proven": 2.0, "published": 1.0, "proven_lower": 1.9, "every_trial": None},
    "seconds": 0.1,
    "device": "cpu",
}


def made_up(experiment, accuracy_of, **more):
    """A row for every cell, its accuracy a function of configuration and seed."""
    return [
        {**cell, **FIGURES, "accuracy": accuracy_of(cell["config"], cell["seed"]), **more}
        for cell in experiment.cells(Options())
    ]


def check_every_part_renders(experiment, rows, tmp_path):
    """The whole, one row, one seed, one arm, and every other row."""
    arms = {row["config"]["arm"] for row in rows}
    parts = [rows, rows[:1], rows[-1:], rows[::2], [row for row in rows if row["seed"] == 1]]
    parts += [[row for row in rows if row["config"]["arm"] == arm] for arm in sorted(arms)]
    for index, part in enumerate(parts):
        missing = [{}] if len(part) < len(rows) else []
        written = render(experiment, Filled(part, missing), tmp_path / str(index))
        assert written
        assert all(path.stat().st_size > 0 for path in written)
