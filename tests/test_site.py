"""The documentation site: every page and every public name is on it, and its code runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpsur
from reproduction import site_pages

ROOT = Path(__file__).parent.parent
MENU = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)


def test_every_page_is_in_the_menu():
    """Those that are written, and those that the build makes; the list of old names is no page."""
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"moved.md"}
    assert sorted(MENU) == sorted({*pages, *site_pages.pages(), "tables/index.md"})


def test_made_pages_hold_the_notebooks_and_the_examples():
    made = site_pages.pages()
    for name, path in site_pages.NOTEBOOKS.items():
        for cell in json.loads(path.read_text())["cells"]:
            assert "".join(cell["source"]) in made[name]
    for path in site_pages.EXAMPLES.glob("*.py"):
        assert path.read_text().rstrip() in made["examples.md"]
    assert "http" not in "".join(re.findall(r"src=\S{9}", "".join(made.values())))


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(r"^::: dpsur\.(\w+)$", text, flags=re.MULTILINE))
    errors = {name for name in dpsur.__all__ if name.endswith(("Error", "Warning"))}
    assert named - {"errors"} == set(dpsur.__all__) - errors - {"__version__"}


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="needs mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    subprocess.run([*command, "--site-dir", str(tmp_path)], cwd=ROOT, check=True)
    pages = {path.parent.name for path in tmp_path.glob("*/index.html")}
    assert {page.removesuffix(".md").removesuffix("/index") for page in MENU} - {"index"} <= pages


@pytest.mark.parametrize("page", ["getting_started.md", "algorithm_1.md"])
def test_code_on_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / page).read_text().partition("## An afternoon")[0]
    codes = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert codes
    for code in codes:
        exec(compile(code, page, "exec"), {})


def execute(notebook, folder):
    """A notebook of the site with its outputs."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    import nbformat

    book = nbformat.read(ROOT / "docs" / notebook, as_version=4)
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": folder}}).execute()
    return book


@pytest.mark.slow
def test_the_notebook_on_the_paper_runs(tmp_path):
    printed = json.dumps(execute("paper.ipynb", tmp_path))
    assert "Run of dpsur" in printed
    assert "6.048e-04 3.500e-04 1.73" in printed


def test_the_notebook_has_the_code_of_the_page():
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "proof.md").read_text(), flags=re.DOTALL
    )
    cells = json.loads((ROOT / "docs" / "paper.ipynb").read_text())["cells"]
    assert "".join(cells[-1]["source"]) == code.rstrip("\n")


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path):
    book = execute("tutorial.ipynb", tmp_path)
    kinds = [out.get("data", {}) for cell in book.cells for out in cell.get("outputs", [])]
    assert sum("image/png" in kind for kind in kinds) == 2
    printed = json.dumps(book)
    assert "faults: []" in printed
    assert "CONTRADICTED" not in printed
