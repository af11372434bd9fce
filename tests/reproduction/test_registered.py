"""What every experiment keeps to, by being listed; and the committed pages against their rows."""

import json
from pathlib import Path

import pytest

from dpsur.errors import InvalidInputError
from reproduction.artifacts import FIGURES
from reproduction.base import Options
from reproduction.registry import EXPERIMENTS, experiment_named
from reproduction.runner import look_up, render, rows_file

ROOT = Path(__file__).parent.parent.parent
RESULTS, DOCS = ROOT / "results", ROOT / "docs"


def committed(experiment):
    return look_up(experiment, rows_file(experiment, RESULTS), Options())


def with_rows(name):
    experiment = experiment_named(name)
    filled = committed(experiment)
    if not filled.rows and list(experiment.cells(Options())):
        pytest.skip(f"no rows of {name} yet")
    return experiment, filled


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_cells_are_plain_values_with_a_key_of_their_own(name):
    experiment = experiment_named(name)
    assert experiment.name == name
    cells = list(experiment.cells(Options()))
    for cell in cells:
        assert cell.keys() == set(experiment.identity)
        assert experiment.key(json.loads(json.dumps(cell))) == experiment.key(cell)
    assert len({experiment.key(cell) for cell in cells}) == len(cells)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_committed_rows_fill_the_grid_and_nothing_else(name):
    experiment = experiment_named(name)
    filled = committed(experiment)
    assert experiment.partial or not filled.missing
    path = rows_file(experiment, RESULTS)
    lines = path.read_text().splitlines() if path.exists() else []
    assert len(lines) == len(filled.rows)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_committed_pages_are_what_their_rows_give(name, tmp_path):
    experiment, filled = with_rows(name)
    drawn = render(experiment, filled, tmp_path)
    assert drawn
    for one in drawn:
        kept = DOCS / one.relative_to(tmp_path)
        assert kept.is_file(), f"{kept} is not committed"
        if one.suffix in (".md", ".csv"):
            assert kept.read_text() == one.read_text(), f"{kept} is not what its rows give"


QUICKLY_DRAWN = ("convergence", "ablation")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICKLY_DRAWN else [pytest.mark.slow])
        for name in EXPERIMENTS
    ],
)
def test_pages_are_always_the_same(name, tmp_path):
    """One way of saving serves all figures: the default suite draws a few of them twice."""
    experiment, filled = with_rows(name)
    first, second = (render(experiment, filled, tmp_path / folder) for folder in ("one", "two"))
    assert [path.name for path in first] == [path.name for path in second]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_figures_are_small_and_made_of_lines_and_letters():
    drawn = sorted((DOCS / FIGURES).glob("*.svg"))
    assert drawn
    for path in drawn:
        text = path.read_text()
        assert "<text" in text, path
        assert "<image" not in text, path
        assert "dc:date" not in text, path
        assert len(text) < 130_000, path


def test_an_unknown_name():
    with pytest.raises(InvalidInputError, match="unknown experiment 'nothing'; choose one of"):
        experiment_named("nothing")


def test_what_is_committed_of_all_results_stays_small():
    places = (ROOT / "results", ROOT / "docs" / "tables", ROOT / "docs" / "figures")
    files = [file for place in places for file in place.iterdir()]
    assert sum(file.stat().st_size for file in files) < 8_300_000
