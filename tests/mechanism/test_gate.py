import math
from dataclasses import replace

import pytest
import torch

from dpsur.errors import InvalidInputError
from dpsur.mechanism.gaussian import Batch
from dpsur.mechanism.state import Candidate, State
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import CoinRule, LossRule, LossTestGate, make_rule, mean_losses
from dpsur.privacy.events import CoinTest, LossTest
from tests.conftest import stream
from tests.statistics import assert_frequency

DRAWS = 200_000


def frequency(gate, difference, seed=0):
    differences = torch.full((DRAWS,), difference, dtype=torch.float64)
    return int(gate.decide(differences, stream(seed)).sum())


@pytest.mark.parametrize(
    ("beta", "better", "worse"), [(0.0, 0.691462, 0.308538), (-1.0, 0.5, 0.158655)]
)
def test_acceptance_frequencies_of_the_paper(beta, better, worse):
    gate = LossRule(loss_clip=0.001, noise_multiplier=1.0, accept_threshold=beta)
    assert_frequency(frequency(gate, -0.5), DRAWS, better)
    assert_frequency(frequency(gate, +0.5), DRAWS, worse)


@pytest.mark.parametrize("noise", [0.8, 1.3])
@pytest.mark.parametrize("beta", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("at", [-1.0, -0.3, 0.0, 0.6, 1.0])
def test_frequencies_match_the_event_that_is_accounted(noise, beta, at):
    gate = LossRule(0.01, noise, beta)
    event = LossTest(0.1, noise, beta)
    assert_frequency(frequency(gate, at * 0.01), DRAWS, event.acceptance(at))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_difference_that_is_not_finite_counts_as_the_worst(odd):
    gate = LossRule(0.001, 1.0, 0.0)
    assert_frequency(frequency(gate, odd), DRAWS, LossTest(0.1, 1.0, 0.0).accept_min)


def test_the_threshold_is_strict():
    # with vanishing noise a difference exactly at the threshold is a coin toss, not a certainty
    gate = LossRule(0.5, 1e-3, 1.0)
    exactly = torch.full((100,), 0.5, dtype=torch.float64)
    assert 20 < int(gate.decide(exactly, stream(0)).sum()) < 80


def test_noise_is_drawn_whatever_the_difference():
    gate = LossRule(0.001, 1.0, 0.0)
    one, two = stream(0), stream(0)
    gate.decide(torch.tensor(math.nan, dtype=torch.float64), one)
    gate.decide(torch.tensor(0.3, dtype=torch.float64), two)
    assert one._next == two._next > 0


def test_empty_batch_is_no_evidence(problem):
    empty = problem.train.select(torch.zeros(0, dtype=torch.int64))
    params = problem.initial_params()
    after, before = mean_losses(problem, params, params, Batch(empty))
    assert float(after - before) == 0.0


def test_mean_losses_are_means_over_the_batch(problem):
    batch = problem.train.select(torch.arange(5))
    params = problem.initial_params()
    other = {name: value + 0.1 for name, value in params.items()}
    after, before = mean_losses(problem, other, params, Batch(batch))
    expected = torch.nn.functional.cross_entropy(
        problem.model(batch.inputs), batch.targets
    ).detach()
    assert float(before) == pytest.approx(float(expected), rel=1e-5)
    assert float(after) != pytest.approx(float(before), rel=1e-5)


@pytest.mark.parametrize(
    "arguments", [(0.0, 1.0, 0.0), (-1.0, 1.0, 0.0), (1.0, 0.0, 0.0), (1.0, 1.0, math.nan)]
)
def test_bad_gates(arguments):
    with pytest.raises(InvalidInputError):
        LossRule(*arguments)


@pytest.mark.parametrize("worse", [0.0, 0.3, math.nan, math.inf])
def test_the_coin_accepts_a_worsening_now_and_then(worse):
    assert_frequency(frequency(CoinRule(4.0), worse), DRAWS, 0.25)


def test_the_coin_accepts_every_improvement():
    assert frequency(CoinRule(4.0), -1e-12) == DRAWS


def test_a_coin_that_rejects_nan_for_certain_is_caught():
    class Wrong(CoinRule):
        def decide(self, difference, drawn):
            return super().decide(difference, drawn) & ~difference.isnan()

    with pytest.raises(AssertionError):
        assert_frequency(frequency(Wrong(4.0), math.nan), DRAWS, 0.25)


def test_the_gate_is_the_accounted_test():
    assert make_rule(CoinTest(0.1, 3.0), 0.001) == CoinRule(3.0)
    assert make_rule(LossTest(0.1, 1.3, -1.0), 0.01) == LossRule(0.01, 1.3, -1.0)


def test_padding_does_not_change_the_mean_losses(problem):
    params = problem.initial_params()
    other = {name: value + 0.1 for name, value in params.items()}
    rows = torch.arange(8)
    exact = Batch(problem.train.select(rows[:5]))
    padded = problem.train.select(rows)
    padded.inputs[5:] = math.nan  # what a padded row holds must not matter
    mask = rows < 5
    for one, two in zip(
        mean_losses(problem, other, params, exact),
        mean_losses(problem, other, params, Batch(padded, mask)),
        strict=True,
    ):
        assert float(one) == pytest.approx(float(two), rel=1e-6)
    nobody = Batch(padded, torch.zeros(8, dtype=torch.bool))
    after, before = mean_losses(problem, other, params, nobody)
    assert float(after - before) == 0.0


@pytest.mark.parametrize("padded", [False, True])
def test_a_test_that_was_begun_early_finds_the_same_losses(problem, padded):
    params = problem.initial_params()
    state = State(params, None, torch.zeros((), dtype=torch.int64))
    other = replace(state, params={name: value + 0.1 for name, value in params.items()})
    gate = LossTestGate(problem, LossTest(0.1, 1.0, 0.0), LossRule(0.01, 1.0, 0.0))
    gate = gate.padded() if padded else gate
    found = []
    for early in (False, True):
        draws = Streams(3, torch.device("cpu")).at(1)
        begun = gate.begin(state, draws) if early else None
        assert begun is None or "examples" not in vars(begun[0])  # beside the gradients
        found.append(gate.judge(state, Candidate(other, test=begun), draws).private)
    assert found[0] == found[1]


def test_the_mean_of_a_batch_is_over_the_drawn_rows_alone(problem):
    values = torch.tensor([[1.0, 2.0, math.nan], [3.0, 5.0, math.inf]], dtype=torch.float64)
    rows, mask = torch.arange(3), torch.tensor([True, True, False])
    assert Batch(problem.train, mask=mask, rows=rows).mean(values).tolist() == [1.5, 4.0]
    assert Batch(problem.train, mask=mask & False, rows=rows).mean(values).tolist() == [0.0, 0.0]
    assert Batch(problem.train, rows=rows[:2]).mean(values[:, :2]).tolist() == [1.5, 4.0]
    assert Batch(problem.train, rows=rows[:0]).mean(values[:, :0]).tolist() == [0.0, 0.0]
