"""What a custom loop hands over: a statement and a release that `verify` accepts."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from tests.engine.helpers import linear_model, private, records
from tests.engine.test_loop import train
from tests.mutants import Mutant, law_tests

CASES = {
    "completed": {"epochs": 2},
    "stopped early": {"steps": 50},
    "filter": {"target_epsilon": 8.0},
    "gate": {"steps": 5, "gate": dpsur.LossGate(val_batch_size=20)},
    "coin": {"steps": 5, "gate": dpsur.CoinGate(val_batch_size=20), "seed": 1},
    "metrics": {"steps": 5, "metrics": dpsur.Metrics()},
    "patience": {"steps": 40, "metrics": dpsur.Metrics(noise_multiplier=400.0, patience=1)},
}


@pytest.mark.parametrize("case", CASES)
def test_a_release_is_verified(case, tmp_path):
    options = {"target_delta": 1e-3, "criterion": nn.CrossEntropyLoss(), **CASES[case]}
    engine, model, optimizer, loader = private(**options)
    train(engine, model, optimizer, loader)
    while case not in ("stopped early", "filter", "gate") and not engine.finished():
        train(engine, model, optimizer, loader)
    folder = engine.save(tmp_path / "run")
    faults, figures = dpsur.verify(tmp_path / "run")
    assert faults == []
    assert figures["proven" if case == "coin" else "every_trial"] == pytest.approx(
        engine.guarantee()
    )
    assert bool(engine.metrics) == ("metrics" in options)
    loaded = dpsur.load(tmp_path / "run", linear_model()).module
    for one, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    statement = json.loads((folder / "privacy.json").read_text())
    changed = {"noise_multiplier": 2.0, "accept_ratio": 9.0, "metrics_noise_multiplier": 9.0}
    for name, value in {**changed, "patience": 7}.items():
        if name == "noise_multiplier" or name in statement["settings"]:
            wrong = {**statement, "settings": {**statement["settings"], name: value}}
            if case == "patience" and name == "patience":
                wrong["settings"][name] = None
            (folder / "privacy.json").write_text(json.dumps(wrong))
            assert dpsur.verify(tmp_path / "run")[0] != [], name


def test_a_release_without_frozen_weights(tmp_path):
    """As of adapters: the model that it is loaded into brings the frozen ones."""
    model = linear_model()
    frozen = model[0].requires_grad_(False)
    engine, model, *made = private(model, steps=5)
    train(engine, model, *made)
    folder = engine.save(tmp_path / "run", trained_only=True)
    assert dpsur.verify(tmp_path / "run")[0] == []
    whole = engine.save(tmp_path / "whole")
    assert (folder / "model.safetensors").stat().st_size < (
        whole / "model.safetensors"
    ).stat().st_size

    base = linear_model()
    with torch.no_grad():
        base[0].weight.fill_(7.0)
    loaded = dpsur.load(tmp_path / "run", base).module
    assert torch.equal(loaded[2].weight, model[2].weight)
    assert not torch.equal(loaded[0].weight, frozen.weight)  # its own
    with pytest.raises(dpsur.DpsurError, match=r"do not fit the model: it has no 2\."):
        dpsur.load(tmp_path / "run", nn.Sequential(nn.Linear(6, 8)))


def test_metrics_are_stated_when_they_were_all_made(tmp_path):
    engine, *made = private(steps=5, metrics=dpsur.Metrics(), criterion=nn.CrossEntropyLoss())
    with pytest.raises(dpsur.DpsurError, match="continue until the loader ends"):
        engine.save(tmp_path / "early")
    train(engine, *made)
    assert [row["quantity"] for row in engine.metrics[:2]] == [
        "training accuracy",
        "training Brier score",
    ]
    engine.save(tmp_path / "run")


def test_metrics_are_those_of_classifiers():
    data = TensorDataset(torch.randn(60, 6), torch.randn(60, 3))
    made = private(data=data, steps=5, metrics=dpsur.Metrics(), criterion=nn.MSELoss())
    with pytest.raises(dpsur.InvalidInputError, match="not class indices"):
        next(iter(made[3]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gate": dpsur.LossGate(), "metrics": dpsur.Metrics()}, "leave metrics or the gate out"),
        ({"accounting": "proven"}, "give make_private gate="),
        ({"gate": dpsur.CoinGate(), "accounting": "every-trial"}, "every-trial"),
        ({"gate": dpsur.LossGate()}, "needs the loss of each record"),
        ({"metrics": dpsur.Metrics()}, "needs the loss of each record"),
        ({"gate": dpsur.LossGate(val_batch_size=1000)}, "larger than the 60 records"),
        ({"accounting": "rdp"}, "accounting must be one of"),
    ],
)
def test_settings_that_cannot_be(options, words):
    with pytest.raises(dpsur.InvalidInputError, match=words):
        private(steps=5, **options)


@pytest.mark.parametrize(
    "kind", [lambda: dpsur.LossGate(loss_clip=-1.0), lambda: dpsur.CoinGate(accept_ratio=0.5)]
)
def test_settings_of_gates_are_checked_when_they_are_made(kind):
    with pytest.raises(dpsur.InvalidInputError):
        kind()


def test_a_loop_without_a_plan_states_no_guarantee():
    engine, _, _, _ = private()
    with pytest.raises(dpsur.InvalidInputError, match="without a plan"):
        engine.statement()


@pytest.mark.parametrize(
    "options",
    [
        {"gate": dpsur.LossGate(val_batch_size=20)},
        {"gate": dpsur.LossGate(val_batch_size=20), "accounting": "proven"},
        {"gate": dpsur.CoinGate(val_batch_size=20)},
        {"metrics": dpsur.Metrics()},
        {"metrics": dpsur.Metrics(patience=2)},
    ],
)
def test_noise_is_calibrated_to_a_budget_behind_every_gate(options):
    model = linear_model()
    engine = dpsur.PrivacyEngine()
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=12),
        criterion=nn.CrossEntropyLoss(),
        max_grad_norm=1.0,
        target_epsilon=8.0,
        target_delta=1e-3,
        steps=20,
        **options,
    )
    assert 7.8 < engine.guarantee() <= 8.0
    assert 0 < engine.noise_multiplier < 10


def test_without_noise_the_release_says_that_it_is_not_private(tmp_path):
    engine, model, optimizer, loader = private(noise_multiplier=0, epochs=1)
    train(engine, model, optimizer, loader)
    assert engine.guarantee() == engine.get_epsilon(1e-3) == float("inf")
    folder = engine.save(tmp_path / "run")
    assert "**without any privacy**" in (folder / "PRIVACY.md").read_text()
    assert dpsur.verify(tmp_path / "run")[0] == []
    statement = json.loads((folder / "privacy.json").read_text())
    statement["settings"]["noise_multiplier"] = 1.0
    (folder / "privacy.json").write_text(json.dumps(statement))
    assert dpsur.verify(tmp_path / "run")[0] != []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "say how long"),
        ({"target_epsilon": 3.0}, "no privacy"),
        ({"gate": CASES["gate"]["gate"]}, "no privacy"),
    ],
)
def test_without_noise_nothing_is_promised(options, words):
    with pytest.raises(dpsur.InvalidInputError, match=words):
        private(noise_multiplier=0.0, **options)


def a_loop_without_noise_promises_nothing():
    engine, model, optimizer, loader = private(noise_multiplier=0, epochs=1)
    train(engine, model, optimizer, loader)
    assert engine.guarantee() == engine.get_epsilon(1e-3) == float("inf")
    assert engine.statement()["guarantee"]["epsilon"] == float("inf")


def charged_as_if_there_were_noise(patch):
    update = dpsur.SampledGaussian(0.2, 1.0)
    patch.setattr("dpsur.engine.privacy_engine.NonPrivate", lambda: update)
    patch.setattr(
        "dpsur.engine.procedure.Mechanism.account",
        lambda self, _: dpsur.Account.for_steps(dpsur.Trial(update), self.steps, delta=self.delta),
    )


test_law, test_mutant = law_tests(
    [Mutant(a_loop_without_noise_promises_nothing, charged_as_if_there_were_noise)]
)
