"""The gate over blocks in a custom loop: the rule of `fit`, all of it charged."""

import copy
import gc
import io
import json
import math
import warnings
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from dpsur.engine import model_tests
from dpsur.engine.model_tests import ModelTests
from dpsur.engine.weights import ModuleUpdates, ModuleWeights
from dpsur.errors import StepError
from dpsur.mechanism import gaussian
from dpsur.mechanism.blocks import RateSearchTraining
from dpsur.mechanism.streams import Stream
from dpsur.privacy.accountants import pld
from dpsur.privacy.events import Gaussian, SampledGaussian
from dpsur.privacy.plan import Plan
from tests.mutants import Mutant

SIZE, RATE, DELTA = 120, 1 / 5, 1e-3
SHORT = {"blocks": 4, "block_updates": 3, "val_noise_multiplier": 3.0}


def points(seed=0, count=SIZE):
    made = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, dtype=torch.float64, generator=made)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


class Network(nn.Module):
    """With a buffer, which `step` of the tests below changes by hand."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.register_buffer("temperature", torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.layers(x) / self.temperature


def make(model=None, data=None, *, optimizer=None, batch_size=24, workers=0, **options):
    """An engine with a block gate, and what it returns."""
    model = Network() if model is None else model
    if optimizer is None:
        trained = [value for value in model.parameters() if value.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.3, momentum=0.5)
    gate = dpsur.BlockGate(**{**SHORT, **options.pop("gate", {})})
    engine = dpsur.PrivacyEngine()
    settings = {
        "noise_multiplier": 1.0,
        "steps": 5,
        "target_delta": DELTA,
        "criterion": nn.CrossEntropyLoss(),
        "seed": 3,
        **options,
    }
    loader = DataLoader(
        points() if data is None else data, batch_size=batch_size, num_workers=workers
    )
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, gate=gate, **settings
    )
    return (engine, *made)


def loop(engine, model, optimizer, loader, most=None, loss=F.cross_entropy, after=None):
    """The usual loop, of at most so many updates."""
    made = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        made += 1
        if after is not None:
            after()
        if made == most:
            break
    return made


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_close(one, other, tolerance=1e-9):
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=tolerance, atol=tolerance)


def run(**options):
    made = make(**options)
    loop(*made)
    return made[0], weights(made[1])


# --- the same run as that of `fit` ---------------------------------------------------------------


class Flat(nn.Module):
    def forward(self, x):
        return x[:, 0]


def regressor():
    return nn.Sequential(Network(), Flat())


CASES = {
    "sgd": ({}, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5), {}),
    "adam": ({"optimizer": "adam"}, lambda p: torch.optim.Adam(p, lr=0.3, eps=1e-7), {}),
    "a rate and a norm given": (
        {"clip_norm": "given", "learning_rate": 0.7, "blocks": 5, "max_grad_norm": 0.5},
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5),
        {"max_grad_norm": 0.5, "gate": {"learning_rate": 0.7, "blocks": 5}},
    ),
    "sampled tests": (
        {"val_batch_size": 60},
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5),
        {"gate": {"val_batch_size": 60}},
    ),
    "precise tests": (
        {"batch_size": 400},
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5),
        {"batch_size": 400, "data": points(count=2000)},
    ),
    "regression": ({}, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_engine_makes_the_run_of_fit(case):
    """Same seed, same settings: same rates, same values, same weights."""
    settings, optimizer, options = CASES[case]
    options = dict(options)
    inputs, targets = options.pop("data", points()).tensors
    model, criterion = Network(), nn.CrossEntropyLoss()
    if case == "regression":
        model, criterion, targets = regressor(), nn.MSELoss(), inputs[:, 3].clone()
    method = dpsur.Dpsgd(
        **{
            "gate": "block",
            "batch_size": 24,
            "updates": 5,
            "noise_multiplier": 1.0,
            "max_grad_norm": 1.0,
            "momentum": 0.5,
            **SHORT,
            **settings,
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dpsur.PrivacyWarning)
        fitted = dpsur.fit(
            copy.deepcopy(model),
            (inputs, targets),
            loss=criterion,
            budget=dpsur.Budget(100.0, DELTA),
            method=method,
            accounting="every-trial",
            seed=3,
            device="cpu",
        )
    data = TensorDataset(inputs, targets)
    engine, model, _, loader = made = make(
        model, data, optimizer=optimizer(model.parameters()), criterion=criterion, **options
    )
    assert loop(*made, loss=criterion) == len(loader)
    for one, other in zip(fitted.statement["metrics"], engine.metrics, strict=True):
        for name, value in one.items():
            same = value == pytest.approx(other[name], rel=1e-9) if name == "value" else None
            assert same or value == pytest.approx(other[name]), (name, one, other)
    assert_close(weights(fitted.model), weights(model))
    assert engine.guarantee() == pytest.approx(fitted.statement["guarantee"]["epsilon"])


def test_the_engine_decides_nothing_itself(monkeypatch):
    """With another rule it does something else."""

    real = RateSearchTraining.after_test

    def other(self, state, noisy):
        after = real(self, state, noisy)
        rate = torch.full_like(after.memory["rate"], 0.25)
        return replace(after, memory={**after.memory, "rate": rate})

    monkeypatch.setattr(RateSearchTraining, "after_test", other)
    monkeypatch.setattr(ModuleUpdates, "restore", lambda self, state, *_: state)
    rates, counts = [], []
    made = make(gate={"schedule": "constant"}, optimizer=None)

    def note():
        rates.append(made[2].param_groups[0]["lr"])
        counts.append(len(made[2].state))

    loop(*made, after=note)
    assert set(rates) == {0.25}
    assert set(counts) == {4}  # no block started with an optimizer at rest


def test_the_ways_of_blocks_are_added_to_restored_weights():
    """As a rule may decide."""
    engine, model, optimizer, _ = make()
    updates, first, ends = engine._procedure.updates, weights(model), {}
    state = updates.save(updates.initial_state(), "first")
    for name in ("one", "two"):
        with torch.no_grad():
            for value in model.parameters():
                value.add_(torch.randn_like(value))
        optimizer.state[next(model.parameters())] = {"step": torch.ones(())}
        ends[name] = weights(model)
        state = updates.restore(updates.save(state, name), "first")
        assert_close(first, weights(model), 0.0)
        assert not optimizer.state
    updates.restore(state, "first", (("one", 0.5), ("two", -0.25)))
    for name, value in first.items():
        wanted = value + 0.5 * (ends["one"][name] - value) - 0.25 * (ends["two"][name] - value)
        torch.testing.assert_close(model.state_dict()[name], wanted)


# --- laws ----------------------------------------------------------------------------------------


def what_was_drawn_is_charged():
    """Adds up noise as seen from outside, not what the ledger says."""
    done = []

    def spy(total, multiplier, stream, real=gaussian.add_noise):
        if "test" in total.params:
            assert total.sensitivity == 1.0
            done.append(Gaussian(multiplier))
        else:
            done.append(SampledGaussian(RATE, multiplier))
        return real(total, multiplier, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "add_noise", spy)
        engine, _ = run()
    plan = engine.accountant.plan
    assert len(done) == plan.updates + len(plan.blocks)
    spent = pld.composed_epsilon(list(Counter(done).items()), DELTA)
    assert spent <= engine.guarantee() + 1e-9
    assert engine.get_epsilon(DELTA) == pytest.approx(engine.guarantee())


def a_run_depends_on_the_records_through_noisy_sums_only():
    """With the noisy sums replaced by numbers of our own, two data sets lead to the same end."""

    def noise_alone(total, multiplier, stream):
        return {
            n: stream.normal(v.numel()).view(v.shape).to(v.dtype) for n, v in total.params.items()
        }

    ends = []
    for seed in (0, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gaussian, "add_noise", noise_alone)
            engine, found = run(data=points(seed), max_grad_norm=1.0)
            ends.append((engine.metrics, found))
    assert ends[0][0] == ends[1][0]
    assert_close(ends[0][1], ends[1][1], 0.0)


def nothing_of_a_block_survives_a_restart():
    """Weights, buffers, optimizer and averages are those of before the first update."""
    model = Network()
    average = AveragedModel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    engine, model, optimizer, loader = make(
        model, optimizer=optimizer, gate={"averages": (average,)}
    )
    first, first_average = weights(model), weights(average)
    restarts = []
    real = ModuleUpdates.restore

    def spy(self, state, name, add=()):
        found = real(self, state, name, add)
        if name == "first" and not add:
            restarts.append(engine.accountant.steps)
            assert_close(first, weights(model), 0.0)
            assert_close(first_average, weights(average), 0.0)
            assert not optimizer.state
            assert all(value.grad is None for value in model.parameters())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleUpdates, "restore", spy)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                model.temperature.mul_(1.01)  # a schedule of the user
            average.update_parameters(model)
            optimizer.step()
    assert engine.accountant.completed
    assert len(restarts) >= 2


def no_random_number_is_drawn_twice():
    drawn = []
    real, added = Stream.normal, Stream.add_normal

    def normal(self, count, offset=None):
        first = self._next if offset is None else offset
        drawn.append((self.purpose, int(self.step), first))
        return real(self, count, offset)

    def add_normal(self, values, scale, **more):
        drawn.append((self.purpose, int(self.step), self._next))
        return added(self, values, scale, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "normal", normal)
        patch.setattr(Stream, "add_normal", add_normal)
        engine, _ = run()
    plan = engine.accountant.plan
    assert len(drawn) >= plan.updates + len(plan.blocks)
    assert len(set(drawn)) == len(drawn)


def a_record_adds_at_most_one():
    """Whatever it is: also one whose loss is enormous or no number."""
    inputs, targets = points(count=30).tensors
    inputs = inputs.clone()
    inputs[3] *= 1e8
    inputs[4] = math.nan
    for options in ({}, {"gate": {"losses": lambda model, batch: model(batch[0])[:, 0] ** 3}}):
        added = []
        real = ModelTests._values

        def spy(self, *given, real=real, added=added):
            values = real(self, *given)
            added.append(values.norm(dim=1).max())
            return values

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelTests, "_values", spy)
            engine, *made = make(
                data=TensorDataset(inputs, targets),
                max_grad_norm=1.0,
                batch_size=6,
                seed=2,
                **options,
            )
            engine._make_tests()
            if options:  # decreases come after an update
                loss = lambda outputs, _: (outputs[:, 0] ** 3).mean()  # noqa: E731
                loop(engine, *made, most=3, loss=loss)
        assert max(added) <= 1 + 1e-12


LAWS = [
    what_was_drawn_is_charged,
    a_run_depends_on_the_records_through_noisy_sums_only,
    nothing_of_a_block_survives_a_restart,
    no_random_number_is_drawn_twice,
    a_record_adds_at_most_one,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws(law):
    law()


# --- mutants: each breaks a law ------------------------------------------------------------------


def tests_not_charged(patch):
    real = Plan.charges
    patch.setattr(
        Plan, "charges", lambda self: [part for part in real(self) if part[0] != self.test]
    )


def restarted_blocks_not_charged(patch):
    real = Plan.charges
    patch.setattr(
        Plan, "charges", lambda self: real(replace(self, phases=(self.phases[0], self.phases[-1])))
    )


def the_value_without_noise(patch):
    def wrong(self, quantity, state, draws):
        return self.tests.total(quantity, state, draws)

    patch.setattr(RateSearchTraining, "_noisy", wrong)


def _restore_without(part):
    def apply(patch):
        if part == "optimizer":
            patch.setattr(ModuleWeights, "write_optimizer", lambda *_: None)
            return
        real = ModuleWeights.write

        def wrong(self, saved):
            live = {n: v for n, v in self.copy().items() if n.startswith(part)}
            real(self, {**saved, **live})

        patch.setattr(ModuleWeights, "write", wrong)

    apply.__name__ = f"{part}_survive"
    return apply


def test_noise_starts_again_after_a_restore(patch):
    real = RateSearchTraining._noisy

    def wrong(self, quantity, state, draws):
        again = draws._streams.at(1 + int(state.memory["tests"]) % 3)
        return real(self, quantity, state, again)

    patch.setattr(RateSearchTraining, "_noisy", wrong)


test_noise_starts_again_after_a_restore.__test__ = False
tests_not_charged.__test__ = False


def metrics_not_clipped(patch):
    def wrong(outputs, targets):
        return outputs.double().square()[:, :2]

    patch.setattr(model_tests, "metrics_of", wrong)


def decreases_not_clipped(patch):
    wrong = lambda one, other, bound: (one - other)[:, None] / bound  # noqa: E731
    patch.setattr(model_tests, "decreases_of", wrong)


MUTANTS = [
    Mutant(what_was_drawn_is_charged, tests_not_charged),
    Mutant(what_was_drawn_is_charged, restarted_blocks_not_charged),
    Mutant(a_run_depends_on_the_records_through_noisy_sums_only, the_value_without_noise),
    Mutant(nothing_of_a_block_survives_a_restart, _restore_without("parameter")),
    Mutant(nothing_of_a_block_survives_a_restart, _restore_without("buffer")),
    Mutant(nothing_of_a_block_survives_a_restart, _restore_without("optimizer")),
    Mutant(nothing_of_a_block_survives_a_restart, _restore_without("0 ")),
    Mutant(no_random_number_is_drawn_twice, test_noise_starts_again_after_a_restore),
    Mutant(a_record_adds_at_most_one, metrics_not_clipped),
    Mutant(a_record_adds_at_most_one, decreases_not_clipped),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.apply.__name__)
def test_mutants_break_their_law(mutant, monkeypatch):
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        mutant.law()


# --- interruptions -------------------------------------------------------------------------------


def saved_and_loaded(engine, model, optimizer, average):
    """A checkpoint, through a file."""
    file = io.BytesIO()
    parts = {"model": model, "optimizer": optimizer, "engine": engine, "average": average}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def with_average(**options):
    model = Network()
    average = AveragedModel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    made = make(model, optimizer=optimizer, gate={"averages": [average]}, **options)
    return made, average


def test_a_run_resumes_at_any_update():
    """At the first, within a block, right after a restart, in the last block, before the last."""
    made, average = with_average()
    updates = loop(*made, after=lambda: average.update_parameters(made[1]))
    whole, averaged = weights(made[1]), weights(average)
    for stop in (0, 1, 3, 4, 7, 12, updates - 5, updates - 1):
        made, average = with_average()
        if stop:
            loop(*made, stop, after=lambda made=made, a=average: a.update_parameters(made[1]))
        checkpoint = saved_and_loaded(*made[:3], average)
        made, average = with_average()
        for part, name in zip(made, ("engine", "model", "optimizer"), strict=False):
            part.load_state_dict(checkpoint[name])
        average.load_state_dict(checkpoint["average"])
        rest = loop(*made, after=lambda made=made, a=average: a.update_parameters(made[1]))
        assert stop + rest == updates
        assert_close(whole, weights(made[1]), 0.0)
        assert_close(averaged, weights(average), 0.0)


def test_an_interrupted_test_is_made_again_and_charged_once():
    engine, whole = run()
    for after in (3, 9, 20, 33):
        calls, broken = [], [False]

        def outputs(model, batch, calls=calls, broken=broken, after=after):
            calls.append(1)
            if len(calls) == after and not broken[0]:
                broken[0] = True
                raise KeyboardInterrupt
            return model(batch[0]), batch[1]

        made = make(gate={"outputs": outputs})
        with pytest.raises(KeyboardInterrupt):
            loop(*made)
        loop(*made)
        assert made[0].metrics == engine.metrics
        assert made[0].accountant.to_json() == engine.accountant.to_json()
        assert_close(whole, weights(made[1]), 0.0)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("part", ["copy", "write", "write_optimizer"])
def test_a_decision_that_was_interrupted_is_made_and_carried_out_again(part, done, monkeypatch):
    """Whether weights were saved or restored already, or not yet: it is as if nothing was."""
    engine, whole = run()
    made, seen, real = make(), [], getattr(ModuleWeights, part)

    def interrupted(self, *args):
        seen.append(1)
        found = real(self, *args) if len(seen) > 1 or done else None
        if len(seen) == 1:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(ModuleWeights, part, interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop(*made)
    loop(*made)
    assert made[0].metrics == engine.metrics
    assert_close(whole, weights(made[1]), 0.0)


def test_unseeded_runs_have_noise_of_their_own():
    ends = [run(seed=None)[1] for _ in range(2)]
    assert not torch.equal(ends[0]["layers.0.weight"], ends[1]["layers.0.weight"])


# --- models and loops ----------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self.two.weight = self.one.weight
        self.last = nn.Linear(6, 3).double()

    def forward(self, x):
        return self.last(torch.tanh(self.two(torch.tanh(self.one(x)))))


def frozen():
    model = Network()
    model.layers[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", ["tied", "frozen"])
def test_tied_and_frozen_weights(kind):
    torch.manual_seed(0)
    model = Tied() if kind == "tied" else frozen()
    before = weights(model)
    made = make(model)
    loop(*made)
    after = weights(model)
    assert (
        torch.equal(before["layers.0.weight"], after["layers.0.weight"])
        if (kind == "frozen")
        else model.two.weight is model.one.weight
    )
    assert made[0].accountant.completed


@pytest.mark.parametrize("most", [7, 100])
def test_microbatches_change_nothing(most):
    engine, whole = run()
    other, found = run(max_physical_batch_size=most)
    assert_close(whole, found)
    for one, two in zip(engine.metrics, other.metrics, strict=True):
        assert one["value"] == pytest.approx(two["value"], rel=1e-9, abs=1e-9)


def test_workers_read_the_records_of_tests():
    assert_close(run()[1], run(workers=1)[1], 0.0)


def test_empty_batches_are_steps_of_noise():
    made = make(data=points(count=4), batch_size=1, gate={"val_batch_size": 1})
    sizes = []
    real = made[0].yielded

    def spy(batch, content):
        sizes.append(batch.rows)
        real(batch, content)

    made[0].yielded = spy
    loop(*made)
    assert 0 in sizes
    assert made[0].accountant.completed


def test_bfloat16_in_the_loop():
    model = Network().float()
    data = TensorDataset(points().tensors[0].float(), points().tensors[1])
    engine, model, optimizer, loader = make(model, data)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert "bfloat16" in engine.statement()["arithmetic"]
    assert len(engine.metrics) > 3


def test_groups_keep_the_ratio_of_their_rates():
    model = Network()
    optimizer = torch.optim.AdamW(
        [
            {"params": model.layers[0].parameters(), "lr": 1e-4},
            {"params": model.layers[2].parameters()},
        ],
        lr=1e-3,
    )
    rates = []
    made = make(model, optimizer=optimizer)
    loop(
        *made, most=2, after=lambda: rates.append([group["lr"] for group in optimizer.param_groups])
    )
    assert all(one == pytest.approx(0.1 * other) for one, other in rates)
    assert rates[0][1] == pytest.approx(0.08)
    assert rates[1][1] < rates[0][1]


def test_batches_of_other_forms_and_losses_of_the_user():
    class Words(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, row):
            x, y = points(count=40)[row]
            return {"inputs": x, "labels": y}

    common = {"data": Words(), "max_grad_norm": 1.0}
    with pytest.raises(dpsur.InvalidInputError, match="no pairs of inputs and targets"):
        next(iter(make(**common)[3]))

    def outputs(model, batch):
        return model(batch["inputs"]), batch["labels"]

    def losses(model, batch):
        return F.cross_entropy(*outputs(model, batch), reduction="none")

    for gate, quantity in (({"outputs": outputs}, "score"), ({"losses": losses}, "median loss")):
        engine, model, optimizer, loader = make(**{**common, "max_grad_norm": None}, gate=gate)
        for batch in loader:
            optimizer.zero_grad()
            F.cross_entropy(*outputs(model, batch)).backward()
            optimizer.step()
        assert engine.metrics[0]["quantity"] == "median gradient norm"
        assert engine.metrics[1]["quantity"] == quantity


def test_the_clipping_norm_is_measured_or_given():
    engine, _ = run()
    assert engine._watcher.max_grad_norm == pytest.approx(engine.metrics[0]["value"])
    engine, _ = run(max_grad_norm=0.7)
    assert engine._watcher.max_grad_norm == 0.7
    assert engine.metrics[0]["quantity"] == "score"


# --- what is refused -----------------------------------------------------------------------------


def test_schedulers_are_refused_by_name():
    scheduler = torch.optim.lr_scheduler.StepLR
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler(optimizer, 1)
    with pytest.raises(dpsur.InvalidInputError, match="scheduler sets the learning rate"):
        make(model, optimizer=optimizer)
    made = make()
    with pytest.raises(dpsur.InvalidInputError, match="StepLR sets the learning rate"):
        scheduler(made[2], 1)


def test_a_rate_set_by_hand_is_refused():
    engine, model, optimizer, loader = make()

    def change():
        optimizer.param_groups[0]["lr"] *= 0.5

    with pytest.raises(StepError, match="BlockGate searches for"):
        loop(engine, model, optimizer, loader, after=change)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": None}, "needs steps=... or epochs=..."),
        ({"criterion": None}, "needs the loss of each record"),
        ({"gate": {"learning_rate": 0.1}}, "max_grad_norm"),
        ({"gate": {"val_batch_size": 1000}}, "larger than the 120 records"),
        ({"gate": {"blocks": 0}}, "blocks"),
        ({"gate": {"schedule": "steep"}}, "schedule"),
        ({"gate": {"outputs": abs, "losses": abs}}, "not both"),
        ({"gate": {"losses": 3}}, "must be a function"),
        ({"gate": {"averages": [1]}}, "must be modules"),
        ({"target_epsilon": 0.01}, "epsilon"),
    ],
)
def test_settings_that_cannot_be(options, words):
    with pytest.raises(dpsur.InvalidInputError, match=words):
        make(**options)


def test_a_rate_of_zero_is_refused():
    model = Network()
    with pytest.raises(dpsur.InvalidInputError, match="above zero"):
        make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))


def test_without_a_gate_a_clipping_norm_is_needed():
    model = Network()
    with pytest.raises(dpsur.InvalidInputError, match="give max_grad_norm"):
        dpsur.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(points(), batch_size=24),
            noise_multiplier=1.0,
        )


def centred(model, batch):
    found = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return found - found.mean()


def divided(model, batch):
    """By the number of records: the last microbatch changes as a whole when one is added."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none") / len(batch[1])


def tiny(model, batch):
    return 1e-7 * centred(model, batch)


@pytest.mark.parametrize("losses", [centred, divided, tiny])
def test_losses_that_mix_records_are_those_of_each_alone(losses):
    """A record cannot change the losses of others, however they are computed."""
    engine, model, *_ = make(gate={"losses": losses}, max_grad_norm=1.0)
    x, y = (value[:10] for value in points().tensors)
    found = engine._procedure.tests.evaluate((x, y))[-1]
    model.eval()
    with torch.no_grad():
        wanted = [losses(model, (x[[row]], y[[row]])) for row in range(10)]
        together = losses(model, (x, y))
    torch.testing.assert_close(found, torch.cat(wanted))
    assert not torch.allclose(found, together, rtol=1e-3, atol=1e-12)  # they do mix


@pytest.mark.parametrize("losses", [centred, divided])
def test_gradient_norms_of_such_losses_are_those_of_each_alone(losses):
    engine, *_ = make(gate={"losses": losses}, max_grad_norm=None)
    x, y = (value[:10] for value in points().tensors)
    found = engine._procedure.tests.evaluate.gradient_norms((x, y))
    alone = [
        engine._procedure.tests.evaluate.gradient_norms((x[[row]], y[[row]])) for row in range(10)
    ]
    torch.testing.assert_close(found, torch.cat(alone))


@pytest.mark.parametrize("norm", [1.0, None])
def test_losses_of_more_than_one_number_are_refused(norm):
    def losses(model, batch):
        return model(batch[0])

    words = "the loss of each record|one number"
    made = make(gate={"losses": losses}, max_grad_norm=norm)
    with pytest.raises(dpsur.InvalidInputError, match=words):
        next(iter(made[3]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 7])
def test_a_record_that_is_not_finite_changes_no_others_loss(value, place):
    x, y = (part[:10].clone() for part in points(count=40).tensors)
    engine, *_ = make(gate={"losses": centred}, max_grad_norm=1.0)
    before = engine._procedure.tests.evaluate((x, y))[-1]
    x[place] = value
    after = engine._procedure.tests.evaluate((x, y))[-1]
    others = torch.arange(10) != place
    torch.testing.assert_close(after[others], before[others])
    assert after[place].isnan()


def test_microbatches_do_not_stay_in_memory():
    _, model, optimizer, loader = make(max_grad_norm=1.0, max_physical_batch_size=4)
    held = []
    for count, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        held.append(weakref.ref(x))
        del x, y
        optimizer.step()
        optimizer.zero_grad()
        if count == 8:
            break
    gc.collect()
    assert sum(one() is not None for one in held) <= 2  # the last, which the engine may hold


def test_a_loss_without_a_gradient_gives_no_clipping_norm():
    def losses(model, batch):
        with torch.no_grad():
            return model(batch[0])[:, 0]

    with pytest.raises((dpsur.InvalidInputError, RuntimeError), match="grad"):
        next(iter(make(gate={"losses": losses})[3]))


def test_one_pass_is_the_whole_training():
    made = make()
    assert len(made[3]) == made[0].accountant.plan.updates
    loop(*made, most=2)
    with pytest.raises(StepError, match="continue until the loader ends"):
        made[0].statement()
    loop(*made)
    with pytest.raises(dpsur.BudgetError, match="iterate over it once"):
        loop(*made)


def test_a_checkpoint_of_another_plan_is_refused():
    state = make()[0].state_dict()
    with pytest.raises(dpsur.CheckpointError, match="other plan"):
        make(steps=7)[0].load_state_dict(state)
    with pytest.raises(dpsur.CheckpointError, match="max_grad_norm"):
        make(max_grad_norm=1.0)[0].load_state_dict(state)


# --- budgets and releases ------------------------------------------------------------------------


def test_noise_is_calibrated_to_a_budget_with_its_tests():
    model = Network()
    engine = dpsur.PrivacyEngine()
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(points(), batch_size=24),
        criterion=nn.CrossEntropyLoss(),
        target_epsilon=2.0,
        target_delta=DELTA,
        epochs=4,
        gate=dpsur.BlockGate(),
    )
    plan = engine.accountant.plan
    assert plan.blocks[-1] == 20
    assert 1.98 < engine.guarantee(DELTA) <= 2.0
    alone = pld.composed_epsilon(
        [(SampledGaussian(RATE, plan.update.noise_multiplier / 1.015), plan.updates)], DELTA
    )
    assert alone == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_release_is_verified(sampled, tmp_path):
    made = make(gate={"val_batch_size": 60} if sampled else {})
    loop(*made)
    folder = made[0].save(tmp_path / "run")
    faults, figures = dpsur.verify(tmp_path / "run")
    assert faults == []
    assert figures["every_trial"] == pytest.approx(made[0].guarantee())
    statement = json.loads((folder / "privacy.json").read_text())
    assert statement["metrics"] == made[0].metrics
    assert "Test of a block" in (folder / "PRIVACY.md").read_text()
    assert_close(weights(dpsur.load(tmp_path / "run", Network()).module), weights(made[1]), 0.0)

    def faults_with(change):
        wrong = copy.deepcopy(statement)
        change(wrong)
        (folder / "privacy.json").write_text(json.dumps(wrong))
        return dpsur.verify(tmp_path / "run")[0]

    def fewer_tests(wrong):
        wrong["mechanism"]["blocks"]["updates"].pop(0)

    assert faults_with(fewer_tests) != []
    assert faults_with(lambda wrong: wrong["settings"].update(steps=50)) != []
    assert faults_with(lambda wrong: wrong["settings"].update(val_noise_multiplier=9.0)) != []
    assert faults_with(lambda wrong: wrong["metrics"].pop()) != []
