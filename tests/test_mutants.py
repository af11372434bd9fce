"""Deliberately wrong mechanisms, each of which a stated law must reject.

A law is a function that asserts a property of the mechanism as it stands. Every law holds for the
package, and fails once its mutant is patched in. The first five faults were seen in code that was
released for the paper.
"""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.config import RunConfig
from dpsur.errors import CouplingError, InvalidInputError, NothingReleasedError
from dpsur.features import statistics as feature_sums
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples, HostExamples, place
from dpsur.functional.tree import flatten, map_tensors
from dpsur.mechanism import captured_batches, gaussian, proposer, trial
from dpsur.mechanism import gaussian as sampling
from dpsur.mechanism import trial as gate
from dpsur.mechanism.cuda_graph_loop import CudaGraphLoop
from dpsur.mechanism.gaussian import Batch
from dpsur.mechanism.proposer import DpGradient
from dpsur.mechanism.streams import BATCH, Stream, Streams
from dpsur.mechanism.trial import LossRule, mean_losses, start
from dpsur.methods import Dpsgd, Dpsur
from dpsur.per_example import clipped_sum, record_function
from dpsur.privacy.accountants import pld
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import LossTest, SampledGaussian, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import repeated_plan
from dpsur.runs import data as losses
from dpsur.runs import input_features
from dpsur.runs import session as building
from dpsur.runs.input_features import InputFeatures, compute_inputs
from reproduction.loops import run_loop, train
from tests.conftest import blobs, small_model, stream
from tests.plans import spent
from tests.statistics import assert_frequency, assert_standard_deviation

CPU = torch.device("cpu")
BUDGET = Budget(3.0, 1e-5)


# --- laws ---------------------------------------------------------------------------------------


def rejection_restores_everything():
    """After rejections alone, every tensor of the state is the initial one."""
    tried = Trial(SampledGaussian(0.2, 1.0), LossTest(0.2, 1.0, -math.inf))
    plan = repeated_plan(BUDGET, "every-trial", tried, 6)
    method = Dpsur(average_decay=0.9)
    procedure = method.build(Problem(small_model(), F.cross_entropy, blobs()), plan)
    end = flatten(train(procedure, plan, Streams(0, CPU)).state)
    for name, value in flatten(procedure.initial_state()).items():
        assert torch.equal(value, end[name]), name


def both_losses_come_from_one_batch():
    """A candidate equal to the current model has a loss difference of exactly zero."""
    tried = Trial(SampledGaussian(0.2, 1.0), LossTest(0.05, 1.0, 0.0))
    plan = repeated_plan(BUDGET, "every-trial", tried, 10)
    method = Dpsur(learning_rate=1e-30)
    procedure = method.build(Problem(small_model(), F.cross_entropy, blobs()), plan)
    differences = []
    train(
        procedure,
        plan,
        Streams(0, CPU),
        on_block=lambda _, made: differences.append(float(made[0].private["loss_difference"])),
    )
    assert differences == [0.0] * 10


class Ones(nn.Module):
    """Every record has the same gradient, of norm one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x[:, :1] * 0 + self.weight


def steps_in_records(rate=0.1, count=40, size=100, multiplier=1e-6):
    """How many records' worth of gradient each DPSGD step holds."""
    problem = Problem(
        Ones(), lambda out, _: -out.sum(), Examples(torch.ones(size, 1), torch.zeros(size))
    )
    plan = repeated_plan(BUDGET, "every-trial", Trial(SampledGaussian(rate, multiplier)), count)
    method = Dpsgd(learning_rate=1.0, momentum=0.0, schedule="constant", max_grad_norm=1.0)
    procedure = method.build(problem, plan)
    weights = [0.0]
    end = train(
        procedure,
        plan,
        Streams(0, CPU),
        on_block=lambda progress, _: weights.append(float(progress.state.params["weight"])),
    )
    return np.diff(np.array(weights)) * rate * size, end


def sums_are_divided_by_the_expected_size():
    """Each step is a whole number of records over the expected size: the number that was drawn."""
    steps, _ = steps_in_records()
    streams = Streams(0, CPU)
    batches = [streams.at(step)[BATCH] for step in range(1, 41)]
    sizes = [len(sampling.poisson_sample(100, 0.1, drawn)) for drawn in batches]
    assert len(set(sizes)) > 5
    assert np.allclose(steps, sizes, atol=1e-2), (steps[:5], sizes[:5])


def an_empty_batch_is_a_trial_like_any_other():
    """With hardly any record drawn, every trial still adds noise and is recorded."""
    steps, end = steps_in_records(rate=1e-4, multiplier=1.0)
    assert np.all(steps != 0)
    assert end.ledger.trials == end.ledger.updates == 40
    assert_standard_deviation(steps, 1.0)


def the_budget_stops_training_before_it_is_overspent():
    settled, plan = Dpsgd(noise_multiplier=6.0).resolve(200, Budget(2.0, 1e-4), "every-trial")
    problem = Problem(small_model(), F.cross_entropy, blobs())
    procedure = settled.build(problem, plan)
    end = train(procedure, plan, Streams(0, CPU))
    assert spent("every-trial", end.ledger, 1e-4) <= 2.0


def a_nan_difference_is_accepted_as_often_as_the_worst():
    gate = LossRule(0.001, 1.0, 0.0)
    count = 100_000
    accepted = gate.decide(torch.full((count,), math.nan, dtype=torch.float64), stream())
    assert_frequency(int(accepted.sum()), count, LossTest(0.1, 1.0, 0.0).accept_min)


def a_mean_is_charged_for_what_a_record_moves():
    """One Gaussian event of the noise that was added, relative to what one record can move."""
    asked = InputFeatures("vectors", "mean", noise=50.0)
    rows = 3 * F.normalize(torch.randn(41, 4000, generator=torch.Generator().manual_seed(0)))

    def noisy_sum(count):
        train = Examples(rows[:count], torch.zeros(count))
        return compute_inputs(asked, train, None, Streams(0, CPU)).statistics["centre"] * count

    assert len(asked.setup) == 1  # without a charge nothing is drawn
    moved = float((noisy_sum(41) - noisy_sum(40)).norm())
    (event,) = asked.setup
    assert moved <= 1 + 1e-4  # rounded to the grid of the noise
    exact = F.normalize(rows[:40]).double().sum(0)
    assert_standard_deviation((noisy_sum(40) - exact).numpy(), event.noise_multiplier)


def noise_has_the_accounted_scale():
    steps, _ = steps_in_records(rate=1e-4, count=2000, multiplier=2.0)
    assert_standard_deviation(steps, 2.0)


def training_and_test_batches_are_independent():
    """The rows of both batches of a trial agree no more often than chance."""
    drawn = []
    real = sampling.poisson_mask

    def spy(size, rate, drawn_from):
        drawn.append(real(size, rate, drawn_from))
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "poisson_mask", spy)
        tried = Trial(SampledGaussian(0.5, 1.0), LossTest(0.5, 1.0, 0.0))
        plan = repeated_plan(BUDGET, "every-trial", tried, 200)
        problem = Problem(small_model(), F.cross_entropy, blobs())
        procedure = Dpsur(learning_rate=1e-3).build(problem, plan)
        train(procedure, plan, Streams(0, CPU))
    together = sum(int((a & b).sum()) for a, b in zip(drawn[::2], drawn[1::2], strict=True))
    assert_frequency(together, 200 * 200, 0.25)


def every_part_of_every_trial_is_charged():
    """A strong test must show in epsilon: here it costs more than the gradient does."""
    tried = Trial(SampledGaussian(0.01, 5.0), LossTest(0.1, 0.8, 0.0))
    alone = pld.composed_epsilon([(tried.test, 100)], 1e-5)
    assert pld.composed_epsilon([(tried, 100)], 1e-5) >= alone > 1.0


def host_batches_are_the_drawn_ones():
    """Captured trials whose batches come from the host, some of them larger than the padding."""
    plan = repeated_plan(BUDGET, "every-trial", Trial(SampledGaussian(0.1, 1.0), None), 24)
    ends = []
    for records in (blobs(), place(blobs(), CPU, limit=1)):
        procedure = Dpsgd().build(Problem(small_model(), F.cross_entropy, records), plan)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "padded_size", lambda size, rate: 22)
            streams, first = Streams(0, CPU), start(procedure)
            loop = CudaGraphLoop(procedure, procedure.padded(), plan, streams, first, block=1)
            captured = isinstance(records, HostExamples)
            try:
                end = run_loop(loop, plan) if captured else train(procedure, plan, streams)
            except NothingReleasedError as error:
                raise AssertionError(error) from error
        ends.append(flatten(end.state))
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], rtol=1e-4, atol=1e-5)


class RunningMean(nn.Module):
    """A loss divided by a running mean of the losses before."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = 1.0

    def forward(self, outputs, targets):
        losses = F.cross_entropy(outputs, targets)
        self.mean = 0.99 * self.mean + 0.01 * float(losses.detach())
        return losses / self.mean


class LongestText(nn.Module):
    """Embedding, cut to the longest text of the batch, LSTM, last state. Padded with 5."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.lstm, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, words):
        longest = int((words != 5).sum(1).max())
        return self.head(self.lstm(self.table(words[:, :longest]))[0][:, -1])


def texts(size=40):
    """Short ones, and a long one at the end."""
    words = torch.full((size, 30), 5)
    words[:, 0] = torch.arange(size) % 4
    words[-1] = 2
    return Examples(words, torch.arange(size) % 3)


def one_record_moves_the_sum_by_the_clipping_norm_at_most(model, loss, records, clip=1e-2):
    """Of whatever `fit` accepts. The last record is added to the batch of all others."""
    try:
        config = RunConfig(
            task=None,
            budget=BUDGET,
            method=Dpsgd(updates=1),
            accounting="every-trial",
            seed=0,
            device="cpu",
        )
        session = building.build_session(config, model, records, loss=loss)
    except InvalidInputError:
        return
    sums = []
    for size in (len(records) - 1, len(records)):
        problem = replace(copy.deepcopy(session.problem), train=records)
        # the last record comes first, so that others come after it
        batch = records.select(torch.arange(len(records)).flip(0)[len(records) - size :])
        try:
            sums.append(clipped_sum(problem, problem.initial_params(), batch, clip).params)
        except CouplingError:  # which ends the run
            return
    moved = sum((sums[0][name] - sums[1][name]).square().sum() for name in sums[0]).sqrt()
    assert moved <= clip * (1 + 1e-4), float(moved)


def a_loss_has_no_memory():
    records = blobs()
    model = nn.Linear(2, 3)
    records.inputs[-1] *= 1e6  # one loss that the mean does not forget
    records.targets[-1] = model(records.inputs[-1:]).argmin()
    one_record_moves_the_sum_by_the_clipping_norm_at_most(model, RunningMean(), records)


def a_text_does_not_depend_on_the_longest():
    one_record_moves_the_sum_by_the_clipping_norm_at_most(LongestText(), F.cross_entropy, texts())


# --- mutants ------------------------------------------------------------------------------------


def keeps(change):
    """A mutant that replaces how one of two states is chosen."""

    def patch_it(patch):
        real = trial.keep
        patch.setattr(
            trial, "keep", lambda accept, new, old, out=None: change(real, accept, new, old)
        )

    return patch_it


keep_weights_only = keeps(
    lambda real, accept, new, old: replace(new, params=real(accept, new, old).params)
)
keep_without_optimizer = keeps(
    lambda real, accept, new, old: replace(real(accept, new, old), optimizer=new.optimizer)
)
keep_without_average = keeps(
    lambda real, accept, new, old: replace(real(accept, new, old), average=new.average)
)
no_restore = keeps(lambda real, accept, new, old: new)
alias_until_the_first_acceptance = keeps(
    lambda real, accept, new, old: (
        replace(old, params=new.params) if int(old.updates) == 0 else real(accept, new, old)
    )
)


def stale_loss(patch):
    stored = {}

    def compare(problem, candidate, current, batch):
        after, before = mean_losses(problem, candidate, current, batch)
        before = stored.get("loss", before)
        stored["loss"] = after
        return after, before

    patch.setattr(gate, "mean_losses", compare)


def losses_on_two_batches(patch):
    def compare(problem, candidate, current, batch):
        half = len(batch.examples) // 2
        rows = torch.arange(len(batch.examples))
        one, two = (Batch(batch.examples.select(part)) for part in (rows[:half], rows[half:]))
        after, _ = mean_losses(problem, candidate, current, one)
        _, before = mean_losses(problem, candidate, current, two)
        return after, before

    patch.setattr(gate, "mean_losses", compare)


def drawn_size(source, draws):
    """How many records the batch of a step holds."""
    again = Stream(draws._streams, BATCH, draws.step)
    size = len(source.sampler.problem.train)
    return len(sampling.poisson_sample(size, source.update.sample_rate, again))


def gradients(change):
    """A mutant that changes the gradient of a step."""

    def patch_it(patch):
        real = DpGradient.gradient

        def wrong(self, state, draws):
            gradient = real(self, state, draws)
            factor = change(self, draws)
            return {name: value * factor for name, value in gradient.items()}

        patch.setattr(DpGradient, "gradient", wrong)

    return patch_it


def expected_size(source):
    return source.update.sample_rate * len(source.sampler.problem.train)


divided_by_the_drawn_size = gradients(
    lambda source, draws: expected_size(source) / max(1, drawn_size(source, draws))
)
divided_by_another_draws_size = gradients(
    lambda source, draws: (
        expected_size(source) / max(1, drawn_size(source, Streams(9, CPU).at(draws.step)))
    )
)
skipped_empty_batch = gradients(lambda source, draws: float(drawn_size(source, draws) > 0))


def late_stop(patch):
    patch.setattr(Plan, "affords", lambda self, ledger, step: ledger.trials <= self.trials)
    patch.setattr(Plan, "completed", lambda self, ledger: True)


def nan_rejects_always(patch):
    def decide(self, difference, drawn):
        bound = self.loss_clip
        draw = drawn.normal(difference.numel()).view(difference.shape)
        noisy = difference.clamp(-bound, bound) + 2 * bound * self.noise_multiplier * draw
        return noisy < self.accept_threshold * bound

    patch.setattr(LossRule, "decide", decide)


def noise_times(factor):
    def patch_it(patch):
        real = gaussian.add_noise
        patch.setattr(
            gaussian,
            "add_noise",
            lambda total, multiplier, g: real(total, factor * multiplier, g),
        )

    return patch_it


def one_stream_replayed_for_both_batches(patch):
    def fresh_batch(self, draws):
        again = Stream(draws._streams, BATCH, draws.step)
        return self.draw(self.problem.train, self.test.sample_rate, again)

    patch.setattr(gate.LossTestGate, "_fresh_batch", fresh_batch)


def noise_of_the_first_step_repeated(patch):
    """The counter goes back: every step draws the noise of the first."""
    real = proposer.dp_mean_gradient

    def wrong(problem, params, batch, rate, multiplier, norm, drawn, **rest):
        first = Stream(drawn._streams, drawn.purpose, 1)
        return real(problem, params, batch, rate, multiplier, norm, first, **rest)

    patch.setattr(proposer, "dp_mean_gradient", wrong)


def forget_the_test(patch):
    real = pld.mechanisms
    untested = lambda event: event.update if isinstance(event, Trial) else event  # noqa: E731
    patch.setattr(pld, "mechanisms", lambda event: real(untested(event)))


def first_host_batch_again(patch):
    """A replay reads what an earlier one has read."""
    real = captured_batches._Feed.load

    def wrong(self, step, last):
        if self._loaded is None:
            real(self, step, last)

    patch.setattr(captured_batches._Feed, "load", wrong)


def host_batch_of_another_step(patch):
    real = captured_batches._Feed.sample
    patch.setattr(captured_batches._Feed, "sample", lambda self, step: real(self, step + 1))


def host_batch_cut_to_its_padding(patch):
    patch.setattr(captured_batches.CapturedBatches, "levels", lambda _, steps: [0] * len(steps))
    real = captured_batches._Feed.sample
    patch.setattr(
        captured_batches._Feed, "sample", lambda self, step: real(self, step)[: self._capacity]
    )


def padding_of_host_batches_counts(patch):
    real = captured_batches._Feed.batch

    def wrong(self, room):
        batch, drawn = real(self, room)
        return replace(batch, mask=None), drawn

    patch.setattr(captured_batches._Feed, "batch", wrong)


def losses_may_remember(patch):
    patch.setattr(losses, "without_memory", lambda *_: nullcontext())
    patch.setattr(record_function, "check_again", lambda *_: None)


def records_meet(patch):
    """The function gets the whole batch, for each record."""

    def joined(batch, _):
        return map_tensors(lambda value: value.flatten(0, 1), batch)

    patch.setattr(record_function, "slice_records", joined)


def mean_charged_nothing(patch):
    patch.setattr(input_features, "feature_mean", lambda _: ())


def rows_of_the_mean_clipped_to(bound):
    def apply(patch):
        real = feature_sums.clipped_rows_sum
        patch.setattr(feature_sums, "clipped_rows_sum", lambda rows, _: real(rows, bound))

    return apply


class Mutant(NamedTuple):
    name: str
    law: object
    apply: object


MUTANTS = [
    # the five faults of the released code
    Mutant("1 momentum survives a rejection", rejection_restores_everything, keep_weights_only),
    Mutant(
        "1 optimizer survives a rejection", rejection_restores_everything, keep_without_optimizer
    ),
    Mutant("2 stale loss", both_losses_come_from_one_batch, stale_loss),
    Mutant(
        "3 alias until accepted", rejection_restores_everything, alias_until_the_first_acceptance
    ),
    Mutant(
        "4 divided by another draw",
        sums_are_divided_by_the_expected_size,
        divided_by_another_draws_size,
    ),
    Mutant("5 empty batch skipped", an_empty_batch_is_a_trial_like_any_other, skipped_empty_batch),
    Mutant("5 late stop", the_budget_stops_training_before_it_is_overspent, late_stop),
    # and other ways to be wrong
    Mutant("average survives", rejection_restores_everything, keep_without_average),
    Mutant("no restore", rejection_restores_everything, no_restore),
    Mutant("two batches", both_losses_come_from_one_batch, losses_on_two_batches),
    Mutant(
        "divided by the drawn size",
        sums_are_divided_by_the_expected_size,
        divided_by_the_drawn_size,
    ),
    Mutant("NaN rejects", a_nan_difference_is_accepted_as_often_as_the_worst, nan_rejects_always),
    Mutant("noise repeated", noise_has_the_accounted_scale, noise_of_the_first_step_repeated),
    Mutant("noise x 2/3", noise_has_the_accounted_scale, noise_times(2 / 3)),
    Mutant("noise x 3/2", noise_has_the_accounted_scale, noise_times(3 / 2)),
    Mutant(
        "shared stream",
        training_and_test_batches_are_independent,
        one_stream_replayed_for_both_batches,
    ),
    Mutant("host batch stays", host_batches_are_the_drawn_ones, first_host_batch_again),
    Mutant("next step's batch", host_batches_are_the_drawn_ones, host_batch_of_another_step),
    Mutant("host batch cut", host_batches_are_the_drawn_ones, host_batch_cut_to_its_padding),
    Mutant("padding counts", host_batches_are_the_drawn_ones, padding_of_host_batches_counts),
    Mutant("test charged nothing", every_part_of_every_trial_is_charged, forget_the_test),
    Mutant("a loss with memory is accepted", a_loss_has_no_memory, losses_may_remember),
    Mutant("mean not charged", a_mean_is_charged_for_what_a_record_moves, mean_charged_nothing),
    Mutant(
        "rows of the mean clipped to 2",
        a_mean_is_charged_for_what_a_record_moves,
        rows_of_the_mean_clipped_to(2.0),
    ),
    Mutant(
        "rows of the mean not clipped",
        a_mean_is_charged_for_what_a_record_moves,
        rows_of_the_mean_clipped_to(math.inf),
    ),
    Mutant("records meet", a_text_does_not_depend_on_the_longest, records_meet),
]

LAWS = sorted({mutant.law for mutant in MUTANTS}, key=lambda law: law.__name__)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law_holds(law):
    law()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_killed(mutant, monkeypatch):
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError):
        mutant.law()
