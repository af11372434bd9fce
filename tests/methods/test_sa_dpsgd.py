"""Laws of simulated annealing, each of which a named mutant breaks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import erfcx, ndtr

from dpsur.errors import InvalidInputError
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import LossRule, make_trial, start
from reproduction.loops import train
from reproduction.methods import SaDpsgd
from reproduction.methods.sa_dpsgd import AnnealingGate, CountingProposer
from tests.methods.problems import BUDGET, CPU, NOISE, SIZE, TESTED, bound
from tests.mutants import Mutant, law_tests
from tests.statistics import STANDARD_ERRORS

CLIP, SIGMA = 0.5, 1.0
OPTIONS = {**NOISE, **TESTED, "val_noise_multiplier": SIGMA, "loss_clip": CLIP}
FORCED = {**OPTIONS, "val_noise_multiplier": 6.0, "trials": 12, "max_rejections": 2}
STREAMS = Streams(0, CPU)
DRAWS = range(1, 4001)


def acceptance(difference: float, coldness: float) -> float:
    """E min(1, exp(-coldness (difference + 2 SIGMA Z))), in units of the clip bound.

    exp(-c x) times the density of N(d, s^2) is exp(c^2 s^2 / 2 - c d) times that of N(d - c s^2,
    s^2), whose part above 0 is written so that nothing overflows.
    """
    spread = 2 * SIGMA
    rest = erfcx((coldness * spread - difference / spread) / math.sqrt(2))
    return float(
        ndtr(-difference / spread) + math.exp(-((difference / spread) ** 2) / 2) * rest / 2
    )


def accepted(difference: float, updates: int, cooling: float) -> float:
    """How often a candidate with this loss difference passes after so many updates."""
    procedure, _ = bound(SaDpsgd(**OPTIONS, updates=4, cooling=cooling))
    state = procedure.initial_state()
    state = replace(state, updates=state.updates + updates)
    asked = torch.tensor(difference, dtype=torch.float64)
    gate = procedure.gate
    return np.mean([bool(gate.decide(state, asked, STREAMS.at(n))) for n in DRAWS])


# --- laws ---------------------------------------------------------------------------------------


def a_candidate_passes_as_the_formula_says():
    """Of every clipped difference, at every temperature; nan counts as the worst."""
    for difference in (-3 * CLIP, 0.0, CLIP, 3 * CLIP, math.nan):
        for updates in (0, 2, 50):
            clipped = 1.0 if math.isnan(difference) else max(-1.0, min(1.0, difference / CLIP))
            chance = acceptance(clipped, 0.4 * updates * CLIP)
            error = math.sqrt(chance * (1 - chance) / len(DRAWS)) + 1e-9
            assert abs(accepted(difference, updates, 0.4) - chance) <= STANDARD_ERRORS * error


def the_charge_covers_every_temperature():
    """The ratio of the ends grows with the coldness up to that of the test that is charged."""
    _, plan = SaDpsgd(**OPTIONS, updates=4).resolve(SIZE, BUDGET, "proven")
    charged = plan.typical.gate
    assert charged.noise_multiplier == SIGMA
    ends = [(acceptance(1.0, c), acceptance(-1.0, c)) for c in (0.0, 0.01, 0.3, 1, 5, 100, 1e6)]
    ratios = [most / least for least, most in ends]
    assert ratios == sorted(ratios)
    assert ratios[0] == 1
    assert ratios[-1] == pytest.approx(charged.accept_max / charged.accept_min, rel=1e-5)
    assert ratios[-1] <= charged.accept_max / charged.accept_min
    assert min(least for least, _ in ends) >= charged.accept_min
    for least, most in ends:  # what lies between them: acceptance falls with the difference
        between = [acceptance(d, 5.0) for d in np.linspace(-1, 1, 9)]
        assert between == sorted(between, reverse=True)
        assert least <= most


def forced_acceptances_are_charged_in_full():
    """How many candidates were rejected decides there, so that every trial has to count."""
    method = SaDpsgd(**{**FORCED, "trials": None, "updates": 4})
    refused = 0
    for accounting in ("proven", "proven-pld", "published"):
        try:
            method.resolve(SIZE, BUDGET, accounting)
        except InvalidInputError as error:
            refused += "max_rejections 2 accepts by how many" in str(error)
    assert refused == 3
    SaDpsgd(**FORCED).resolve(SIZE, BUDGET, "every-trial")


def no_more_rejections_in_a_row_than_allowed():
    """With a test that rejects everything, every third trial of a run is accepted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossRule, "noisy", lambda *_: torch.tensor(math.inf, dtype=torch.float64))
        procedure, plan = bound(SaDpsgd(**FORCED), "every-trial")
        progress, verdicts = start(procedure), []
        progress = replace(progress, state=replace(progress.state, updates=torch.tensor(1)))
        for _ in range(plan.trials):
            progress, verdict = make_trial(procedure, plan, STREAMS, progress)
            verdicts.append(bool(verdict.accept))
    assert verdicts == 4 * [False, False, True]


def what_was_accepted_is_what_cools():
    """Trials that were rejected leave the temperature as it was."""
    procedure, plan = bound(SaDpsgd(**OPTIONS, updates=4))
    progress, passed, worse = start(procedure), 0, torch.tensor(0.0125, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossRule, "noisy", lambda *_: worse)
        while passed < 4:
            verdicts = [procedure.gate.decide(progress.state, worse, STREAMS.at(n)) for n in DRAWS]
            chance = math.exp(-10 * passed * float(worse))
            error = math.sqrt(chance * (1 - chance) / len(DRAWS)) + 1e-9
            found = float(torch.stack(verdicts).double().mean())
            assert abs(found - chance) <= STANDARD_ERRORS * error
            progress, verdict = make_trial(procedure, plan, STREAMS, progress)
            passed += int(verdict.accept)


# --- mutants ------------------------------------------------------------------------------------


def without_noise(patch):
    def wrong(self, difference, stream):
        return torch.nan_to_num(difference.double(), nan=CLIP).clamp(-CLIP, CLIP)

    patch.setattr(LossRule, "noisy", wrong)


def without_a_clip(patch):
    def wrong(self, difference, stream):
        return stream.add_normal(difference.double().view(-1), 2 * CLIP * SIGMA).view(())

    patch.setattr(LossRule, "noisy", wrong)


def half_the_noise(patch):
    real = LossRule.noisy

    def wrong(self, difference, stream):
        return real(replace(self, noise_multiplier=self.noise_multiplier / 2), difference, stream)

    patch.setattr(LossRule, "noisy", wrong)


def charged_as_a_test_that_accepts_more(patch):
    """With a threshold at which the ends are nearer to each other than they get to be."""
    real = SaDpsgd._test

    def wrong(self, *given):
        return replace(real(self, *given), accept_threshold=2.0)

    patch.setattr(SaDpsgd, "_test", wrong)


def forced_whatever_is_charged(patch):
    patch.setattr(
        SaDpsgd,
        "resolve",
        lambda self, *given: replace(self, accept_threshold=0.0)._settle_repeated(*given, ()),
    )


def rejections_that_are_not_counted(patch):
    patch.setattr(AnnealingGate, "after_rejection", lambda self, state, candidate: state)


def a_count_that_never_ends(patch):
    patch.setattr(CountingProposer, "propose", CountingProposer.__mro__[1].propose)


def cooled_by_a_constant(patch):
    real = AnnealingGate.decide

    def wrong(self, state, difference, draws):
        return real(self, replace(state, updates=torch.tensor(3)), difference, draws)

    patch.setattr(AnnealingGate, "decide", wrong)


MUTANTS = [
    Mutant(a_candidate_passes_as_the_formula_says, without_noise),
    Mutant(a_candidate_passes_as_the_formula_says, without_a_clip),
    Mutant(a_candidate_passes_as_the_formula_says, half_the_noise),
    Mutant(the_charge_covers_every_temperature, charged_as_a_test_that_accepts_more),
    Mutant(forced_acceptances_are_charged_in_full, forced_whatever_is_charged),
    Mutant(no_more_rejections_in_a_row_than_allowed, rejections_that_are_not_counted),
    Mutant(no_more_rejections_in_a_row_than_allowed, a_count_that_never_ends),
    Mutant(what_was_accepted_is_what_cools, cooled_by_a_constant),
]
test_law_holds, test_mutant_is_killed = law_tests(MUTANTS)


# --- details ------------------------------------------------------------------------------------


def test_without_a_count_a_rejected_trial_leaves_the_state_as_it_was():
    procedure, plan = bound(SaDpsgd(**OPTIONS, updates=4, cooling=1e9))
    known = replace(procedure.initial_state(), updates=torch.tensor(3))
    candidate = procedure.propose(known, STREAMS.at(1), torch.tensor(0))
    assert procedure.after_rejection(known, candidate) is known
    assert train(procedure, plan, STREAMS).ledger.updates == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gate": "coin"}, "has a test of its own"),
        ({"gate": "none"}, "has a test of its own"),
        ({"accept_threshold": -1.0}, "has a test of its own"),
        ({"cooling": 0.0}, "cooling"),
        ({"max_rejections": 0}, "max_rejections"),
    ],
)
def test_what_it_does_not_do_is_refused(options, words):
    with pytest.raises(InvalidInputError, match=words):
        SaDpsgd(**options)
