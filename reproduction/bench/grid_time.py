"""How long grids of runs take, one run at a time.

    python -m reproduction.bench.grid_time OUT [--tasks TASK ...] [--methods METHOD ...]

Rows of results are made over several sittings by processes that share a GPU, so the seconds that
they state do not add up to anything. Here one run of every kind (records, method and batch) is
begun alone, its start and some of its trials are timed, and the figures are multiplied by the runs
and the trials that the rows of that kind count. A row for each kind is appended to OUT, and the sum
is printed. Reading records, computing their features and all evaluations are left out. What runs
take that share the GPU is measured by `grid_part.py`, which weighs them by these rows.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpsur.config import Intervals
from dpsur.mechanism.state import Verdict
from dpsur.mechanism.trial import Progress
from dpsur.privacy.plan import Plan
from dpsur.runs.fit import execute
from dpsur.runs.tasks import build_task_session
from reproduction.rows import provenance, read_rows
from reproduction.training import NEVER, device_name, loaded_records, task_run

RESULTS = Path(__file__).parents[2] / "results"
GRIDS = ("accuracy", "ablation", "robustness", "convergence", "iterates", "best")
# Trials between two looks at the clock.
BLOCK = 25
# Steps that are reported as they are made warm up during the first few, which belong to the start.
WARM_UP = 10
# Trials of one kind that are timed, or seconds after which a smaller number is enough.
MOST_TRIALS, MOST_SECONDS, ENOUGH_TRIALS = 200, 1.0, 60
Row = dict[str, Any]


class EnoughError(Exception):
    """Ends a run of which enough was timed."""


class Clock:
    """Times the start of a run, up to its first block or first few trials, and those after it."""

    def __init__(self) -> None:
        self.trials_at_first = self.trials_timed = 0
        self.seconds_to_start = self.seconds = 0.0
        self._since = time.perf_counter()

    def started(self, plan: Plan, progress: Progress) -> None:
        """Nothing was made yet."""

    def trials(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:  # noqa: ARG002
        """A block of trials is done, or a single one."""
        now = time.perf_counter()
        if not self.seconds_to_start:
            self.trials_at_first += len(verdicts)
            if self.trials_at_first >= WARM_UP:
                self.seconds_to_start, self._since = now - self._since, now
            return
        self.trials_timed += len(verdicts)
        self.seconds = now - self._since
        late = self.seconds > MOST_SECONDS and self.trials_timed >= ENOUGH_TRIALS
        if self.trials_timed >= MOST_TRIALS or late:
            raise EnoughError

    def evaluated(self, progress: Progress, scores: dict[str, float], epsilon: float) -> None:
        """Looks at the test set are not asked for."""


KIND = ("task", "features", "method", "tf32", "batch_size")


def kind_of(config: Row) -> tuple[Any, ...]:
    """What the time of a trial depends on, by and large, the records first."""
    known = {**config, "batch_size": config["options"].get("batch_size")}
    return tuple(known[name] for name in KIND)


def made_rows(tasks: Sequence[str] = ()) -> Iterator[tuple[str, Row]]:
    """Rows of all grids that were made, not copied, with the names of their grids."""
    for name in GRIDS:
        for row in read_rows(RESULTS / f"{name}.jsonl"):
            if (not tasks or row["config"]["task"] in tasks) and "copied_from" not in row:
                yield name, row


def kinds(
    tasks: Sequence[str] = (), methods: Sequence[str] = ()
) -> dict[tuple[Any, ...], list[Row]]:
    """Rows of all grids by their kind, those on the same records next to each other."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for _, row in made_rows(tasks):
        if not methods or row["config"]["method"] in methods:
            found[kind_of(row["config"])].append(row)
    return dict(sorted(found.items(), key=lambda item: tuple(map(str, item[0]))))


def timed(rows: Sequence[Row], device: str) -> Row:
    """What all of these runs would take one after the other, from a part of the first."""
    config = rows[0]["config"]
    records = loaded_records(config["task"], config["features"], config["hold_out"], device)
    clock = Clock()
    session = build_task_session(task_run(config, 0, device), records)
    pace = Intervals(checkpoint_every=BLOCK, evaluate_every=NEVER)
    with suppress(EnoughError):
        execute(replace(session, config=replace(session.config, intervals=pace)), observers=[clock])
    assert clock.trials_timed, f"no trial was timed of {config}"
    a_trial = clock.seconds / clock.trials_timed
    made = sum(row["trials"] for row in rows)
    others = max(0, made - len(rows) * clock.trials_at_first)  # than those of the start
    return {
        "experiment": "grid-time",
        "config": dict(zip(KIND, kind_of(config), strict=True)),
        "device": device_name(session.streams.device),
        "seconds_to_start": round(clock.seconds_to_start, 3),
        "seconds_a_trial": a_trial,
        "trials_timed": clock.trials_timed,
        "runs": len(rows),
        "trials": made,
        "seconds": round(len(rows) * clock.seconds_to_start + others * a_trial, 1),
        **provenance(),
    }


def main() -> None:
    """Time every kind, append its row, and print the sum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--methods", nargs="*", default=[])
    given = parser.parse_args()
    total = 0.0
    for kind, rows in kinds(given.tasks, given.methods).items():
        row = timed(rows, "auto")
        total += row["seconds"]
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            *kind, f"{1e3 * row['seconds_a_trial']:.2f} ms a trial, {row['seconds']:.0f} s in all"
        )
    print(f"{total / 60:.1f} minutes")


if __name__ == "__main__":
    main()
