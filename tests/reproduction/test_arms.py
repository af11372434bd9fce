"""Arms of the experiments: what the released code does differently, and controls."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dpsur
from dpsur.cli import main
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.functional.tree import flatten
from dpsur.mechanism.cuda_graph_loop import CudaGraphLoop
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import make_trial, start
from dpsur.methods import METHODS, Dpsur
from dpsur.privacy.accountants.rdp import composed_epsilon
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Gaussian, Ledger, LossTest, SampledGaussian, Trial
from dpsur.privacy.planning import repeated_plan
from reproduction.arms import ARMS, HF_PUBLISHED, METHOD_ARMS
from reproduction.loops import run_loop, train
from reproduction.released_code import (
    NO_LOSS,
    FirstRejectionsKept,
    KeptMomentum,
    OtherDivisor,
    RandomAcceptance,
    RandomAcceptanceKept,
    ReleasedCode,
    StaleLoss,
)
from reproduction.released_dpagd import COUNT, DECAY, LARGEST, ReleasedDpagd, ReleasedSteps
from tests.conftest import blobs, small_model
from tests.methods.problems import CPU, assert_same
from tests.statistics import STANDARD_ERRORS, assert_frequency
from tests.test_mutants import Ones

BUDGET = Budget(3.0, 1e-3)
SIZE = 60
TEST = {"gate": "loss", "val_batch_size": 10, "val_noise_multiplier": 6.0, "accept_threshold": -1.0}
OPTIONS = {"batch_size": 20, "learning_rate": 0.5, "noise_multiplier": 6.0, **TEST}
FAULTS = (StaleLoss, OtherDivisor, FirstRejectionsKept)
OWN = (ReleasedCode, RandomAcceptance, RandomAcceptanceKept, KeptMomentum, *FAULTS)


def strategy_for(threshold, trials=30, updates=6, noise=1.5):
    trial = Trial(SampledGaussian(0.3, noise), LossTest(0.2, 1.0, threshold))
    return repeated_plan(BUDGET, "published", trial, trials, updates)


def bound(method, plan, problem=None):
    return method.build(problem or Problem(small_model(), F.cross_entropy, blobs(SIZE)), plan)


def steps(procedure, plan, count):
    """Progress and verdict after each of some trials."""
    progress, streams = start(procedure), Streams(0, CPU)
    for _ in range(count):
        progress, verdict = make_trial(procedure, plan, streams, progress)
        yield progress, verdict


def velocity(state):
    return state.optimizer.buffers["velocity"]


# --- the released code --------------------------------------------------------------------------


def test_momentum_is_kept_across_rejections():
    """And not by Algorithm 1, under the same plan and draws."""
    plan = strategy_for(-math.inf)
    for method, kept in ((ReleasedCode(), True), (Dpsur(), False)):
        (progress, _), *_ = steps(bound(method, plan), plan, 1)
        size = max(float(value.abs().max()) for value in velocity(progress.state).values())
        assert (size > 0) == kept


@pytest.mark.parametrize(
    ("method", "momentum"), [(ReleasedCode, True), (FirstRejectionsKept, False)]
)
def test_rejected_weights_stay_until_the_first_acceptance(method, momentum):
    plan = strategy_for(-math.inf)
    procedure = bound(method(), plan)
    before = procedure.initial_state()
    (progress, _), *_ = steps(procedure, plan, 1)
    assert not torch.equal(progress.state.params["0.weight"], before.params["0.weight"])
    assert int(progress.state.updates) == progress.ledger.updates == 0
    # After an acceptance a rejected trial restores the weights, if not the momentum.
    accepted = replace(progress.state, updates=torch.tensor(1))
    candidate = procedure.propose(accepted, Streams(0, CPU).at(2), torch.tensor(1))
    after = procedure.after_rejection(accepted, candidate)
    assert_same(after.params, accepted.params)
    assert_same(after.optimizer, (candidate.state if momentum else accepted).optimizer)
    restored = bound(Dpsur(), plan)
    (progress, _), *_ = steps(restored, plan, 1)
    assert_same(progress.state, restored.initial_state())


@pytest.mark.parametrize("method", [ReleasedCode, StaleLoss])
def test_a_candidate_is_compared_with_a_stale_loss(method):
    """The loss that is stored is the last accepted candidate's, on its own batch."""
    plan = strategy_for(0.0, trials=200, updates=12)
    stored, seen = NO_LOSS, []
    for progress, verdict in steps(bound(method(), plan), plan, 12):
        loss = float(verdict.private["loss"])
        assert float(verdict.private["loss_difference"]) == pytest.approx(loss - stored)
        if bool(verdict.accept):
            stored = loss
        assert float(progress.state.memory["stored_loss"]) == pytest.approx(stored)
        seen.append(bool(verdict.accept))
    assert True in seen
    assert False in seen
    # A candidate that is the model itself still has a difference, which Algorithm 1 has not.
    still = strategy_for(0.0, trials=20)
    for kind in (method, Dpsur):
        verdicts = [v for _, v in steps(bound(kind(learning_rate=1e-30), still), still, 4)]
        found = [float(verdict.private["loss_difference"]) for verdict in verdicts]
        assert any(value != 0.0 for value in found) == (kind is method)


def test_a_stale_loss_is_all_that_its_arm_keeps():
    plan = strategy_for(-math.inf)
    procedure = bound(StaleLoss(), plan)
    (progress, _), *_ = steps(procedure, plan, 1)
    assert_same(progress.state, procedure.initial_state())


@pytest.mark.parametrize("faulty_kind", [ReleasedCode, OtherDivisor])
def test_sums_are_divided_by_the_size_of_another_draw(faulty_kind):
    """Each step is a whole number of records over another such number."""
    data = Examples(torch.ones(100, 1), torch.zeros(100))
    problem = Problem(Ones(), lambda out, _: -out.sum(), data)
    plan = repeated_plan(
        BUDGET, "published", Trial(SampledGaussian(0.1, 1e-9), LossTest(0.1, 1.0, 0.0)), 99
    )
    ratios = {}
    for method in (faulty_kind, Dpsur):
        options = {"learning_rate": 1.0, "momentum": 0.0, "schedule": "constant"}
        procedure = bound(method(**options, max_grad_norm=1.0), plan, problem=problem)
        proposer = procedure.proposer.steps if method is ReleasedCode else procedure.proposer
        state, streams = procedure.initial_state(), Streams(0, CPU)
        found = [proposer.source.gradient(state, streams.at(step)) for step in range(1, 61)]
        ratios[method] = np.array([-float(gradient["weight"]) for gradient in found])
    own, faulty = ratios[Dpsur] * 10, ratios[faulty_kind] * 10
    assert np.allclose(own, own.round(), atol=1e-3)
    assert not np.allclose(faulty, faulty.round(), atol=1e-3)
    # The other size is a whole number as well, and has nothing to do with the drawn one.
    other = own / ratios[faulty_kind]
    assert np.allclose(other, other.round(), atol=1e-2)
    assert abs(np.corrcoef(own, other)[0, 1]) < STANDARD_ERRORS / math.sqrt(60)
    assert len(set(other.round())) > 4


def test_one_update_more_is_made_than_is_paid_for():
    _, claimed = Dpsur(**OPTIONS).resolve(SIZE, BUDGET, "published")
    method, plan = ReleasedCode(**OPTIONS).resolve(SIZE, BUDGET, "published")
    assert plan.updates == claimed.updates + 1
    assert claimed.epsilon() <= BUDGET.epsilon < plan.epsilon()
    short = replace(plan, phases=(replace(plan.phases[0], count=4, cap=500),))
    procedure = bound(method, short)
    assert train(procedure, short, Streams(0, CPU)).ledger.updates == 4


def test_bounds_of_statistics_are_not_paid_for():
    setup = (Gaussian(40.0), Gaussian(40.0), Gaussian(8.0), Gaussian(8.0))
    _, plan = ReleasedCode(**OPTIONS).resolve(SIZE, BUDGET, "published", setup)
    assert plan.setup == (Gaussian(8.0), Gaussian(8.0))
    assert ReleasedCode(**OPTIONS).resolve(SIZE, BUDGET, "published")[1].setup == ()


# --- the released code of DPAGD ------------------------------------------------------------------

PATH = LARGEST * (COUNT - 1) / 2 + LARGEST / 2  # the sum of all candidate lengths, 52.5


def dpagd_bound(**options):
    method = ReleasedDpagd(batch_size=20, noise_multiplier=3.0, val_noise_multiplier=4.0, **options)
    method, plan = method.resolve(SIZE, BUDGET, "published")
    return bound(method, plan), plan


def always(index):
    """A choice that was decided beforehand: the least noisy loss is this candidate's."""

    def mean_loss(self, params, batch):
        self.calls = getattr(self, "calls", -1) + 1
        return torch.tensor(0.0 if self.calls % COUNT == index else 1e9, dtype=torch.float64)

    return mean_loss


@pytest.mark.parametrize(("index", "more"), [(0, 0.0), (1, 0.25), (20, 5.0)])
def test_candidates_add_up_whatever_is_chosen(index, more, monkeypatch):
    procedure, plan = dpagd_bound()
    monkeypatch.setattr(ReleasedSteps, "_mean_loss", always(index))
    before = procedure.initial_state().params
    (progress, verdict), *_ = steps(procedure, plan, 1)
    gradient = progress.state.memory["gradient/0.weight"]
    moved = before["0.weight"] - progress.state.params["0.weight"]
    torch.testing.assert_close(moved, (PATH + more) * gradient, rtol=1e-3, atol=1e-4)
    assert bool(verdict.accept) == (index > 0) == bool(progress.ledger.updates)


def test_a_retry_uses_the_gradient_at_hand_and_moves_on(monkeypatch):
    procedure, plan = dpagd_bound()
    start_at = procedure.initial_state().params["0.weight"]
    monkeypatch.setattr(ReleasedSteps, "_mean_loss", always(0))
    (first, _), (second, _) = steps(procedure, plan, 2)
    name = "gradient/0.weight"
    assert torch.equal(first.state.memory[name], second.state.memory[name])
    moved = start_at - second.state.params["0.weight"]
    expected = 2 * PATH * first.state.memory[name]
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-4)
    assert float(second.state.memory["noise"]) == 3.0
    monkeypatch.setattr(ReleasedSteps, "_mean_loss", always(3))
    progress, _ = make_trial(procedure, plan, Streams(0, CPU), second)
    assert float(progress.state.memory["noise"]) == pytest.approx(DECAY * 3.0)
    assert [entry.step.test is None for entry in progress.ledger.entries] == [False, True]


def test_the_claim_is_the_sum_that_the_released_code_adds_up():
    """All gradients at the last noise, choices that are accepted, and gradients never drawn."""
    rate, test = 20 / SIZE, LossTest(20 / SIZE, 4.0, 0.0)
    _, plan = dpagd_bound()
    ledger = Ledger()
    ledger = ledger.record(Trial(SampledGaussian(rate, 3.0), test), trials=5, updates=4)
    ledger = ledger.record(Trial(SampledGaussian(rate, 3.0), None), trials=2, updates=1)
    ledger = ledger.record(Trial(SampledGaussian(rate, 2.97), test), trials=3, updates=3)
    charges = [
        (SampledGaussian(rate, 2.97), 8),
        (SampledGaussian(rate, 4.0), 8),
        (SampledGaussian(rate, DECAY * 3.0), 2),
    ]
    assert plan.spent(ledger) == pytest.approx(composed_epsilon(charges, BUDGET.delta))
    # an iteration that was begun is finished, and another begun as long as less is claimed
    spent = replace(plan, budget=Budget(plan.spent(ledger) * 0.99, BUDGET.delta))
    assert spent.affords(ledger, Trial(SampledGaussian(rate, 3.0), None))
    assert not spent.affords(ledger, Trial(SampledGaussian(rate, 3.0), test))
    left = replace(plan, budget=Budget(plan.spent(ledger) * 1.01, BUDGET.delta))
    assert left.affords(ledger, Trial(SampledGaussian(rate, 3.0), test))


def test_the_released_dpagd_runs_alike_padded_and_in_fixed_memory():
    procedure, plan = dpagd_bound(val_batch_size=10)
    streams = Streams(0, CPU)
    alone = train(procedure, plan, streams)
    assert alone.ledger.updates > 2
    assert plan.spent(alone.ledger) >= BUDGET.epsilon
    loop = CudaGraphLoop(procedure, procedure.padded(), plan, streams, start(procedure), block=5)
    together = run_loop(loop, plan)
    assert together.ledger == alone.ledger
    for name, value in flatten(alone.state).items():
        torch.testing.assert_close(value, flatten(together.state)[name], rtol=1e-3, atol=1e-3)


# --- controls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [RandomAcceptance, RandomAcceptanceKept])
def test_random_acceptance_has_its_rate_whatever_the_losses(method):
    test = LossTest(0.2, 1.0, -1.0)
    rate = (test.accept_min + test.accept_max) / 2
    plan = strategy_for(-1.0)
    problem = Problem(small_model(), F.cross_entropy, blobs(SIZE))
    procedure = bound(method(), plan, problem=problem)
    state, streams = procedure.initial_state(), Streams(0, CPU)
    good = procedure.propose(state, streams.at(1), torch.tensor(0))
    bad = replace(
        good, state=replace(state, params={n: v + math.nan for n, v in state.params.items()})
    )

    def accepted(procedure, candidate):
        found = [procedure.judge(state, candidate, streams.at(step)) for step in range(1, 2001)]
        return sum(bool(verdict.accept) for verdict in found)

    for candidate in (good, bad):
        assert_frequency(accepted(procedure, candidate), 2000, rate)
    # The control: the real gate does look.
    gate = bound(Dpsur(), plan, problem=problem)
    with pytest.raises(AssertionError):
        assert_frequency(accepted(gate, bad), 2000, rate)


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        (RandomAcceptance, False),
        (RandomAcceptanceKept, True),
        (KeptMomentum, True),
        (OtherDivisor, False),
        (Dpsur, False),
    ],
)
def test_what_a_control_keeps_of_a_rejected_trial(method, kept):
    plan = strategy_for(-math.inf)
    if issubclass(method, RandomAcceptance):
        plan = strategy_for(-50.0)  # accepted hardly ever
    procedure = bound(method(average_decay=0.9), plan)
    before = procedure.initial_state()
    (progress, verdict), *_ = steps(procedure, plan, 1)
    assert not bool(verdict.accept)
    assert_same(progress.state.params, before.params)
    assert_same(progress.state.average, before.average)
    moved = any(float(value.abs().max()) > 0 for value in velocity(progress.state).values())
    assert moved == kept


def test_kept_momentum_is_a_fault_that_no_plan_can_ask_for():
    with pytest.raises(dpsur.InvalidInputError, match="keep-momentum is not covered"):
        Dpsur(**OPTIONS, on_reject="keep-momentum").resolve(SIZE, BUDGET, "published")


@pytest.mark.parametrize("method", OWN, ids=lambda method: method.name)
def test_padded_and_exact_versions_agree(method):
    plan = strategy_for(0.0, trials=200, updates=8)
    exact, other = (bound(method(average_decay=0.9), plan) for _ in range(2))
    padded = other.padded()
    accepted = []
    pairs = zip(steps(exact, plan, 8), steps(padded, plan, 8), strict=True)
    for (one, verdict), (two, same) in pairs:
        assert bool(verdict.accept) == bool(same.accept)
        accepted.append(bool(verdict.accept))
        for name, value in flatten(one.state).items():
            torch.testing.assert_close(value, flatten(two.state)[name], rtol=1e-4, atol=1e-5)
    assert len(set(accepted)) == 2


@pytest.mark.parametrize("method", OWN, ids=lambda method: method.name)
def test_blocks_with_a_state_in_fixed_memory_agree(method):
    """What a CUDA graph replays, here on the host: the next state overwrites the last one."""
    plan, streams = strategy_for(0.0, trials=200, updates=8), Streams(0, CPU)
    procedure = bound(method(), plan)
    alone = train(procedure, plan, streams)
    loop = CudaGraphLoop(procedure, procedure.padded(), plan, streams, start(procedure), block=5)
    together = run_loop(loop, plan)
    assert together.ledger == alone.ledger
    assert alone.ledger.trials > 8
    for name, value in flatten(alone.state).items():
        torch.testing.assert_close(value, flatten(together.state)[name], rtol=1e-4, atol=1e-5)


def test_layers_that_draw_are_not_padded():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(2, 3))
    problem = Problem(model, F.cross_entropy, blobs(SIZE))
    for method in OWN:
        assert bound(method(), strategy_for(0.0), problem=problem).padded() is None


# --- out of reach -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*OWN, ReleasedDpagd], ids=lambda method: method.name)
def test_arms_cannot_be_named_for_training(method, tmp_path, capsys):
    assert method.name not in METHODS
    assert method not in METHODS.values()
    assert not hasattr(dpsur, method.__name__)
    status = main(["train", "--out", str(tmp_path / "run"), "--method", method.name])
    assert status == 2
    assert f"unknown method '{method.name}'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_arms_have_names_of_their_own_and_presets():
    assert len({arm.label for arm in ARMS.values()}) == len(ARMS)
    for name, arm in ARMS.items():
        assert arm.name == name
        built = arm.build(arm.preset("fmnist", 3).options)
        assert isinstance(built, arm.method)
    assert {name for name, arm in ARMS.items() if not arm.sound} == {
        "released-code", "kept-momentum", "random", "random-kept",
        "stale-loss", "other-divisor", "first-rejections", "released-commands", "released-network",
        "released-dpagd",
    }  # fmt: skip
    assert ARMS["every-trial"].preset("fmnist", 3).options["on_reject"] == "keep-momentum"
    assert {arm.accounting for arm in METHOD_ARMS} == {"proven"}
    assert HF_PUBLISHED.accounting == "published"
    assert {type(arm.build(arm.preset("mnist", 1).options)) for arm in ARMS.values()} >= set(OWN)
