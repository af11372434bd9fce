"""Tables inside the pages, written from the rows of `results/` and from declarations.

    python -m reproduction.page_tables            print the lines that differ from the rows
    python -m reproduction.page_tables --write    write the tables into the pages

A table is found by the comment above it. Sentences are nobody's business here: figures that can
change stand in tables.
"""

import difflib
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from reproduction import options_table, simulated_heads
from reproduction.artifacts import Column, Table
from reproduction.bench import cpu_loops, data_path, loops, network_grid
from reproduction.bench.report import markdown as bench_table
from reproduction.experiments import heads, sixteen
from reproduction.experiments.accuracy import paper_accuracy, summary
from reproduction.experiments.accuracy_pages import DATA_SETS, TOLERANCE, short_table
from reproduction.experiments.robustness import RATES
from reproduction.series import Point, series

Row = Mapping[str, Any]
ROOT = Path(__file__).parent.parent
BUDGETS = (1, 2, 3, 4)
KINDS = {
    "every trial charged": ("every-trial", "constant"),
    "Algorithm 1, proven": ("proven", "constant"),
    "DP-SGD": ("dpsgd-hf", "constant"),
    "DP-SGD, rate decaying": ("dpsgd-hf", "linear"),
}
NAMES = (
    "reproduction.md",
    "tables/compared.md",
    "benchmarks.md",
    "tables/speed.md",
    "results.md",
    "tables/features.md",
    "api.md",
)
PAGES = tuple(ROOT / "docs" / name for name in NAMES)
_BLOCK = re.compile(r"<!-- (\S.*?) -->\n(.*?)\n<!-- end -->", re.DOTALL)


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of an experiment."""
    path = ROOT / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


FOUND = {(r["task"], r["arm"], r["epsilon"]): r for r in summary(rows_of("accuracy"))}


def written(page: Path) -> str:
    """A page with the tables of the rows."""
    text = page.read_text(encoding="utf-8")
    marked = marked_tables()
    return _BLOCK.sub(lambda found: f"<!-- {found[1]} -->\n{marked[found[1]]}\n<!-- end -->", text)


def marked_tables() -> dict[str, str]:
    """Tables by the comment that stands above each."""
    networks = ("bench_networks_gpu", "bench_networks_cpu", "bench_families_gpu")
    return {
        **{_comment(name): bench_table(rows_of(name)) for name in ("bench_gpu", "bench_cpu")},
        **{_comment(name): network_grid.markdown(rows_of(name)) for name in networks},
        _comment("bench_loops_gpu"): loops.markdown(rows_of("bench_loops_gpu")),
        _comment("bench_loops_cpu"): cpu_loops.markdown(rows_of("bench_loops_cpu")),
        "data path": data_path.markdown(rows_of("bench_networks_gpu")),
        "sixteen cells": sixteen.short_table(rows_of("accuracy"), paper_accuracy()),
        _comment("bench_cpu_others"): _other_arms(),
        _comment("heads"): heads.table({**heads.of_auto(rows_of("heads")), **heads.of_others()}),
        _comment(simulated_heads.ROWS.stem): simulated_heads.table(),
        "options of a run": options_table.options(),
        "accuracy in short": short_table(list(FOUND.values()), paper_accuracy()).markdown(),
        "controls": _headed(
            "arm, momentum of rejected steps, accepted by, Fashion-MNIST, MNIST, CIFAR-10",
            _controls(),
        ),
        "rates": _headed(
            "best of seven rates on Fashion-MNIST, at epsilon 1, at epsilon 3, worst at epsilon 1, "
            "worst at epsilon 3",
            _best_and_worst_of_rates(),
        ),
        "DPAGD": _headed("data set, 1, 2, 3, 4, the paper's at 1 to 4", _beside_the_paper("dpagd")),
        "DPIS": _headed("data set, DPIS, DP-SGD, the paper's DPIS", _dpis_at_three()),
    }


def _other_arms() -> str:
    """Every arm over plain PyTorch, of networks that only a CPU has measured."""
    arms = ("dpsgd", "dpsur", "opacus-hooks", "opacus-ghost", "vmap", "loop")
    cells: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows_of("bench_cpu_others"):
        name = row["network"], row["batch_size"]
        named = {"network": name[0], "batch_size": name[1], **dict.fromkeys(arms)}
        cells.setdefault(name, named)[row["arm"]] = row["time_over_plain"]
    columns = [Column("network", "network"), Column("batch", "batch_size", ",")]
    return Table([*columns, *(Column(a, a, ".2f") for a in arms)], list(cells.values())).markdown()


def _comment(name: str) -> str:
    return f"results/{name}.jsonl"


def _headed(head: str, lines: Iterable[str]) -> str:
    """A table whose head is a list of words."""
    words = head.split(", ")
    return "\n".join([_line(*words), _line(*["---"] * len(words)), *lines])


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _measured(record: Row) -> str:
    return f"{record['mean']:.2f} ± {record['spread']:.2f}"


def _controls() -> Iterator[str]:
    """What is kept of rejected steps against how candidates are accepted, at epsilon 1."""
    arms = {
        "released-code": ("the released code", "kept", "the noisy test, with its faults"),
        "kept-momentum": ("kept momentum", "kept", "the noisy test as printed"),
        "random-kept": ("a coin, kept momentum", "kept", "a coin that ignores the model"),
        "published": ("Algorithm 1", "restored", "the noisy test as printed"),
        "random": ("a coin", "restored", "a coin that ignores the model"),
    }
    tasks = ("fmnist", "mnist", "cifar10")
    for task in tasks:
        records = [FOUND[task, arm, 1] for arm in arms]
        means = [record["mean"] for record in records]
        spread = max(record["spread"] for record in records)
        kept, restored = means[:3], means[3:]
        assert restored[0] < restored[1] + spread  # "the test does no better than the coin"
        assert min(kept) - max(restored) > spread
        if task != "cifar10":  # "With these gradients a coin does as well as the test"
            assert max(kept) - min(kept) < spread
            assert abs(records[2]["difference"]) < TOLERANCE
    for arm, words in arms.items():
        yield _line(*words, *(_measured(FOUND[task, arm, 1]) for task in tasks))


def _best_and_worst_of_rates() -> Iterator[str]:
    curves = rate_curves()
    for name, kind in KINDS.items():
        ends = [[point.mean for point in curves[e, kind]] for e in (1, 3)]
        yield _line(name, *shown(".2f", [*map(max, ends), *map(min, ends)]))


def _beside_the_paper(arm: str) -> Iterator[str]:
    for task, name in DATA_SETS.items():
        records = [FOUND[task, arm, e] for e in BUDGETS]
        paper = ", ".join(shown(".2f", (record["paper"] for record in records)))
        yield _line(name, *shown(".2f", (record["mean"] for record in records)), paper)


def _dpis_at_three() -> Iterator[str]:
    for task, name in DATA_SETS.items():
        plain, dpis = (
            FOUND[task, "dpsgd" if task == "imdb" else "dpsgd-hf", 3],
            FOUND[task, "dpis", 3],
        )
        yield _line(name, _measured(dpis), _measured(plain), f"{dpis['paper']:.2f}")


def shown(form: str, values: Iterable[float]) -> tuple[str, ...]:
    """Figures as they are written."""
    return tuple(format(value, form) for value in values)


@cache
def rate_curves() -> dict[tuple[int, tuple[str, str]], list[Point]]:
    """Accuracy against the learning rate, by epsilon and by arm and schedule."""
    curves = {}
    for epsilon, kind in itertools.product((1, 3), KINDS.values()):
        chosen = [r for r in rows_of("robustness") if _kind(r) == kind]
        chosen = [r for r in chosen if r["config"]["epsilon"] == epsilon]
        pairs = ((r["config"]["options"]["learning_rate"], r["accuracy"]) for r in chosen)
        curves[epsilon, kind] = series(pairs)
        assert len(curves[epsilon, kind]) == len(RATES) == 7  # "best of seven rates"
    return curves


def _kind(row: Row) -> tuple[str, str]:
    return row["config"]["arm"], row["config"]["options"]["schedule"]


def main() -> int:
    """Print the lines that differ from the rows, and write them if asked to."""
    for page in PAGES:
        before, text = page.read_text(encoding="utf-8"), written(page)
        for line in difflib.unified_diff(before.splitlines(), text.splitlines(), n=0, lineterm=""):
            if line[:1] in "+-" and line[:3] not in ("+++", "---"):
                print(line)
        if "--write" in sys.argv[1:]:
            page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
