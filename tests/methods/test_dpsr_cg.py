"""Laws of release by clipped norms, each of which a named mutant breaks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism import gaussian
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import make_trial, start
from dpsur.privacy.events import SampledGaussian
from reproduction.methods import DpsrCg, dpsr_cg
from reproduction.methods.dpsr_cg import GradientWithNorms, NormsGate
from tests.methods.problems import BUDGET, CPU, SIZE
from tests.methods.test_dpis import Direction, known_gradients
from tests.mutants import Mutant, law_tests
from tests.statistics import assert_standard_deviation

CLIP, SIGMA, LIMIT = 0.7, 9.0, 2.0
OPTIONS = {
    "batch_size": SIZE,  # all records, so that sums are known
    "max_grad_norm": CLIP,
    "noise_multiplier": SIGMA,
    "updates": 6,
    "norm_limit": LIMIT,
}
STREAMS = Streams(0, CPU)


def bound(problem: Problem, **changes):
    method, plan = DpsrCg(**{**OPTIONS, **changes}).resolve(
        len(problem.train), replace(BUDGET, epsilon=50.0), "every-trial"
    )
    return method.build(problem, plan), plan


def released(problem: Problem, draws: int = 1) -> list[tuple[np.ndarray, float]]:
    """Noisy gradients and noisy sums of norms from the first weights."""
    procedure, _ = bound(problem)
    state = procedure.initial_state()
    found = [
        procedure.proposer.source.with_norms(state, STREAMS.at(n + 1), LIMIT) for n in range(draws)
    ]
    return [(gradient["weight"].double().numpy(), float(norms)) for gradient, norms in found]


def noised(problem: Problem) -> tuple[torch.Tensor, float, list[float]]:
    """What is about to get noise, its sensitivity, and the multipliers of all its noise."""
    sums, multipliers, real = [], [], gaussian.add_noise

    def spy(total, multiplier, stream):
        sums.append((total.params, float(total.sensitivity)))
        multipliers.append(multiplier)
        return real(replace(total, scratch=False), multiplier, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "add_noise", spy)
        released(problem)
    (params, sensitivity), *more = sums
    assert not more
    vector = torch.cat([value.double().flatten() for value in params.values()])
    return vector, sensitivity, multipliers


def without_record(problem: Problem, row: int) -> Problem:
    """The same with a record that adds nothing in its place."""
    rows = problem.train.inputs.clone()
    rows[row] = 0
    return Problem(Direction(), problem.loss, Examples(rows, problem.train.targets))


# --- laws ---------------------------------------------------------------------------------------


def a_record_moves_what_gets_noise_by_no_more_than_is_said():
    """Gradients and sum of norms together, and the noise of both is what is charged."""
    problem = known_gradients(spread=3.0)
    with_all, sensitivity, multipliers = noised(problem)
    procedure, plan = bound(problem)
    charged = procedure.step(procedure.initial_state()).update
    assert charged == plan.typical.update == SampledGaussian(1.0, SIGMA)
    assert multipliers == [SIGMA]
    moved = [float((with_all - noised(without_record(problem, r))[0]).norm()) for r in range(SIZE)]
    assert max(moved) <= sensitivity * (1 + 1e-6)
    assert max(moved) >= 0.999 * sensitivity  # a record with a long gradient
    assert min(moved) < 0.5 * sensitivity


def the_sum_of_norms_has_noise():
    """Eight times the variance that the charge needs for it alone; gradients get 8/7 of theirs."""
    problem = known_gradients(spread=3.0)
    gradients, norms = zip(*released(problem, draws=400), strict=True)
    assert_standard_deviation(np.array(norms) - np.mean(norms), math.sqrt(8) * SIGMA)
    steps = np.array(gradients) * SIZE
    assert_standard_deviation(steps - steps.mean(0), math.sqrt(8 / 7) * SIGMA * CLIP)
    rows = problem.train.inputs.double().norm(dim=1) / CLIP
    exact = float(torch.where(rows > 1, rows.clamp(max=LIMIT) / LIMIT, 0.0).sum())
    assert abs(np.mean(norms) - exact) <= 5 * math.sqrt(8 / 400) * SIGMA


def every_candidate_is_charged():
    """Accountings that charge accepted updates alone refuse it; a rejected trial counts."""
    refused = 0
    for accounting in ("proven", "proven-pld", "published"):
        try:
            DpsrCg(**OPTIONS).resolve(SIZE, BUDGET, accounting)
        except InvalidInputError as error:
            refused += "use the accounting every-trial" in str(error)
    assert refused == 3
    procedure, plan = bound(known_gradients(), fall=1e9, kept_first=1)
    progress = start(procedure)
    for number in range(1, 4):
        progress, _ = make_trial(procedure, plan, STREAMS, progress)
        assert (progress.ledger.trials, progress.ledger.updates) == (number, 1)


def a_candidate_is_compared_with_the_last_that_was_kept():
    """The first are kept in any case; then only what fell by more than the threshold."""
    procedure, plan = bound(known_gradients(), fall=0.0, kept_first=2)
    progress, kept, verdicts = start(procedure), math.inf, []
    for number in range(1, plan.trials + 1):
        candidate = procedure.propose(progress.state, STREAMS.at(number), torch.tensor(0))
        new = float(candidate.state.memory["norms"])
        due = len([one for one in verdicts if one]) < 2 or new < kept
        progress, verdict = make_trial(procedure, plan, STREAMS, progress)
        verdicts.append(bool(verdict.accept))
        assert verdicts[-1] == due
        kept = new if due else kept
        assert float(progress.state.memory["norms"]) == kept
    assert verdicts[:2] == [True, True]
    assert not all(verdicts)


# --- mutants ------------------------------------------------------------------------------------


def norms_beyond_their_limit(patch):
    real = dpsr_cg.clipped_norms
    patch.setattr(
        dpsr_cg,
        "clipped_norms",
        lambda problem, params, rows, most: real(problem, params, rows, 9 * most),
    )


def norms_that_are_not_in_the_sensitivity(patch):
    patch.setattr(dpsr_cg.math, "hypot", lambda gradients, norms: gradients)


def noise_of_the_gradients_alone(patch):
    real = GradientWithNorms.with_norms

    def wrong(self, state, draws, limit):
        gradient, _ = real(self, state, draws, limit)
        exact = replace(self, update=replace(self.update, noise_multiplier=1e-9))
        return gradient, real(exact, state, draws, limit)[1]

    patch.setattr(GradientWithNorms, "with_norms", wrong)


def accepted_updates_alone(patch):
    patch.setattr(DpsrCg, "resolve", DpsrCg.__mro__[1].resolve)


def the_last_candidate_is_remembered(patch):
    patch.setattr(
        NormsGate,
        "after_rejection",
        lambda self, state, candidate: replace(state, memory=candidate.state.memory),
    )


MUTANTS = [
    Mutant(a_record_moves_what_gets_noise_by_no_more_than_is_said, norms_beyond_their_limit),
    Mutant(
        a_record_moves_what_gets_noise_by_no_more_than_is_said,
        norms_that_are_not_in_the_sensitivity,
    ),
    Mutant(the_sum_of_norms_has_noise, noise_of_the_gradients_alone),
    Mutant(every_candidate_is_charged, accepted_updates_alone),
    Mutant(a_candidate_is_compared_with_the_last_that_was_kept, the_last_candidate_is_remembered),
]
test_law_holds, test_mutant_is_killed = law_tests(MUTANTS)


# --- details ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gate": "loss"}, "has a test of its own"),
        ({"metrics_budget": 0.01}, "has a test of its own"),
        ({"norm_limit": 0.9}, "norm_limit must be a finite number of at least 1"),
        ({"kept_first": 0}, "kept_first"),
    ],
)
def test_what_it_does_not_do_is_refused(options, words):
    with pytest.raises(InvalidInputError, match=words):
        DpsrCg(**options)
