"""What a crash leaves behind at each point of a step: one law for `fit` and for a custom loop.

A step is charged before its noise is drawn, and its verdict is booked before a candidate stays. So
an interruption may leave a charge without its update, and never an update without its charge.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from dpsur.engine.weights import ModuleWeights
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism import gaussian, trial
from dpsur.mechanism.blocks import memory_of
from dpsur.mechanism.proposer import Sgd
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import EagerLoop, LossRule, start
from dpsur.privacy.account import Account
from tests.mutants import Mutant

CPU, DELTA, RECORDS = torch.device("cpu"), 1e-3, 60
TEST = {"val_batch_size": 20, "loss_clip": 0.5, "accept_threshold": 0.0}
BLOCKS = {"blocks": 2, "block_updates": 2, "val_noise_multiplier": 4.0}


def network():
    torch.manual_seed(2)
    return nn.Linear(4, 3).double()


def records():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, 4, generator=generator, dtype=torch.float64)
    return x, x[:, :3].argmax(1)


class Fit:
    """A run of `fit`, step by step."""

    def __init__(self, gate, accounting):
        options = {"loss": TEST | {"gate": "loss"}, "none": {}, "block": BLOCKS | {"gate": "block"}}
        counts = {"trials": 9} if gate == "loss" and accounting == "every-trial" else {"updates": 9}
        method = dpsur.Dpsgd(
            batch_size=20, noise_multiplier=1.0, momentum=0.0, **counts, **options[gate]
        )
        budget = dpsur.Budget(500.0, DELTA)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dpsur.PrivacyWarning)
            settled, plan = method.resolve(RECORDS, budget, accounting)
        problem = Problem(network(), F.cross_entropy, Examples(*records()))
        self.procedure = settled.build(problem, plan)
        self.loop = EagerLoop(self.procedure, plan, Streams(3, CPU), start(self.procedure))
        self.account = self.loop._account

    def step(self):
        self.loop.collect()

    @property
    def weights(self):
        try:
            return dict(self.loop.progress.state.params)
        except dpsur.NothingReleasedError:  # half updated in place, and said to be so
            return None


class Loop:
    """The same run in a custom loop."""

    def __init__(self, gate, accounting):
        build = {
            "loss": lambda: dpsur.LossGate(**TEST),
            "none": lambda: None,
            "block": lambda: dpsur.BlockGate(**BLOCKS),
        }
        model = network()
        self.engine = dpsur.PrivacyEngine()
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            data_loader=DataLoader(TensorDataset(*records()), batch_size=20),
            criterion=nn.CrossEntropyLoss(),
            noise_multiplier=1.0,
            max_grad_norm=None if gate == "block" else 0.1,
            steps=9,
            target_epsilon=500.0,
            target_delta=DELTA,
            gate=build[gate](),
            accounting=accounting,
            seed=3,
        )
        self.account = self.engine.accountant

    def step(self):
        x, y = next(iter(self.loader))
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    @property
    def weights(self):
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


class Stop(BaseException):
    """Like Ctrl-C."""


def raising(when="before", real=None):
    def stop(*args, **options):
        if when == "after":
            real(*args, **options)
        raise Stop

    return stop


def refuse_to_charge(patch):
    patch.setattr(Account, "book", raising())


def stop_after_the_charge(patch):
    patch.setattr(Account, "book", raising("after", Account.book))


def stop_in_the_noise(patch):
    patch.setattr(gaussian, "add_noise", raising())


def stop_in_the_update(patch):
    patch.setattr(Sgd, "step", raising())
    patch.setattr(torch.optim.SGD, "step", raising("after", torch.optim.SGD.step))


def stop_in_the_verdict(patch):
    patch.setattr(LossRule, "decide", raising())


def stop_while_the_verdict_is_booked(patch):
    patch.setattr(Account, "decide", raising("after", Account.decide))


# Where a step is interrupted, and the trials and updates that are booked then if it is accepted.
POINTS = {
    refuse_to_charge: (0, 0),
    stop_after_the_charge: (1, 0),
    stop_in_the_noise: (1, 0),
    stop_in_the_update: (1, 0),
    stop_in_the_verdict: (1, 0),
    stop_while_the_verdict_is_booked: (1, 1),
}


def interrupted(driver, point, gate, accounting):
    """A run after one whole step, interrupted in its second; the weights in between."""
    run = driver(gate, accounting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossRule, "decide", lambda *_: torch.tensor(True))
        run.step()
        before = run.weights, run.account.charged.trials, run.account.charged.updates
        point(patch)
        with pytest.raises(Stop):
            run.step()
    return run, *before


def no_update_without_its_charge(driver=Loop, accounting="every-trial"):
    """A gate's candidate is undone, wherever its step is interrupted."""
    for point, (trials, updates) in POINTS.items():
        run, before, trials_before, updates_before = interrupted(driver, point, "loss", accounting)
        assert run.account.charged.trials == trials_before + trials, point
        assert run.account.charged.updates == updates_before + updates, point
        for name, value in run.weights.items():
            assert torch.equal(value, before[name]), (point, name)


@pytest.mark.parametrize("accounting", ["every-trial", "proven"])
@pytest.mark.parametrize("driver", [Fit, Loop])
def test_no_update_without_its_charge(driver, accounting):
    no_update_without_its_charge(driver, accounting)


@pytest.mark.parametrize("driver", [Fit, Loop])
@pytest.mark.parametrize("point", [stop_after_the_charge, stop_in_the_noise, stop_in_the_update])
def test_without_a_gate_a_step_is_charged_and_not_refunded(driver, point):
    run, before, trials, _ = interrupted(driver, point, "none", "every-trial")
    assert run.account.charged.trials == trials + 1
    assert run.account.charged.updates == trials + 1
    if driver is Fit:
        assert run.weights is None  # nothing may be released from what is half updated
    elif point is not stop_in_the_update:
        assert all(torch.equal(value, before[name]) for name, value in run.weights.items())


@pytest.mark.parametrize("driver", [Fit, Loop])
def test_a_step_that_was_not_charged_can_be_made_later(driver):
    run, before, trials, _ = interrupted(driver, refuse_to_charge, "loss", "every-trial")
    run.step()
    assert run.account.charged.trials == trials + 1
    assert any(not torch.equal(value, before[name]) for name, value in run.weights.items()) or (
        run.account.charged.updates < run.account.charged.trials
    )


@pytest.mark.parametrize("point", [stop_after_the_charge, stop_in_the_noise, stop_in_the_verdict])
def test_a_loop_goes_on_with_the_next_batch(point):
    run = Loop("loss", None)
    batches = iter(run.loader)
    for interrupted_now in (False, True, False):
        x, y = next(batches)
        run.optimizer.zero_grad()
        F.cross_entropy(run.model(x), y).backward()
        with pytest.MonkeyPatch.context() as patch:
            if interrupted_now:
                point(patch)
            with pytest.raises(Stop) if interrupted_now else nullcontext():
                run.optimizer.step()
    assert run.account.steps == 3


def test_an_interrupted_update_takes_its_place_in_its_block():
    """The block has one update less than was charged, and its test comes when it is due."""
    run = Loop("block", None)
    with pytest.MonkeyPatch.context() as patch:
        stop_in_the_noise_of_updates(patch)
        with pytest.raises(Stop):
            run.step()
    while not run.engine.finished():
        run.step()
    plan = run.account.plan
    assert run.account.charged.updates == plan.updates
    assert run.account.tests == len(plan.blocks) == len(set(tests_of(run.engine.metrics)))
    assert int(memory_of(run.engine._state)["tests"]) == len(plan.blocks)


def stop_in_the_noise_of_updates(patch):
    real = gaussian.add_noise

    def stop(total, *rest):
        if "test" in total.params:
            return real(total, *rest)
        raise Stop

    patch.setattr(gaussian, "add_noise", stop)


def tests_of(metrics):
    return [row["test"] for row in metrics]


tests_of.__test__ = False


def nothing_is_undone(patch):
    patch.setattr(trial, "undone_if_interrupted", lambda _: nullcontext())


def weights_are_not_put_back(patch):
    patch.setattr(ModuleWeights, "write", lambda *_: None)


def charged_after_the_step(patch):
    """Nothing is charged before the verdict."""
    book, decide = Account.book, Account.decide
    due = []
    patch.setattr(Account, "book", lambda self, step: due.append(step))

    def late(self, *, accepted):
        book(self, due.pop())
        decide(self, accepted=accepted)

    patch.setattr(Account, "decide", late)


MUTANTS = [
    Mutant(no_update_without_its_charge, nothing_is_undone),
    Mutant(no_update_without_its_charge, weights_are_not_put_back),
    Mutant(no_update_without_its_charge, charged_after_the_step),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.apply.__name__)
def test_mutants_break_the_law(mutant, monkeypatch):
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, IndexError, dpsur.DpsurError)):
        mutant.law()
