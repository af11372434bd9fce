"""Last iterates and peaks on the test set, and the settings that are changed one at a time."""

import pytest

from reproduction.base import Options
from reproduction.experiments import iterates
from tests.reproduction.made_up import check_every_part_renders, made_up

EXPERIMENT = iterates.EXPERIMENT


def rows():
    """Every run peaks half-way, two points above its end."""
    curve = {
        "updates": [100, 200, 300, 400],
        "epsilon": [1, 2, 3, 4],
        "loss": [0.9, 0.8, 0.8, 0.9],
        "accuracy": [0.6, 0.72, 0.71, 0.70],
    }
    return [{**row, "curve": curve} for row in made_up(EXPERIMENT, lambda *_: 0.7)]


def test_the_grid_has_every_budget_and_one_change_at_a_time():
    every = [cell["config"] for cell in EXPERIMENT.cells(Options())]
    cells = [config for config in every if config["arm"] == "released-code"]
    others = [config for config in every if config not in cells]
    assert {(c["arm"], c["task"]) for c in others} == {
        ("nonprivate", "imdb"),
        ("dpsgd-ts", "cifar10"),
    }
    unchanged = [config for config in cells if not config["tried"]]
    places = [(config["task"], config["epsilon"]) for config in unchanged]
    assert sorted(places) == sorted(5 * list(iterates.CELLS))
    for config in cells:
        assert len(config["tried"]) <= 1
        assert config["evaluations"] == iterates.LOOKS
    changed = [config for config in cells if config["tried"]]
    assert len(changed) == 3 * sum(map(len, iterates.CELLS.values()))
    for config in changed:  # a change that is the preset's own value would explain nothing
        place = config["task"], config["epsilon"]
        same = next(c for c in unchanged if (c["task"], c["epsilon"]) == place)
        assert config["options"] != same["options"]


def test_the_best_on_the_test_set_stands_beside_the_last_iterate():
    records = iterates.records(rows())
    cells = sum(1 + len(changes) for changes in iterates.CELLS.values())
    assert len(records) == cells + 1 + len(iterates.METHOD_CELLS)
    papers = {r["epsilon"]: r["paper"] for r in records if r["arm"] == "dpsgd-ts"}
    assert papers == {1: 51.52, 2: 56.78}  # of its own column, not DPSUR's
    (without,) = (r for r in records if r["epsilon"] is None)
    assert (without["task"], without["paper"]) == ("imdb", 79.97)
    for record in records:
        assert record["last"] == pytest.approx(70)
        assert record["best"] == pytest.approx(72)
        assert record["at"] == pytest.approx(0.5)
        assert record["best_difference"] - record["last_difference"] == pytest.approx(2)
    of_dpsur = [r for r in records if r["arm"] == "released-code"]
    assert [r["changed"] for r in of_dpsur if r["epsilon"] == 1] == [""]
    reached = {(r["task"], r["epsilon"]): r["reached"] for r in of_dpsur if not r["changed"]}
    assert reached["imdb", 2] == pytest.approx(0.5)  # 71.02, between 60 and 72
    assert reached["imdb", 4] is None  # 74.14


def test_a_part_of_the_rows_is_rendered(tmp_path):
    check_every_part_renders(EXPERIMENT, rows(), tmp_path)
