"""Audits of the mechanism itself: many repetitions of tiny problems, and exact laws.

Each problem is run through one kind of output: the accepted updates, which `proven` and `published`
charge, or every trial with its verdict, which `every-trial` charges.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from dpsur.audits.bounds import Array, Finding
from dpsur.errors import InvalidInputError
from dpsur.mechanism.streams import NOISE, SETUP, Stream, Streams
from dpsur.privacy.accounting import ACCOUNTINGS, RESTORE, Accounting
from reproduction.audits.exact import Setting
from reproduction.audits.repetitions import epsilon_lower_bound
from reproduction.audits.sampler import accepted_updates, draw_trials
from reproduction.audits.worst_case_problems import (
    CoinSetting,
    Unit,
    dead_unit,
    exact_epsilon,
    gate_alone,
    no_selection,
)

DELTA = 0.01
REPETITIONS = 50_000
CONFIDENCE = 0.999

# Large sample rates and little noise: few updates then say much. The threshold lies low, so that
# the test separates candidates sharply; the published accounting does not see the threshold.
_ONE = Setting(1000, 1000, 1.0, 5, 0.7, 1, -3.0, delta=DELTA)
_FOUR = Setting(500, 500, 2.0, 5, 0.5, 4, -2.0, delta=DELTA)
_SAMPLED = Setting(500, 250, 1.0, 5, 0.7, 4, -3.0, delta=DELTA)
_TEST = Setting(40, 40, 1e4, 20, 1.0, 1, -1.0, delta=DELTA)
_COIN = CoinSetting(500, 500, 2.0, 5, 1.0, 4, 0.0, delta=DELTA, accept_ratio=100.0)
_COIN_TEST = CoinSetting(40, 40, 1e4, 20, 1.0, 4, 0.0, delta=DELTA, accept_ratio=10.0)

UNITS: dict[str, Callable[[], Unit]] = {
    "gate alone": lambda: gate_alone(_TEST),
    "gate alone, 4 updates": lambda: gate_alone(_TEST).repeated(4),
    "gate alone, coin, 4 updates": lambda: gate_alone(_COIN_TEST),
    "dead unit, 1 update": lambda: dead_unit(_ONE, reach=1.5),
    "dead unit, 4 updates": lambda: dead_unit(_FOUR),
    "dead unit, sampled, 4 updates": lambda: dead_unit(_SAMPLED),
    "dead unit, coin, 4 updates": lambda: dead_unit(_COIN),
    "no selection, 4 updates": lambda: no_selection(_FOUR),
}
# Problems of the paper's own size: too many updates to repeat, but not to compute.
FMNIST_3 = Setting(60000, 2048, 2.15, 256, 0.8, 1076)
EXACT_ONLY: dict[str, Callable[[], Unit]] = {
    "dead unit, Fashion-MNIST at ε 3": lambda: dead_unit(FMNIST_3, reach=1.5),
}


def covered(unit: Unit, accounting: Accounting) -> bool:
    """Whether the accounting says anything about the unit's trials."""
    try:
        accounting.check(unit.setting.trial, RESTORE)
    except InvalidInputError:
        return False
    return True


def claimed_epsilon(unit: Unit, accounting: Accounting) -> float:
    """What the accounting claims for the unit's updates, or as many trials."""
    setting = unit.setting
    return accounting.planned((), setting.trial, setting.updates, setting.delta)


def audit_unit(
    name: str,
    unit: Unit,
    charges: str,
    repetitions: int = REPETITIONS,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Iterator[Finding]:
    """Repeat a tiny problem with and without x, and hold it against accountings.

    `charges` is "updates" or "trials": what is seen of a run, and which accountings cover that.
    """
    of_trials = charges == "trials"
    score = trial_scores if of_trials else update_scores
    stream = Streams(seed, torch.device("cpu")).at(SETUP)[NOISE]
    with_x, without = (
        score(unit, repetitions, stream, present=present) for present in (True, False)
    )
    bound = epsilon_lower_bound(with_x, without, unit.setting.delta, confidence)
    exact = None if of_trials else max(exact_epsilon(unit, "add"), exact_epsilon(unit, "remove"))
    for accounting in ACCOUNTINGS.values():
        if accounting.charges == charges and covered(unit, accounting):
            yield Finding(
                audit="mechanism",
                subject=name,
                accounting=accounting.name,
                claimed=claimed_epsilon(unit, accounting),
                delta=unit.setting.delta,
                lower=bound.epsilon,
                confidence=confidence,
                exact=exact,
                details={
                    "direction": bound.event.direction,
                    "likelier": bound.likelier,
                    "rarer": bound.rarer,
                    "repetitions": bound.repetitions,
                    "seed": seed,
                },
            )


def audit_exactly(name: str, unit: Unit) -> Iterator[Finding]:
    """Hold the exact law of the accepted updates against the accountings that charge them."""
    exact = max(exact_epsilon(unit, "add"), exact_epsilon(unit, "remove"))
    delta = unit.setting.delta
    for accounting in ACCOUNTINGS.values():
        if accounting.charges == "updates" and covered(unit, accounting):
            claimed = claimed_epsilon(unit, accounting)
            yield Finding("exact", name, accounting.name, claimed, delta, exact, 1.0, exact)


def audit_mechanisms(
    repetitions: int = REPETITIONS, confidence: float = CONFIDENCE, seed: int = 0
) -> Iterator[Finding]:
    """Every problem under every accounting that covers it."""
    for name, make in UNITS.items():
        for charges in ("updates", "trials"):
            yield from audit_unit(name, make(), charges, repetitions, confidence, seed)
    for name, make in EXACT_ONLY.items():
        yield from audit_exactly(name, make())


def update_scores(unit: Unit, repetitions: int, stream: Stream, *, present: bool) -> Array:
    """Log-likelihood ratios of runs of accepted updates."""
    updates = accepted_updates(unit, repetitions, stream, present=present)
    return np.asarray(unit.log_ratio(updates.numpy()).sum(1))


def trial_scores(unit: Unit, repetitions: int, stream: Stream, *, present: bool) -> Array:
    """Log-likelihood ratios of runs of trials whose noisy sums and verdicts are all seen."""
    count = repetitions * unit.setting.updates
    trials = draw_trials(unit, count, stream, present=present)
    z, accept = trials.z.numpy(), trials.accept.numpy()
    scores = np.where(accept, unit.log_ratio(z), unit.log_ratio(z, accepted=False))
    return np.asarray(scores.reshape(repetitions, -1).sum(1))
