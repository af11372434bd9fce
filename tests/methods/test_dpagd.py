"""Laws of adaptive gradient descent, each of which a named mutant breaks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism import gaussian, proposer
from dpsur.mechanism.gaussian import exact_batch
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import make_trial, start
from dpsur.privacy.accountants.proven import event_divergence
from dpsur.privacy.events import NoisyChoice, SampledGaussian, Trial
from dpsur.privacy.plan import Plan
from reproduction.loops import train
from reproduction.methods import Dpagd, dpagd
from reproduction.methods.dpagd import AdaptiveSteps, exponential_mechanism
from tests.conftest import stream
from tests.methods.problems import CPU, SIZE, assert_same, bound
from tests.mutants import Mutant, law_tests
from tests.statistics import FALSE_ALARM, assert_standard_deviation

CLIP = 0.5
STREAMS = Streams(0, CPU)
METHOD = Dpagd(
    batch_size=SIZE, val_batch_size=SIZE, max_grad_norm=CLIP, updates=6, step_sizes=5,
    largest_step=4.0, raise_by=0.5, momentum=0.0, range_schedule="adaptive", choice_share=0.2,
)  # fmt: skip
FAST = replace(METHOD, momentum=0.9, range_schedule="linear", range_end=0.25)


class Point(nn.Module):
    """One weight per coordinate; what a record says of them is the loss's business."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x * 0 + self.weight


def records(values) -> Examples:
    inputs = torch.as_tensor(values, dtype=torch.float32).reshape(len(values), -1)
    return Examples(inputs, inputs)


def quadratic(centre: float = 1.0, width: int = 1) -> Problem:
    """All records agree where the best weights are."""
    train = records(torch.full((SIZE, width), centre))
    return Problem(Point(width), lambda out, target: (out - target).square().sum(), train)


def flat(width: int = 1) -> Problem:
    """A loss that no weight changes: every gradient is nothing but noise."""
    train = records(torch.zeros(SIZE, width))
    return Problem(Point(width), lambda out, _: (out * 0).sum(), train)


def always(index: int):
    """A choice that was decided beforehand."""
    return lambda losses, *_: torch.tensor(index)


def the_least(losses, *_):
    """A choice without noise."""
    return losses.double().clamp(0.0, 3.0).sum(1).argmin()


def trials(procedure, plan, choices, progress=None):
    """Progress after each trial, the choices being given."""
    progress = progress or start(procedure)
    for index in choices:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dpagd, "exponential_mechanism", always(index))
            progress, _ = make_trial(procedure, plan, STREAMS, progress)
        yield progress


# --- laws ---------------------------------------------------------------------------------------


def candidates_start_from_the_same_weights():
    """The chosen length is the best of those tried one by one from where the run stands."""
    procedure, _ = bound(METHOD, problem=quadratic())
    weights, gradient = {"weight": torch.zeros(1)}, {"weight": torch.tensor([-1.0])}
    lengths = torch.tensor([0.0, 0.25, 0.5, 1.0, 2.0], dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpagd, "exponential_mechanism", the_least)
        draws = STREAMS.at(1)
        sample = exact_batch(procedure._problem.train, 1.0, draws["batch"])
        # length 1 hits the centre
        assert int(procedure._choose(weights, gradient, lengths, sample, draws)) == 3


def one_record_moves_a_gradient_by_at_most_the_bound():
    """With and without a huge record, at the first try and at every retry."""
    usual = [[0.3]] * SIZE
    problems = [
        Problem(Point(), lambda out, target: (out * target).sum(), records(values))
        for values in (usual, [*usual[:-1], [1e4]])
    ]
    runs = [bound(METHOD, problem=problem) for problem in problems]
    states = [list(trials(*run, [0, 0, 0, 0])) for run in runs]
    for one, two in zip(*states, strict=True):
        first, second = (p.state.memory["gradient/weight"] for p in (one, two))
        moved = float((first - second).norm())
        # Both records are clipped: from 0.3 to the bound of 0.5, over the expected size.
        assert moved == pytest.approx((CLIP - 0.3) / SIZE, rel=1e-2)


def what_was_drawn_fits_the_allowance():
    """Adds up what the run did to the records, as seen from outside, not what it recorded."""
    rates, done = [], []
    gradient_rate, choice_rate = 20 / SIZE, 1.0

    def spy_batch(examples, rate, drawn_from):
        rates.append(rate)
        return exact_batch(examples, rate, drawn_from)

    def spy_noise(total, multiplier, drawn_from, real=gaussian.add_noise):
        assert total.sensitivity == CLIP
        done.append(SampledGaussian(gradient_rate, float(multiplier)))
        return real(total, multiplier, drawn_from)

    def spy_choice(losses, loss_clip, choice_epsilon, drawn_from):
        done.append(NoisyChoice(choice_rate, choice_epsilon))
        return exponential_mechanism(losses, loss_clip, choice_epsilon, drawn_from)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposer, "steady_batch", spy_batch)
        patch.setattr(gaussian, "add_noise", spy_noise)
        patch.setattr(dpagd, "exponential_mechanism", spy_choice)
        procedure, plan = bound(replace(METHOD, batch_size=20, step_sizes=3), problem=flat())
        end = train(procedure, plan, STREAMS)
    assert 0 < end.ledger.updates < end.ledger.trials
    assert len(done) == 2 * end.ledger.trials
    assert rates == [gradient_rate, choice_rate] * end.ledger.trials
    spent = sum(event_divergence(event, plan.filter.order) for event in done)
    assert spent <= plan.filter.allowance, f"spent {spent:.3f} of {plan.filter.allowance:.3f}"
    assert spent == pytest.approx(plan.divergence(end.ledger), rel=1e-9)


def gradients_are_averaged_by_their_precisions():
    """After retries the noise is what one gradient of all the precision would have."""
    width = 20_000
    procedure, plan = bound(METHOD, problem=flat(width))
    for count, progress in enumerate(trials(procedure, plan, [0, 0, 0]), start=1):
        memory = progress.state.memory
        held = float(memory["precision"])
        assert held == pytest.approx(procedure._first_precision * 1.5 ** (count - 1))
        deviation = held**-0.5 * CLIP / SIZE
        assert_standard_deviation(memory["gradient/weight"].numpy(), deviation)


def a_choice_of_nothing_leaves_the_weights_alone():
    procedure, plan = bound(METHOD, problem=quadratic())
    before = start(procedure)
    (after,) = trials(procedure, plan, [0], before)
    assert_same(after.state.params, before.state.params)
    assert_same(after.state.optimizer, before.state.optimizer)
    assert int(after.state.updates) == after.ledger.updates == 0
    assert after.ledger.trials == 1
    assert float(after.state.memory["retry"]) == 1
    kept = ("largest_step", "largest_chosen", "chosen")
    for name in kept:
        assert float(after.state.memory[name]) == float(before.state.memory[name])
    (moved,) = trials(procedure, plan, [2], after)
    assert float(moved.state.memory["retry"]) == 0
    assert not torch.equal(moved.state.params["weight"], before.state.params["weight"])


def the_largest_step_follows_what_was_chosen():
    """Every tenth update it becomes 1.1 times the largest length of the last ten."""
    procedure, plan = bound(METHOD, problem=quadratic())
    plan = replace(
        plan, filter=replace(plan.filter, allowance=1e9)
    )  # long enough to see two windows
    choices = [1, 2, 0, 1, 1, 3, 1, 0, 1, 1, 1, 1, *[1] * 10, 4]
    seen = [float(p.state.memory["largest_step"]) for p in trials(procedure, plan, choices)]
    first = 1.1 * (3 / 4 * 4.0)
    second = 1.1 * (1 / 4 * first)
    assert seen[:11] == [4.0] * 11
    assert seen[11:21] == pytest.approx([first] * 10)
    assert seen[21:] == pytest.approx([second] * 2)


def a_choice_of_nothing_leaves_the_momentum_alone():
    """And the velocity of an update is that of gradient descent with momentum."""
    procedure, plan = bound(FAST, problem=quadratic())
    first, nothing, second = trials(procedure, plan, [2, 0, 1])
    velocity = first.state.optimizer.buffers["velocity"]["weight"]
    assert_same(nothing.state.optimizer, first.state.optimizer)
    assert_same(nothing.state.params, first.state.params)
    gradient = second.state.memory["gradient/weight"]
    moved = second.state.optimizer.buffers["velocity"]["weight"]
    assert float(moved) == pytest.approx(float(0.9 * velocity + gradient), rel=1e-5)


def candidates_lie_where_the_step_would_go():
    """What a length is scored at is where the weights are if it is chosen."""
    procedure, plan = bound(FAST, problem=quadratic())
    scored = []
    real = dpagd.record_losses

    def spy(problem, params, examples):
        scored.append(float(params["weight"]))
        return real(problem, params, examples)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpagd, "record_losses", spy)
        *_, last = trials(procedure, plan, [2, 3])
    assert len(scored) == 2 * FAST.step_sizes
    assert float(last.state.params["weight"]) == pytest.approx(
        scored[FAST.step_sizes + 3], rel=1e-5
    )


def the_range_shrinks_as_the_allowance_is_spent():
    """From the largest step to its share at the end, by what is charged and nothing else."""
    procedure, plan = bound(FAST, problem=quadratic())
    memory = procedure.initial_state().memory
    ends = [float(procedure._largest(memory, torch.tensor(p))) for p in (0, 500, plan.length)]
    assert ends == pytest.approx([4.0, 2.5, 1.0])
    constant = bound(replace(FAST, range_schedule="constant"), problem=quadratic())[0]
    assert float(constant._largest(memory, torch.tensor(900))) == 4.0
    for progress in trials(procedure, plan, [4, 4, 4]):
        chosen = float(progress.state.memory["chosen"])
    position = plan.position(progress.ledger) / plan.length
    assert position > 0.3
    assert chosen < 4.0 * (1 - 0.75 * 0.3)
    assert chosen > 4.0 * (1 - 0.75 * position)


def choice_pvalue(choice_epsilon: float, count: int = 8000) -> float:
    """How well draws agree with the exponential mechanism."""
    losses = torch.tensor([[0.9, 0.5], [0.2, 5.0], [math.nan, 0.0], [-3.0, 0.6]])
    clipped = np.array([1.4, 1.2, 1.0, 0.6])  # at a clip bound of 1
    weights = np.exp(-1.5 * clipped)
    drawn_from = stream(3)
    drawn = [
        int(exponential_mechanism(losses, 1.0, choice_epsilon, drawn_from)) for _ in range(count)
    ]
    observed = np.bincount(drawn, minlength=4)
    return float(stats.chisquare(observed, weights / weights.sum() * count).pvalue)


# --- mutants ------------------------------------------------------------------------------------


def candidates_that_accumulate(patch):
    def wrong(self, params, gradient, lengths, sample, draws):
        losses, moved = [], params
        for length in lengths:
            moved = {n: v - length.to(v.dtype) * gradient[n] for n, v in moved.items()}
            losses.append(self._problem.losses(moved, sample.examples))
        return dpagd.exponential_mechanism(torch.stack(losses), 3.0, 1.0, None)

    patch.setattr(AdaptiveSteps, "_choose", wrong)


def unclipped_retry(patch):
    real, tries = gaussian.clipped_sum, []

    def wrong(problem, params, examples, bound, **more):
        tries.append(problem)
        again = sum(one is problem for one in tries) > 1
        total = real(problem, params, examples, 1e9 if again else bound, **more)
        return replace(total, sensitivity=bound)

    patch.setattr(gaussian, "clipped_sum", wrong)


def uncharged_retries(patch):
    patch.setattr(
        Plan,
        "divergence",
        lambda self, ledger: sum(
            entry.updates * event_divergence(entry.step, self.filter.order)
            for entry in ledger.entries
        ),
    )


def difference_charged_and_all_of_it_taken(patch):
    """A retry draws a gradient of the whole precision, and is charged for what was added."""
    real = AdaptiveSteps._noisy_gradient

    def wrong(self, params, batch, noise_multiplier, draws):
        noise = noise_multiplier.clamp(max=self._first_precision**-0.5)
        return real(self, params, batch, noise, draws)

    patch.setattr(AdaptiveSteps, "_noisy_gradient", wrong)


def plain_average(patch):
    def wrong(self, state, memory, batch, draws):
        fresh_precision = self._fresh_precision(memory)
        fresh = self._noisy_gradient(state.params, batch, fresh_precision**-0.5, draws)
        share = 1.0 if float(memory["retry"]) == 0 else 0.5
        mixed = {
            name: share * value + (1 - share) * memory[f"gradient/{name}"]
            for name, value in fresh.items()
        }
        return mixed, memory["precision"] * memory["retry"] + fresh_precision

    patch.setattr(AdaptiveSteps, "_improved_gradient", wrong)


def every_choice_counts(patch):
    patch.setattr(
        AdaptiveSteps,
        "judge",
        lambda self, state, candidate, draws: dpagd.Verdict(torch.tensor(True)),
    )


def no_headroom(patch):
    patch.setattr(dpagd, "HEADROOM", 1.0)


def forgets_nothing(patch):
    real = AdaptiveSteps._adapted

    def wrong(self, memory, chosen, updates):
        seen = torch.maximum(memory["largest_chosen"], chosen)
        return {**real(self, memory, chosen, updates), "largest_chosen": seen}

    patch.setattr(AdaptiveSteps, "_adapted", wrong)


def momentum_of_what_was_not_taken(patch):
    real = AdaptiveSteps.after_rejection

    def wrong(self, state, candidate):
        return replace(real(self, state, candidate), optimizer=candidate.state.optimizer)

    patch.setattr(AdaptiveSteps, "after_rejection", wrong)


def scored_without_momentum(patch):
    patch.setattr(AdaptiveSteps, "_direction", lambda _self, _optimizer, gradient: gradient)


def range_that_stays(patch):
    patch.setattr(AdaptiveSteps, "_largest", lambda _self, memory, _: memory["largest_step"])


MUTANTS = [
    Mutant(candidates_start_from_the_same_weights, candidates_that_accumulate),
    Mutant(one_record_moves_a_gradient_by_at_most_the_bound, unclipped_retry),
    Mutant(what_was_drawn_fits_the_allowance, uncharged_retries),
    Mutant(what_was_drawn_fits_the_allowance, difference_charged_and_all_of_it_taken),
    Mutant(gradients_are_averaged_by_their_precisions, plain_average),
    Mutant(a_choice_of_nothing_leaves_the_weights_alone, every_choice_counts),
    Mutant(the_largest_step_follows_what_was_chosen, no_headroom),
    Mutant(the_largest_step_follows_what_was_chosen, forgets_nothing),
    Mutant(a_choice_of_nothing_leaves_the_momentum_alone, momentum_of_what_was_not_taken),
    Mutant(candidates_lie_where_the_step_would_go, scored_without_momentum),
    Mutant(the_range_shrinks_as_the_allowance_is_spent, range_that_stays),
]
test_law_holds, test_mutant_is_killed = law_tests(MUTANTS)


# --- details ------------------------------------------------------------------------------------


def test_the_choice_is_the_exponential_mechanism():
    assert choice_pvalue(1.5) > FALSE_ALARM
    assert choice_pvalue(3.0) < FALSE_ALARM  # with twice the epsilon


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_loss_that_is_not_finite_counts_as_the_clip_bound(bad):
    """Else a record could rule a candidate out, which no epsilon would cover."""
    streams = [stream(1) for _ in range(2)]
    odd = torch.tensor([[bad, 0.5], [0.5, 0.5]])
    clipped = torch.tensor([[1.0, 0.5], [0.5, 0.5]])
    found = [
        [int(exponential_mechanism(losses, 1.0, 2.0, drawn_from)) for _ in range(200)]
        for losses, drawn_from in zip((odd, clipped), streams, strict=True)
    ]
    assert found[0] == found[1]
    assert set(found[0]) == {0, 1}


def test_an_empty_sample_chooses_at_random():
    drawn_from = stream(0)
    drawn = [int(exponential_mechanism(torch.zeros(3, 0), 1.0, 1e6, drawn_from)) for _ in range(60)]
    assert set(drawn) == {0, 1, 2}


@pytest.mark.parametrize("values", [(0.0, 1.0), (1.0, -1.0), (math.nan, 1.0)])
def test_bad_choices(values):
    with pytest.raises(InvalidInputError, match="must be a finite number above 0"):
        exponential_mechanism(torch.zeros(2, 2), *values, stream())


def test_a_retry_states_and_draws_the_difference():
    procedure, plan = bound(METHOD, problem=flat())
    first = procedure.step(procedure.initial_state())
    assert isinstance(first, Trial)
    assert first.test == plan.typical.test
    planned = plan.typical.update
    assert first.update.sample_rate == planned.sample_rate
    assert first.update.noise_multiplier == pytest.approx(planned.noise_multiplier, rel=1e-14)
    (after,) = trials(procedure, plan, [0])
    retry = procedure.step(after.state)
    gained = retry.update.noise_multiplier**-2
    assert gained == pytest.approx(0.5 * first.update.noise_multiplier**-2)
    (moved,) = trials(procedure, plan, [1], after)
    new = procedure.step(moved.state)  # the next gradient has the precision that was reached
    assert new.update.noise_multiplier**-2 == pytest.approx(3 * gained)


def test_it_ends_when_nothing_fits_and_not_before():
    procedure, plan = bound(replace(METHOD, step_sizes=2), problem=flat())
    end = train(procedure, plan, STREAMS)
    left = plan.filter.allowance - plan.divergence(end.ledger)
    assert 0 <= left < event_divergence(procedure.step(end.state), plan.filter.order)
    assert plan.completed(end.ledger)
    assert plan.position(end.ledger) <= plan.length == 1000


def test_without_noise_it_comes_within_a_step_of_the_minimum(monkeypatch):
    monkeypatch.setattr(dpagd, "exponential_mechanism", the_least)
    monkeypatch.setattr(gaussian, "add_noise", lambda total, *_: total.params)
    procedure, plan = bound(METHOD, problem=quadratic(centre=0.8))
    end = train(procedure, plan, STREAMS)
    assert float(end.state.params["weight"]) == pytest.approx(0.8, abs=0.25)


def test_an_average_follows_updates_and_rests_where_nothing_is_chosen():
    procedure, plan = bound(replace(METHOD, average_decay=0.5), problem=quadratic())
    before = start(procedure)
    assert_same(before.state.released_params, before.state.params)
    first, nothing, second = trials(procedure, plan, [2, 0, 1], before)
    weights = [float(p.state.params["weight"]) for p in (before, first, second)]
    # the decay warms up: 2/11 at the first update, 3/12 at the second
    expected = weights[1] + 2 / 11 * (weights[0] - weights[1])
    assert float(first.state.average["weight"]) == pytest.approx(expected, rel=1e-5)
    assert_same(nothing.state.average, first.state.average)
    expected = weights[2] + 3 / 12 * (expected - weights[2])
    assert float(second.state.released_params["weight"]) == pytest.approx(expected, rel=1e-5)


def test_layers_that_draw_have_a_stream_of_their_own(monkeypatch):
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 3))
    inputs = torch.randn(SIZE, 2, generator=torch.Generator().manual_seed(0))
    train_set = Examples(inputs, torch.arange(SIZE) % 3)
    problem = Problem(model, nn.functional.cross_entropy, train_set)
    settled, plan = METHOD.resolve(SIZE, bound(METHOD)[1].budget, "proven")
    procedure = settled.build(problem, plan)
    assert procedure.padded() is None  # a replay would repeat their draws
    seeds = []
    real = Streams.seed_for
    monkeypatch.setattr(Streams, "seed_for", lambda self, *at: seeds.append(at) or real(self, *at))
    state = torch.get_rng_state()
    list(trials(procedure, plan, [1]))
    assert torch.equal(state, torch.get_rng_state())
    assert set(seeds) == {("layers", 1)}


def test_the_price_is_shared_as_stated():
    """A fifth of a trial's price is the choice's, and six trials use the allowance up."""
    settled, plan = METHOD.resolve(SIZE, bound(METHOD)[1].budget, "proven")
    choice = NoisyChoice(1.0, settled.choice_epsilon)
    price = plan.filter.allowance / 6
    assert event_divergence(choice, plan.filter.order) == pytest.approx(0.2 * price, rel=1e-6)
    assert 0.999 * price <= event_divergence(plan.typical, plan.filter.order) <= price
    given, _ = replace(METHOD, choice_epsilon=0.1).resolve(SIZE, plan.budget, "proven")
    assert given.choice_epsilon == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_sizes": 1}, "step_sizes must be at least 2, one of them the length 0, got 1"),
        ({"raise_by": 0.0}, "raise_by must be a finite number above 0"),
        ({"largest_step": math.inf}, "largest_step must be a finite number above 0"),
        ({"loss_clip": -1.0}, "loss_clip must be a finite number above 0"),
        ({"choice_epsilon": 0.0}, "choice_epsilon must be a finite number above 0"),
        ({"val_batch_size": 0}, "val_batch_size must be a whole number"),
        ({"average_decay": 1.5}, "average_decay must be"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InvalidInputError, match=message):
        Dpagd(**options)


@pytest.mark.parametrize("name", ["batch_size", "val_batch_size"])
def test_a_batch_larger_than_the_data(name):
    with pytest.raises(InvalidInputError, match=f"{name} 61 is larger than the data set of 60"):
        Dpagd(**{name: 61}).resolve(SIZE, bound(METHOD)[1].budget, "proven")
