"""What a custom loop hands over: a statement and a release that `verify` accepts."""

import json

import pytest
import torch
import torch.nn.functional as F

import dpsur
from tests.engine.helpers import linear_model, private
from tests.engine.test_loop import train
from tests.mutants import Mutant, law_tests

GATE = dpsur.LossGate(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), 20)


@pytest.mark.parametrize(
    "options",
    [{"epochs": 2}, {"steps": 50}, {"target_epsilon": 8.0}, {"steps": 5, "gate": GATE}],
    ids=["completed", "stopped early", "filter", "gate"],
)
def test_a_release_is_verified(options, tmp_path):
    engine, model, optimizer, loader = private(target_delta=1e-3, **options)
    train(engine, model, optimizer, loader)
    if "epochs" in options:
        train(engine, model, optimizer, loader)
    folder = engine.save(tmp_path / "run")
    faults, figures = dpsur.verify(tmp_path / "run")
    assert faults == []
    assert figures["every_trial"] == pytest.approx(engine.guarantee())
    loaded = dpsur.load(tmp_path / "run", linear_model()).module
    for one, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    statement = json.loads((folder / "privacy.json").read_text())
    statement["settings"]["noise_multiplier"] = 2.0
    (folder / "privacy.json").write_text(json.dumps(statement))
    assert dpsur.verify(tmp_path / "run")[0] != []


def test_a_loop_without_a_plan_states_no_guarantee():
    engine, _, _, _ = private()
    with pytest.raises(dpsur.InvalidInputError, match="without a plan"):
        engine.statement()


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
    [({}, "say how long"), ({"target_epsilon": 3.0}, "no privacy"), ({"gate": GATE}, "no privacy")],
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
        "dpsur.engine.privacy_engine.plan_without_noise",
        lambda planned, _, delta, gated: (
            dpsur.Account.for_steps(dpsur.Trial(update), planned, delta=delta).plan
        ),
    )


test_law, test_mutant = law_tests(
    [Mutant(a_loop_without_noise_promises_nothing, charged_as_if_there_were_noise)]
)
