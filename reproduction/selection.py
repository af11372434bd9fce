"""The tables of docs/selection.md, from the rows of the simulator that the rule was found with.

python -m reproduction.selection --write
"""

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "results" / "selection_prototype.jsonl"
PAGE = ROOT / "docs" / "selection.md"
BLOCK = re.compile(r"(<!-- from the rows: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TASKS = (
    "scat-lin", "mlp", "cnn", "mnist-lin", "mnist-cnn", "imdb-lin", "imdb-mlp", "imdb-tr",
)  # fmt: skip
STARTS = {-6: "1/64", -3: "1/8", 0: "1", 3: "8", 6: "64"}
CLIPS = {1 / 16: "1/16", 1 / 4: "1/4", 1: "1", 4: "4", 16: "16"}
FIRST_FORM = "first form, 0.71"
WIDE, WIDE_BEFORE = "wide", "wide without the 0.15 line, noise share"
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


def wide() -> str:
    """Searches around a starting rate: the first form, and the wide search."""
    head = ["task, epsilon", "search", *(f"x {name}" for name in STARTS.values())]
    lines = []
    for name, found in cells(rows()):
        for form in (FIRST_FORM, WIDE_BEFORE, WIDE):
            if any(row["form"] == form for row in found):
                lines.append([name, form, *(mean(select(found, form, start)) for start in STARTS)])
    return table(head, lines)


def clip() -> str:
    """The first form with a clipping norm that is off by a factor."""
    head = ["task, epsilon", *(f"x {name}" for name in CLIPS.values())]
    lines = [
        [name, *(mean(select(found, FIRST_FORM, clip=factor)) for factor in CLIPS)]
        for name, found in cells(rows())
        if any(row.get("clip_off_by", 1) != 1 for row in found)
    ]
    return table(head, lines)


def _grid(found: list[Row], clip: float) -> dict[float, float]:
    """Accuracy by rate of plain DP-SGD with linear decay, at a clipping norm."""
    return {
        row["rate"]: row["held_out"]
        for row in found
        if row["form"] == "grid, linear decay" and row["clip"] == clip
    }


def grid() -> str:
    """Plain DP-SGD with other clipping norms: the tuned rate kept, and the best for that norm."""
    head = ["task, epsilon", *(f"C = {name}" for name in CLIPS.values())]
    lines = []
    for name, found in cells(rows()):
        plain = _grid(found, 1)
        others = {factor: _grid(found, factor) for factor in CLIPS if factor != 1}
        if not plain or not all(others.values()):
            continue
        tuned = max(plain, key=plain.__getitem__)
        line = [name]
        for factor in CLIPS:
            known = others.get(factor, plain)
            kept = f"{known[tuned]:.1f}" if tuned in known else "–"
            line.append(f"{kept} / {max(known.values()):.1f}")
        lines.append(line)
    return table(head, lines)


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


TABLES = {"short": short, "wide": wide, "clip": clip, "grid": grid, "product": product}


def rendered(text: str) -> str:
    """The page with its tables drawn anew."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[4]}", text)


if __name__ == "__main__":
    new = rendered(PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
    else:
        print(new)
