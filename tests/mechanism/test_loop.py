import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dpsur.errors import NothingReleasedError
from dpsur.functional.problem import Problem
from dpsur.functional.tree import flatten
from dpsur.mechanism.state import OptimizerState, State
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import Selective, keep
from dpsur.methods import Dpsgd, Dpsur
from dpsur.privacy.accounting import KEEP_MOMENTUM, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import CoinTest, LossTest, SampledGaussian, Trial
from dpsur.privacy.planning import repeated_plan
from reproduction.loops import train
from tests.conftest import blobs, small_model
from tests.plans import spent

CPU = torch.device("cpu")
BUDGET = Budget(3.0, 1e-5)
UPDATE = SampledGaussian(0.2, 1.5)


def strategy_for(threshold=None, trials=12, updates=None, accounting="every-trial", rate=0.2):
    test = None if threshold is None else LossTest(rate, 1.0, threshold)
    return repeated_plan(BUDGET, accounting, Trial(UPDATE, test), trials, updates)


def end_of(method, plan, seed=0, on_trial=lambda *_: None):
    problem = Problem(small_model(), F.cross_entropy, blobs())
    procedure = method.build(problem, plan)
    return train(
        procedure,
        plan,
        Streams(seed, CPU),
        on_block=lambda progress, verdicts: on_trial(progress, verdicts[-1]),
    )


def assert_same(one, two):
    one, two = flatten(one), flatten(two)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


@pytest.fixture(params=["sgd", "adam"])
def options(request):
    return {"optimizer": request.param, "average_decay": 0.9, "learning_rate": 0.5}


def test_an_always_open_gate_is_dpsgd_bit_for_bit(options):
    open_gate = end_of(Dpsur(**options), strategy_for(math.inf))
    plain = end_of(Dpsgd(**options), strategy_for())
    assert_same(open_gate.state, plain.state)
    assert open_gate.ledger.updates == 12


def test_a_never_open_gate_leaves_the_initial_state_bit_for_bit(options):
    method, plan = Dpsur(**options), strategy_for(-math.inf)
    procedure = method.build(Problem(small_model(), F.cross_entropy, blobs()), plan)
    shut = train(procedure, plan, Streams(0, CPU))
    assert_same(shut.state, procedure.initial_state())
    assert (shut.ledger.trials, shut.ledger.updates) == (12, 0)


def test_a_rejected_draw_is_not_repeated():
    seen = []
    problem = Problem(small_model(), F.cross_entropy, blobs())
    plan = strategy_for(-math.inf)
    procedure = Dpsur().build(problem, plan)
    state = procedure.initial_state()
    streams = Streams(0, CPU)
    for step in range(1, 5):
        candidate = procedure.propose(state, streams.at(step), torch.tensor(0))
        seen.append(candidate.state.params["0.weight"])
    assert len({tuple(value.flatten().tolist()) for value in seen}) == 4


def test_accepted_trials_alone_make_the_result():
    """Replaying only the accepted candidates gives the same state."""
    accepted = []
    end = end_of(
        Dpsur(learning_rate=0.5),
        strategy_for(0.0, trials=30),
        on_trial=lambda progress, verdict: accepted.append((bool(verdict.accept), progress.state)),
    )
    assert 0 < sum(flag for flag, _ in accepted) < 30
    previous = None
    for flag, state in accepted:
        if not flag and previous is not None:
            assert_same(state, previous)
        previous = state
    assert_same(end.state, previous)
    assert int(end.state.updates) == end.ledger.updates == sum(flag for flag, _ in accepted)


def test_without_noise_and_clipping_it_is_torch_optim():
    model, data = small_model(), blobs()
    plan = repeated_plan(BUDGET, "every-trial", Trial(SampledGaussian(1.0, 1e-9)), 20)
    method = Dpsgd(learning_rate=0.3, momentum=0.9, schedule="linear", max_grad_norm=100.0)
    procedure = method.build(Problem(model, F.cross_entropy, data), plan)
    ours = train(procedure, plan, Streams(0, CPU)).state.params
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 20)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(data.inputs), data.targets).backward()
        optimizer.step()
        schedule.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(ours[name], value.detach(), rtol=1e-4, atol=1e-5)


def test_schedules_follow_trials_where_trials_are_charged_and_updates_elsewhere():
    def positions(plan):
        seen = []
        problem = Problem(small_model(), F.cross_entropy, blobs())
        procedure = Dpsur().build(problem, plan)
        propose = procedure.propose

        class Watched(Selective):
            def propose(self, state, draws, position):
                seen.append((int(position), int(state.updates)))
                return propose(state, draws, position)

        procedure = Watched(procedure.proposer, procedure.gate)
        train(procedure, plan, Streams(0, CPU))
        return seen

    by_trial = positions(strategy_for(0.0, trials=15))
    assert [position for position, _ in by_trial] == list(range(15))
    by_update = positions(strategy_for(0.0, trials=500, updates=8, accounting="published"))
    assert all(position == updates for position, updates in by_update)
    assert len(by_update) > 8


def test_exactly_the_planned_updates_are_kept():
    end = end_of(Dpsur(), strategy_for(0.0, trials=500, updates=8, accounting="published"))
    assert end.ledger.updates == 8


def test_the_cap_releases_nothing():
    with pytest.raises(NothingReleasedError, match="cap of 20 trials"):
        end_of(Dpsur(), strategy_for(-math.inf, trials=20, updates=5, accounting="published"))


@pytest.mark.parametrize("accounting", ["every-trial", "published", "proven"])
@pytest.mark.parametrize("method", [Dpsgd(noise_multiplier=6.0), Dpsur(noise_multiplier=6.0)])
def test_spends_at_most_the_budget_and_one_more_would_not_fit(method, accounting):
    problem = Problem(small_model(), F.cross_entropy, blobs())
    budget = Budget(2.0, 1e-4)
    settled, plan = method.resolve(len(problem.train), budget, accounting)
    procedure = settled.build(problem, plan)
    end = train(procedure, plan, Streams(0, CPU))
    counting = accounting_named(accounting)
    whole = spent(counting.name, end.ledger, budget.delta)
    one_more = spent(counting.name, end.ledger.record(plan.typical, updates=1), budget.delta)
    assert whole <= budget.epsilon < one_more


def test_training_resumes_from_any_progress():
    plan = strategy_for(0.0, trials=20)
    procedure = Dpsur().build(Problem(small_model(), F.cross_entropy, blobs()), plan)
    saved = []
    expected = train(
        procedure, plan, Streams(0, CPU), on_block=lambda progress, _: saved.append(progress)
    )
    end = train(procedure, plan, Streams(0, CPU), saved[6])
    assert_same(end.state, expected.state)
    assert end.ledger == expected.ledger


def test_keep_chooses_whole_states():
    def state(value):
        params = {"w": torch.full((2,), value)}
        return State(
            params=params,
            optimizer=OptimizerState(torch.tensor(int(value)), {"velocity": params}),
            updates=torch.tensor(int(value)),
            average=params,
        )

    old, new = state(1.0), state(2.0)
    assert_same(keep(torch.tensor(True), new, old), new)
    assert_same(keep(torch.tensor(False), new, old), old)


def test_a_nan_in_the_candidate_does_not_leak_through_a_rejection():
    params = {"w": torch.tensor([math.nan])}
    fine = {"w": torch.tensor([1.0])}
    empty = OptimizerState(torch.tensor(0), {})
    new, old = State(params, empty, torch.tensor(1)), State(fine, empty, torch.tensor(0))
    assert float(keep(torch.tensor(False), new, old).params["w"]) == 1.0


def test_kept_momentum_keeps_the_optimizer_and_nothing_else():
    plan = replace(strategy_for(-math.inf), on_reject=KEEP_MOMENTUM)
    problem = Problem(small_model(), F.cross_entropy, blobs())
    procedure = Dpsur(average_decay=0.9).build(problem, plan)
    end, initial = train(procedure, plan, Streams(0, CPU)).state, procedure.initial_state()
    assert_same(end.params, initial.params)
    assert_same(end.average, initial.average)
    assert int(end.updates) == 0
    velocity = end.optimizer.buffers["velocity"]
    assert all(value.abs().max() > 0 for value in velocity.values())


def test_a_coin_gate_keeps_improvements():
    plan = repeated_plan(BUDGET, "proven", Trial(UPDATE, CoinTest(0.5, 50.0)), 500, 15)
    differences = []
    end = end_of(
        Dpsur(learning_rate=30.0),
        plan,
        on_trial=lambda _, verdict: differences.append(
            (float(verdict.private["loss_difference"]), bool(verdict.accept))
        ),
    )
    assert end.ledger.updates == 15
    assert all(accepted for difference, accepted in differences if difference < 0)
    assert not all(accepted for _, accepted in differences)
