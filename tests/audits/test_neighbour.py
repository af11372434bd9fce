"""One record reaches an update through its noisy sums, by no more than is charged."""

import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.audits.neighbour import _Without, neighbour_test
from dpsur.cli import main
from dpsur.config import RunConfig
from dpsur.errors import InvalidInputError
from dpsur.functional.tree import to_vector
from dpsur.mechanism import gaussian
from dpsur.mechanism.trial import start
from dpsur.runs.session import build_session

METHODS = {
    "sgd": dpsur.Dpsgd(updates=8, batch_size=30),
    "adam": dpsur.Dpsgd(updates=8, batch_size=30, optimizer="adam", average_decay=0.9),
    "gate": dpsur.Dpsur(updates=4, batch_size=30),
    "blocks": dpsur.Dpsgd(gate="block", updates=6, blocks=2, block_updates=3),
}


def session(method="sgd", *layers):
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    return build_session(
        RunConfig(
            task=None,
            method=METHODS[method],
            budget=dpsur.Budget(3.0, 1e-3),
            features="vectors",
            device="cpu",
        ),
        nn.Sequential(nn.Linear(5, 16), nn.ReLU(), *layers, nn.Linear(16, 2)),
        (x, (x.sum(1) > 0).long()),
        loss=F.cross_entropy,
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_record_moves_sums_and_nothing_else(method):
    pairs = neighbour_test(session(method), 4)
    assert len(pairs) == 4
    assert all(pair.sound for pair in pairs)
    assert max(pair.moved for pair in pairs) > 0.5


def test_noise_for_half_of_what_a_record_moves_is_seen(monkeypatch):
    real = gaussian.clipped_sum

    def halved(*args, **kwargs):
        total = real(*args, **kwargs)
        return replace(total, sensitivity=total.sensitivity / 2)

    monkeypatch.setattr(gaussian, "clipped_sum", halved)
    pairs = neighbour_test(session(), 4)
    assert all(pair.same_otherwise for pair in pairs)
    assert max(pair.moved for pair in pairs) > 1.5


def test_division_by_the_drawn_size_is_seen(monkeypatch):
    real = gaussian.dp_mean_gradient

    def of_drawn(problem, params, batch, rate, *args, **kwargs):
        found = real(problem, params, batch, rate, *args, **kwargs)
        return {n: value * (rate * problem.size / len(batch)) for n, value in found.items()}

    monkeypatch.setattr("dpsur.mechanism.proposer.dp_mean_gradient", of_drawn)
    assert not any(pair.same_otherwise for pair in neighbour_test(session(), 4))


def test_a_clip_norm_from_the_batch_is_seen(monkeypatch):
    real = gaussian.clipped_sum

    def adaptive(problem, params, data, norm, *, rows, **kwargs):
        return real(problem, params, data, norm * (1 + len(rows) / 100), rows=rows, **kwargs)

    monkeypatch.setattr(gaussian, "clipped_sum", adaptive)
    assert not any(pair.same_otherwise for pair in neighbour_test(session(), 4))


def test_layers_that_draw_are_refused():
    with pytest.raises(InvalidInputError, match="dropout"):
        neighbour_test(session("sgd", nn.Dropout()), 1)


def network():
    return nn.Linear(6, 3)


def test_the_command_takes_your_network_and_records(tmp_path, capsys):
    x = torch.randn(90, 6, generator=torch.Generator().manual_seed(1)).numpy()
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(90) % 3, x_test=x, y_test=np.arange(90) % 3)
    own = ["audit", "--task", f"npz:{tmp_path / 'own.npz'}", "--classes", "3", "--device", "cpu"]
    own += ["--delta", "1e-3", "--updates", "5", "--batch-size", "20"]
    model = ["--model", f"{__name__}:network"]
    assert main([*own, *model, "--neighbour", "3"]) == 0
    assert "nothing else differed" in capsys.readouterr().out
    assert main([*own, *model, "--neighbour", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["updates"] == 3
    assert found["sound"]
    for wrong in (model, ["--neighbour", "0"], ["--neighbour", "1", "--records-per-person", "2"]):
        assert main([*own, *wrong]) == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("charged", [1, 0.5])
def test_the_auditor_of_another_project_agrees(charged, monkeypatch):
    """Re:cord-play (ObliviousAI/dp-recorder): put its `src` on PYTHONPATH to run this."""
    primitives = pytest.importorskip("dp_recorder.auditing.audit_primitives")
    made, real = session(), gaussian.add_noise
    now = []

    @primitives.audit_spec(
        kind="gaussian",
        input_arg="values",
        sensitivity_arg="sensitivity",
        metric_fn=lambda one, other: float(np.linalg.norm(one - other)),
    )
    def mechanism(values, sensitivity, noise_multiplier):
        total, stream = now[-1]
        return real(total, noise_multiplier, stream)

    def add_noise(total, noise_multiplier, stream):
        now.append((total, stream))
        vector = to_vector(total.params).double().numpy()
        return mechanism(vector, charged * total.sensitivity * (1 + 1e-6), float(noise_multiplier))

    monkeypatch.setattr(gaussian, "add_noise", add_noise)
    progress = start(made.procedure)
    for step in range(1, 9):
        record = int(made.streams.at(step)["batch"].uniform(200).argmin())
        auditor = primitives.Auditor()
        ends = []
        for streams in (made.streams, _Without(made.streams, record)):
            if ends:
                auditor.set_replay()
            with auditor:
                candidate = made.procedure.propose(
                    progress.state, streams.at(step), torch.tensor(step - 1)
                )
                ends.append(candidate.state)
                primitives.ensure_equality(weights=to_vector(candidate.state.params).numpy())
        with nullcontext() if charged == 1 else pytest.raises(AssertionError, match="Sens"):
            auditor.validate_records()
        progress = replace(progress, state=ends[0])
