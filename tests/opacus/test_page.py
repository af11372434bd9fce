"""The tables of the pages on Opacus say what the names, the programs and the row say.

python -m tests.opacus.test_page    # writes them
"""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from dpsur.opacus import names
from reproduction import opacus_suite
from reproduction.artifacts import Column, Table
from reproduction.rows import read_rows
from tests.opacus import messages
from tests.opacus import test_programs as programs

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "from_opacus.md", DOCS / "tables" / "opacus.md")


def table_of_names() -> str:
    """For each remedy, the names that it stands for."""
    refused = defaultdict(set)
    for name, remedy in names.REMEDIES.items():
        if not name.startswith("_"):
            refused[remedy].add(name)
    works = {name for held in names.WORKS.values() for name in held.split()}
    rows = [{"count": len(works), "names": _some(works), "here": "works"}]
    for remedy, held in sorted(refused.items(), key=lambda one: -len(one[1])):
        rows.append({"count": len(held), "names": _some(held), "here": remedy})
    columns = [Column("", "count"), Column("names", "names"), Column("here", "here")]
    return Table(columns, rows).markdown() + "\n"


def _some(held: set[str], most: int = 2) -> str:
    found = sorted(name for name in held if name[0].isupper()) or sorted(held)
    return ", ".join(f"`{name}`" for name in found[:most]) + (", ..." if len(held) > most else "")


def table_of_programs() -> str:
    """What each program is, and the lines that are changed in it."""
    rows, unchanged = [], []
    for name in programs.PROGRAMS:
        text = (programs.FOLDER / f"{name}.py").read_text()
        count = programs.lines_changed(name)
        if not count:
            unchanged.append(f"`{name}`")
            continue
        about = text.split('"""')[1].rstrip(".")
        rows.append({"lines": count, "name": f"`{name}`", "about": about})
    rows.sort(key=lambda row: (row["lines"], row["name"]))
    about = f"{len(unchanged)} programs"
    rows.insert(0, {"lines": 0, "name": ", ".join(unchanged), "about": about})
    columns = [
        Column("lines", "lines"),
        Column("program", "name"),
        Column("what it does", "about"),
    ]
    return Table(columns, rows).markdown() + "\n"


def table_of_messages() -> str:
    """What is said of what does not work: by running each case."""
    rows = []
    for program, case in messages.CASES:
        told = messages.told(case).replace("\n", " ")
        told = re.sub(r"takes any function: .*", "takes any function: (five lines of code)", told)
        if told != "works":
            rows.append({"program": program, "told": told})
    columns = [Column("program", "program"), Column("message", "told")]
    return Table(columns, rows).markdown() + "\n"


WORKING = 8  # of the cases of `messages`

TABLES = {
    "tests/opacus/messages.py": table_of_messages,
    "src/dpsur/opacus/names.py": table_of_names,
    "tests/opacus/programs": table_of_programs,
    "results/opacus_suite.jsonl": lambda: opacus_suite.table(read_rows(opacus_suite.ROWS)[0]),
}


def block(source: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {re.escape(source)} -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@pytest.mark.parametrize("source", TABLES)
def test_a_table_is_that_of_its_source(source):
    (found,) = block(source).findall("".join(page.read_text() for page in PAGES))
    assert found[1] == TABLES[source]()


def test_these_work():
    works = [program for program, case in messages.CASES if messages.told(case) == "works"]
    assert len(works) == WORKING


def test_the_programs_that_run_are_enough():
    """At least 30 with at most three changed lines; and every one of them runs."""
    few = [name for name in programs.PROGRAMS if programs.lines_changed(name) <= programs.MOST]
    assert len(few) >= 30


def test_the_row_has_a_reason_for_every_test():
    (row,) = read_rows(opacus_suite.ROWS)
    assert row["passed"] >= 130
    assert row["unexplained"] == []
    assert all(one["kind"] != opacus_suite.UNEXPLAINED[0] for one in row["failed"])


def test_what_no_rule_explains_is_unexplained():
    test = "opacus_suite/privacy_engine_test.py::PrivacyEngineConvNetTest::test_basic"
    assert opacus_suite.reason_of(test, "IndexError: list") == opacus_suite.UNEXPLAINED
    assert opacus_suite.reason_of(test, "poisson_sampling=False is ...")[0] == (
        opacus_suite.DELIBERATE
    )
    row = opacus_suite.row_of({test: ("failed", "IndexError"), "other": ("passed", "")})
    assert (row["passed"], row["unexplained"]) == (1, [test])


def test_names_of_the_tests_are_replaced():
    text = 'from opacus.a import A\nimport opacus\nfrom opacus.tests.b import x\n"opacus.a"'
    assert opacus_suite.substituted(text) == (
        "from dpsur.opacus.a import A\nimport dpsur.opacus as opacus\n"
        'from opacus_suite.b import x\n"dpsur.opacus.a"'
    )


@pytest.mark.slow
def test_the_tests_of_opacus_have_the_outcomes_of_the_row(tmp_path):
    pytest.importorskip("torchvision", reason="the tests of Opacus need torchvision")
    pytest.importorskip("opacus", reason="needs the extra dev: opacus")
    row = opacus_suite.row_of(opacus_suite.run(tmp_path))
    assert row["passed"] >= 130
    assert row["unexplained"] == []


if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text()
        for source, table in TABLES.items():
            text = block(source).sub(lambda found, new=table: found[1] + new() + found[3], text)
        page.write_text(text)
