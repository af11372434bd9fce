"""`python -m reproduction` as a person meets it."""

import json
import math
import re
import shutil
import subprocess
import sys

import pytest

from dpsur.cli import main as dpsur_main
from reproduction.base import Options
from reproduction.command import main
from reproduction.registry import EXPERIMENTS, experiment_named
from reproduction.rows import read_rows
from tests.reproduction.test_registered import RESULTS, ROOT


def run(*arguments, capsys):
    try:
        status = main(list(arguments))
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def reproduce(*arguments, folder, capsys):
    places = ("--results", str(folder / "results"), "--out", str(folder / "docs"))
    return run(*arguments, *places, capsys=capsys)


def test_rows_are_made_once_and_rendered_each_time(tmp_path, capsys):
    status, out, _ = reproduce("gate-density", "gate-density", folder=tmp_path, capsys=capsys)
    assert status == 0
    assert out.count("gate-density: 3 rows, 3 of them new") == 1
    rows = (tmp_path / "results" / "gate-density.jsonl").read_text()
    assert len(rows.splitlines()) == 3
    for path in ("tables/gate-density.md", "tables/gate-density.csv", "figures/gate-density.svg"):
        (tmp_path / "docs" / path).unlink()
    status, out, _ = reproduce("gate-density", folder=tmp_path, capsys=capsys)
    assert "0 of them new" in out
    assert (tmp_path / "results" / "gate-density.jsonl").read_text() == rows
    assert (tmp_path / "docs" / "figures" / "gate-density.svg").exists()


def test_seeds_choose_the_runs(tmp_path, capsys):
    status, out, err = reproduce("trajectory", "--seeds", "3,5-6", folder=tmp_path, capsys=capsys)
    assert status == 0
    assert "trajectory: 9 rows, 9 of them new" in out
    assert "row 9 of 9" in err
    lines = (tmp_path / "results" / "trajectory.jsonl").read_text().splitlines()
    assert {json.loads(line)["config"]["seed"] for line in lines} == {3, 5, 6}


@pytest.mark.parametrize("seeds", ["", "a", "3-1", "1,,2"])
def test_odd_seeds_are_refused(seeds, capsys):
    status, _, err = run("trajectory", "--seeds", seeds, capsys=capsys)
    assert status == 2
    assert "is not a list of seeds such as 0-4 or 1,3" in err


def test_rendering_needs_rows_and_makes_none(tmp_path, capsys):
    status, _, err = reproduce("demo", "--render-only", folder=tmp_path, capsys=capsys)
    assert status == 2
    assert "112 rows of demo are missing" in err
    (tmp_path / "results").mkdir()
    lines = (RESULTS / "demo.jsonl").read_text().splitlines()
    (tmp_path / "results" / "demo.jsonl").write_text("\n".join(lines[:7]) + "\n")
    status, out, _ = reproduce("demo", "--render-only", folder=tmp_path, capsys=capsys)
    assert status == 0
    assert "demo: 7 rows, 0 of them new, 105 cells without one" in out


def test_all_goes_through_the_list(tmp_path, capsys, monkeypatch):
    listed = {name: EXPERIMENTS[name] for name in ("sigma-v", "accounting", "demo")}
    monkeypatch.setattr("reproduction.command.EXPERIMENTS", listed)
    shutil.copytree(RESULTS, tmp_path / "results")
    status, out, _ = reproduce("all", "--render-only", folder=tmp_path, capsys=capsys)
    assert status == 0
    heads = [line.split(":")[0] for line in out.splitlines() if not line.startswith(" ")]
    assert heads == [*listed, "everything, and how to regenerate it"]
    page = next(tmp_path.rglob("index.md"))
    lines = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == list(listed)
    assert all(f"`python -m reproduction {name}`" in page.read_text() for name in listed)
    links = re.findall(r"\]\(([^)#]*\.(?:md|svg))\)", "\n".join(lines))
    assert links
    assert all((page.parent / link).exists() for link in links)


def test_the_list_and_the_help_name_every_experiment(capsys):
    for arguments in (["--list"], ["--help"]):
        out = run(*arguments, capsys=capsys)[1]
        for name in EXPERIMENTS:
            assert f"  {name} " in out


def test_a_name_is_needed_and_must_be_known(capsys):
    status, _, err = run(capsys=capsys)
    assert status == 2
    assert "name an experiment, or all" in err
    status, _, err = run("nothing", capsys=capsys)
    assert status == 2
    assert err.startswith("reproduction: error: ")
    assert "nothing" in err


def test_it_runs_as_a_module_and_the_library_says_where_it_is(capsys):
    command = [sys.executable, "-m", "reproduction", "--list"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "  accuracy " in listed.stdout
    assert dpsur_main(["reproduce", "accuracy"]) == 2
    said = capsys.readouterr().err
    assert "python -m reproduction" in said
    assert said.count("\n") == 1


def test_some_rows_of_the_accounting_are_what_the_code_gives():
    experiment = experiment_named("accounting")
    kept = read_rows(ROOT / "results" / "accounting.jsonl")
    for old in (kept[0], kept[6], kept[15]):  # three data sets, at epsilon 1, 3 and 4
        new = experiment.measure({"config": old["config"]}, Options())
        assert new["epsilon"] == pytest.approx(old["epsilon"], rel=1e-4)


@pytest.mark.slow
def test_the_accounting_table_is_rendered_from_its_rows(tmp_path, capsys):
    """The committed page is what the committed rows give, and the rows are what the code gives."""
    status, _, _ = run(
        "accounting",
        "--results",
        str(tmp_path),
        "--out",
        str(tmp_path),
        capsys=capsys,
    )
    assert status == 0
    page = (tmp_path / "tables" / "accounting.md").read_text()
    assert page == (ROOT / "docs" / "tables" / "accounting.md").read_text()
    fresh, kept = (
        [json.loads(line) for line in (folder / "accounting.jsonl").read_text().splitlines()]
        for folder in (tmp_path, ROOT / "results")
    )
    assert len(fresh) == len(kept) == 16
    for new, old in zip(fresh, kept, strict=True):
        assert new["config"] == old["config"]
        for key, value in new["epsilon"].items():
            assert math.isclose(value, old["epsilon"][key], rel_tol=1e-4)
