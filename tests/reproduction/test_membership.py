"""The grid and the tables of the paper's attacks."""

from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from dpsur.attacks.metrics import Scores, measure
from dpsur.functional.records import Examples
from dpsur.presets import preset_named
from dpsur.tasks import task_named
from reproduction.base import Options
from reproduction.experiments import membership
from reproduction.plain_targets import Recipe, plain_trainer


@pytest.mark.parametrize("method", ["nonprivate", pytest.param("dpsgd", marks=pytest.mark.slow)])
def test_a_cell_is_measured(method, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(60, 1, 28, 28, generator=generator)
    pool = Examples(images, torch.randint(10, (60,), generator=generator))
    monkeypatch.setattr(membership, "pool_on", lambda *_: pool)
    cell = grid(tasks=("fmnist",), arms=(method,), seeds=(1,))[-1]
    if method == "nonprivate":
        cell["config"]["recipe"]["epochs"] = 1
    else:
        preset = replace(preset_named("paper", method, "fmnist", 4), given={"batch_size": 4})
        monkeypatch.setattr(membership, "preset_named", lambda *_: preset)
    found = membership.EXPERIMENT.measure(cell, Options(device="cpu"))
    assert found["device"] == "cpu"
    assert set(found["attacks"]) == set(found["gains"]) > set(membership.PLAIN_ATTACKS)


def row(task, method, epsilon, value):
    scores = Scores(torch.rand(50).double().numpy() + value, torch.rand(50).double().numpy(), 0.5)
    return {
        "config": {"task": task, "method": method, "epsilon": epsilon},
        "seed": 0,
        "train_accuracy": 0.9,
        "test_accuracy": 0.8,
        "attacks": {"shadow": asdict(measure(scores))},
        "gains": {"shadow": membership.gains_of(membership.hits_of(scores))},
    }


def test_the_table_has_the_papers_values():
    rows = [row("fmnist", "nonprivate", None, 0.5), row("cifar10", "dpsur", 3, 0.0)]
    page, data, _ = membership.EXPERIMENT.render(rows)
    assert "| 0.582 |" in page.text
    assert "| 0.503 |" in page.text
    assert data.text.count("\n") == 3
    fields = data.text.splitlines()[0].split(",")
    assert len(set(fields)) == len(fields) == 19
    assert "of the first seed" in " ".join(page.text.split())


def test_intervals_that_a_row_has_too_narrow_are_not_trusted():
    attacked = row("fmnist", "dpsur", 3, 0.2)
    stored = attacked["attacks"]["shadow"]
    (honest,) = membership.summary([attacked])
    for name in ("tpr_at_1_percent", "tpr_at_01_percent"):
        stored[name] = {**stored[name], "low": stored[name]["value"], "high": stored[name]["value"]}
    (found,) = membership.summary([attacked])
    assert found == honest
    assert found["tpr_1_low"] < found["tpr_1"] < found["tpr_1_high"]
    assert (found["auc_low"], found["auc_high"]) == (stored["auc"]["low"], stored["auc"]["high"])


def test_a_control_that_only_some_rows_have():
    rows = [row("fmnist", "nonprivate", None, 0.5), row("fmnist", "nonprivate", None, 0.5)]
    for part in ("attacks", "gains"):
        rows[1][part]["shadow, shuffled"] = rows[0][part]["shadow"]
    found = {record["attack"]: record["seeds"] for record in membership.summary(rows)}
    assert found == {"shadow": 2, "shadow, shuffled": 1}
    page, *_ = membership.EXPERIMENT.render(rows)
    assert page.text.count("| shadow, shuffled |") == 2  # once in each table


def grid(**limits):
    return list(membership.EXPERIMENT.cells(Options(**limits)))


def test_the_grid():
    cells = grid()
    assert len(cells) == 3 * 2 * (1 + 3 * 4)
    assert len({membership.EXPERIMENT.key(cell) for cell in cells}) == len(cells)
    ratios = [cell for cell in cells if "lira-online" in cell["config"]["attacks"]]
    assert {cell["seed"] for cell in ratios} == {0}
    every = [("dpsur", e) for e in (1, 2, 3, 4)] + [("dpsgd", e) for e in (1, 2, 3, 4)]
    configs = [cell["config"] for cell in ratios]
    assert [(c["task"], c["method"], c["epsilon"], c["shadow_models"]) for c in configs] == [
        (task, *target, models)
        for task, without, within in (("fmnist", 32, 8), ("cifar10", 4, 4))
        for target, models in [(("nonprivate", None), without), *((p, within) for p in every)]
    ]


@pytest.mark.parametrize("task", membership.TASKS)
def test_targets_without_privacy_are_the_network_that_dpsgd_trains(task):
    (cell,) = grid(tasks=(task,), arms=("nonprivate",), seeds=(0,))
    assert cell["config"]["network"] == preset_named("paper", "dpsgd", task, 1).network
    module = plain_trainer(task_named(task), Recipe(), torch.device("cpu")).make()
    kinds = {type(part) for part in module.modules()}
    assert nn.ReLU in kinds
    assert nn.Tanh not in kinds


@pytest.mark.parametrize("task", membership.TASKS)
def test_the_targets_on_pixels_have_the_settings_of_dpsur(task):
    """And nothing of its features; their network is that of the other methods on pixels."""
    for epsilon in (1, 4):
        found = membership._preset(membership.PIXELS, task, epsilon)
        assert found.options == preset_named("paper", "dpsur", task, epsilon).options
        pixels = preset_named("paper", "dpsgd-ts", task, epsilon)
        assert (found.features, found.normalisation) == (pixels.features, pixels.normalisation)
        assert found.network == pixels.network
    for cell in grid(tasks=(task,), arms=(membership.PIXELS,)):
        assert cell["config"]["attacks"] == list(membership.PLAIN_ATTACKS)


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"tasks": ("cifar10",)}, 39),
        ({"arms": ("nonprivate",)}, 6),
        ({"arms": ("dpsur",), "epsilons": (1, 4)}, 12),
        ({"epsilons": (4.0,)}, 18),
        ({"seeds": (5,), "tasks": ("fmnist",), "arms": ("dpsgd", "nonprivate")}, 5),
    ],
)
def test_the_grid_can_be_limited(limits, count):
    found = grid(**limits)
    assert len(found) == count
    for cell in found:
        assert cell["config"]["task"] in limits.get("tasks", membership.TASKS)
        assert cell["config"]["method"] in limits.get("arms", ("nonprivate", *membership.PRIVATE))
        assert cell["config"]["epsilon"] in limits.get("epsilons", (None, 1, 2, 3, 4))
        assert cell["seed"] in limits.get("seeds", membership.SEEDS)


def test_shards_make_every_row_once(monkeypatch):
    monkeypatch.setattr(membership.Membership, "measure", lambda *_: {})
    cells = grid()
    missing = cells[1:]  # a row is there already, which must not shift the shares
    made = [
        row
        for part in range(4)
        for row in membership.EXPERIMENT.make(missing, Options(shard=(part, 4)))
    ]
    keys = [membership.EXPERIMENT.key(row) for row in made]
    assert sorted(keys) == sorted(membership.EXPERIMENT.key(cell) for cell in missing)
    first = list(membership.EXPERIMENT.make(cells, Options(shard=(0, 4))))
    assert [row["config"] for row in first] == [cell["config"] for cell in cells[::4]]
