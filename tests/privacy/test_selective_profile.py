"""The profile of blocks of accepted updates against adversaries that do not know how it is found.

Laws are functions; each mutant below breaks one of them.
"""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linprog

from dpsur.privacy.accountants import pld, proven
from dpsur.privacy.accountants.pld import hockey_stick
from dpsur.privacy.accountants.proven import DIRECTIONS, SelectiveUpdate
from dpsur.privacy.accountants.selective import profile
from dpsur.privacy.accountants.selective.pair import Vertices, bracket, vertices
from dpsur.privacy.accountants.selective.profile import Effort, Profile, block_profiles
from dpsur.privacy.events import CoinTest, Gaussian, SampledGaussian, Trial
from tests.privacy.selective_cases import DELTA, ROW, empty_cache

SETTINGS = [
    (0.034, 4.0, 0.0043, 2.26),
    (0.2, 1.2, 0.3, 3.0),
    (1.0, 2.0, 1.0, 6.0),
    (0.0, 1.0, 0.05, 2.0),
]
QUICK = Effort(cells=10.0, nodes=0.2)


# --- a small pair, where everything can be enumerated ---------------------------------------------

LAW = np.array([0.5, 0.3, 0.2])
RATIOS = np.array([0.6, 1.0, 2.0])  # E[L] = 1


def small_programme(q_v, r, direction):
    """What `_programme` returns, for three atoms, and the corners of the two acceptances."""
    corner = profile.vertices(r, q_v)
    a0, a1 = corner.base, corner.base * (1 + corner.gain)
    num, den = a1 * LAW * RATIOS, a0 * LAW
    if direction == "remove":
        num, den = den, num
    return profile._Programme(
        num=num[:, None, :], den=den[:, None, :], shift=np.log(den / num)[:, None, :], outside=0.0,
        num_floor=float(num.min(axis=0).sum()), num_sum=float((num + den).max(axis=0).sum()),
    )  # fmt: skip


def small_profiles(q_v, r, direction, updates, width=0.02):
    p = small_programme(q_v, r, direction)
    grid = profile._Grid.covering(-4.0, 4.0, width, 1e-3)
    found = profile._next(p, grid, updates, 6)
    assert found is not None
    return found


def corners(q_v, r, direction):
    """num and den per vertex and atom, written down a second time."""
    step = q_v * (r - 1)
    a0, a1 = np.array([1, 1, r, r]), np.array([1, 1 + step, r - step, r])
    num, den = np.outer(a1, LAW * RATIOS), np.outer(a0, LAW)
    return (num, den) if direction == "add" else (den, num)


def largest_by_linear_programmes(q_v, r, direction, x, points=41):
    """The supremum over randomised choices at one x: a linear programme for each E[den]/E[num]."""
    num, den = corners(q_v, r, direction)
    n, d = num.ravel(), den.ravel()
    atom = num.shape[1]
    least, most = (linear_extreme(num, den, sign) for sign in (1, -1))
    whole = np.zeros((atom, n.size + 1))  # the chances of the vertices of an atom add up to one
    for z in range(atom):
        whole[z, z : n.size : atom] = 1
        whole[z, -1] = -1
    best = 0.0
    for t in np.linspace(least, most, points):
        gain = np.maximum(n - x / t * d, 0.0)
        equal = np.vstack((whole, np.append(n, 0.0), np.append(d, 0.0)))
        found = linprog(
            -np.append(gain, 0.0), A_eq=equal, b_eq=[0.0] * atom + [1.0, t], bounds=(0, None)
        )
        if found.status == 0:
            best = max(best, -found.fun)
    return best


def linear_extreme(num, den, sign):
    values = [
        den[list(c), range(3)].sum() / num[list(c), range(3)].sum()
        for c in itertools.product(range(4), repeat=3)
    ]
    return min(values) if sign > 0 else max(values)


def attained(q_v, r, direction, updates, x):
    """What adaptive tests attain that take the best of all 64 pure choices, given the history."""
    num, den = corners(q_v, r, direction)
    pairs = [
        (num[list(c), range(3)], den[list(c), range(3)])
        for c in itertools.product(range(4), repeat=3)
    ]
    pairs = [(n / n.sum(), d / d.sum()) for n, d in pairs]

    def best(x, left):
        if left == 0:
            return np.maximum(1 - x, 0.0)
        found = np.zeros_like(x)
        for p, q in pairs:
            ratios = q / p
            if left == 1:
                value = np.maximum(p - x[..., None] * q, 0.0).sum(axis=-1)
            else:
                value = (best(x[..., None] * ratios, left - 1) * p).sum(axis=-1)
            found = np.maximum(found, value)
        return found

    return best(x, updates)


SMALL = [(0.2, 4.0), (0.0, 3.0), (1.0, 2.0)]


def no_randomised_choice_of_a_small_pair_exceeds_the_profile():
    for (q_v, r), direction in itertools.product(SMALL, DIRECTIONS):
        bound = small_profiles(q_v, r, direction, 1)[0]
        for x in (0.7, 1.0, 1.5, 3.5):
            exact = largest_by_linear_programmes(q_v, r, direction, x)
            value = float(bound.at(np.array([x]))[0])
            assert exact <= value + 1e-12
            assert value <= 1.01 * exact + 1e-3


def no_adaptive_choice_of_a_small_pair_exceeds_the_profile():
    x = np.exp(np.linspace(-1.5, 2.5, 15))
    for (q_v, r), direction in itertools.product(SMALL, DIRECTIONS):
        bounds = small_profiles(q_v, r, direction, 2)
        for updates, bound in enumerate(bounds, start=1):
            found = attained(q_v, r, direction, updates, x)
            assert np.all(found <= bound.at(x) + 1e-12)
            assert np.all(bound.at(x) <= found + 0.1)  # mixtures of choices attain more


def profiles_are_convex_and_fall():
    for direction in DIRECTIONS:
        for one in small_profiles(0.2, 4.0, direction, 3):
            slope, level = one.pieces()
            assert np.all(np.diff(slope) >= -1e-9)
            assert np.all(slope <= 0)
            assert np.all(one.values >= np.maximum(0, 1 - one.points))
            assert level[0] == 1.0


# --- the Gaussian pair ----------------------------------------------------------------------------


def lines_hold_by_another_integration():
    """Every line's condition, integrated over the densities themselves instead of over atoms."""
    rng = np.random.default_rng(3)
    for (q, s, q_v, r), direction in itertools.product(SETTINGS[:3], DIRECTIONS):
        p = profile._programme(q, s, q_v, r, direction, 0.3)
        grid = profile._grid(p, q, s, q_v, r, direction, 2, QUICK)
        assert grid is not None
        x = np.exp(grid.losses)
        rest = Profile(x, np.maximum(0.0, 1.0 - x))
        (_, first), (_, last) = profile._range(p)
        piece = grid.piece(grid.losses[:, None] + p.shift)
        lines = profile._find_lines(p, rest, x, piece, 3, (first, last))
        values = profile._largest(x, lines, 1.0, 1.0)  # a second profile, convex or not
        rest = profile._convex(x, values)
        lines = profile._find_lines(p, rest, x, piece, 3, (first, last))
        z = np.linspace(-10 * s, 1 + 10 * s, 60_001)
        density = np.exp(-0.5 * (z / s) ** 2) / (s * math.sqrt(2 * math.pi))
        ratio = 1 - q + q * np.exp((2 * z - 1) / (2 * s * s))
        step = q_v * (r - 1)
        for k in rng.integers(0, len(x), 12):
            for height, slope in zip(lines.height[k], lines.slope[k], strict=True):
                options = []
                for a0, a1 in ((1, 1), (1, 1 + step), (r, r - step), (r, r)):
                    num, den = ratio * a1, np.full_like(z, a0)
                    if direction == "remove":
                        num, den = den, num
                    worth = num * rest.at(x[k] * den / num)
                    options.append(worth - slope * (den - num) - height * num)
                total = float(np.trapezoid(density * np.max(options, axis=0), z))
                assert total <= 1e-13 + 1e-9 * (abs(height) + abs(slope))


def step_pairs(q, s, q_v, r, direction, count, rng):
    """Laws of an accepted update under acceptances that are step functions of z.

    The adversary learns the cell of z only, which is less than there is to learn. Acceptances
    change at two places, or anywhere.
    """
    cells = bracket(q, s, 3.0, direction, 40).cells
    place = np.cumsum(cells.weight)
    step = q_v * (r - 1)
    corner = np.array([[1, 1], [1, 1 + step], [r, r - step], [r, r]])
    for k in range(count):
        low, high = np.sort(rng.random(2))
        choice = np.where((place > low) & (place < high), *rng.integers(0, 4, 2))
        if k % 4 == 0:
            choice = rng.integers(0, 4, place.size)
        den, num = corner[choice, 0] * cells.weight, corner[choice, 1] * cells.weighted_ratio
        if direction == "remove":
            num, den = den, num
        yield num / num.sum(), den / den.sum()


def no_adaptive_adversary_exceeds_the_profile():
    """Two updates; the second acceptance is the best of a list for every outcome of the first."""
    rng = np.random.default_rng(11)
    for setting, direction in itertools.product(SETTINGS, DIRECTIONS):
        bounds = block_profiles(*setting, direction, 2, QUICK)
        assert bounds is not None
        losses = np.log(bounds[0].points)
        x = np.exp(np.linspace(0.4 * losses[0], 0.4 * losses[-1], 15))
        pairs = list(step_pairs(*setting, direction, 48, rng))

        def once(x, pairs=pairs):
            return np.max([np.maximum(p - x[..., None] * d, 0).sum(-1) for p, d in pairs], axis=0)

        assert np.all(once(x) <= bounds[0].at(x) + 1e-13)
        for p, d in pairs[:8]:
            assert np.all((once(x[:, None] * (d / p)) * p).sum(axis=1) <= bounds[1].at(x) + 1e-13)


def without_a_test_it_is_the_sampled_gaussian():
    for q, s in ((0.03, 2.0), (0.3, 1.0), (1.0, 4.0)):
        for direction in DIRECTIONS:
            found = block_profiles(q, s, 0.0, 1.0, direction, 1, QUICK)
            assert found is not None
            losses = np.linspace(0.3, 0.7, 9) * (math.log(found[0].points[-1]))
            exact = hockey_stick(SampledGaussian(q, s), losses, direction)
            bound = found[0].at(np.exp(losses))
            assert np.all(bound >= exact * (1 - 1e-9) - 1e-15)
            at_zero = hockey_stick(SampledGaussian(q, s), np.zeros(1), direction)[0]
            assert found[0].at(np.ones(1))[0] <= 1.02 * at_zero


# --- epsilon --------------------------------------------------------------------------------------


def epsilon(update, count, setup=()):
    trial = Trial(
        SampledGaussian(update.sample_rate, update.noise_multiplier),
        CoinTest(update.val_sample_rate, update.accept_ratio),
    )
    charges = [(trial, count), *((event, 1) for event in setup)]
    return pld.accepted_epsilon(charges, DELTA)


def the_figure_covers_a_fixed_attack():
    """T updates under one good choice, whose law is known: none may need more than delta."""
    q, s, q_v, r = ROW
    step = q_v * (r - 1)
    for direction in DIRECTIONS:
        cells = bracket(q, s, 4.0, direction, 400).cells
        place = np.cumsum(cells.weight)
        up = np.where(place > 0.93, r, 1.0)
        # accepted often where L is far from 1, and a little more so where that shows the record
        den = np.where((place > 0.93) | (place < 0.07), r, 1.0)
        num = np.where(up > 1, r, np.where(den > 1, r - step, 1 + step * (place > 0.5)))
        num, den = num * cells.weighted_ratio, den * cells.weight
        if direction == "remove":
            num, den = den, num
        for updates in (5, 37, 300):
            claimed = epsilon(ROW, updates)
            assert delta_from_below(num / num.sum(), den / den.sum(), updates, claimed) <= DELTA


def delta_from_below(p, q, count, epsilon, width=2e-4):
    """Delta of independent repetitions: losses rounded down, sums on a circle that is long."""
    losses = np.floor(np.log(p / q) / width).astype(int)
    size = 1 << 18
    chances = np.bincount(losses - losses.min(), p)
    total = np.fft.irfft(np.fft.rfft(chances, size) ** count, size)
    sums = np.arange(size) + count * losses.min()
    middle = round(count * float(p @ losses))
    sums = (sums - middle + size // 2) % size + middle - size // 2
    return float(total @ np.maximum(0.0, -np.expm1(epsilon - sums * width))) - 1e-9


def each_update_is_charged():
    figures = [epsilon(ROW, count) for count in (15, 16, 17, 18, 33)]
    assert all(1.002 * a < b for a, b in itertools.pairwise(figures))


def setup_is_charged():
    assert epsilon(ROW, 32, (Gaussian(5.0),)) > epsilon(ROW, 32) + 0.1


def figures_follow_the_parameters():
    """Epsilon rises with rates and ratio and falls with noise, beyond what the grid blurs."""
    q, s, q_v, r = ROW
    figure = epsilon(ROW, 48)
    for other in ((1.1 * q, s, q_v, r), (q, 0.9 * s, q_v, r), (q, s, 1.5 * q_v, r)):
        assert epsilon(SelectiveUpdate(*other), 48) > figure
    assert epsilon(SelectiveUpdate(q, s, q_v, 1.2 * r), 48) > figure


def a_test_alone_is_covered():
    """Without training one release is a ratio of two means of numbers in a known range."""
    q_v, r = 0.1, 3.0
    for direction in DIRECTIONS:
        found = block_profiles(0.0, 1.0, q_v, r, direction, 1, QUICK)
        assert found is not None
        # accepted by half of the probability: p = a1/u against a0, best of a fine search
        step = q_v * (r - 1)
        corner = np.array([[1, 1], [1, 1 + step], [r, r - step], [r, r]])
        best = 0.0
        for share in np.linspace(0.05, 0.95, 19):
            for one, two in itertools.permutations(corner, 2):
                den, num = np.array([share * one, (1 - share) * two]).T
                if direction == "remove":
                    num, den = den, num
                best = max(best, float(np.maximum(num / num.sum() - den / den.sum(), 0).sum()))
        value = float(found[0].at(np.ones(1))[0])
        assert best <= value <= 1.03 * best


def without_a_test_the_figure_is_that_of_plain_composition():
    """In both directions: at a small rate and little noise they differ by more than the grid."""
    for q, sigma, count in ((0.01, 0.7, 40), (0.3, 3.0, 20)):
        plain = pld.composed_epsilon([(SampledGaussian(q, sigma), count)], DELTA)
        found = epsilon(SelectiveUpdate(q, sigma, 0.1, 1.0), count)
        assert plain * (1 - 1e-3) <= found <= 1.03 * plain


LAWS = [
    no_randomised_choice_of_a_small_pair_exceeds_the_profile,
    no_adaptive_choice_of_a_small_pair_exceeds_the_profile,
    profiles_are_convex_and_fall,
    lines_hold_by_another_integration,
    no_adaptive_adversary_exceeds_the_profile,
    without_a_test_it_is_the_sampled_gaussian,
    the_figure_covers_a_fixed_attack,
    each_update_is_charged,
    setup_is_charged,
    figures_follow_the_parameters,
    a_test_alone_is_covered,
    without_a_test_the_figure_is_that_of_plain_composition,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.usefixtures("forgotten")
def test_law_holds(law):
    law()


@pytest.mark.usefixtures("forgotten")
def test_single_updates_are_dominated_at_a_higher_price(monkeypatch):
    """Why blocks: a pair for one update at a time is no better than Rényi divergences."""
    blocks = epsilon(ROW, 512)
    renyi = proven.composed_epsilon(proven.Composition(((ROW, 512),)), DELTA).upper
    monkeypatch.setattr(pld, "BLOCK", 1)
    one_by_one = pld._epsilon([(ROW, 512)], DELTA)
    assert one_by_one > renyi > 1.05 * blocks


@pytest.mark.usefixtures("forgotten")
def test_a_figure_is_looked_up_before_it_is_computed(monkeypatch):
    figure = epsilon(ROW, 20)
    proven.known.cache_clear()

    def fail(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(pld, "_epsilon", fail)
    assert epsilon(ROW, 20) == figure


# --- mutants --------------------------------------------------------------------------------------

SUP_RATIO, LARGEST, CHORD, PROFILES = (
    profile._sup_ratio, profile._largest, profile.chord, block_profiles,
)  # fmt: skip


@pytest.fixture
def forgotten(tmp_path, monkeypatch):
    """Nothing that was computed before is known, and nothing that a mutant computes outlives it."""
    cached = (PROFILES, pld._block, pld._total)
    for one in cached:
        one.cache_clear()
    with empty_cache(tmp_path, monkeypatch):
        yield
    for one in cached:
        one.cache_clear()


def equal_normalisers(monkeypatch):
    """As if acceptance had the same probability with and without the record."""
    near = 1e-9
    monkeypatch.setattr(
        profile, "_largest", lambda x, lines, *_: LARGEST(x, lines, 1 - near, 1 + near)
    )


def verdicts_read_no_record(monkeypatch):
    """As if the acceptances with and without the record were the same function."""

    def one_function(r, q_v):
        corner = vertices(r, q_v)
        return Vertices(corner.base, 0 * corner.gain)

    monkeypatch.setattr(profile, "vertices", one_function)


def heights_not_checked(monkeypatch):
    """The value of the choice that the search starts from, without looking for a better one."""

    def unfinished(options, num, start):
        _, residual, choice = SUP_RATIO(options, num, start)
        return start, 0 * residual, choice

    monkeypatch.setattr(profile, "_sup_ratio", unfinished)


def right_ends_of_cells(monkeypatch):
    """The value at the end of a cell for the whole of it: below a function that falls."""

    def shifted(*arguments):
        values = LARGEST(*arguments)
        return np.append(values[1:], values[-1])

    monkeypatch.setattr(profile, "_largest", shifted)


def tails_dropped(monkeypatch):
    monkeypatch.setattr(profile, "REACH", 5.05)
    monkeypatch.setattr(profile, "chord", lambda *a: (CHORD(*a)[0], 0.0))


def rest_of_the_updates_free(monkeypatch):
    def without_rest(count, length):
        return (max(count // length, 1), 0) if length == pld.BLOCK else divmod(count, length)

    monkeypatch.setattr(pld, "divmod", without_rest, raising=False)


def block_charged_as_one_update(monkeypatch):
    monkeypatch.setattr(pld, "block_profiles", lambda *a: (PROFILES(*a)[0],) * pld.BLOCK)


def only_removal(monkeypatch):
    monkeypatch.setattr(pld, "block_profiles", lambda *a: PROFILES(*a[:4], "remove", a[5]))
    monkeypatch.setattr(
        pld.proven, "composed_epsilon", lambda *_: proven.EpsilonBounds(0, 99.0, "add", 2.0)
    )


def setup_forgotten(monkeypatch):
    whole = pld._epsilon
    monkeypatch.setattr(
        pld, "_epsilon",
        lambda parts, delta: whole([p for p in parts if not isinstance(p[0], Gaussian)], delta),
    )  # fmt: skip


MUTANTS = [
    (no_randomised_choice_of_a_small_pair_exceeds_the_profile, equal_normalisers),
    (no_adaptive_choice_of_a_small_pair_exceeds_the_profile, equal_normalisers),
    (no_randomised_choice_of_a_small_pair_exceeds_the_profile, verdicts_read_no_record),
    (no_adaptive_adversary_exceeds_the_profile, verdicts_read_no_record),
    (lines_hold_by_another_integration, verdicts_read_no_record),
    (lines_hold_by_another_integration, heights_not_checked),
    (no_randomised_choice_of_a_small_pair_exceeds_the_profile, heights_not_checked),
    (no_randomised_choice_of_a_small_pair_exceeds_the_profile, right_ends_of_cells),
    (lines_hold_by_another_integration, tails_dropped),
    (each_update_is_charged, rest_of_the_updates_free),
    (the_figure_covers_a_fixed_attack, block_charged_as_one_update),
    (without_a_test_the_figure_is_that_of_plain_composition, only_removal),
    (setup_is_charged, setup_forgotten),
]


@pytest.mark.parametrize(("law", "mutant"), MUTANTS, ids=lambda function: function.__name__)
@pytest.mark.usefixtures("forgotten")
def test_mutant_is_killed(law, mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        law()
