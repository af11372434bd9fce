import json
from pathlib import Path

from dpsur.presets import Preset
from reproduction.experiments.tuning import best_settings
from reproduction.presets import settings
from reproduction.presets.paper import BATCHES
from reproduction.presets.settings import tuned_setting, tuned_settings
from reproduction.training import TrainingCell

ROOT = Path(__file__).parents[2]


def row(arm, task, tried, accuracy, epsilon=3):
    config = {"arm": arm, "task": task, "epsilon": epsilon, "tried": tried}
    return {"config": config, "accuracy": accuracy}


def test_the_best_mean_is_chosen_and_not_the_best_run():
    rows = [
        row("dpis", "mnist", {"updates": 1}, 0.90),
        row("dpis", "mnist", {"updates": 1}, 0.10),
        row("dpis", "mnist", {"updates": 2}, 0.60),
        row("dpis", "mnist", {"updates": 1}, 0.50, epsilon=1),
        row("dpagd", "mnist", {"updates": 3}, 0.05),
    ]
    assert best_settings(rows) == {
        ("dpis", "mnist", 3): {"updates": 2},
        ("dpis", "mnist", 1): {"updates": 1},
        ("dpagd", "mnist", 3): {"updates": 3},
    }


def test_rows_at_a_stretched_budget_decide_for_the_budget_itself():
    plain = row("dpis", "mnist", {"updates": 1}, 0.90)
    stretched = [row("dpis", "mnist", {"updates": n}, n / 10, epsilon=3.6) for n in (1, 2)]
    for one in stretched:
        one["config"]["stretch"] = 1.2
    assert best_settings([plain, *stretched]) == {("dpis", "mnist", 3): {"updates": 2}}
    cell = TrainingCell("mnist", "dpis", 3, 0, {"updates": 5}, hold_out=10_000, stretch=1.2)
    plainly = TrainingCell("mnist", "dpis", 3, 0, {"updates": 5}, hold_out=10_000)
    assert cell.config() == {**plainly.config(), "epsilon": 3 * 1.2, "stretch": 1.2}


def test_a_budget_that_was_not_tried_takes_the_nearest(monkeypatch):
    chosen = {("a", "mnist", 1): {"updates": 1}, ("a", "mnist", 3): {"updates": 3}}
    monkeypatch.setattr(settings, "tuned_settings", lambda: chosen)
    assert [tuned_setting("a", "mnist", e)["updates"] for e in (1, 3, 4)] == [1, 3, 3]
    assert tuned_setting("b", "mnist", 1) == {}


def test_presets_are_the_best_of_the_rows():
    lines = (ROOT / "results" / "tuning.jsonl").read_text().splitlines()
    for block, setting in best_settings([json.loads(line) for line in lines]).items():
        assert tuned_settings()[block] == setting, block


def test_settings_are_tried_as_if_none_had_been_chosen(monkeypatch):
    preset = Preset(BATCHES, "pixels", chosen={"batch_size": 7, "raise_by": 0.5})
    monkeypatch.setattr("reproduction.arms.preset_named", lambda *_: preset)
    tried = TrainingCell("fmnist", "dpagd", 3, 0, {"updates": 5}, hold_out=10_000)
    assert tried.config()["options"] == {**BATCHES, "updates": 5}
    used = TrainingCell("fmnist", "dpagd", 3, 0)
    assert used.config()["options"] == {**BATCHES, "batch_size": 7, "raise_by": 0.5}
