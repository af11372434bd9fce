"""The tables of docs/selection.md: the library's rows, and those of a simulator.

The rule was found with the simulator.

python -m reproduction.selection --write
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from reproduction.experiments.selection_grid import points_of
from reproduction.experiments.selection_tuning import by_rate
from reproduction.rows import read_rows
from reproduction.selection_runs import CASES, EPSILONS

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "results" / "selection_prototype.jsonl"
PAGE = ROOT / "docs" / "selection.md"
BLOCK = re.compile(r"(<!-- from the rows: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TASKS = (
    "scat-lin", "mlp", "cnn", "mnist-lin", "mnist-cnn", "imdb-lin", "imdb-mlp", "imdb-tr",
)  # fmt: skip
STARTS = {-6: "1/64", -3: "1/8", 0: "1", 3: "8", 6: "64"}
GRID = ROOT / "results" / "selection-grid.jsonl"
FIRST_SEARCH = ROOT / "results" / "selection_earlier_searches.jsonl"
TUNING = ROOT / "results" / "selection-tuning.jsonl"
Row = dict[str, Any]


def rows() -> list[Row]:
    """All runs of the simulator."""
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def mean(found: list[Row], key: str = "held_out", *, count: bool = False) -> str:
    """A mean accuracy in percent; a dash where there is no run."""
    if not found:
        return "–"
    text = f"{statistics.fmean(row[key] for row in found):.1f}"
    return f"{text} ({len(found)})" if count else text


def select(found: list[Row], form: str, start: int = 0, clip: float = 1) -> list[Row]:
    """Runs of a form from a starting rate, with the clipping norm off by a factor."""
    return [
        row
        for row in found
        if row["form"] == form
        and row.get("start_octaves") == start
        and row.get("clip_off_by", 1) == clip
        and row.get("median_over", 8) == 8
    ]


def cells(found: list[Row]) -> list[tuple[str, list[Row]]]:
    """Runs by task and epsilon, with the name of the line."""
    return [
        (f"{task}, {epsilon}", [r for r in found if (r["task"], r["epsilon"]) == (task, epsilon)])
        for task in TASKS
        for epsilon in (1, 3)
    ]


def table(head: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    rule = ["---"] * len(head)
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, rule, *lines])


def short() -> str:
    """The short search beside plain DP-SGD with linear decay from right and wrong rates."""
    head = ["task, epsilon", *(f"x {name}" for name in STARTS.values()), "DoG", "short (runs)"]
    head += ["test: x 1", "test: short"]
    lines = []
    for name, found in cells(rows()):
        plain = [mean(select(found, "linear decay", start)) for start in STARTS]
        dog = [row for row in found if row["form"] == "DoG"]
        chosen, tuned = select(found, "short"), select(found, "linear decay")
        line = [name, *plain, mean(dog), mean(chosen, count=True)]
        lines.append([*line, mean(tuned, "test"), mean(chosen, "test")])
    return table(head, lines)


def _grid(found: list[Row], clip: float) -> dict[float, float]:
    """Accuracy by rate of plain DP-SGD with linear decay, at a clipping norm."""
    return {
        row["rate"]: row["held_out"]
        for row in found
        if row["form"] == "grid, linear decay" and row["clip"] == clip
    }


def product() -> str:
    """Linear decay at one product of rate and clipping norm for all, beside the best of a grid."""
    head = ["task, epsilon", "best", "rate times C = 4", "8", "16"]
    lines = []
    for name, found in cells(rows()):
        known = _grid(found, 1)
        if {4.0, 8.0, 16.0} & known.keys() and not name.startswith("imdb-tr"):
            at = [f"{known[rate]:.1f}" if rate in known else "–" for rate in (4.0, 8.0, 16.0)]
            lines.append([name, f"{max(known.values()):.1f}", *at])
    return table(head, lines)


def library() -> str:
    """The gate block beside plain DP-SGD with linear decay, from the library's own rows."""
    head = ["data, network", "epsilon", *(f"x {name}" for name in STARTS.values())]
    head += ["gate block", "rate given: worst", "against the best"]
    found = read_rows(GRID) if GRID.exists() else []
    tried = by_rate(read_rows(TUNING) if TUNING.exists() else [])
    lines = []
    for case in CASES.values():
        for epsilon in EPSILONS:
            plain = {p.value: p.mean for p in points_of(found, case.name, epsilon, "linear")}
            if not plain:
                continue
            free = points_of(found, case.name, epsilon, "block-free")
            given = points_of(found, case.name, epsilon, "block")
            whole = len(tried.get((case.name, epsilon), ())) > 3
            tuned = "" if whole else " *"
            line = [f"{case.label}{tuned}", str(epsilon)]
            line += [f"{plain[start]:.1f}" if start in plain else "–" for start in STARTS]
            line.append(f"{free[0].mean:.1f} ({free[0].seeds})" if free else "–")
            line.append(f"{min(p.mean for p in given):.1f}" if given else "–")
            line.append(f"{free[0].mean - max(plain.values()):+.1f}" if free else "–")
            lines.append(line)
    return table(head, lines)


def first() -> str:
    """The gate block with a rate given, in the first form of its search."""
    head = ["data, network", "epsilon", *(f"x {name}" for name in STARTS.values()), "runs"]
    found, lines = read_rows(FIRST_SEARCH), []
    for case in CASES.values():
        for epsilon in EPSILONS:
            points = points_of(found, case.name, epsilon, "block")
            if points:
                means = [f"{point.mean:.1f}" for point in points]
                runs = sum(point.seeds for point in points)
                lines.append([case.label, str(epsilon), *means, str(runs)])
    return table(head, lines)


TABLES = {"library": library, "first": first, "short": short, "product": product}


def rendered(text: str) -> str:
    """The page with its tables drawn anew."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[4]}", text)


if __name__ == "__main__":
    new = rendered(PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
    else:
        print(new)
