import json
from pathlib import Path

from dpsur.experiments.tuned import best_settings, tuned_settings

ROOT = Path(__file__).parents[2]


def row(arm, task, tried, accuracy):
    return {"config": {"arm": arm, "task": task, "tried": tried}, "accuracy": accuracy}


def test_the_best_mean_is_chosen_and_not_the_best_run():
    rows = [
        row("dpis", "mnist", {"updates": 1}, 0.90),
        row("dpis", "mnist", {"updates": 1}, 0.10),
        row("dpis", "mnist", {"updates": 2}, 0.60),
        row("dpagd", "mnist", {"updates": 3}, 0.05),
    ]
    assert best_settings(rows) == {
        ("dpis", "mnist"): {"updates": 2},
        ("dpagd", "mnist"): {"updates": 3},
    }


def test_presets_are_the_best_of_the_rows():
    lines = (ROOT / "results" / "tuning.jsonl").read_text().splitlines()
    for block, setting in best_settings([json.loads(line) for line in lines]).items():
        assert tuned_settings()[block] == setting, block
