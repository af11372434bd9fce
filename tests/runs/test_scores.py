"""Figures that a model is shown with: beside a constant, counted, and called what they are."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dpsur
from dpsur.privacy.statement import render_model_card, shown_settings, used_settings
from dpsur.runs.evaluation import describe_scores, objection, score, shown_scores
from dpsur.runs.verification import verify
from tests.conftest import blobs, small_model

BUDGET = dpsur.Budget(3.0, 1e-5)


def outputs_and_targets(classes, count=400):
    generator = torch.Generator().manual_seed(classes)
    outputs = 2 * torch.randn(count, classes, generator=generator)
    drawn = torch.multinomial(outputs.softmax(1), 1, generator=generator).flatten()
    return outputs, drawn


@pytest.mark.parametrize("classes", [2, 5])
def test_scores_of_classes_are_those_of_scikit_learn(classes):
    metrics = pytest.importorskip("sklearn.metrics")
    outputs, targets = outputs_and_targets(classes)
    found = score(outputs, targets, F.cross_entropy)
    sure = outputs.double().softmax(1).numpy()
    positive = sure[:, 1] if classes == 2 else sure
    area = metrics.roc_auc_score(targets, positive, multi_class="ovr", average="macro")
    assert found["auc"] == pytest.approx(area)
    assert found["log_loss"] == pytest.approx(metrics.log_loss(targets, sure))
    shares = np.bincount(targets.numpy()) / len(targets)
    constant = metrics.log_loss(targets, np.tile(shares, (len(targets), 1)))
    assert found["constant_log_loss"] == pytest.approx(constant)
    assert found["base_rate"] == shares.max()
    assert found["calibration_error"] < 0.1


def test_calibration_error_is_the_gap_between_confidence_and_accuracy():
    outputs = torch.tensor([[0.0, 10.0]]).expand(100, 2)
    targets = torch.tensor([0, 1]).repeat(50)
    found = score(outputs, targets, F.cross_entropy)
    assert found["calibration_error"] == pytest.approx(0.5, abs=1e-3)
    assert objection(found) is not None
    right = score(outputs[:50], torch.ones(50, dtype=torch.long), F.cross_entropy)
    assert right["calibration_error"] < 1e-3


def test_other_losses_have_no_probabilities():
    outputs, targets = outputs_and_targets(3)
    assert "log_loss" not in score(outputs, targets, F.multi_margin_loss)


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({"log_loss": 0.7, "constant_log_loss": 0.4}, "0.7 is not below that of a constant"),
        ({"log_loss": math.nan, "constant_log_loss": 0.4}, "is not below that of a constant"),
        ({"log_loss": 0.39, "constant_log_loss": 0.4, "accuracy": 0.8, "base_rate": 0.8}, None),
        ({"accuracy": 0.8, "base_rate": 0.8}, "the accuracy 80.00% is that of a constant"),
        ({"accuracy": 0.81, "base_rate": 0.8}, None),
        ({"r2": -1.0}, None),
    ],
)
def test_a_model_that_is_no_better_than_a_constant_is_said_to_be(scores, said):
    text = objection(scores)
    assert (text is None) if said is None else (said in str(text))


def test_shown_scores_have_the_base_rate_and_one_loss():
    outputs, targets = outputs_and_targets(2)
    scores = {"loss": 1.0, **score(outputs, targets, F.cross_entropy)}
    names = [name for name, _ in shown_scores(scores)]
    assert names[:3] == ["accuracy", "share of the most frequent class", "AUC"]
    assert "loss" not in names
    assert describe_scores(scores, 1234).endswith("(1,234 records)")


def test_a_release_states_its_test_figures_and_the_settings_it_used(tmp_path):
    run = dpsur.fit(
        small_model(),
        blobs(),
        budget=BUDGET,
        method=dpsur.Dpsgd(updates=2, learning_rate=0.5),
        test_set=blobs(seed=1),
        seed=0,
    )
    assert run.statement["test"] == {"records": len(blobs()), "scores": dict(run.scores)}
    card = render_model_card(run.statement)
    assert f"| Public test records | {len(blobs())} |" in card
    assert "| base rate | " in card
    settings = run.statement["settings"]
    assert settings["learning_rate"] == 0.5
    assert not {"adam_beta1", "loss_clip", "clip_norm", "accept_ratio"} & settings.keys()
    folder = run.save(tmp_path / "run")
    assert verify(folder)[0] == []
    stated = json.loads((folder / "privacy.json").read_text())
    stated["test"]["scores"]["accuracy"] = "perfect"
    (folder / "privacy.json").write_text(json.dumps(stated))
    assert any("not a number" in fault for fault in verify(folder)[0])


def test_what_a_run_found_itself_is_not_a_setting():
    settings = {"gate": "block", "learning_rate": 4.0, "max_grad_norm": 0.1, "clip_norm": "median"}
    metrics = [{"learning_rate": None}, {"learning_rate": 38.2}]
    used = used_settings({**settings, "loss_clip": 0.001})
    assert used["learning_rate"] is None
    found = shown_settings({"texts": 1, "settings": used, "metrics": metrics})
    assert found["learning_rate"] == "found by tests, 38.2 last"
    assert "median" in found["max_grad_norm"]
    assert "loss_clip" not in found
