"""Figures in the text of docs/reproduction.md and its details, written from the rows.

Tables of docs/benchmarks.md and docs/overview.md are written as well.

    python -m reproduction.page_figures            say which figures differ from the rows
    python -m reproduction.page_figures --write    and write them into the pages

A claim is the pattern of a sentence and the figures that the rows give for it. A line of a table is
found by how it begins. What is said in words is asserted beside the claim: if an assertion fails,
the sentence has to be written anew.
"""

import difflib
import re
import sys
from collections.abc import Iterator

from reproduction.bench import data_path, loops, network_grid
from reproduction.bench.report import markdown as bench_table
from reproduction.experiments.accuracy import paper_accuracy
from reproduction.experiments.accuracy_pages import short_table
from reproduction.page_figures import (
    attack_claims,
    comparison_claims,
    dpagd_and_dpis_claims,
    dpsur_claims,
    method_claims,
    setting_claims,
)
from reproduction.page_figures.records import FOUND, NUMBER, ROOT, Claim, demo, rows_of, shown
from reproduction.page_figures.tables import tables

PAGES = tuple(ROOT / "docs" / name for name in ("reproduction.md", "reproduction_details.md"))
# Names, and budgets that a sentence is about; everything else with a digit is a finding.
NOT_FINDINGS = (
    r"\]\([^)]*\)",
    r"`[^`]*`",
    r"Algorithm 1",
    r"CIFAR-10",
    r"NVIDIA H200",
    r"at epsilon (?:1, 2, 3 and 4|1, 2 and [34]|1, 3 and 4|2, 3 and 4|2 and 4|1 and [23])",
    r"(?:[Aa]t|to|of) (?:a proven )?epsilon (?:of )?\d\b",
    r"beta = -1",
    r"a threshold of -1",
)


def claims() -> Iterator[Claim]:
    """Patterns of sentences, and the figures that the rows give for them."""
    parts = (
        *(dpsur_claims, comparison_claims, method_claims),
        *(dpagd_and_dpis_claims, setting_claims, attack_claims),
    )
    for part in parts:
        yield from part.claims()
    yield (
        rf"DPSUR reaches {NUMBER} and plain DP-SGD {NUMBER}",
        shown(".1f", (demo("dpsur, proven"), demo("dpsgd"))),
    )
    ratios = dpsur_claims.trials_per_update()
    yield rf"makes {NUMBER} to {NUMBER} trials", shown(".1f", (min(ratios), max(ratios)))


def written(text: str) -> str:
    """The text of the pages with the figures of the rows."""
    for pattern, figures in claims():
        found = list(re.finditer(_over_lines(pattern), text))
        assert len(found) == 1, f"{pattern} should be said once, and is {len(found)} times"
        (match,) = found
        for group in reversed(range(1, len(figures) + 1)):
            start, end = match.span(group)
            text = text[:start] + figures[group - 1] + text[end:]
    for header, lines in tables():
        before, found_header, after = text.partition(f"{header}\n")
        assert found_header, f"no table is headed {header}"
        rule, rest = after.split("\n", 1)
        while rest.startswith("|"):
            rest = rest.split("\n", 1)[1]
        text = before + found_header + "\n".join([rule, *lines]) + "\n" + rest
    return text


def _over_lines(pattern: str) -> str:
    """The same pattern for text that is broken into lines."""
    return pattern.replace(" ", r"\s+")


def unchecked(text: str) -> list[str]:
    """Figures in sentences that no claim covers."""
    lines = (line for line in text.splitlines() if not line.startswith("|"))
    prose = " ".join(" ".join(lines).split())
    for pattern in (*(pattern for pattern, _ in claims()), *NOT_FINDINGS):
        prose = re.sub(pattern, "", prose)
    return re.findall(r"[^ ]*\d[^ ]*", prose)


# Pages with tables between comments.
MARKED = tuple(ROOT / "docs" / name for name in ("benchmarks.md", "overview.md"))
_BLOCK = re.compile(r"<!-- (\S.*?) -->\n(.*?)\n<!-- end -->", re.DOTALL)


def marked_tables() -> dict[str, str]:
    """Tables by the comment that stands above each."""
    networks = ("bench_networks_gpu", "bench_networks_cpu", "bench_families_gpu")
    return {
        **{_rows_comment(name): bench_table(rows_of(name)) for name in ("bench_gpu", "bench_cpu")},
        **{_rows_comment(name): network_grid.markdown(rows_of(name)) for name in networks},
        _rows_comment("bench_loops_gpu"): loops.markdown(rows_of("bench_loops_gpu")),
        "data path": data_path.markdown(rows_of("bench_networks_gpu")),
        "accuracy in short": short_table(list(FOUND.values()), paper_accuracy()).markdown(),
    }


def _rows_comment(name: str) -> str:
    return f"results/{name}.jsonl"


def written_tables(text: str) -> str:
    """A page with the tables of the rows."""
    tables = marked_tables()
    return _BLOCK.sub(lambda found: f"<!-- {found[1]} -->\n{tables[found[1]]}\n<!-- end -->", text)


# Stands between two pages that are worked on as one text.
_BORDER = "\n\f\n"


def pages() -> str:
    """Both pages as one text."""
    return _BORDER.join(page.read_text(encoding="utf-8") for page in PAGES)


def main() -> int:
    """Print the lines that differ from the rows, and write them if asked to."""
    found = dict(zip(PAGES, written(pages()).split(_BORDER), strict=True))
    found |= {page: written_tables(page.read_text(encoding="utf-8")) for page in MARKED}
    for page, text in found.items():
        before = page.read_text(encoding="utf-8")
        for line in difflib.unified_diff(before.splitlines(), text.splitlines(), n=0, lineterm=""):
            if line[:1] in "+-" and line[:3] not in ("+++", "---"):
                print(line)
        if "--write" in sys.argv[1:]:
            page.write_text(text, encoding="utf-8")
    return 0
