"""Laws of the gate over blocks, each of which a named mutant breaks."""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.errors import BudgetError, InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.functional.tree import flatten
from dpsur.mechanism import block_tests, gaussian, proposer
from dpsur.mechanism.block_tests import median_of, noisy_sum
from dpsur.mechanism.blocks import RateSearchTraining
from dpsur.mechanism.gaussian import exact_batch
from dpsur.mechanism.proposer import GradientProposer
from dpsur.mechanism.rate_search import (
    TOO_HIGH,
    TOO_LOW,
    USEFUL,
    WEAK,
    TriedRate,
    best_exponent,
    between,
    classify,
    next_exponent,
)
from dpsur.mechanism.streams import NOISE, VAL_NOISE, Draws, Stream, Streams
from dpsur.mechanism.trial import has_next, make_trial, start
from dpsur.methods import Dpsgd, Dpsur
from dpsur.privacy.accountants import pld
from dpsur.privacy.accountants.rdp import sampled_gaussian_rdp
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Gaussian, SampledGaussian, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import cheapest_test
from reproduction.loops import train
from reproduction.methods import Dpis
from reproduction.methods.dpis import ImportanceProposer
from tests.conftest import blobs, small_model
from tests.mutants import Mutant, law_tests
from tests.statistics import assert_standard_deviation

CPU = torch.device("cpu")
SIZE = 60
BUDGET = Budget(3.0, 1e-3)
SHORT = {"gate": "block", "batch_size": 20, "updates": 5, "blocks": 4, "block_updates": 3}
TESTED = {**SHORT, "val_noise_multiplier": 8.0}


def problem_of(records: Examples | None = None) -> Problem:
    return Problem(small_model(), F.cross_entropy, blobs(SIZE) if records is None else records)


@cache
def settled(method: Dpsgd, size: int):
    return method.resolve(size, BUDGET, "proven")


def bound(problem: Problem | None = None, settle=settled, **changes):
    """A gate and its plan."""
    problem = problem or problem_of()
    method, plan = settle(Dpsgd(**{**TESTED, **changes}), len(problem.train))
    gate = method.build(problem, plan)
    assert isinstance(gate, RateSearchTraining)
    return gate, plan


def is_test(total):
    """Whether a sum is that of a test, and no gradient."""
    return "test" in total.params


def steps_of(gate, plan, seed: int = 0):
    """Every progress of a run, the first one included."""
    progress, streams = start(gate), Streams(seed, CPU)
    yield progress
    while has_next(gate, plan, progress):
        progress, _ = make_trial(gate, plan, streams, progress)
        yield progress


# --- laws ---------------------------------------------------------------------------------------


def what_was_drawn_fits_the_budget():
    """Adds up what the run did to the records, as seen from outside, not what it recorded."""
    gate, plan = bound(settle=settled.__wrapped__)  # not from the cache: mutants change the price
    done, rates = [], []

    def spy_batch(examples, rate, stream):
        rates.append(rate)
        return exact_batch(examples, rate, stream)

    def spy(total, multiplier, stream, real=gaussian.add_noise):
        if is_test(total):
            assert total.sensitivity == 1.0
            done.append(Gaussian(multiplier))
        else:
            done.append(SampledGaussian(rates[-1], multiplier))
        return real(total, multiplier, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposer, "steady_batch", spy_batch)
        patch.setattr(gaussian, "add_noise", spy)
        end = train(gate, plan, Streams(0, CPU))
    assert len(done) == 7 + 4 * 3 + 5
    assert pld.composed_epsilon([(event, 1) for event in done], BUDGET.delta) <= BUDGET.epsilon
    assert plan.spent(end.ledger) == plan.epsilon() <= BUDGET.epsilon


def a_run_depends_on_the_records_through_noisy_sums_only():
    """With the noisy sums replaced by numbers of our own, two data sets lead to the same end."""
    other = blobs(SIZE, seed=7)
    other = Examples(other.inputs * 3, other.targets.flip(0))

    def noise_alone(total, multiplier, stream):
        return {
            n: stream.normal(v.numel()).view(v.shape).to(v.dtype) for n, v in total.params.items()
        }

    ends = []
    for records in (blobs(SIZE), other):
        gate, plan = bound(problem_of(records), clip_norm="given")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gaussian, "add_noise", noise_alone)
            patch.setattr(
                RateSearchTraining, "standard_error", 1e-3
            )  # so that there is a head start
            ends.append(flatten(train(gate, plan, Streams(10, CPU)).state))
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


def a_record_moves_a_test_by_at_most_one():
    """Whatever the record: with an enormous loss, with values that are no numbers."""
    odd = torch.tensor([[1e6, -1e6], [math.nan, 0.0], [math.inf, 0.0], [0.0, 0.0]])
    for row, scale, classes in product(odd, (1, 50), (True, False)):
        weights = {n: scale * value for n, value in problem_of().initial_params().items()}
        sums = []
        for records in (blobs(SIZE), _with(blobs(SIZE), row)):
            loss = F.cross_entropy if classes else _steep
            targets = records.targets if classes else records.targets.float()
            problem = Problem(small_model(), loss, Examples(records.inputs, targets))
            gate, _ = bound(problem)
            sums.append(_exact_tests(gate, weights))
            if classes:
                sums[-1].append(block_tests.class_metrics(problem, weights, problem.train).sum(0))
        for one, two in zip(*sums, strict=True):
            assert float((one - two).norm()) <= 1 + 1e-9


def metrics_of_a_record_are_jointly_at_most_one():
    """Whatever the scores of the classes: right by a hair among many is the worst case."""
    problem, many = problem_of(), 100
    outputs = torch.cat([torch.zeros(1, many), 9 * torch.randn(500, many), 1e-3 * torch.eye(many)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_tests, "record_outputs", lambda *_: outputs)
        rows = Examples(outputs, outputs.argmax(1))
        values = block_tests.class_metrics(problem, problem.initial_params(), rows)
    lengths = torch.sqrt(values.square().sum(1))
    assert float(lengths.max()) <= 1 + 1e-9
    assert float(lengths.max()) > 0.99  # and no less is charged for


def _steep(outputs, targets):
    return 1e3 * (outputs[:, 0] - targets).square().mean()


def _with(records: Examples, row: torch.Tensor) -> Examples:
    inputs = torch.cat([records.inputs, row[None]])
    return Examples(inputs, torch.cat([records.targets, records.targets[:1]]))


def _exact_tests(gate, weights):
    """The sums of all kinds of tests before noise."""
    state = gate.initial_state()
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "add_noise", lambda total, *_: total.params)
        for number in range(3):
            memory = {
                **state.memory,
                "tests": torch.tensor(number),
                "loss_scale": torch.tensor(1.0),
            }
            at = replace(state, params=weights, memory=memory)
            found.append(_value(gate, at, 1))
    return found


def _value(gate, state, step):
    """What the test that is due releases."""
    quantity = gate.quantity(state)
    return noisy_sum(gate.tests, quantity, state, gate.plan.test, Streams(0, CPU).at(step))


def a_test_has_the_accounted_noise():
    """What a test releases is off the exact sum by its noise multiplier, in every coordinate."""
    gate, plan = bound()
    state = gate.initial_state()
    for tests, draws in ((0, 6), (1, 500)):
        at = replace(state, memory={**state.memory, "tests": torch.tensor(tests)})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gaussian, "add_noise", lambda total, *_: total.params)
            exact = _value(gate, at, 1)
        found = [_value(gate, at, step) - exact for step in range(1, draws)]
        assert_standard_deviation(torch.stack(found).numpy(), plan.test.noise_multiplier)


class Still(nn.Module):
    """Its gradients are zero, so that all that moves the weights is noise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x * self.weight).sum(1, keepdim=True)


def noise_is_in_proportion_to_the_clip_norm_in_force():
    """Its deviation is noise multiplier times the norm that the first test has set."""
    records = Examples(torch.zeros(SIZE, 3), torch.zeros(SIZE))
    gate, plan = bound(Problem(Still(), lambda out, _: out.sum(), records), max_grad_norm=0.1)
    state = gate.initial_state()
    memory = {
        **state.memory,
        "tests": torch.tensor(2),
        "max_grad_norm": torch.tensor(0.7, dtype=torch.float64),
        "rate": torch.tensor(3.0, dtype=torch.float64),
        "size": torch.tensor(3),
    }
    state = replace(state, memory=memory)
    moves = [
        gate.propose(state, Streams(0, CPU).at(step), torch.tensor(0)).state.params["weight"] - 1
        for step in range(300)
    ]
    expected = 3.0 * plan.update.noise_multiplier * 0.7 / 20
    assert_standard_deviation(torch.stack(moves).double().numpy(), expected)


def noise_is_never_repeated():
    """Every test and every update has noise of its own, also after a block was restored."""
    gate, plan = bound(clip_norm="given")
    drawn = {NOISE: [], VAL_NOISE: []}
    real, added = Stream.normal, Stream.add_normal

    def spy(self, count, offset=None):
        found = real(self, count, offset)
        if self.purpose in drawn and self._next <= 4 * -(-count // 4):
            drawn[self.purpose].append(float(found[0]))
        return found

    def spy_on_sum(self, values, scale, **more):
        if self.purpose in drawn and not self._next:
            drawn[self.purpose].append(float(real(self, 1, 0)[0]))
        return added(self, values, scale, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "normal", spy)
        patch.setattr(Stream, "add_normal", spy_on_sum)
        train(gate, plan, Streams(0, CPU))
    assert len(drawn[VAL_NOISE]) == 6
    assert drawn[NOISE]
    for values in drawn.values():
        assert len(set(values)) == len(values)


def nothing_of_a_searched_block_survives():
    """After its test, weights, optimizer and averages are the first ones, bit by bit."""
    gate, plan = bound(average_decay=0.9, momentum=0.9)
    first = flatten(_trained(gate.initial_state()))
    seen = 0
    for progress in steps_of(gate, plan):
        tests = int(progress.state.memory["tests"])
        if 3 <= tests <= 6 and not int(progress.state.memory["made"]):
            seen += 1
            found = flatten(_trained(progress.state))
            for name, value in first.items():
                assert torch.equal(value, found[name]), name
            for name, value in gate.initial_state().saved["first"].items():
                assert torch.equal(value, progress.state.saved["first"][name])
    assert seen == 4


def _trained(state):
    return replace(state, memory=None, saved=None)


# --- mutants ------------------------------------------------------------------------------------


def uncharged_tests(patch):
    real = Plan.charges
    patch.setattr(
        Plan, "charges", lambda self: [part for part in real(self) if part[0] != self.test]
    )


def restored_blocks_not_charged(patch):
    real = Plan.charges
    patch.setattr(
        Plan, "charges", lambda self: real(replace(self, phases=(self.phases[0], self.phases[-1])))
    )


def verdict_from_the_value_without_noise(patch):
    real = RateSearchTraining.after_test

    def wrong(self, state, noisy):
        if noisy.numel() == 2:
            problem = self.updates.problem
            noisy = block_tests.class_metrics(problem, state.params, problem.train).sum(0)
        return real(self, state, noisy)

    patch.setattr(RateSearchTraining, "after_test", wrong)


def the_sum_clipped_instead_of_each_record(patch):
    def wrong(problem, params, rows):
        losses = problem.losses(params, rows).double().nan_to_num(1e9, 1e9)
        mean = (-losses.mean() / (2 * math.log(3))).clamp(-1, 1)
        return mean.repeat(len(rows), 2)

    patch.setattr(block_tests, "class_metrics", wrong)


def metrics_of_separate_sensitivity(patch):
    """Each within 1 by itself, both together not."""
    patch.setattr(block_tests, "METRICS_NORM", 1.0)
    patch.setattr(torch.Tensor, "norm", lambda self, *_, **__: torch.zeros(len(self), 1))


def unclipped_loss_decreases(patch):
    def wrong(before, after, bound):
        return (before - after).double()[:, None]

    patch.setattr(block_tests, "decreases_of", wrong)


def half_the_noise_on_tests(patch):
    real = gaussian.add_noise

    def wrong(total, noise, stream):
        return real(total, noise / 2 if is_test(total) else noise, stream)

    patch.setattr(gaussian, "add_noise", wrong)


def noise_at_an_old_clip_norm(patch):
    real = gaussian.clipped_sum

    def wrong(*arguments, **more):
        return replace(real(*arguments, **more), sensitivity=0.1)

    patch.setattr(gaussian, "clipped_sum", wrong)


def repeated_test_noise(patch):
    real = Draws.__getitem__

    def wrong(self, purpose):
        if purpose == VAL_NOISE:
            return Stream(self._streams, purpose, 1)
        return real(self, purpose)

    patch.setattr(Draws, "__getitem__", wrong)


def head_start_by_the_records(patch):
    """Ways are added in proportion to a loss of the records that was not released."""
    real = GradientProposer.restore

    def wrong(self, state, name, add=()):
        records, saved = self.problem.train, state.saved
        losses = [float(self.problem.losses(saved[name], records).mean()) for name, _ in add]
        add = [(n, f / loss) for (n, f), loss in zip(add, losses, strict=True)]
        return real(self, state, name, add)

    patch.setattr(GradientProposer, "restore", wrong)


def _restart_keeping(name):
    def apply(patch):
        real = GradientProposer.restore
        patch.setattr(
            GradientProposer,
            "restore",
            lambda self, state, *which: replace(
                real(self, state, *which), **{name: getattr(state, name)}
            ),
        )

    apply.__name__ = f"{name}_survive"
    return apply


MUTANTS = [
    Mutant(what_was_drawn_fits_the_budget, uncharged_tests),
    Mutant(what_was_drawn_fits_the_budget, restored_blocks_not_charged),
    Mutant(
        a_run_depends_on_the_records_through_noisy_sums_only, verdict_from_the_value_without_noise
    ),
    Mutant(a_run_depends_on_the_records_through_noisy_sums_only, head_start_by_the_records),
    Mutant(a_record_moves_a_test_by_at_most_one, the_sum_clipped_instead_of_each_record),
    Mutant(a_record_moves_a_test_by_at_most_one, unclipped_loss_decreases),
    Mutant(metrics_of_a_record_are_jointly_at_most_one, metrics_of_separate_sensitivity),
    Mutant(a_test_has_the_accounted_noise, half_the_noise_on_tests),
    Mutant(noise_is_in_proportion_to_the_clip_norm_in_force, noise_at_an_old_clip_norm),
    Mutant(noise_is_never_repeated, repeated_test_noise),
    *(
        Mutant(nothing_of_a_searched_block_survives, _restart_keeping(name))
        for name in ("params", "optimizer", "average", "updates")
    ),
]
test_law_holds, test_mutant_is_killed = law_tests(MUTANTS)


# --- the rule -----------------------------------------------------------------------------------


def useful(*pairs):
    return [TriedRate(exponent, value) for exponent, value in pairs]


def test_the_neighbours_of_the_best_then_beside_or_beyond_it():
    start = 3.0
    assert next_exponent(start, []) == 3.0
    assert next_exponent(start, useful((3.0, 0.5))) == 1.5
    assert next_exponent(start, useful((3.0, 0.5), (4.5, 0.1))) == 1.5
    assert next_exponent(start, useful((3.0, 0.5), (4.5, 0.6))) == 6.0
    assert next_exponent(start, useful((3.0, 0.5), (4.5, 0.1), (1.5, 0.6))) == 0.0
    assert next_exponent(start, useful((3.0, 0.5), (4.5, 0.4), (1.5, 0.1))) == 3.75
    assert next_exponent(start, useful((3.0, 0.5), (4.5, 0.1), (1.5, 0.4))) == 2.25


def test_a_tie_goes_to_the_lower_rate():
    """Values that tests cannot tell apart lead the search down, without a parabola."""
    flat = useful((3.0, 0.500), (1.5, 0.498))
    assert next_exponent(3.0, flat, 0.01) == 0.0
    assert best_exponent([*flat, TriedRate(0.0, 0.495)], 0.01) == 0.0
    assert best_exponent([*flat, TriedRate(0.0, 0.3)], 0.01) == 1.5
    assert best_exponent([*flat, TriedRate(0.0, 0.3)]) > 1.5  # the highest value, without ties
    assert next_exponent(3.0, useful((3.0, 0.5), (1.5, 0.4)), 0.01) == 4.5


def test_the_score_is_best_for_true_probabilities_where_a_class_is_rare():
    """A model that is sure of the common class whatever the record has a lower score."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, generator=generator) - 2
    labels = (torch.rand(20_000, generator=generator) < logits.sigmoid()).long()

    def score(scale):
        right, half = block_tests.metrics_of(
            torch.stack([torch.zeros(20_000), scale(logits)], 1), labels
        ).mean(0)
        return float(right - half)

    honest = score(lambda found: found)
    assert honest > score(lambda found: torch.full_like(found, -20.0)) + 0.02
    assert honest > score(lambda found: 8 * found) + 0.01


def test_long_steps_while_no_rate_is_useful():
    low, high = TriedRate(3.0, 0.3, TOO_LOW), TriedRate(3.0, -0.8, TOO_HIGH)
    assert next_exponent(3.0, [low]) == 6.0
    assert next_exponent(3.0, [high]) == 0.0
    assert next_exponent(3.0, [low, TriedRate(6.0, -0.9, TOO_HIGH)]) == 4.5
    assert next_exponent(3.0, [low, TriedRate(6.0, 0.1, USEFUL)]) == 4.5  # whatever its value
    assert best_exponent([low, TriedRate(6.0, 0.2, TOO_LOW)]) == 6.0
    assert best_exponent([low, TriedRate(6.0, -0.9, TOO_HIGH)]) == 3.0
    assert best_exponent([high, TriedRate(0.0, -0.9, TOO_HIGH)]) == -3.0


def test_a_block_is_judged_by_what_it_did_to_the_loss():
    for value, loss, kind in (
        (0.3, 0.499, TOO_LOW),  # a fluke of predictions
        (0.0, 0.52, TOO_LOW),
        (0.1, 0.49, WEAK),
        (0.3, 0.4, USEFUL),
        (0.3, 0.6, WEAK),  # sure of itself, and right
        (-0.3, 0.9, TOO_HIGH),
    ):
        assert classify(1.0, value, loss, 0.0, 0.5, 0.005).kind == kind


def test_a_weak_block_is_left_once_for_a_much_higher_rate():
    weak = TriedRate(3.0, 0.1, WEAK)
    assert next_exponent(3.0, [weak]) == 6.0
    assert next_exponent(3.0, [weak, TriedRate(6.0, 0.0, TOO_LOW)]) == 4.5
    assert next_exponent(3.0, [weak, TriedRate(6.0, -0.8, TOO_HIGH)]) == 4.5
    assert next_exponent(3.0, [weak, TriedRate(6.0, 0.6, USEFUL)]) == 4.5


@pytest.mark.parametrize(("value", "used"), [(0.1, False), (0.9, True)])
def test_a_rate_that_is_given_is_tried_last_and_used_only_if_it_is_better(value, used, monkeypatch):
    gate, plan = bound(clip_norm="given", learning_rate=2.0**-9, max_grad_norm=1.0, momentum=0.0)
    monkeypatch.setattr(RateSearchTraining, "standard_error", 1e-3)
    scripted(monkeypatch, [0.0, 0.5, 0.3, 0.2, value, 0.7])
    monkeypatch.setattr(RateSearchTraining, "_noise_share", lambda *_: 0.0)
    *_, exponents = (p.state.memory["exponents"].tolist() for p in steps_of(gate, plan))
    first = math.log2(24)
    assert exponents[:4] == pytest.approx([first, first - 1.5, first + 1.5, -9.0])
    assert (exponents[4] == -9.0) == used
    assert used or abs(exponents[4] - first) <= 0.75


def test_the_search_finds_the_top_from_anywhere():
    """Of a hill on a plain, with a cliff behind it, whatever rate is tried last."""

    def tried_at(exponent):
        if exponent < 4:
            return TriedRate(exponent, 0.2, TOO_LOW)
        if exponent > 10:
            return TriedRate(exponent, -0.9, TOO_HIGH)
        return TriedRate(exponent, 0.8 - 0.05 * (exponent - 7) ** 2)

    for by_rule, given in product((-1.0, 3.0, 6.0, 9.0, 12.0), (-10.0, 0.0, 7.0, 14.0)):
        tried = []
        for _ in range(3):
            tried.append(tried_at(next_exponent(by_rule, tried)))
        assert abs(best_exponent(tried) - 7) <= 2.0, by_rule
        tried.append(tried_at(given))
        assert abs(best_exponent(tried) - 7) <= 2.0, (by_rule, given)


def test_the_best_rate_is_the_top_of_a_parabola_within_half_a_step():
    """Through the best and its neighbours, or at an end through the best and the two beside it."""
    generator = np.random.default_rng(0)
    for _ in range(300):
        places = 3.0 + np.array([-1.5, 0.0, generator.choice([0.75, 1.5])])
        heights = generator.normal(size=3)
        best = int(np.argmax(heights))
        low, high = (places[[0, 2]] - places[1]) / 2 if best == 1 else (-0.75, 0.75)
        curve, slope, _ = np.polyfit(places - places[best], heights, 2)
        top = -slope / (2 * curve) if curve < 0 else np.inf * slope
        expected = places[best] + np.clip(top, low, high)
        found = best_exponent(useful(*zip(places, heights, strict=True)))
        assert found == pytest.approx(expected, abs=1e-9)


def test_the_best_rate_at_an_end_is_not_led_by_what_was_too_high():
    blocks = [TriedRate(3.0, 0.5), TriedRate(4.5, -0.6, TOO_HIGH), TriedRate(6.0, -0.9, TOO_HIGH)]
    assert best_exponent(blocks) == 3.0
    assert best_exponent(useful((3.0, 0.5), (9.0, 0.1))) == 3.0


def test_interpolation():
    assert between(1.0, [0.0, 2.0], [0.0, 1.0]) == 0.5
    assert between(-1.0, [0.0, 2.0], [0.2, 1.0]) == 0.2
    assert between(9.0, [2.0, 0.0], [1.0, 0.2]) == 1.0
    assert between(3.0, [3.0], [0.4]) == 0.4


def test_the_median_of_a_noisy_histogram():
    sizes = torch.full((5000,), 3.0, dtype=torch.float64)
    sizes[:1000] = 1e-9
    sizes[-1000:] = math.inf  # which counts as zero
    sizes[1000:1100] = 1e12
    bins = block_tests.bins_of(sizes)
    assert torch.equal(bins.sum(1), torch.ones(5000, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    noisy = bins.sum(0) + 30 * torch.randn(block_tests.BINS, generator=generator).double()
    assert median_of(noisy, 30.0) == pytest.approx(3.0, rel=0.2)
    assert median_of(torch.zeros(block_tests.BINS), 30.0) is None


# --- runs ---------------------------------------------------------------------------------------


def scripted(patch, values):
    """Let tests release these values, times the number of records that they look at."""
    following = iter(values)

    def wrong(self, *_):
        half = next(following) * self.tested / block_tests.METRICS_NORM / 2
        return torch.tensor([half, -half], dtype=torch.float64)

    patch.setattr(RateSearchTraining, "_noisy", wrong)


@pytest.mark.parametrize(("last", "fallback"), [(0.49, False), (-0.5, True)])
def test_the_best_block_is_released_if_the_last_one_is_clearly_worse(last, fallback, monkeypatch):
    gate, plan = bound(clip_norm="given", average_decay=0.9)
    scripted(monkeypatch, [0.0, 0.1, 0.5, 0.2, 0.3, last])
    ends = []
    for progress in steps_of(gate, plan):
        ends.append(progress.state)
    best = next(state for state in ends if int(state.memory["tests"]) == 3).saved
    found = ends[-1]
    assert int(found.memory["best"]) == 1
    assert torch.equal(found.params["0.weight"], best["block 2"]["0.weight"]) == fallback
    assert torch.equal(found.average["0.weight"], best["block 2_average"]["0.weight"]) == fallback
    values = [row["value"] for row in gate.metrics(found) if row["quantity"] == "score"]
    assert values == pytest.approx([0.0, 0.1, 0.5, 0.2, 0.3, last])


def last_start(gate, plan):
    """The state when the last block starts, and the first weights."""
    states = [progress.state for progress in steps_of(gate, plan)]
    found = next(state for state in states if int(state.memory["tests"]) == 5)
    return found, states[0].params["0.weight"]


def test_the_last_block_starts_with_parts_of_the_ways_of_the_others(monkeypatch):
    gate, plan = bound(clip_norm="given", average_decay=0.9)
    monkeypatch.setattr(RateSearchTraining, "standard_error", 1e-3)
    scripted(monkeypatch, [0.0, 0.3, 0.6, -0.9, 0.4, 0.7])  # the third rate is too high
    state, first = last_start(gate, plan)
    exponents, saved = state.memory["exponents"].tolist(), state.saved
    expected = first.clone()
    for number, name in ((0, "block 1"), (1, "block 2"), (3, "block 4")):
        factor = min(1 / 3, 2 ** (exponents[4] - exponents[number]))
        expected += factor * (saved[name]["0.weight"] - first)
    assert len(set(exponents[:4])) == 4
    assert not torch.equal(expected, first)
    torch.testing.assert_close(state.params["0.weight"], expected)
    assert torch.equal(state.average["0.weight"], state.params["0.weight"])
    velocity = state.optimizer.buffers["velocity"]["0.weight"]
    assert torch.equal(velocity, torch.zeros_like(velocity))


@pytest.mark.parametrize("infinite", [True, False])
def test_without_a_head_start_where_blocks_are_useless(infinite, monkeypatch):
    """Ways to weights that are no numbers are left out, and all ways if tests are too coarse."""
    gate, plan = bound(clip_norm="given")
    if infinite:
        monkeypatch.setattr(RateSearchTraining, "standard_error", 1e-3)
        monkeypatch.setattr(GradientProposer, "squared_distance", lambda *_: (math.nan, 51))
    scripted(monkeypatch, [0.0, 0.3, 0.6, 0.2, 0.4, 0.7])
    state, first = last_start(gate, plan)
    assert torch.equal(state.params["0.weight"], first)
    assert math.isfinite(float(state.memory["rate"]))


def test_the_last_rate_falls_with_its_length_where_noise_dominates(monkeypatch):
    """By the power 0.75 of the ratio if all is noise, and not at all if nothing is."""
    values = [0.0, 0.3, 0.6, 0.5, 0.4, 0.7]
    rates = {}
    for squares in (1e-12, 1e12):
        gate, plan = bound(clip_norm="given", updates=48)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GradientProposer, "squared_distance", lambda *_, s=squares: (s, 51))
            scripted(patch, values)
            rates[squares] = float(last_start(gate, plan)[0].memory["rate"])
    assert rates[1e12] / rates[1e-12] == pytest.approx(16**0.75)


def test_noise_with_momentum_has_the_share_of_a_simulated_walk():
    """The expected squared length of the noise's way, by simulation."""
    gate, _ = bound(clip_norm="given", momentum=0.9, block_updates=30)
    memory = gate.after_test(gate.initial_state(), torch.tensor([30.0, 30.0])).memory
    rate, draws = float(memory["rate"]), np.random.default_rng(0).normal(size=(30, 40_000))
    way, velocity = np.zeros(40_000), np.zeros(40_000)
    for made, noise in enumerate(draws):
        velocity = 0.9 * velocity + noise * 2.0 * gate.rule.max_grad_norm / 20
        way -= rate * (1 - made / 30) * velocity
    squares = 51 * float(np.square(way).mean()) * 4
    found = gate._noise_share(memory, 0, SampledGaussian(20 / SIZE, 2.0), squares, 51)
    assert found == pytest.approx(1 / 4, rel=0.03)


def test_a_block_decays_from_its_rate_and_starts_where_the_rule_says():
    gate, plan = bound(clip_norm="given", momentum=0.5, max_grad_norm=0.25)
    rates = []
    real = gate.updates.optimizer.step

    class Spy:
        def init(self, params):
            return gate.updates.optimizer.init(params)

        def step(self, params, gradient, state, learning_rate):
            rates.append(float(learning_rate))
            return real(params, gradient, state, learning_rate)

    spied = replace(gate, updates=replace(gate.updates, optimizer=Spy()))
    train(spied, plan, Streams(0, CPU))
    first = 24 * (1 - 0.5) / 0.25
    assert rates[:3] == pytest.approx([first, first * 2 / 3, first / 3])
    assert rates[3] == pytest.approx(first * 2**-1.5)
    assert any(rates[6] == pytest.approx(first * 2**step) for step in (1.5, -3.0))
    assert len(rates) == 17
    assert rates[13] / rates[12] == pytest.approx(4 / 5)


@pytest.mark.parametrize(
    ("options", "start_at"),
    [
        ({}, [2.4]),
        ({"momentum": 0.0}, [24.0]),
        ({"learning_rate": 3.0, "max_grad_norm": 0.5}, [2.4, 1.5]),
        ({"optimizer": "adam"}, [0.08]),
        ({"optimizer": "adam", "learning_rate": 0.01}, [0.08, 0.01]),
    ],
)
def test_where_the_search_starts(options, start_at):
    gate, _ = bound(**options)
    assert [2**start for start in gate.rule.starts] == pytest.approx(start_at)


@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": "adam"}, {"val_batch_size": 30}, {"clip_norm": "given", "blocks": 1}],
)
def test_runs_of_all_kinds_end_as_planned(options):
    gate, plan = bound(**options)
    end = train(gate, plan, Streams(0, CPU))
    assert plan.completed(end.ledger)
    assert end.ledger.updates == plan.updates
    assert all(math.isfinite(row["value"]) for row in gate.metrics(end.state))


def test_a_loss_without_classes():
    records = blobs(SIZE)
    problem = Problem(nn.Linear(2, 1), F.mse_loss, Examples(records.inputs, records.inputs[:, :1]))
    gate, plan = bound(problem, val_noise_multiplier=4.0)
    end = train(gate, plan, Streams(0, CPU))
    quantities = [row["quantity"] for row in gate.metrics(end.state)]
    assert quantities == [
        "median gradient norm", "median loss", *["clipped loss decrease"] * 5
    ]  # fmt: skip
    assert float(end.state.memory["loss_scale"]) > 0


def test_it_finds_a_rate_and_learns():
    problem = Problem(small_model(), F.cross_entropy, blobs(2000))
    method = Dpsgd(gate="block", batch_size=200, updates=30, block_updates=20, momentum=0.0)
    method, plan = method.resolve(2000, BUDGET, "proven")
    gate = method.build(problem, plan)
    end = train(gate, plan, Streams(0, CPU))
    outputs = problem.outputs(end.state.released_params, problem.train.inputs)
    assert float((outputs.argmax(1) == problem.train.targets).float().mean()) > 0.9
    assert float(end.state.memory["max_grad_norm"]) != method.max_grad_norm


# --- settings -----------------------------------------------------------------------------------


def test_defaults_by_rule():
    method, plan = Dpsgd(gate="block", batch_size=4096, updates=600).resolve(
        50_000, Budget(1.0, 1e-5), "proven"
    )
    assert (method.blocks, method.block_updates) == (3, 40)
    assert plan.blocks == (0, 0, 40, 40, 40, 600)
    assert method.val_noise_multiplier == pytest.approx(54, abs=2)
    plain, _ = Dpsgd(batch_size=4096, updates=720).resolve(50_000, Budget(1.0, 1e-5), "proven")
    assert method.noise_multiplier / plain.noise_multiplier == pytest.approx(1.015, abs=1e-3)
    again, same = method.resolve(50_000, Budget(1.0, 1e-5), "proven")
    assert (again, same) == (method, plan)
    assert Dpsgd(gate="block", updates=1000).resolve(9000, BUDGET, "proven")[0].block_updates == 63


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 5}, "trials 5 has no meaning with the gate block"),
        ({"on_reject": "keep-momentum"}, "on_reject keep-momentum has no meaning with the gate"),
        (
            {"gate": "coin"},
            "blocks 4 belongs to the gate block and cannot be used with the gate co",
        ),
        (
            {"gate": "none", "blocks": None, "block_updates": None, "clip_norm": "given"},
            "clip_norm",
        ),
        ({"accept_ratio": 2.0}, "accept_ratio 2.0 belongs to the gate coin"),
        ({"loss_clip": 1.0}, "loss_clip 1.0 belongs to the gate loss"),
        ({"blocks": 0}, "blocks must be a whole number of at least 1"),
        ({"clip_norm": "mean"}, "clip_norm must be one of median, given"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(InvalidInputError, match=message):
        Dpsgd(**{**SHORT, **options})


def test_where_it_is_not_built_it_is_refused():
    with pytest.raises(InvalidInputError, match="noise_multiplier 9 cannot be fixed with the gate"):
        Dpis(gate="block", noise_multiplier=9.0).resolve(SIZE, BUDGET, "proven")
    with pytest.raises(InvalidInputError, match="not covered by the published accounting"):
        Dpsgd(**SHORT).resolve(SIZE, BUDGET, "published")


STEERED = {**TESTED, "refresh_every": 2, "norm_noise_multiplier": 9.0}


def test_importance_sampling_releases_norms_at_the_start_of_every_block(monkeypatch):
    problem = problem_of()
    method, plan = Dpis(**STEERED).resolve(SIZE, BUDGET, "proven")
    gate = method.build(problem, plan)
    assert gate.padded() is None
    norm, releases = None, 0
    for progress in steps_of(gate, plan):
        memory, last = progress.state.memory, progress.ledger.entries[-1:]
        if last and last[0].step == plan.phases[0].steering:
            releases += 1
            norm = float(memory["max_grad_norm"])
            assert 0 <= float(memory["norm_sum"]) <= SIZE * norm
    assert releases == 4 * 2 + 3
    assert plan.spent(progress.ledger) == plan.epsilon() <= BUDGET.epsilon
    assert Plan.from_json(plan.to_json()) == plan
    charged = sum(n * getattr(e, "repeats", 0) for e, n in plan.charges())
    assert charged == plan.updates == 17
    # without a release of its own a block would be steered by the norms of other weights
    monkeypatch.setattr(ImportanceProposer, "restore", GradientProposer.restore)
    with pytest.raises(BudgetError, match="was not planned"):
        list(steps_of(gate, plan))


@pytest.mark.slow
def test_the_smallest_sample_for_a_wanted_precision():
    for size, error in ((10**6, 0.005), (10**7, 0.01), (60_000, 0.002)):
        rate, noise = cheapest_test(size, error)
        tested = rate * size
        found = math.hypot(noise / tested, math.sqrt((1 - rate) / tested))
        assert found == pytest.approx(error, rel=1e-9)
        if rate == 1:
            assert size == 60_000
            continue
        cost = [sampled_gaussian_rdp(q, s, 8) for q, s in ((rate, noise), (1.0, error * size))]
        assert 1.2 < cost[0] / cost[1] <= 1.25
        smaller = 0.95 * rate
        left = error**2 - (1 - smaller) / (smaller * size)
        assert sampled_gaussian_rdp(smaller, smaller * size * left**0.5, 8) > 1.25 * cost[1]
    method, plan = Dpsgd(gate="block", updates=100, test_error=0.02, batch_size=1000).resolve(
        200_000, BUDGET, "proven"
    )
    assert isinstance(plan.test, SampledGaussian)
    assert method.val_batch_size < 50_000
    assert method.test_error is None
    again, same = method.resolve(200_000, BUDGET, "proven")
    assert (again, same) == (method, plan)
    with pytest.raises(InvalidInputError, match="100 records cannot give a standard error of 0.02"):
        Dpsgd(gate="block", updates=9, test_error=0.02, val_batch_size=100).resolve(
            200_000, BUDGET, "proven"
        )


def test_noise_that_does_not_fit_is_refused():
    with pytest.raises(BudgetError, match="spend epsilon"):
        Dpsgd(**TESTED, noise_multiplier=0.8).resolve(SIZE, BUDGET, "proven")
    with pytest.raises(BudgetError, match="leave nothing of epsilon"):
        Dpsgd(**SHORT, noise_multiplier=0.8).resolve(SIZE, BUDGET, "proven")
    with pytest.raises(BudgetError, match="7 tests of blocks spend epsilon 3 by themselves"):
        Dpsgd(**SHORT, val_noise_multiplier=0.5).resolve(SIZE, BUDGET, "proven")


def test_options_of_blocks_imply_the_gate():
    method, plan = Dpsur(batch_size=20, updates=5, blocks=2, block_updates=2).resolve(
        SIZE, BUDGET, "every-trial"
    )
    assert method.gate == "block"
    assert plan.tests
    assert plan.typical == Trial(plan.update)
