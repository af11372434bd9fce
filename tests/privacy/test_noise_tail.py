"""Noise ends at 8.57 standard deviations, and every figure is charged for what lies beyond."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import log_ndtr

from dpsur.cli import main
from dpsur.errors import BudgetError
from dpsur.mechanism.noise_table import DISTANCE
from dpsur.privacy import accounting
from dpsur.privacy.accountants import noise_tail
from dpsur.privacy.accountants.noise_tail import LARGEST_RADIUS, MOST_WEIGHTS, out_of_reach
from dpsur.privacy.accountants.pld import hockey_stick
from dpsur.privacy.accounting import ACCOUNTINGS, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import CoinTest, Gaussian, Ledger, LossTest, Menu, SampledGaussian, Trial
from dpsur.privacy.planning import Request, filtered_plan, make_plan
from reproduction.methods.menus import fitted_menu_plan
from tests.plans import plan_behind_filter

PAGE = (Path(__file__).parent.parent.parent / "docs" / "privacy.md").read_text(encoding="utf-8")


def leaving(shift, radius=LARGEST_RADIUS):
    """The chance that a pair of normal draws within the radius is moved beyond it, by quadrature.

    A pair at distance x from the origin leaves for directions within some angle of the shift.
    """

    def chance(x):
        cosine = (radius**2 - x**2 - shift**2) / (2 * x * shift)
        return x * math.exp(-(x**2) / 2) * math.acos(min(max(cosine, -1.0), 1.0)) / math.pi

    least = max(radius - shift, 0.0)
    return quad(chance, least, radius, epsabs=0, epsrel=1e-9, limit=500)[0]


@pytest.mark.parametrize("sigma", [0.3, 1.0, 10.0])
def test_the_charge_covers_what_discrete_noise_lacks(sigma):
    """Of every number a distance in total variation, at e^epsilon times as much again."""
    assert out_of_reach(1e-5, sigma) >= MOST_WEIGHTS * DISTANCE * (1 + math.exp(20))


def stated(text):
    """A number with the precision that it is stated to."""
    digits = len(text.split("e")[0].replace(".", ""))
    return pytest.approx(float(text), rel=0.5 * 10.0 ** (1 - digits))


def test_the_figures_of_the_page_are_those_of_the_formula():
    said = re.search(r"M\(1/σ\)\s+is (.*?): nothing", PAGE, flags=re.DOTALL)[1]
    pairs = re.findall(r"([\d.]+e-\d+) at (?:σ = )?([\d.]+)", " ".join(said.split()))
    assert len(pairs) == 4
    for figure, sigma in pairs:
        assert out_of_reach(1.0, float(sigma), coordinates=1) == stated(figure)
    assert stated("8.57") == LARGEST_RADIUS


@pytest.mark.parametrize("sigma", [0.125, 0.15, 0.25, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("dimension", [1, 10, 10_000])
def test_the_bound_holds_however_the_gradient_lies(sigma, dimension):
    bound = out_of_reach(1.0, sigma, coordinates=2 * dimension)
    alone = np.eye(1, dimension)[0]
    even = np.full(dimension, dimension**-0.5)
    heavy = np.abs(np.random.default_rng(0).standard_cauchy(dimension))
    heavy[20:] = 0.0
    for direction in (alone, even, heavy / np.linalg.norm(heavy)):
        shifts, counts = np.unique(direction / sigma, return_counts=True)
        lost = sum(n * leaving(a) for a, n in zip(shifts, counts, strict=True) if a > 1e-12)
        assert lost <= bound
    assert leaving(1 / sigma) >= 0.3 * out_of_reach(1.0, sigma, coordinates=1)  # a third is too low


def test_delta_includes_mass_beyond_the_largest_noise():
    assert out_of_reach(0.25, 0.1) == out_of_reach(0.25, 1e-200) == 0.25


@pytest.mark.parametrize("direction", ["add", "remove"])
@pytest.mark.parametrize(("q", "sigma"), [(1.0, 1.0), (0.3, 1.0), (0.3, 0.6), (0.05, 0.5)])
def test_noise_that_ends_exceeds_the_ideal_delta_by_no_more(q, sigma, direction, monkeypatch):
    """The whole mechanism on a grid, for noise that ends early enough to see it."""
    radius = 3.5
    monkeypatch.setattr(noise_tail, "LARGEST_RADIUS", radius)
    tail = out_of_reach(q, sigma, coordinates=2)
    x = np.linspace(-6, 6 + 1 / sigma, 2401)
    cell = (x[1] - x[0]) * (x[1] - x[0])
    x, y = x[:, None], np.linspace(-6, 6, 2401)[None, :]

    def law(shift):
        square = (x - shift) ** 2 + y**2
        return np.where(square <= radius**2, np.exp(-square / 2), 0.0)

    cell = cell * 12 / (12 + 1 / sigma)
    whole = law(0.0).sum() * cell
    without = law(0.0) / whole
    with_it = (1 - q) * without + q * law(1 / sigma) / whole
    first, second = (with_it, without) if direction == "add" else (without, with_it)
    seen = False
    for epsilon in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
        delta = np.clip(first - math.exp(epsilon) * second, 0, None).sum() * cell
        ideal = hockey_stick(SampledGaussian(q, sigma), np.array([epsilon]), direction)[0]
        normalised = ideal / -math.expm1(-(radius**2) / 2)
        assert delta <= normalised + tail + 2e-4 * q
        seen = seen or delta > normalised + 0.2 * tail
    assert seen or direction == "remove"


# --- every figure is charged ----------------------------------------------------------------------

SMALL = SampledGaussian(1.0, 0.25)  # the tail of one is 4e-6


def figures_cover_what_noise_cannot_reach(name="every-trial"):
    """Where epsilon is finite, delta is above the chance that a record is certain."""
    for sigma in (0.15, 0.2, 0.25, 0.3, 0.4):
        for count in (1, 10, 1000):
            for delta in (1e-5, 1e-9):
                trial = Trial(SampledGaussian(0.5, sigma))
                found = accounting_named(name).epsilon([(trial, count)], delta)
                certain = 1 - (1 - 0.5 * leaving(1 / sigma)) ** count
                assert found == math.inf or certain <= delta


@pytest.mark.parametrize("name", ACCOUNTINGS)
def test_figures_cover_what_noise_cannot_reach(name, monkeypatch):
    figures_cover_what_noise_cannot_reach(name)
    monkeypatch.setattr(accounting, "noise_tail", lambda *_, **__: 0.0)
    with pytest.raises(AssertionError):
        figures_cover_what_noise_cannot_reach(name)


@pytest.mark.parametrize("name", ACCOUNTINGS)
def test_the_tail_comes_out_of_delta(name):
    found = accounting_named(name)
    charges, delta = [(Trial(SMALL), 1)], 1e-5
    tail = found.noise_tail(charges)
    assert 3e-6 < tail < 5e-6
    assert found.epsilon(charges, delta) == found.ideal_epsilon(charges, delta - tail)
    assert found.epsilon(charges, delta) > found.ideal_epsilon(charges, delta)
    assert found.epsilon(charges, tail) == math.inf


def test_events_lose_what_their_noise_loses():
    def lost(event, count=1, charged=True):
        return noise_tail.noise_tail([(event, count)], verdicts_charged=charged)

    one, coin, loss = lost(SMALL), CoinTest(0.1, 3.0), LossTest(0.1, 0.25, 0.0)
    assert lost(Trial(SMALL), 7) == pytest.approx(7 * one)
    assert lost(Gaussian(0.25)) == pytest.approx(one)
    assert lost(Menu((SampledGaussian(0.1, 1.0), SMALL), repeats=3), 2) == pytest.approx(6 * one)
    assert lost(Trial(SMALL, coin)) == pytest.approx(one)
    assert lost(Trial(SMALL, loss)) == pytest.approx(one + out_of_reach(0.1, 0.25, 1))
    assert lost(Trial(SMALL, coin), charged=False) == pytest.approx(3 * one)
    ratio = loss.accept_max / loss.accept_min
    assert lost(Trial(SMALL, loss), charged=False) == pytest.approx(ratio * one)
    assert lost(Trial(SMALL), 10**9) == 1.0
    assert lost(Trial(SMALL), 0) == 0.0


def test_a_loss_test_that_noise_cannot_pass_never_accepts():
    assert LossTest(0.1, 0.1, -1.0).accept_min == 0.0  # ten standard deviations away
    test = LossTest(0.1, 0.8, -1.0)
    assert 0 < math.exp(log_ndtr(-1 / 0.8)) - test.accept_min < 1e-15


def request(noise, count, test=None):
    return Request(lambda s: Trial(SampledGaussian(0.1, s), test), noise, count, 1)


@pytest.mark.parametrize("name", ACCOUNTINGS)
def test_a_plan_is_refused_by_name(name):
    for count in (None, 10):
        with pytest.raises(
            BudgetError, match=r"0\.25 is too small for delta 1e-09.*raise the noise"
        ):
            make_plan(request(0.25, count), Budget(200.0, 1e-9), name)
    make_plan(request(0.25, 1), Budget(200.0, 1e-5), name)


@pytest.mark.parametrize("test", [CoinTest(0.05, 2.0), pytest.param(None, marks=pytest.mark.slow)])
def test_calibration_pays_for_the_tail(test):
    budget = Budget(300.0, 1e-9)
    plan = make_plan(request(None, 20, test), budget, "proven")
    charges = [(plan.typical, 20)]
    assert plan.epsilon() <= budget.epsilon
    assert accounting_named("proven").noise_tail(charges) < budget.delta
    ideal = accounting_named("proven").ideal_epsilon(charges, budget.delta)
    assert ideal < 0.9 * budget.epsilon  # the tail decides here, not the budget


@pytest.mark.slow
def test_a_menu_pays_for_the_tail():
    menu = Menu((SampledGaussian(0.1, 1.0), SampledGaussian(0.2, 1.5)), repeats=5)
    plan = fitted_menu_plan(
        Budget(300.0, 1e-9), "proven", menu, SampledGaussian(0.1, 5.0), updates=10
    )
    assert plan is not None
    assert plan.epsilon() <= 300.0
    noises = [choice.noise_multiplier for choice in plan.menu.choices]
    assert sum(10 * out_of_reach(0.1, noise) for noise in noises[:1]) < 1e-9


def test_a_filter_stops_before_the_tail_is_spent():
    small = Trial(SampledGaussian(0.1, 0.25))
    plan = plan_behind_filter(Budget(1e4, 1e-3), "every-trial", 2.0, 1e4, small, updates=None)
    ledger = Ledger()
    while plan.affords(ledger, small):
        ledger = ledger.record(small, updates=1)
    assert 0 < ledger.trials == int(1e-3 * 1e-3 / (0.1 * out_of_reach(1.0, 0.25)))
    assert plan.tail(ledger) <= 1e-6
    with pytest.raises(BudgetError, match=r"0\.25 is too small for delta 1e-05"):
        filtered_plan(Budget(500.0, 1e-5), "every-trial", small, updates=None)


def test_account_says_why_epsilon_is_infinite(capsys):
    arguments = "account --dataset-size 1000 --batch-size 500 --noise-multiplier 0.2 --updates 100"
    assert main([*arguments.split(), "--delta", "1e-5", "--json"]) == 0
    shown = capsys.readouterr()
    assert set(json.loads(shown.out).values()) == {math.inf}
    assert "noise multiplier 0.2 is too small for delta 1e-05" in shown.err


def test_most_networks_are_small_enough():
    assert MOST_WEIGHTS > 2.6e8
