"""The privacy loss of a menu lies above that of everything that can be chosen from it."""

import itertools
import math

import mpmath as mp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import norm

from dpsur.errors import InvalidInputError
from dpsur.privacy.accountants import pld, proven
from dpsur.privacy.accountants.pld import hockey_stick
from dpsur.privacy.events import Menu, SampledGaussian, event_from_json, event_to_json

DELTA = 1e-5
WIDTH = 1e-3
CHOICES = (
    SampledGaussian(0.05, 1.0),
    SampledGaussian(0.1, 1.5),
    SampledGaussian(0.3, 4.0),
    SampledGaussian(1.0, 12.0),
)
# Between the points of the grid, on them, and far beyond its ends.
EPSILONS = np.concatenate((np.linspace(-1.5, 1.5, 25) + 0.37 * WIDTH, [-9.0, -0.5, 0.0, 0.5, 9.0]))
ROUNDING = 1e-13


def integrated(event, epsilon, direction):
    """The hockey-stick divergence by its definition, as an integral over the noise."""
    q, s = event.sample_rate, event.noise_multiplier
    x = np.linspace(-14 * s, 1 + 14 * s, 100_001)
    without = norm.pdf(x, 0, s)
    laws = ((1 - q) * without + q * norm.pdf(x, 1, s), without)
    top, bottom = laws if direction == "add" else laws[::-1]
    return float(np.trapezoid(np.maximum(top - math.exp(epsilon) * bottom, 0), x))


def profile(losses, width, epsilons):
    """The hockey-stick divergence of a discrete privacy loss distribution, at any epsilon."""
    cells = (losses.first + np.arange(len(losses.chances))) * width
    shares = np.maximum(-np.expm1(np.asarray(epsilons)[:, None] - cells), 0.0)
    return losses.infinite + shares @ losses.chances


def combined(how):
    """A menu whose profile is made of those of its choices in some way."""
    real = pld._largest

    def wrong(offer, width, direction):
        parts = [real(Menu((choice,), offer.repeats), width, direction) for choice in offer.choices]
        first, last = min(p.first for p in parts), max(p.last for p in parts)
        profiles = [pld._profile(part, first, last, width) for part in parts]
        return pld.connect(first, how(profiles, axis=0), width)

    return wrong


WRONG = {"mean": np.mean, "least": np.min, "median": np.median}


def the_profile_covers_every_choice():
    for direction in ("add", "remove"):
        found = profile(pld._largest(Menu(CHOICES), WIDTH, direction), WIDTH, EPSILONS)
        for choice in CHOICES:
            exact = np.array([integrated(choice, e, direction) for e in EPSILONS])
            assert (found >= exact - 1e-8).all(), (choice, direction)


def no_sequence_costs_more(repeats=3, blocks=3):
    """Whatever is chosen in every block, composed as if it had been known in advance."""
    whole = pld.composed_epsilon([(Menu(CHOICES, repeats), blocks)], DELTA)
    for chosen in itertools.combinations_with_replacement(CHOICES, blocks):
        fixed = pld.composed_epsilon([(choice, repeats) for choice in chosen], DELTA)
        assert fixed <= whole * (1 + 1e-9), chosen


def of_two(first, seconds, epsilon, direction):
    """Delta of two updates, the second the worst of some, given what the first one released."""
    q, s = first.sample_rate, first.noise_multiplier
    x = np.linspace(-12 * s, 1 + 12 * s, 20_001)
    without = norm.pdf(x, 0, s)
    with_it = (1 - q) * without + q * norm.pdf(x, 1, s)
    losses = np.log(with_it / without)
    front, losses = (with_it, losses) if direction == "add" else (without, -losses)
    rest = [hockey_stick(second, epsilon - losses, direction) for second in seconds]
    return float(np.trapezoid(front * np.max(rest, axis=0), x))


def no_way_to_choose_costs_more():
    """The second update is chosen by the outcome of the first, in the worst way there is."""
    whole = pld.dominating(Menu(CHOICES), WIDTH).repeated(2)
    for epsilon in (0.02, 0.1, 0.37, 1.0):
        chosen = max(of_two(c, CHOICES, epsilon, d) for c in CHOICES for d in ("add", "remove"))
        assert chosen <= whole.delta(epsilon) + ROUNDING, epsilon


LAWS = [the_profile_covers_every_choice, no_sequence_costs_more, no_way_to_choose_costs_more]


@pytest.mark.parametrize("law", LAWS)
def test_law_holds(law):
    law()


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("how", WRONG)
def test_mutant_is_killed(law, how, monkeypatch):
    monkeypatch.setattr(pld, "_largest", combined(WRONG[how]))
    pld.dominating.cache_clear()
    try:
        with pytest.raises(AssertionError):
            law()
    finally:
        pld.dominating.cache_clear()


def test_choosing_by_what_was_released_can_cost_more():
    """Than every sequence that is fixed in advance, so that the worst of those is no bound."""
    epsilon, pairs = 0.1, itertools.product(CHOICES, CHOICES)
    fixed = max(of_two(one, (other,), epsilon, "add") for one, other in pairs)
    chosen = max(of_two(one, CHOICES, epsilon, "add") for one in CHOICES)
    assert chosen > 1.01 * fixed


def test_the_largest_is_what_is_built():
    """The control of the mutants: combined by the maximum, nothing changes."""
    real = pld._largest(Menu(CHOICES, 4), WIDTH, "add")
    same = combined(np.max)(Menu(CHOICES, 4), WIDTH, "add")
    assert profile(same, WIDTH, EPSILONS) == pytest.approx(profile(real, WIDTH, EPSILONS), abs=1e-9)


@pytest.mark.parametrize("direction", ["add", "remove"])
@pytest.mark.parametrize("choice", [*CHOICES, SampledGaussian(0.01, 0.3)], ids=str)
def test_closed_form_is_the_integral(choice, direction):
    epsilons = np.concatenate((np.linspace(-3, 3, 25), [8.0]))
    found = hockey_stick(choice, epsilons, direction)
    exact = [integrated(choice, epsilon, direction) for epsilon in epsilons]
    assert found == pytest.approx(exact, abs=1e-8)
    other = hockey_stick(choice, epsilons, "remove" if direction == "add" else "add")
    if choice.sample_rate < 1:  # the control: directions differ, except without sampling
        assert found != pytest.approx(other.tolist(), abs=1e-8)


def test_closed_form_far_out():
    """Where e^epsilon is no floating-point number, and where one law is all there is."""
    for direction in ("add", "remove"):
        far = hockey_stick(CHOICES[0], np.array([-1e3, 1e3]), direction)
        assert far == pytest.approx([1.0, 0.0])
        sharp = hockey_stick(SampledGaussian(1.0, 0.02), np.array([1000.0]), direction)
        assert sharp == pytest.approx([norm.cdf(25 - 1000 * 0.02)], rel=1e-3)


@pytest.mark.parametrize("repeats", [1, 2, 30])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_one_choice_costs_what_it_costs(choice, repeats):
    alone = pld.composed_epsilon([(choice, 60)], DELTA)
    assert pld.composed_epsilon([(Menu((choice,), repeats), 60 // repeats)], DELTA) == (
        pytest.approx(alone, rel=1e-6)
    )
    assert pld.composed_epsilon([(choice, 66)], DELTA) != pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("repeats", [1, 10])
def test_every_choice_that_is_added_can_only_cost(repeats):
    found = [
        pld.composed_epsilon([(Menu(CHOICES[:n], repeats), 20)], DELTA)
        for n in range(1, len(CHOICES) + 1)
    ]
    assert all(more >= less * (1 - 1e-9) for less, more in itertools.pairwise(found))
    assert found[-1] > found[0]


def test_longer_blocks_leave_less_to_choose():
    """The same number of updates, chosen less often, costs less; chosen once, as the worst."""
    found = [pld.composed_epsilon([(Menu(CHOICES, n), 60 // n)], DELTA) for n in (1, 6, 60)]
    assert found[0] > found[1] > found[2]
    worst = max(pld.composed_epsilon([(choice, 60)], DELTA) for choice in CHOICES)
    assert found[2] == pytest.approx(worst, rel=1e-3)


def test_repeated_profiles_are_those_of_dp_accounting():
    for choice in CHOICES:
        theirs = privacy_loss_distribution.from_gaussian_mechanism(
            choice.noise_multiplier, value_discretization_interval=WIDTH,
            sampling_prob=choice.sample_rate,
        ).self_compose(25)  # fmt: skip
        ours = pld.dominating(Menu((choice,), 25), WIDTH)
        for epsilon in (0.0, 0.3, 1.0, 2.0):
            assert ours.delta(epsilon) == pytest.approx(
                theirs.get_delta_for_epsilon(epsilon), rel=1e-6, abs=ROUNDING
            )


def test_gaussians_without_sampling_are_known_exactly():
    """The worst of them dominates the others, so that the menu is a Gaussian."""
    offer = Menu((SampledGaussian(1.0, 20.0), SampledGaussian(1.0, 25.0)), 10)
    mu = math.sqrt(200) / 20
    for delta in (1e-4, 1e-8):
        epsilon = pld.composed_epsilon([(offer, 20)], delta)
        exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(
            -mu / 2 - epsilon / mu
        )
        assert 0.998 * delta <= exact <= delta


def test_the_bound_by_renyi_divergences_covers_every_choice():
    """What is used where distributions cannot be computed: a small delta, or a tiny noise."""
    tiny = 1e-13
    whole = pld.composed_epsilon([(Menu(CHOICES, 3), 20)], tiny)
    assert whole == proven.composed_epsilon(proven.compose([(Menu(CHOICES, 3), 20)]), tiny).upper
    for choice in CHOICES:
        assert proven.composed_epsilon(proven.compose([(choice, 60)]), tiny).upper <= whole
    sharp = Menu((SampledGaussian(0.5, 1e-6), SampledGaussian(0.5, 1.0)))
    assert pld.composed_epsilon([(sharp, 1)], DELTA) > 1e6


def test_events_are_written_and_read():
    offer = Menu(CHOICES, 7)
    assert event_from_json(event_to_json(offer)) == offer
    assert offer.worst == SampledGaussian(1.0, 1.0)
    values = event_to_json(offer)
    values["choices"][0] = {"kind": "Gaussian", "noise_multiplier": 1.0}
    with pytest.raises(InvalidInputError, match="a menu offers sampled Gaussians"):
        event_from_json(values)
    for bad in ({"kind": "Menu"}, {**event_to_json(offer), "more": 1}):
        with pytest.raises(InvalidInputError, match="not a privacy event"):
            event_from_json(bad)
    with pytest.raises(InvalidInputError, match="at least one choice"):
        Menu(())
    with pytest.raises(InvalidInputError, match="the repeats of a choice"):
        Menu(CHOICES, 0)


@pytest.mark.parametrize("count", [2, 7, 60])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_tails_that_are_cut_off_are_counted(choice, count):
    """A sum over all cells, without cutting anything off, as numpy's own polynomials have it."""
    once = pld.discretise(choice, 0.05, "add")
    cut = pld.repeat(once, count)
    whole = np.ones(1)
    for _ in range(count):
        whole = np.convolve(whole, once.chances)
    start = cut.first - count * once.first
    found = np.zeros_like(whole)
    found[start : start + len(cut.chances)] = cut.chances
    assert found == pytest.approx(whole, abs=1e-15)
    left, right = whole[:start].sum(), whole[start + len(cut.chances) :].sum()
    assert left + right <= pld.CUT_OFF <= cut.infinite


@pytest.mark.parametrize("repeats", [2, 125])
@pytest.mark.parametrize(
    "choice",
    [
        SampledGaussian(1e-5, 1.0),
        SampledGaussian(1e-3, 0.05),
        SampledGaussian(0.5, 1e16),
    ],
    ids=str,
)
def test_losses_that_are_rare_or_none(choice, repeats):
    """Far fewer draws than cells, and cells without any chance: no bound may be lost in between."""
    once = pld.discretise(choice, 1e-2, "add")
    low, high = pld.ends(once.chances, repeats)
    assert 0 <= low <= high <= repeats * (len(once.chances) - 1)
    if choice.noise_multiplier == 1.0:  # one draw that counts, hardly ever two
        assert high - low < 2 * len(once.chances)
    if choice.noise_multiplier < 1.0:  # epsilon takes seconds to find there
        return
    offer = Menu((choice,), repeats)
    alone = pld.composed_epsilon([(choice, 3 * repeats)], DELTA)
    assert pld.composed_epsilon([(offer, 3)], DELTA) == pytest.approx(alone, rel=1e-6, abs=1e-7)


def to_many_digits(choice, epsilon, direction):
    """The hockey-stick divergence with 40 digits, by where the ratio of the laws is e^epsilon."""
    q, s = mp.mpf(choice.sample_rate), mp.mpf(choice.noise_multiplier)
    bound = mp.exp(epsilon)
    rest = (bound if direction == "add" else 1 / bound) - 1 + q
    if rest <= 0:
        return 1 - bound if direction == "add" else mp.mpf(0)
    cut = s * s * mp.log(rest / q) + mp.mpf(1) / 2
    above, shifted = mp.ncdf(-cut / s), mp.ncdf((1 - cut) / s)
    if direction == "add":
        return (1 - q) * above + q * shifted - bound * above
    return (1 - above) - bound * ((1 - q) * (1 - above) + q * (1 - shifted))


@pytest.mark.parametrize("direction", ["add", "remove"])
@pytest.mark.parametrize(
    ("choice", "width"),
    [
        (SampledGaussian(0.999999, 0.1), 1e-3),  # e^epsilon is far above 1 where the laws part
        (SampledGaussian(1.0, 12.0), 1e-3 / 64),  # many small cells
        (SampledGaussian(0.01, 0.7), 1e-3),
        (SampledGaussian(1e-5, 0.5), 1e-3),
    ],
    ids=str,
)
def test_rounding_is_less_than_what_is_charged_for_it(choice, width, direction):
    losses = pld._largest(Menu((choice,)), width, direction)
    epsilons = np.array([-3.0, -1.0, -0.3, -0.01, 0.0, 0.01, 0.1, 0.37, 1.0, 2.5, 5.0, 9.0, 13.0])
    found = profile(losses, width, epsilons)
    with mp.workdps(40):
        for value, epsilon in zip(found, epsilons, strict=True):
            exact = to_many_digits(choice, mp.mpf(float(epsilon)), direction)
            assert float(exact - mp.mpf(float(value))) <= pld.ROUNDING, epsilon
            assert value <= float(exact) * (1 + 1e-3) + width**2  # and it is no idle bound
