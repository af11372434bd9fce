"""The tables of docs/tables/selection.md, from rows.

python -m reproduction.selection --write
"""

import re
import sys
from pathlib import Path
from typing import Any

from reproduction.base import Options
from reproduction.experiments.selection_grid import EXPERIMENT, points_of
from reproduction.experiments.selection_rule import EXPERIMENT as RULE
from reproduction.rows import read_rows
from reproduction.runner import look_up
from reproduction.selection_runs import CASES, EPSILONS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
GRID, RULES = RESULTS / "selection-grid.jsonl", RESULTS / f"{RULE.name}.jsonl"
ROWS = RESULTS / "selection_prototype.jsonl"  # of a simulator
PAGE = ROOT / "docs" / "tables" / "selection.md"
BLOCK = re.compile(r"(<!-- from the rows: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Row = dict[str, Any]


def table(head: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    rule = ["---"] * len(head)
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, rule, *lines])


def _shown(value: float | None, form: str = ".1f") -> str:
    return "–" if value is None else format(value, form)


def grid_rows() -> list[Row]:
    """Runs of the grid as it is: around the tuned rates, and with the present search."""
    return list(look_up(EXPERIMENT, GRID, Options(results=GRID.parent)).rows)


def summary(rows: list[Row]) -> list[Row]:
    """By case and epsilon: plain DP-SGD at the tuned rate and off it, DoG, and the gate block."""
    found = []
    for case in CASES.values():
        for epsilon in EPSILONS:
            plain = {p.value: p for p in points_of(rows, case.name, epsilon, "linear")}
            given = {p.value: p.mean for p in points_of(rows, case.name, epsilon, "block")}
            free = points_of(rows, case.name, epsilon, "block-free")
            dog = points_of(rows, case.name, epsilon, "dog")
            tuned = plain.get(0)
            off = [plain[start].mean for start in (-3, 3) if start in plain]
            far = [plain[start].mean for start in (-6, 6) if start in plain]
            found.append(
                {
                    "case": case.label,
                    "epsilon": epsilon,
                    "tuned": tuned,
                    "off by 8": min(off) if len(off) == 2 else None,
                    "off by 64": min(far) if len(far) == 2 else None,
                    "dog": dog[0].mean if dog else None,
                    "gate": free[0] if free else None,
                    "worst": min(given.values(), default=None),
                    "starts": len(given),
                    "against": free[0].mean - tuned.mean if free and tuned else None,
                    "worst against": min(given.values()) - tuned.mean if given and tuned else None,
                }
            )
    return found


def library() -> str:
    """The gate block beside plain DP-SGD."""
    head = ["data, network", "epsilon", "plain, tuned rate", "off by 8", "off by 64", "DoG"]
    head += ["gate block (runs)", "against tuned"]
    lines = []
    for row in summary(grid_rows()):
        tuned, gate = (
            "–" if p is None else f"{p.mean:.1f} ± {p.spread:.1f}"
            for p in (row["tuned"], row["gate"])
        )
        gate += "" if row["gate"] is None else f" ({row['gate'].seeds})"
        plain = [_shown(row[name]) for name in ("off by 8", "off by 64", "dog")]
        against = _shown(row["against"], "+.1f")
        lines.append([row["case"], str(row["epsilon"]), tuned, *plain, gate, against])
    return table(head, lines)


def rule() -> str:
    """The gate block with parts of its rule changed, on held-out records."""
    if not RULES.exists():
        return ""
    page, *_ = RULE.render(read_rows(RULES))
    text: str = page.text  # type: ignore[attr-defined]
    return "".join(line + "\n" for line in text.splitlines() if line.startswith("|"))


TABLES = {"library": library, "rule": rule}


def rendered(text: str) -> str:
    """The page with its tables drawn anew."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[4]}", text)


if __name__ == "__main__":
    new = rendered(PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
    else:
        print(new)
