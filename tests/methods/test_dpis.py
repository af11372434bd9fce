"""Laws of importance sampling, each of which a named mutant breaks."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.errors import BudgetError, InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism import gaussian, proposer, streams
from dpsur.mechanism.gaussian import exact_batch
from dpsur.mechanism.state import State
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import Selective, make_trial, start
from dpsur.per_example import clipped_norms, clipped_sum
from dpsur.per_example import contributions as factors
from dpsur.per_example.clipping import strategy_for
from dpsur.per_example.record_function import Way
from dpsur.privacy.accountants import pld
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Menu, SampledGaussian, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import Request, make_plan
from reproduction.loops import train
from reproduction.methods import Dpis, dpis
from reproduction.methods.dpis import ImportanceGradient, price_of_an_update
from tests.conftest import blobs, small_model
from tests.methods.problems import BUDGET, CPU, SIZE, bound, settled
from tests.mutants import Mutant, law_tests
from tests.statistics import STANDARD_ERRORS, assert_standard_deviation

CLIP = 0.7
STREAMS = Streams(0, CPU)
STEPS = {"batch_size": 20, "noise_multiplier": 6.0}  # the noise of a typical step
OPTIONS = {**STEPS, "max_grad_norm": CLIP, "updates": 6, "norm_noise_multiplier": 3.0}
GATED = {
    **{name: value for name, value in OPTIONS.items() if name != "updates"},
    **{"gate": "loss", "val_noise_multiplier": 6.0, "val_batch_size": 4, "trials": 6},
    "norm_noise_multiplier": 20.0,
}


class Direction(nn.Module):
    """A record's gradient is the record itself, so that norms and sums are known exactly."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return (x * self.weight).sum(1, keepdim=True)


def known_gradients(size: int = SIZE, spread: float = 1.0) -> Problem:
    """Gradients of all norms: some far below the clip bound, some above it, one zero."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(size, 3, generator=generator) * torch.linspace(0, spread, size)[:, None]
    rows += 0.2 * spread * torch.tensor([1.0, 0.0, 0.0]) * (rows.norm(dim=1, keepdim=True) > 0)
    return Problem(Direction(), lambda out, _: out.sum(), Examples(rows, torch.zeros(size)))


def clipped_rows(problem: Problem) -> torch.Tensor:
    rows = problem.train.inputs.double()
    return rows * (CLIP / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0)


def refreshed(problem: Problem, norm_sum: float, noise: float = 1e-9, **changes):
    """A procedure in a state in which this sum of norms was released."""
    procedure, _ = bound(Dpis(**{**OPTIONS, **changes}), problem=problem)
    state = procedure.initial_state()
    steering = procedure.proposer.source.steering
    update = steering.update_at(steering.batch_size * CLIP / norm_sum)
    values = {
        "norm_sum": norm_sum,
        "sample_rate": update.sample_rate,
        "noise_multiplier": noise,
    }
    memory = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    return procedure, replace(state, memory={**memory, "refresh_at": state.updates + 10})


def gradient(procedure, state, step, streams=STREAMS):
    return procedure.proposer.source.gradient(state, streams.at(step))["weight"]


# --- laws ---------------------------------------------------------------------------------------


def the_estimate_is_unbiased(draws: int = 600):
    """The mean over draws of batches and coins is the mean clipped gradient."""
    problem = known_gradients()
    rows = clipped_rows(problem)
    norm_sum = float(rows.norm(dim=1).sum())
    procedure, state = refreshed(problem, norm_sum)
    found = np.stack([gradient(procedure, state, step).numpy() for step in range(draws)])
    error = found.std(0) / math.sqrt(draws)
    off = np.abs(found.mean(0) - rows.mean(0).numpy()) / error
    assert off.max() <= STANDARD_ERRORS, off


def every_contribution_has_the_norm_of_the_bound():
    """A record adds nothing, or a vector of its own direction and the length of the bound."""
    problem = known_gradients()
    params = {"weight": torch.zeros(3)}
    generator = torch.Generator().manual_seed(0)
    kept = 0
    for row in range(SIZE):
        one = problem.train.select(torch.tensor([row]))
        coin = torch.rand(1, generator=generator, dtype=torch.float64)
        value = clipped_sum(problem, params, one, CLIP, coins=coin).params["weight"].double()
        if value.abs().max() > 0:
            assert float(value.norm()) == pytest.approx(CLIP, rel=1e-5)
            record = one.inputs[0].double()
            assert float(value @ record) == pytest.approx(CLIP * float(record.norm()), rel=1e-5)
            kept += 1
    assert 10 < kept < SIZE


class Released(NamedTuple):
    norm_sum: float
    event: SampledGaussian
    state: State
    procedure: Selective
    plan: Plan


def released_sums(draws: int, problem: Problem, **changes):
    """Releases of the sum of norms from the initial weights, all records looked at."""
    procedure, plan = bound(Dpis(**{**OPTIONS, **changes}), problem=problem)
    step = procedure.step(procedure.initial_state())
    for number in range(draws):
        progress, _ = make_trial(procedure, plan, STREAMS.spawn(number), start(procedure))
        assert progress.ledger.entries[0].step == step
        norm_sum = float(progress.state.memory["norm_sum"])
        yield Released(norm_sum, step, progress.state, procedure, plan)


def the_sum_of_norms_has_the_accounted_noise():
    """Its deviation is the noise multiplier of the event times the clip bound."""
    problem = known_gradients(spread=0.9)
    exact = float(clipped_rows(problem).norm(dim=1).sum())
    found = list(released_sums(400, problem))
    event = found[0].event
    assert event == SampledGaussian(1.0, 3.0)
    errors = np.array([one.norm_sum - exact for one in found])
    # Neither limit is near, so that nothing is cut off.
    assert OPTIONS["batch_size"] * CLIP < exact - 4 * event.noise_multiplier * CLIP
    assert exact + 4 * event.noise_multiplier * CLIP < SIZE * CLIP
    assert_standard_deviation(errors, event.noise_multiplier * CLIP)


def every_probability_is_at_most_one():
    """However small the gradients are, the rate b C / K is one, and it is the one that is used."""
    for one in released_sums(50, known_gradients(spread=1e-3)):
        rate = OPTIONS["batch_size"] * CLIP / one.norm_sum
        assert 0 < rate <= 1
        used = one.procedure.step(one.state).update.sample_rate
        assert used <= 1
        assert used / 1.05 <= rate <= used * 1.05


def an_update_is_on_the_menu():
    """Whatever sum was released, rate and noise belong together."""
    for spread in (1e-3, 0.2, 0.5, 0.9, 2.0):
        for one in released_sums(3, known_gradients(spread=spread)):
            trial = one.procedure.step(one.state)
            assert isinstance(trial, Trial)
            assert trial.update in one.plan.menu.choices


def an_update_behind_a_gate_costs_its_price():
    """Whatever sum was released, the update that follows fits its share of the allowance."""
    problem = known_gradients(spread=0.5)
    method, plan = settled(Dpis(**GATED), SIZE, "every-trial")
    steps = method.build(problem, plan).proposer
    price = price_of_an_update(plan, steps.source.steering.norms, method.refresh_every)
    for step in range(1, 4):
        state = steps.propose(steps.initial_state(), STREAMS.at(step), torch.tensor(0)).state
        trial = replace(steps.step(state), test=plan.typical.test)
        assert 0.99 * price <= plan.cost(trial) <= price


def what_was_drawn_fits_the_budget():
    """Adds up what the run did to the records, as seen from outside, not what it recorded."""
    method = Dpis(**{**OPTIONS, "norm_noise_multiplier": 8.0, "refresh_every": 2})
    method, plan = method.resolve(SIZE, BUDGET, "proven")
    for seed, spread in enumerate((1e-3, 0.2, 0.5, 0.9, 2.0)):
        done = []
        rates = []

        def spy_batch(examples, rate, drawn_from, rates=rates):
            rates.append(rate)
            return exact_batch(examples, rate, drawn_from)

        real = gaussian.add_noise

        def spy_noise(total, multiplier, drawn_from, rates=rates, done=done, real=real):
            assert total.sensitivity == CLIP
            done.append(SampledGaussian(rates[-1], multiplier))
            return real(total, multiplier, drawn_from)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(proposer, "steady_batch", spy_batch)
            patch.setattr(gaussian, "add_noise", spy_noise)
            problem = known_gradients(spread=spread)
            procedure = method.build(problem, plan)
            end = train(procedure, plan, Streams(seed, CPU))
        assert end.ledger.updates == 6
        assert len(done) == len(rates) == 9
        spent = pld.composed_epsilon([(event, 1) for event in done], BUDGET.delta)
        assert spent <= BUDGET.epsilon
        # Had the updates been others of the menu, in blocks of two, it would still fit.
        norms = [event for event in done if event not in plan.menu.choices]
        assert len(norms) == 3
        charges = [(Menu(plan.menu.choices, 2), 3), *((event, 1) for event in norms)]
        assert pld.composed_epsilon(charges, BUDGET.delta) <= BUDGET.epsilon * (1 + 1e-9)
        assert plan.spent(end.ledger) == plan.epsilon()


# --- mutants ------------------------------------------------------------------------------------


def weights_without_correction(patch):
    """Records are chosen by their norms, but not weighed by 1 / p."""
    real = factors.clip_factors

    def wrong(norms, max_grad_norm, keep, coins=None):
        found = real(norms, max_grad_norm, keep, coins)
        return replace(found, values=found.values.clamp(max=1.0))

    patch.setattr("dpsur.per_example.clipping.clip_factors", wrong)


def unreleased_sum(patch):
    real = gaussian.add_noise

    def wrong(total, multiplier, drawn_from):
        if "norms" in total.params:
            return total.params
        return real(total, multiplier, drawn_from)

    patch.setattr(gaussian, "add_noise", wrong)


def half_the_noise_on_the_sum(patch):
    real = gaussian.add_noise

    def wrong(total, multiplier, drawn_from):
        factor = 0.5 if "norms" in total.params else 1
        return real(total, multiplier * factor, drawn_from)

    patch.setattr(gaussian, "add_noise", wrong)


def no_floor(patch):
    real = ImportanceGradient.released

    def wrong(self, state, draws):
        steering = replace(self.steering, batch_size=1e-6)
        return real(replace(self, steering=steering), state, draws)

    patch.setattr(ImportanceGradient, "released", wrong)


def noise_of_the_planned_rate(patch):
    """The noise that suits the rate b / N, although more records join."""
    real = Menu.nearest

    def wrong(self, rate):
        return replace(real(self, rate), noise_multiplier=self.choices[0].noise_multiplier)

    patch.setattr(Menu, "nearest", wrong)


def exact_rate(patch):
    """The rate b C / K itself, with the noise of the one on the menu."""
    real = Menu.nearest

    def wrong(self, rate):
        return replace(real(self, rate), sample_rate=rate)

    patch.setattr(Menu, "nearest", wrong)


def noise_of_the_planned_rate_behind_a_gate(patch):
    real = dpis.noise_for

    def wrong(plan, sample_rate, price, test=None):
        return real(plan, min(sample_rate, OPTIONS["batch_size"] / SIZE), price, test)

    patch.setattr(dpis, "noise_for", wrong)


def uncharged_sums(patch):
    real = Plan._charges

    def wrong(self, counts, tests):
        return [p for p in real(self, counts, tests) if p[0] != self.phases[0].steering]

    patch.setattr(Plan, "_charges", wrong)


MUTANTS = [
    Mutant(the_estimate_is_unbiased, weights_without_correction),
    Mutant(every_contribution_has_the_norm_of_the_bound, weights_without_correction),
    Mutant(the_sum_of_norms_has_the_accounted_noise, unreleased_sum),
    Mutant(the_sum_of_norms_has_the_accounted_noise, half_the_noise_on_the_sum),
    Mutant(every_probability_is_at_most_one, no_floor),
    Mutant(an_update_is_on_the_menu, noise_of_the_planned_rate),
    Mutant(an_update_is_on_the_menu, exact_rate),
    Mutant(an_update_behind_a_gate_costs_its_price, noise_of_the_planned_rate_behind_a_gate),
    Mutant(what_was_drawn_fits_the_budget, uncharged_sums),
]
test_law_holds, test_mutant_is_killed = law_tests(MUTANTS)


# --- details ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", Way)
def test_coins_mean_the_same_however_gradients_are_found(way):
    problem = Problem(small_model(), F.cross_entropy, blobs(SIZE))
    params = problem.initial_params()
    coins = 1 - torch.rand(SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    norms = clipped_norms(problem, params, problem.train, CLIP)
    alone = [
        clipped_sum(problem, params, problem.train.select(torch.tensor([row])), 1e6).params
        for row in range(SIZE)
    ]
    expected = {
        name: sum(
            one[name] * (CLIP / (sum(v.square().sum() for v in one.values())).sqrt())
            for row, one in enumerate(alone)
            if coins[row] * CLIP < norms[row]
        )
        for name in params
    }
    records = strategy_for(problem, params, problem.train.inputs).records
    records.ways.update(dict.fromkeys(records.ways, way))
    found = clipped_sum(problem, params, problem.train, CLIP, coins=coins).params
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_a_gradient_too_small_to_be_scaled_up_adds_nothing():
    """Coins are above zero, so that a norm near the least float is never kept."""
    rows = torch.full((4, 3), 1e-39)
    problem = Problem(Direction(), lambda out, _: out.sum(), Examples(rows, torch.zeros(4)))
    for coin in (2.0**-53, 1e-6, 1.0):
        coins = torch.full((4,), coin, dtype=torch.float64)
        total = clipped_sum(problem, {"weight": torch.zeros(3)}, problem.train, CLIP, coins=coins)
        assert float(total.params["weight"].abs().max()) == 0
    drawn = []
    real = gaussian.clipped_sum

    def spy(*arguments, coins, **more):
        drawn.append(coins)
        return real(*arguments, coins=coins, **more)

    procedure, state = refreshed(problem, norm_sum=4 * CLIP, batch_size=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "clipped_sum", spy)
        for step in range(200):
            gradient(procedure, state, step)
    coins = torch.cat(drawn)
    assert coins.dtype == torch.float64
    assert coins.min() > 0
    assert coins.max() <= 1


def test_norms_depend_on_their_own_record_and_are_clipped():
    problem = Problem(small_model(), F.cross_entropy, blobs(SIZE))
    params = problem.initial_params()
    norms = clipped_norms(problem, params, problem.train, CLIP)
    assert norms.dtype == torch.float64
    assert norms.shape == (SIZE,)
    assert float(norms.min()) > 0
    assert float(norms.max()) == CLIP
    some = torch.tensor([3, 17, 40])
    assert torch.allclose(
        clipped_norms(problem, params, problem.train.select(some), CLIP), norms[some]
    )
    assert len(clipped_norms(problem, params, problem.train.select(some[:0]), CLIP)) == 0
    inputs = problem.train.inputs.clone()
    inputs[5] = math.nan
    odd = clipped_norms(problem, params, Examples(inputs, problem.train.targets), CLIP)
    assert float(odd[5]) == 0
    assert torch.equal(odd[6:], norms[6:])


def test_norms_of_layers_without_a_rule():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = small_model(), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.inner(x) * self.scale

    problem = Problem(Odd(), F.cross_entropy, blobs(6))
    params = problem.initial_params()
    norms = clipped_norms(problem, params, problem.train, 1e6)
    for row in range(6):
        one = problem.train.select(torch.tensor([row]))
        alone = clipped_sum(problem, params, one, 1e6).params
        expected = math.sqrt(sum(float(v.double().square().sum()) for v in alone.values()))
        assert float(norms[row]) == pytest.approx(expected, rel=1e-4)


def test_the_norms_are_released_when_due_and_the_rate_follows():
    procedure, plan = bound(Dpis(**OPTIONS, refresh_every=2), problem=known_gradients(spread=2.0))
    end = train(procedure, plan, STREAMS)
    kinds = [type(entry.step).__name__ for entry in end.ledger.entries]
    assert kinds == ["SampledGaussian", "Trial"] * 3
    assert [entry.updates for entry in end.ledger.entries] == [1, 2] * 3
    rates = {entry.step.update.sample_rate for entry in end.ledger.entries[1::2]}
    assert len(rates) > 1
    last = float(end.state.memory["norm_sum"])
    assert end.ledger.entries[-1].step.update == plan.menu.nearest(20 * CLIP / last)


def test_it_is_never_padded():
    assert bound(Dpis(**OPTIONS))[0].padded() is None


def test_steering_takes_its_share_by_default():
    method, plan = settled(Dpis(batch_size=20, updates=6, refresh_every=2), SIZE, "proven")
    assert plan.phases[0].steering == SampledGaussian(1.0, method.norm_noise_multiplier)
    without = Dpis(batch_size=20, updates=6, refresh_every=2, norm_noise_multiplier=99.0)
    _, free = settled(without, SIZE, "proven")
    # Two hundredths of the divergence, which goes with the inverse square of noise.
    more = plan.menu.choices[0].noise_multiplier / free.menu.choices[0].noise_multiplier
    assert 1.005 < more < 1.015
    assert method.noise_multiplier is None
    assert method.norm_batch_size == SIZE


@pytest.mark.parametrize(
    ("size", "batch", "updates", "epsilon"),
    [(60_000, 2048, 2500, 1.0), pytest.param(50_000, 8192, 600, 3.0, marks=pytest.mark.slow)],
)
def test_the_noise_is_near_that_of_dpsgd(size, batch, updates, epsilon):
    """At every rate on the menu, the noise that pays for the releases of norms included."""
    budget = Budget(epsilon, 1e-5)
    _, plan = Dpis(batch_size=batch, updates=updates).resolve(size, budget, "every-trial")
    assert plan.epsilon() <= epsilon
    for choice in (plan.menu.choices[0], plan.menu.choices[12]):
        rate = choice.sample_rate
        plain = make_plan(
            Request(lambda noise, rate=rate: Trial(SampledGaussian(rate, noise)), None, updates, 1),
            budget,
            "every-trial",
        ).typical.update
        assert 1.005 < choice.noise_multiplier / plain.noise_multiplier < 1.02


def test_defaults_of_refreshes():
    method = Dpis(batch_size=20, updates=45, norm_noise_multiplier=30.0)
    found, _ = method.resolve(SIZE, Budget(3.0, 1e-3), "proven")
    assert found.refresh_every == 3
    assert [found.refreshes(count) for count in (1, 3, 4, 45)] == [1, 1, 2, 15]


def test_norms_that_spend_everything_are_refused():
    with pytest.raises(BudgetError, match="releases of gradient norms spend the whole budget"):
        bound(Dpis(batch_size=20, updates=6, refresh_every=1, norm_noise_multiplier=0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refresh_every": 0}, "refresh_every must be a whole number"),
        ({"norm_batch_size": 0}, "norm_batch_size must be a whole number"),
        ({"norm_noise_multiplier": -1.0}, "norm_noise_multiplier must be a finite number above 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InvalidInputError, match=message):
        Dpis(**options)


def test_streams_of_a_seed_are_used_apart(monkeypatch):
    """Coins have a stream of their own: the same batches are drawn whatever they are."""
    procedure, state = refreshed(known_gradients(), norm_sum=SIZE * CLIP)
    sizes = []
    real = proposer.steady_batch

    def spy(*arguments):
        sizes.append(real(*arguments))
        return sizes[-1]

    monkeypatch.setattr(proposer, "steady_batch", spy)
    first = gradient(procedure, state, 1)
    monkeypatch.setitem(streams.PURPOSES, "coins", 99)
    second = gradient(procedure, state, 1)
    assert torch.equal(sizes[0].rows, sizes[1].rows)
    assert not torch.equal(first, second)
