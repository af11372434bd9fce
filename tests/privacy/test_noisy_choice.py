"""The cost of a private choice, held against problems small enough to be written out."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import logsumexp

from dpsur.errors import InvalidInputError
from dpsur.privacy.accountants import pld, proven
from dpsur.privacy.accountants.proven import event_divergence
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.events import NoisyChoice, SampledGaussian, Trial, event_from_json, event_to_json

DELTA = 1e-3


def choice_law(losses: np.ndarray, rate: float, epsilon: float) -> np.ndarray:
    """Probabilities of the candidates over all Poisson samples of the records (columns)."""
    total = np.zeros(len(losses))
    count = losses.shape[1]
    for joins in itertools.product((0, 1), repeat=count):
        size = sum(joins)
        weight = np.exp(-epsilon * losses @ np.array(joins))
        total += rate**size * (1 - rate) ** (count - size) * weight / weight.sum()
    return total


def worst_neighbours(rate: float, epsilon: float, tries: int = 60):
    """Pairs of laws with and without one record, extreme ones among them."""
    random = np.random.default_rng(0)
    for number in range(tries):
        candidates, records = 2 + number % 3, number % 4
        losses = random.random((candidates, records + 1))
        if number % 2:
            losses = losses.round()  # where one record says all or nothing
        if number == 0:
            losses = np.array([[0.0], [1.0]])
        yield choice_law(losses, rate, epsilon), choice_law(losses[:, :-1], rate, epsilon)
    # Given the rest of a sample, which all but rules out a candidate: the record is against it, or
    # against the other.
    for against in (np.array([1.0, 0.0]), np.array([0.0, 1.0])):
        without = np.array([1.0, math.exp(-12.0)])
        joined = without * np.exp(-epsilon * against)
        without, joined = without / without.sum(), joined / joined.sum()
        yield (1 - rate) * without + rate * joined, without


def ratio_range(one: np.ndarray, two: np.ndarray) -> float:
    logarithms = np.log(one / two)
    return float(logarithms.max() - logarithms.min())


def renyi(one: np.ndarray, two: np.ndarray, order: float) -> float:
    return float(logsumexp(order * np.log(one) + (1 - order) * np.log(two)) / (order - 1))


def epsilon_of(one: np.ndarray, two: np.ndarray, count: int, delta: float) -> float:
    """Epsilon at delta of a choice repeated, exactly, in the worse direction."""
    found = 0.0
    for p, q in ((one, two), (two, one)):
        joint_p, joint_q = np.ones(1), np.ones(1)
        for _ in range(count):
            joint_p, joint_q = np.outer(joint_p, p).ravel(), np.outer(joint_q, q).ravel()
        low, high = 0.0, 50.0
        while high - low > 1e-9:
            middle = (low + high) / 2
            left = np.maximum(joint_p - math.exp(middle) * joint_q, 0.0).sum()
            low, high = (middle, high) if left > delta else (low, middle)
        found = max(found, high)
    return found


CASES = [(rate, epsilon) for rate in (0.05, 0.4, 1.0) for epsilon in (0.3, 1.0, 4.0)]


@pytest.mark.parametrize(("rate", "epsilon"), CASES)
def test_the_amplified_range_holds_and_is_nearly_reached(rate, epsilon):
    """Of each sample; and over all samples, where it can only be narrower."""
    claimed = NoisyChoice(rate, epsilon).amplified
    widest = max(ratio_range(*pair) for pair in worst_neighbours(rate, epsilon))
    assert widest <= claimed * (1 + 1e-9)
    # The problems are hard enough to reject a claim that is a little smaller.
    assert widest > 0.99 * claimed


def test_the_range_without_sampling_is_epsilon():
    assert NoisyChoice(1.0, 0.7).amplified == pytest.approx(0.7)
    assert NoisyChoice(0.01, 0.7).amplified < 0.02


@pytest.mark.parametrize(("rate", "epsilon"), CASES)
@pytest.mark.parametrize("order", [1.5, 4.0, 20.0])
def test_the_charge_bounds_the_divergence(rate, epsilon, order):
    charge = event_divergence(NoisyChoice(rate, epsilon), order)
    attained = max(
        renyi(one, two, order)
        for pair in worst_neighbours(rate, epsilon)
        for one, two in (pair, pair[::-1])
    )
    assert attained <= charge
    # A quarter of it, as for half the range, would not be enough: no charge is that small.
    if order * NoisyChoice(rate, epsilon).amplified <= 1:
        assert attained > charge / 4


@pytest.mark.parametrize(("rate", "epsilon"), [(0.4, 1.0), (1.0, 0.3)])
def test_both_ways_of_composing_are_upper_bounds(rate, epsilon):
    count = 5
    exact = max(
        epsilon_of(one, two, count, DELTA)
        for one, two in itertools.islice(worst_neighbours(rate, epsilon), 12)
        if len(one) <= 3
    )
    charges = [(NoisyChoice(rate, epsilon), count)]
    by_losses = pld.composed_epsilon(charges, DELTA)
    by_orders = proven.composed_epsilon(proven.compose(charges), DELTA).upper
    assert 0.1 < exact <= by_losses <= count * NoisyChoice(rate, epsilon).amplified + 0.01
    assert exact <= by_orders
    # The control: a single choice in place of five is seen to be too few.
    assert exact > pld.composed_epsilon([(NoisyChoice(rate, epsilon), 1)], DELTA)


def test_a_trial_is_charged_for_its_gradient_and_its_choice():
    gradient, choice = SampledGaussian(0.1, 2.0), NoisyChoice(0.1, 0.5)
    both = event_divergence(Trial(gradient, choice), 8.0)
    apart = event_divergence(gradient, 8.0) + event_divergence(choice, 8.0)
    assert both == pytest.approx(apart, rel=1e-9)
    assert event_divergence(choice, 8.0) == pytest.approx(8.0 * choice.amplified**2 / 8)


@pytest.mark.parametrize("name", ["proven", "every-trial"])
def test_a_choice_costs_something_under_every_accounting(name):
    accounting = accounting_named(name)
    gradient, choice = SampledGaussian(0.1, 2.0), NoisyChoice(0.3, 1.0)
    plain = accounting.epsilon([(Trial(gradient), 20)], 1e-5)
    chosen = accounting.epsilon([(Trial(gradient, choice), 20)], 1e-5)
    assert chosen > plain + 0.3


def test_the_paper_has_no_price_for_a_choice():
    with pytest.raises(InvalidInputError, match="unknown privacy event"):
        accounting_named("published").epsilon([(NoisyChoice(0.3, 1.0), 1)], 1e-5)


def test_a_choice_is_no_gate():
    assert Trial(SampledGaussian(0.1, 2.0), NoisyChoice(0.3, 1.0)).gate is None


def test_choices_survive_a_file():
    trial = Trial(SampledGaussian(0.1, 2.0), NoisyChoice(0.3, 1.0))
    assert event_from_json(event_to_json(trial)) == trial
    assert event_from_json(event_to_json(trial.test)) == trial.test


@pytest.mark.parametrize(
    ("values", "name"),
    [((0.0, 1.0), "choice_sample_rate"), ((1.5, 1.0), "choice_sample_rate"),
     ((0.5, 0.0), "choice_epsilon"), ((0.5, math.inf), "choice_epsilon")],
)  # fmt: skip
def test_bad_choices(values, name):
    with pytest.raises(InvalidInputError, match=name):
        NoisyChoice(*values)
