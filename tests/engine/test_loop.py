"""Loops that users write: microbatches, schedulers, gates, workers, checkpoints."""

import copy
import dataclasses
import math
import pickle
import re
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import dpsur
from dpsur.engine.steps import PrivateLoop
from dpsur.engine.weights import ModuleWeights
from dpsur.errors import StepError
from dpsur.mechanism.trial import LossRule
from tests.engine.helpers import linear_model, private, records, without_noise


def train(engine, model, optimizer, loader, steps=None, after=None):
    """The usual loop, for one pass."""
    for place, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if after is not None:
            after()
        if steps is not None and place + 1 == steps:
            break


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def close(one, other):
    return all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_the_module_and_the_optimizer_stay_the_objects_they_are():
    model = linear_model()
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters()}], lr=0.01
    )
    keys = list(model.state_dict())
    _, private_model, private_optimizer, _ = private(model, optimizer=optimizer)
    assert private_model is model
    assert private_optimizer is optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.01]
    assert list(model.state_dict()) == keys


def test_training_learns_and_spends_what_was_planned():
    engine, model, optimizer, loader = private(epochs=8, noise_multiplier=0.3, lr=0.5, seed=1)
    for _ in range(8):
        train(engine, model, optimizer, loader)
    assert engine.accountant.steps == 8 * len(loader) == 40
    assert engine.get_epsilon(1e-5) == pytest.approx(engine.guarantee(1e-5))
    ledger = dpsur.Account.for_steps(dpsur.SampledGaussian(1 / 5, 0.3), 40, delta=1e-5)
    assert engine.guarantee(1e-5) == ledger.guarantee()


def test_noise_is_calibrated_to_a_budget():
    model = linear_model()
    engine = dpsur.PrivacyEngine()
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=12),
        target_epsilon=2.0,
        target_delta=1e-5,
        epochs=4,
        max_grad_norm=1.0,
    )
    assert 1.9 < engine.guarantee(1e-5) <= 2.0


def test_without_a_plan_there_is_a_record_and_no_guarantee():
    engine, model, optimizer, loader = private(seed=1)
    train(engine, model, optimizer, loader)
    assert math.isinf(engine.guarantee(1e-5))
    assert engine.get_epsilon(1e-5) < 10


def test_epsilon_is_at_most_that_of_opacus_and_one_percent():
    accountants = pytest.importorskip("opacus.accountants", reason="needs the extra dev: opacus")
    engine, _, _, loader = private(noise_multiplier=1.1, epochs=20, data=records(600))
    peer = accountants.PRVAccountant()
    peer.history = [(1.1, 1 / len(loader), 20 * len(loader))]
    assert engine.guarantee(1e-5) <= 1.01 * peer.get_epsilon(delta=1e-5)


@pytest.mark.parametrize("largest", [1, 3, 5, 100])
@pytest.mark.parametrize("way", ["manager", "option", "by hand"])
def test_microbatches_make_the_step_of_the_whole_batch(way, largest):
    """One draw of noise and one charge per batch, whatever its microbatches."""

    def run(largest):
        options = {"max_physical_batch_size": largest} if way == "option" and largest else {}
        engine, model, optimizer, loader = private(seed=4, **options)
        if way == "manager" and largest:
            with dpsur.BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=largest, optimizer=optimizer
            ) as smaller:
                train(engine, model, optimizer, smaller)
        elif way == "by hand" and largest:
            for x, y in loader:
                optimizer.zero_grad()
                for part, target in zip(x.split(largest), y.split(largest), strict=True):
                    F.cross_entropy(model(part), target).backward()
                optimizer.step()
        else:
            train(engine, model, optimizer, loader)
        return engine.accountant.steps, weights(model)

    (steps, whole), (again, found) = run(None), run(largest)
    assert steps == again == 5
    assert close(whole, found)


def test_a_scheduler_moves_once_per_batch():
    for before in (True, False):
        model = linear_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        made = []
        if before:
            made.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        engine, model, optimizer, loader = private(
            model, optimizer=optimizer, seed=1, max_physical_batch_size=3
        )
        if not before:
            made.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        train(engine, model, optimizer, loader, after=made[0].step)
        assert engine.accountant.steps == 5
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5**5)


def gate_for(verdicts, **options):
    """A gate whose test sees what it is told; noise is far smaller than the clip bound."""
    values = iter(
        value for verdict in verdicts for value in ((1.0, 0.0) if verdict else (0.0, 1.0))
    )
    return dpsur.LossGate(
        lambda model, batch: torch.tensor(next(values)),
        val_batch_size=30,
        val_noise_multiplier=1e-3,
        accept_threshold=0.0,
        loss_clip=1.0,
        **options,
    )


def test_a_rejected_step_leaves_no_trace():
    """Weights, buffers, the optimizer's state and the scheduler are what they were."""
    verdicts = [True, False, False, True, False]
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model.register_buffer("steps", torch.zeros(()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine, model, optimizer, loader = private(
        model, optimizer=optimizer, seed=1, gate=gate_for(verdicts, show_verdicts=True)
    )

    def everything():
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))

    def equal(one, other):
        return repr(one) == repr(other)

    seen = []
    for x, y in loader:
        before = everything()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        seen.append(not equal(before, everything()))
        if not seen[-1]:
            assert all(value.grad is None for value in model.parameters())
    assert seen == verdicts == engine.verdicts
    assert engine.accountant.steps == 5


def test_the_first_rejected_step_leaves_an_empty_optimizer():
    model = linear_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    engine, model, optimizer, loader = private(
        model, optimizer=optimizer, seed=1, gate=gate_for([False])
    )
    train(engine, model, optimizer, loader, steps=1)
    assert not optimizer.state
    assert engine.verdicts == []  # which are private unless asked for


def test_every_trial_is_charged_with_its_test():
    engine, _, _, _ = private(gate=gate_for([]), steps=20, noise_multiplier=1.0)
    test = dpsur.LossTest(0.5, 1e-3, 0.0)
    ledger = dpsur.Account.for_steps(
        dpsur.Trial(dpsur.SampledGaussian(0.2, 1.0), test), 20, delta=1e-5
    )
    assert engine.guarantee(1e-5) == ledger.guarantee()


def proven(verdicts):
    """Told verdicts, under a test whose acceptance has a probability that is not tiny."""
    gate = dataclasses.replace(gate_for(verdicts), val_noise_multiplier=0.5)
    return {"gate": gate, "accounting": "proven"}


def test_proven_charges_accepted_updates_and_ends_the_loader(monkeypatch, tmp_path):
    """Three updates among six trials: the loader ends by itself, after the third."""
    verdicts = [False, True, False, False, True, True]
    monkeypatch.setattr(LossRule, "decide", lambda *_: torch.tensor(verdicts.pop(0)))
    engine, model, optimizer, loader = private(
        **proven([True] * 9), steps=3, target_delta=1e-3, seed=1
    )
    with pytest.raises(dpsur.NothingReleasedError, match="all of its updates"):
        engine.save(tmp_path / "early")
    train(engine, model, optimizer, loader)
    assert verdicts == []
    test = dpsur.LossTest(0.5, 0.5, 0.0)
    assert engine.guarantee() == pytest.approx(
        dpsur.selective_epsilon(
            sample_rate=0.2, noise_multiplier=1.0, updates=3, delta=1e-3, test=test
        )
    )
    with pytest.raises(dpsur.BudgetError):
        next(iter(loader))
    engine.save(tmp_path / "run")
    assert dpsur.verify(tmp_path / "run")[0] == []


def test_accepted_updates_may_be_charged_by_distributions(tmp_path):
    """The same updates at the same noise for less epsilon, or less noise for the same."""
    found = {}
    for accounting in ("proven", "proven-pld"):
        given = {**proven([True] * 9), "accounting": accounting}
        engine, model, optimizer, loader = private(**given, steps=3, target_delta=1e-3, seed=1)
        train(engine, model, optimizer, loader)
        engine.save(tmp_path / accounting)
        assert dpsur.verify(tmp_path / accounting)[0] == []
        found[accounting] = engine.guarantee()
    assert 0.5 * found["proven"] < found["proven-pld"] < found["proven"]


def test_proven_releases_nothing_at_the_cap(monkeypatch):
    monkeypatch.setattr(LossRule, "decide", lambda *_: torch.tensor(False))
    gate = dataclasses.replace(proven([])["gate"], loss=lambda *_: torch.zeros(()))
    engine, model, optimizer, loader = private(
        gate=gate,
        accounting="proven",
        steps=1,
        target_delta=1e-2,
        seed=1,
    )
    before = weights(model)
    with pytest.raises(dpsur.NothingReleasedError, match="cap on trials"):
        train(engine, model, optimizer, loader)
    assert same(before, weights(model))
    with pytest.raises(dpsur.NothingReleasedError):
        engine.statement()


def test_proven_hides_verdicts_and_needs_a_number_of_updates():
    with pytest.raises(dpsur.InvalidInputError, match="show_verdicts"):
        private(gate=gate_for([], show_verdicts=True), accounting="proven", steps=3)
    with pytest.raises(dpsur.InvalidInputError, match=r"needs steps"):
        private(**proven([]))


def test_a_gate_tests_on_fresh_poisson_batches():
    """Its batches have the rate that is charged, and are not those of the gradient."""
    seen = []

    def loss(model, batch):
        seen.append(batch[0])
        return F.cross_entropy(model(batch[0]), batch[1])

    gate = dpsur.LossGate(loss, val_batch_size=30, val_noise_multiplier=1.0)
    engine, model, optimizer, loader = private(seed=2, gate=gate)
    trained = []
    for x, y in loader:
        trained.append(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert model.training
    assert len(seen) == 10
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert torch.equal(before, after)
    sizes = [len(one) for one in seen[::2]]
    assert 15 <= sum(sizes) / len(sizes) <= 45
    assert len({tuple(one[:, 0].tolist()) for one in seen}) == 5
    assert engine.accountant.steps == 5


def test_a_resumed_loop_continues_its_ledger():
    engine, model, optimizer, loader = private(seed=3, epochs=2)
    train(engine, model, optimizer, loader)
    saved = copy.deepcopy((engine.state_dict(), weights(model), optimizer.state_dict()))
    train(engine, model, optimizer, loader)
    resumed, other, second, again = private(seed=3, epochs=2)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    second.load_state_dict(saved[2])
    train(resumed, other, second, again)
    assert resumed.accountant.steps == 10
    assert same(weights(model), weights(other))
    with pytest.raises(dpsur.BudgetError, match="spent after 10 steps"):
        next(iter(again))


def test_an_unseeded_resume_never_repeats_noise():
    """Batches and noise after the checkpoint are fresh: nobody can subtract two runs."""
    engine, model, optimizer, loader = private()
    train(engine, model, optimizer, loader, steps=2)
    state = engine.state_dict()
    assert "key" not in repr(state)
    resumed, _, _, _ = private()
    resumed.load_state_dict(state)
    assert resumed._streams.key.content != engine._streams.key.content
    assert resumed.accountant.steps == 2


def test_a_checkpoint_of_other_settings_is_refused():
    engine, _, _, _ = private()
    other, _, _, _ = private(noise_multiplier=2.0)
    with pytest.raises(dpsur.CheckpointError, match="noise_multiplier"):
        other.load_state_dict(engine.state_dict())


def test_copies_of_a_private_model_are_plain():
    _, model, _, _ = private()
    twin = copy.deepcopy(model)
    twin(torch.randn(4, 6)).sum().backward()
    assert twin[0].weight.grad is not None


def test_workers_read_the_records():
    model = linear_model()
    loader = DataLoader(records(), batch_size=12, num_workers=2, prefetch_factor=3)
    engine = dpsur.PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        seed=4,
    )
    assert (loader.num_workers, loader.prefetch_factor) == (2, 3)
    train(engine, model, optimizer, loader)
    alone, other, second, single = private(seed=4)
    train(alone, other, second, single)
    assert close(weights(model), weights(other))


def test_bfloat16_autocast(monkeypatch):
    without_noise(monkeypatch)
    found = []
    for rounded in (False, True):
        _, model, optimizer, loader = private(seed=1)
        x, y = next(iter(loader))
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    gap = float((found[0] - found[1]).norm() / found[0].norm())
    assert 0 < gap < 0.05


def test_a_compiled_module_is_refused_in_a_line():
    model = linear_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its import
        compiled = torch.compile(model)
    with pytest.raises(dpsur.InvalidInputError, match=r"torch\.compile"):
        private(compiled, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_closure_is_called_once():
    """As Lightning does: forward and backward inside the step."""
    engine, model, optimizer, loader = private(seed=1)
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        assert float(optimizer.step(closure).detach()) > 0
    assert engine.accountant.steps == 5


def test_one_engine_trains_once():
    engine, model, _, loader = private()
    with pytest.raises(dpsur.InvalidInputError, match="in use"):
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_microbatches_must_all_be_used():
    _, _, _, loader = private(seed=1, max_physical_batch_size=3)
    batches = iter(loader)
    next(batches)
    with pytest.raises(StepError, match="microbatch"):
        next(batches)


def test_the_pages_run(capsys):
    """Every block of code of docs/own_loop.md up to other models, and what is said of Opacus's."""
    docs = Path(__file__).parents[2] / "docs"
    page, mark, _ = (docs / "own_loop.md").read_text().partition("## Your models and loops")
    _, other, rest = (docs / "from_opacus.md").read_text().partition("## The loop")
    rest, end, _ = rest.partition("## What is different")
    assert all((mark, other, end))
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page + rest, flags=re.DOTALL):
        exec(block, names)
    first, second = map(float, capsys.readouterr().out.split())
    assert second <= first <= 3.0


def test_a_rejection_that_keeps_something_is_noticed(monkeypatch):
    """The mutant: one that puts back the weights and leaves the optimizer's moments."""

    monkeypatch.setattr(ModuleWeights, "write_optimizer", lambda *_: None)
    with pytest.raises(AssertionError):
        test_a_rejected_step_leaves_no_trace()


def test_noise_for_every_microbatch_is_noticed(monkeypatch):
    """The mutant: a step that acts on each microbatch has other weights and more charges."""
    from dpsur.engine.loader import Microbatch

    honest = Microbatch.__init__

    def always_last(self, step, drawn, before, last, records):
        honest(self, step, drawn if last else before, before, True, records)

    monkeypatch.setattr(Microbatch, "__init__", always_last)
    with pytest.raises((AssertionError, StepError)):
        test_microbatches_make_the_step_of_the_whole_batch("option", 3)


def test_a_private_model_can_be_pickled():
    _, model, _, _ = private()
    twin = pickle.loads(pickle.dumps(model))
    twin(torch.randn(4, 6)).sum().backward()
    assert twin[0].weight.grad is not None


def dropped(torch_seed, layer=None, **options):
    """The clipped sum of a batch, with random numbers in the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), layer or nn.Dropout(0.5), nn.Linear(8, 3))
    engine, model, _, loader = private(model, **options)
    x, y = next(iter(loader))
    torch.manual_seed(torch_seed)
    F.cross_entropy(model(x), y).backward()
    return torch.cat([value.flatten() for value in engine._watcher.sums.params.values()])


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


@pytest.mark.parametrize("layer", [None, Noisy()])
def test_layers_draw_secret_numbers(layer, monkeypatch):
    """Which draws a record gets depends on the records before it, so that they must be secret.

    Without a seed they differ under one `torch.manual_seed`, with a seed they do not follow it.
    """
    first, second = (dropped(1, layer, batch_size=60) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(dropped(1, layer, seed=1), dropped(2, layer, seed=1))
    monkeypatch.setattr(PrivateLoop, "layer_randomness", lambda _: nullcontext())
    first, second = (dropped(1, layer, batch_size=60) for _ in range(2))
    assert torch.equal(first, second)  # as it was: a record moves the sum by six times its bound
