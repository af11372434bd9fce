"""What the pages name is there: links with their anchors, files, and names in files."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOTS = (ROOT / "src" / "dpsur", ROOT / "tests", ROOT)
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "reproduction/**/*.md")
    for path in ROOT.glob(pattern)
)
TO_BE_WRITTEN = "docs/extending.md"  # whose files the reader is to make
FILE = r"[\w/]+\.(?:py|csv|jsonl|toml)"
# One or more names in code, then the file that they are in: `a`, `b` (`core/c.py`).
PAIR = re.compile(rf"((?:`[\w.]+`(?:,| and)?\s+)+)\(`({FILE})`")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def anchors(text: str) -> set[str]:
    """The names that headings can be linked by."""
    heads = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def dead_links(text: str, folder: Path) -> list[str]:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http", "mailto")):
            continue
        name, _, anchor = target.partition("#")
        path = folder / name
        there = path.exists() if name else True
        if there and anchor:
            there = anchor in anchors(path.read_text() if name else text)
        dead += [] if there else [target]
    return dead


def place(file: str) -> Path | None:
    return next((root / file for root in ROOTS if (root / file).is_file()), None)


@cache
def defined(path: Path) -> frozenset[str]:
    """Names that a module defines, whatever they belong to."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def wrong_pairs(text: str) -> list[str]:
    """Pairs of a name and a file where the file is missing or does not define the name."""
    wrong = []
    for names, file in PAIR.findall(text):
        path = place(file)
        for name in re.findall(r"`([\w.]+)`", names):
            if path is None or name.split(".")[-1] not in defined(path):
                wrong.append(f"{name} in {file}")
    return wrong


def missing_files(text: str) -> list[str]:
    files = re.findall(rf"`({FILE})`", text)
    return [file for file in files if "/" in file and "NAME" not in file and not place(file)]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_lead_somewhere(page):
    assert dead_links(text_of(page), (ROOT / page).parent) == []


@pytest.mark.parametrize("page", PAGES)
def test_names_are_in_the_files_that_are_said_to_hold_them(page):
    assert wrong_pairs(text_of(page)) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != TO_BE_WRITTEN])
def test_files_exist(page):
    assert missing_files(text_of(page)) == []


def test_there_are_pairs_to_check():
    assert len(PAIR.findall(text_of("docs/privacy.md"))) > 15


def test_what_is_not_there_is_noticed():
    """The checks above reject a page with every kind of fault."""
    page = (
        "# A head\n[a](#a-head) [b](#none) [c](nowhere.md) "
        "`take_step`,\n`keep` (`mechanism/trial.py`)"
    )
    assert dead_links(page, ROOT) == ["#none", "nowhere.md"]
    assert wrong_pairs(page) == []
    assert wrong_pairs("`State`, `keep` (`mechanism/gaussian.py`)") == [
        "State in mechanism/gaussian.py",
        "keep in mechanism/gaussian.py",
    ]
    assert wrong_pairs("`keep` (`core/lop.py`)") == ["keep in core/lop.py"]
    assert missing_files("`core/lop.py` and `mechanism/trial.py`") == ["core/lop.py"]


MAP = text_of("docs/algorithm_1.md") + text_of("reproduction/methods/README.md")


def table_rows(text: str) -> list[list[str]]:
    rows = re.findall(r"^\| (?!-)(.*) \|$", text, flags=re.MULTILINE)
    return [re.split(r"(?<!\\)\|", row) for row in rows]


def test_the_map_of_the_paper_names_a_test_for_every_row():
    rows = [row for row in table_rows(MAP) if len(row) == 4]
    assert len(rows) > 20
    for row in rows:
        assert all(cell.strip() for cell in row), row
        for file in re.findall(rf"`({FILE})`", row[3]):
            assert place(file) is not None, file


def test_the_map_of_the_paper_names_what_its_places_hold():
    """Classes, functions and constants of a row are defined in one of the row's files."""
    for row in table_rows(MAP):
        if len(row) != 4 or row[0].strip() in ("paper", "system, symbol"):
            continue
        named = re.findall(r"`([\w/.]+)`", row[2])
        places = [root / name for name in named for root in ROOTS if (root / name).exists()]
        files = [f for p in places for f in ([p] if p.is_file() else sorted(p.glob("*.py")))]
        names = re.findall(r"`([A-Z][\w.]+)`", row[1])
        known = {name for file in files for name in defined(file)}
        assert {name.split(".")[-1] for name in names} <= known, row
