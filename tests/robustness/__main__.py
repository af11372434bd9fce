"""Look for inputs, moments and faults that `dpsur` does not survive.

  python -m tests.robustness                      the long version (`make soak`)
  python -m tests.robustness --short              the version that `make test` runs
  python -m tests.robustness --family options --case 17      one case again
  python -m tests.robustness --render             the page from the rows that are there

The exit status is 1 where anything failed. Rows go to results/soak.jsonl, and the table of
docs/tables/reliability.md is rendered from them.
"""

import argparse
import datetime
import json
import os
import pickle
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from tests.robustness import cases, crashes
from tests.robustness.cases import FAMILIES, Site, build_site, run_case
from tests.robustness.harness import FAILURES, Fault, import_everything, scratch_folder

ROOT = Path(__file__).parent.parent.parent
ROWS, PAGE = ROOT / "results" / "soak.jsonl", ROOT / "docs" / "tables" / "reliability.md"
BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"

Item = TypeVar("Item")
Result = TypeVar("Result")
Row = dict[str, Any]


@dataclass(frozen=True)
class Amount:
    """How much is tried. `every` takes each nth of the operations on files."""

    cases: dict[str, int]
    every: int
    kills: int
    interruptions: tuple[int, int]
    streams: Sequence[str]
    releases: tuple[str, ...] = tuple(cases.RELEASES)


LONG = Amount(
    cases={"statement": 1500, "release": 1150, "run folder": 450, "records": 450,
           "data sets": 700, "caches": 50, "options": 700},
    every=1, kills=100, interruptions=(40, 12),
    streams=("proof", "error", "train"),
)  # fmt: skip
SHORT = Amount(
    cases={"statement": 40, "release": 30, "run folder": 15, "records": 15, "data sets": 20,
           "caches": 4, "options": 15},
    every=25, kills=3, interruptions=(2, 1), streams=("proof",),
    releases=("coin", "plain", "statistics"),
)  # fmt: skip


@dataclass
class Soak:
    """Makes the rows, section by section."""

    site: Site
    seed: int
    jobs: int
    rows: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)

    def controls(self) -> None:
        """Faults put in on purpose must be reported as what they are."""
        started = time.perf_counter()
        found = list(crashes.controls(self.site))
        missed = [(name, expected, fault) for name, expected, fault in found
                  if fault is None or fault.kind != expected]  # fmt: skip
        for name, expected, fault in missed:
            got = "nothing" if fault is None else f"{fault.kind}: {fault.text}"
            self._fail("controls", name, Fault("missed", f"expected {expected}, found {got}"))
        self._add("controls", "faults put in on purpose", started, cases=len(found),
                  found=len(found) - len(missed))  # fmt: skip

    def mutations(self, family: str, count: int) -> None:
        """Damaged inputs of one kind."""
        started = time.perf_counter()
        reports = in_parallel(
            self.jobs, range(count), lambda n: run_case(self.site, family, self.seed, n)
        )
        kinds = Counter(report.fault.kind for report in reports if report.fault)
        for number, report in enumerate(reports):
            if report.fault is not None:
                again = f"--seed {self.seed} --family '{family}' --case {number}"
                self._fail("mutated inputs", f"{again}: {report.what}", report.fault)
        statuses = [report.outcome.status for report in reports]
        self._add(
            "mutated inputs", family, started, cases=count,
            completed=sum(status == 0 for status in statuses),
            refused=sum(status in {1, 2, 3} for status in statuses),
            **{kind: kinds[kind] for kind in FAILURES},
        )  # fmt: skip

    def deaths(self, every: int) -> None:
        """Death at every operation on files."""
        points = crashes.crash_points(self.site, reads=False, kinds=crashes.DEATHS)[::every]
        self._endings("crash points", points, crashes.death_at)

    def errors(self, every: int) -> None:
        """An error at every operation on files."""
        kinds = crashes.ERRORS
        points = [
            point
            for i, point in enumerate(crashes.crash_points(self.site, reads=True, kinds=kinds))
            if i % len(kinds) == i // len(kinds) % len(kinds)  # one error each, in turn
        ][::every]
        self._endings("failing operations", points, crashes.error_at)

    def _endings(
        self,
        section: str,
        points: list[crashes.Point],
        work: Callable[[crashes.Point, Site], crashes.Ending],
    ) -> None:
        for resumed in (False, True):
            started = time.perf_counter()
            chosen = [point for point in points if point.resumed is resumed]
            endings = in_parallel(self.jobs, chosen, lambda point: work(point, self.site))
            self._count(section, "a resumed run" if resumed else "a new run", started, endings)

    def kills(self, count: int) -> None:
        """SIGKILL at random moments, until there were so many."""
        started = time.perf_counter()
        duration = crashes.timed_run(self.site)
        endings: list[crashes.Ending] = []
        while sum(ending.kills for ending in endings) < count:
            numbers = range(len(endings), len(endings) + 5 * self.jobs)
            endings += in_parallel(
                self.jobs,
                numbers,
                lambda n: crashes.killed_run(
                    self.site, Random(f"{self.seed} kill {n}"), n, duration
                ),
            )
        kills = sum(ending.kills for ending in endings)
        self._count("kills", "SIGKILL at random moments", started, endings, kills=kills)

    def interruptions(self, count: int, processes: int) -> None:
        """Ctrl-C at random moments of a run, and of a process from its very start."""
        started = time.perf_counter()
        duration = crashes.timed_run(self.site)
        endings = in_parallel(
            self.jobs,
            range(count + processes),
            lambda n: (
                crashes.interrupted_run(self.site, Random(f"{self.seed} stop {n}"), n, duration)
                if n < count
                else crashes.interrupted_process(self.site, Random(f"{self.seed} stop {n}"), n)
            ),
        )
        self._count("interruptions", "Ctrl-C at random moments", started, endings)

    def streams(self, names: Sequence[str]) -> None:
        """Streams that are closed, broken or full, another locale, no home folder."""
        started = time.perf_counter()
        pairs = [(name, stream) for name in names for stream in crashes.STREAMS]
        endings = in_parallel(self.jobs, pairs, lambda pair: crashes.with_stream(*pair, self.site))
        self._count("streams", ", ".join(names), started, endings)

    def _count(
        self,
        section: str,
        name: str,
        started: float,
        endings: Sequence[crashes.Ending],
        **more: int,
    ) -> None:
        for ending in endings:
            if ending.fault is not None:
                self._fail(section, ending.what, ending.fault)
        good = [ending for ending in endings if ending.fault is None]
        continued = sum(ending.continued for ending in good)
        self._add(
            section, name, started, cases=len(endings), continued=continued,
            restarted=len(good) - continued, failed=len(endings) - len(good), **more,
        )  # fmt: skip

    def _fail(self, section: str, what: str, fault: Fault) -> None:
        row = {"section": "failure", "of": section, "what": what, "kind": fault.kind,
               "text": fault.text[:1000]}  # fmt: skip
        self.failures.append(row)
        print(f"FAILED {section}: {what[:300]}\n    {fault.kind}: {fault.text[:600]}", flush=True)

    def _add(self, section: str, name: str, started: float, **figures: int) -> None:
        seconds = round(time.perf_counter() - started, 1)
        row = {"section": section, "name": name, **figures, "seconds": seconds}
        self.rows.append(row)
        print(json.dumps(row), flush=True)


def in_parallel(jobs: int, items: Sequence[Item], work: Callable[[Item], Result]) -> list[Result]:
    """Apply to every item, in forked processes; the results in the order of the items."""
    if jobs == 1:
        return [work(item) for item in items]
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for job in range(jobs):
            sys.stdout.flush()
            child = os.fork()
            if not child:
                try:
                    results = [work(item) for item in items[job::jobs]]
                    Path(folder, str(job)).write_bytes(pickle.dumps(results))
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        parts = [pickle.loads(Path(folder, str(job)).read_bytes()) for job in range(jobs)]
    results = [None] * len(items)
    for job, part in enumerate(parts):
        results[job::jobs] = part
    return results  # type: ignore[return-value]


def soak(amount: Amount, seed: int, jobs: int) -> list[Row]:
    """Everything, as rows: first where and when, then the figures, then what failed."""
    started = time.perf_counter()
    import_everything()
    with scratch_folder() as folder:
        run = Soak(build_site(folder, amount.releases), seed, jobs)
        run.controls()
        for family, count in amount.cases.items():
            run.mutations(family, count)
        run.deaths(amount.every)
        run.errors(amount.every)
        run.kills(amount.kills)
        run.interruptions(*amount.interruptions)
        run.streams(amount.streams)
    about = {
        "section": "soak",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "seed": seed,
        "jobs": jobs,
        "seconds": round(time.perf_counter() - started),
    }
    return [about, *run.rows, *run.failures]


def _commit() -> str | None:
    asked = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return asked.stdout.strip() or None


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def render(rows: Sequence[Row]) -> str:
    """The tables of the page."""
    (about,) = [row for row in rows if row["section"] == "soak"]
    of: Callable[[str], list[Row]] = lambda section: [  # noqa: E731
        row for row in rows if row["section"] == section
    ]
    mutated = of("mutated inputs")
    lines = [
        f"Seed {about['seed']}, {about['seconds'] // 60} minutes with {about['jobs']} "
        f"{'process' if about['jobs'] == 1 else 'processes'}, Python {about['python']}, torch "
        f"{about['torch']}, commit {about['commit']}, {about['date']}.",
        "",
        "| mutated inputs | cases | refused | completed | stopped | tracebacks | crashes | hangs | "
        "unclear errors | wrong guarantees |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    columns = ("cases", "refused", "completed", "stopped", *FAILURES)
    for row in mutated:  # what is left is commands that worked on when their time was over
        row["stopped"] = row["cases"] - sum(row[key] for key in ("refused", "completed", *FAILURES))
    total = {key: sum(row[key] for row in mutated) for key in columns}
    for row in (*mutated, {"name": "**all**", **total}):
        lines.append(f"| {row['name']} | {' | '.join(f'{row[key]:,}' for key in columns)} |")
    lines += [
        "",
        "| faults | cases | continued | restarted | failed |",
        "|---|--:|--:|--:|--:|",
    ]
    titles = {
        "crash points": "death at an operation on files",
        "failing operations": "an error at an operation on files",
        "kills": "",
        "interruptions": "",
        "streams": "streams, locale, home folder",
    }
    for section, title in titles.items():
        for row in of(section):
            name = f"{title}: {row['name']}"
            if section == "kills":
                name = f"{row['kills']} SIGKILLs at random moments of runs"
            elif section == "interruptions":
                name = row["name"]
            figures = (f"{row[key]:,}" for key in ("cases", "continued", "restarted", "failed"))
            lines.append(f"| {name} | {' | '.join(figures)} |")
    (controls,) = of("controls")
    lines += [
        "",
        f"Faults put in on purpose that were found: {controls['found']} of {controls['cases']}.",
    ]
    return "\n".join(lines)


def rendered(page: str, rows: Sequence[Row]) -> str:
    """The page with the tables of these rows."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{render(rows)}\n{END}", page)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.robustness", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--short", action="store_true", help="the version of `make test`")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--family", choices=FAMILIES, help="cases of this kind only")
    parser.add_argument("--case", type=int, help="this case of the family only")
    parser.add_argument("--count", type=int, default=100, help="cases of the family")
    parser.add_argument(
        "--rows", type=Path, help="where the rows go (default: results/soak.jsonl; short: nowhere)"
    )
    parser.add_argument("--render", action="store_true", help="only render the page")
    options = parser.parse_args()
    if options.family is not None:
        return _family(options)
    path = options.rows or (None if options.short else ROWS)
    if options.render:
        rows = read_rows(ROWS)
    else:
        rows = soak(SHORT if options.short else LONG, options.seed, options.jobs)
        if path is not None:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if path == ROWS:
        PAGE.write_text(rendered(PAGE.read_text(), rows))
    return int(any(row["section"] == "failure" for row in rows))


def _family(options: argparse.Namespace) -> int:
    import_everything()
    with scratch_folder() as folder:
        run = Soak(build_site(folder), options.seed, options.jobs)
        if options.case is None:
            run.mutations(options.family, options.count)
            return int(bool(run.failures))
        report = run_case(run.site, options.family, options.seed, options.case)
    print(f"{report.what}\nstatus {report.outcome.status}, {report.outcome.seconds:.2f} s")
    print(report.outcome.stdout[-3000:], report.outcome.stderr[-6000:], sep="\n")
    print("FAULT:", report.fault)
    return int(report.fault is not None)


if __name__ == "__main__":
    sys.exit(main())
