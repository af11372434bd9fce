"""One seed gives one run: `fit`, a private step and the Opacus form make the same weights.

All three take the same step (`take_step`). They differ in how a clipped sum comes about and in
where the weights are. Here those are held against each other, behind every gate.
"""

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur

DELTA, BATCH, RECORDS = 1e-3, 25, 100
OPTIMIZERS = {
    "sgd": ({"momentum": 0.0}, lambda p: torch.optim.SGD(p, lr=0.3)),
    "momentum": ({"momentum": 0.5}, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5)),
    "adam": (
        {"optimizer": "adam", "adam_eps": 1e-7},
        lambda p: torch.optim.Adam(p, lr=0.3, eps=1e-7),
    ),
}
LOSS_GATE = {
    "val_batch_size": 40,
    "val_noise_multiplier": 0.8,
    "loss_clip": 0.5,
    "accept_threshold": 0.0,
}
COIN_GATE = {"val_batch_size": 40, "accept_ratio": 6.0}


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def records():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, 6, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long()


BLOCKS = {
    **{"blocks": 2, "block_updates": 3, "val_noise_multiplier": 4.0},
    "schedule": "constant",
}
# Of each gate: how many steps there are, further options of `fit`, and what both are given.
GIVEN = {"clip_norm": "given"}
GATES = {
    "no gate": ({"updates": 9}, {}, {}),
    "loss gate": ({"trials": 9}, {}, {"gate": dpsur.LossGate(**LOSS_GATE)}),
    "loss gate, proven": ({"updates": 5}, {}, {"gate": dpsur.LossGate(**LOSS_GATE)}),
    "loss gate, own loss": ({"trials": 9}, {}, {"gate": dpsur.LossGate(**LOSS_GATE)}),
    "coin gate": ({"updates": 30}, {}, {"gate": dpsur.CoinGate(**COIN_GATE)}),
    "block gate": ({"updates": 5}, GIVEN, {"gate": dpsur.BlockGate(learning_rate=0.3, **BLOCKS)}),
    "block gate, norm measured": ({"updates": 5}, {}, {"gate": dpsur.BlockGate(**BLOCKS)}),
    "metrics": ({"updates": 9}, {}, {"metrics": dpsur.Metrics(noise_multiplier=4.0)}),
    "metrics, patience": (
        {"updates": 40},
        {},
        {"metrics": dpsur.Metrics(noise_multiplier=400.0, patience=1)},
    ),
}


def fitted(gate, settings):
    counts, options, given = GATES[gate]
    searched = gate.startswith("block")
    method = dpsur.Dpsgd(
        batch_size=BATCH,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        learning_rate=None if searched else 0.3,
        schedule="linear" if searched else "constant",
        **{**counts, **options, **given, **settings},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dpsur.PrivacyWarning)
        run = dpsur.fit(
            network(),
            records(),
            loss=F.cross_entropy,
            budget=dpsur.Budget(100.0, DELTA),
            method=method,
            accounting=accounting_of(gate),
            seed=3,
            device="cpu",
        )
    return dict(run.model.state_dict()), run.statement.get("metrics")


def accounting_of(gate):
    return "proven" if gate in ("coin gate", "loss gate, proven") else "every-trial"


def mean_loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def trained(form, gate, optimizer, seed=3):
    model, engine = network(), dpsur.PrivacyEngine()
    counts, _, given = GATES[gate]
    if gate.endswith("own loss"):
        given = {"gate": replace(given["gate"], loss=mean_loss)}
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer(model.parameters()),
        data_loader=DataLoader(TensorDataset(*records()), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=None if gate.endswith("measured") else 1.0,
        criterion=nn.CrossEntropyLoss(),
        steps=next(iter(counts.values())),
        accounting="proven" if gate.endswith("proven") else None,
        seed=seed,
        **given,
    )
    if form == "private_step":
        step = engine.private_step(mean_loss)
    while not engine.finished():
        for batch in loader:
            if form == "private_step":
                step(batch)
                continue
            optimizer.zero_grad()
            mean_loss(model, batch).backward()
            optimizer.step()
    return dict(model.state_dict()), engine.metrics or None, engine.accountant.charged


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("gate", GATES)
def test_one_seed_gives_one_run(optimizer, gate):
    settings, build = OPTIMIZERS[optimizer]
    expected, metrics = fitted(gate, settings)
    start = network().state_dict()
    for form in ("private_step", "opacus"):
        found, released, _ = trained(form, gate, build)
        assert [row["value"] for row in released or ()] == pytest.approx(
            [row["value"] for row in metrics or ()], rel=1e-12
        )
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13)
            assert not torch.equal(found[name], start[name])


@pytest.mark.parametrize("gate", GATES)
def test_another_seed_gives_another_run(gate):
    """The comparison can fail."""
    settings, build = OPTIMIZERS["sgd"]
    (one, *_), (other, _) = trained("private_step", gate, build, seed=4), fitted(gate, settings)
    assert any(not torch.allclose(one[name], other[name]) for name in one)


@pytest.mark.parametrize("gate", ["loss gate", "loss gate, proven", "coin gate"])
def test_candidates_are_kept_and_rejected(gate):
    """So that the comparison covers both."""
    *_, charged = trained("private_step", gate, OPTIMIZERS["sgd"][1], seed=7)
    assert 0 < charged.updates < charged.trials


def test_patience_ends_the_run_before_its_plan():
    _, released, charged = trained("opacus", "metrics, patience", OPTIMIZERS["sgd"][1])
    assert charged.updates < 40
    assert len(released) < 20
