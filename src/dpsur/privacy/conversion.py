"""What the plan of one unit promises for another: a group of records, or a record that is replaced.

    group of k      data sets that differ by k records, as those of a person who has k
    replace one     one record is exchanged for another, so that the number of records stays

Where a plan composes of single mechanisms, each is converted on its own and the privacy losses are
composed. That is tighter than group privacy of the whole, and far tighter than k times epsilon: of
k records of which each joins a batch at rate q, mostly none or one does. Other plans, such as those
whose rejections are free, are known by their (epsilon, delta) alone, and converted as a whole.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from dpsur import checks
from dpsur.errors import BudgetError
from dpsur.privacy.accountants import pld
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    Event,
    Gaussian,
    LossTest,
    Menu,
    NoisyChoice,
    NonPrivate,
    SampledGaussian,
    ThresholdedGaussian,
    Trial,
    any_joins,
)
from dpsur.privacy.plan import Charges, Plan
from dpsur.privacy.planning import fitted_noise

NOT_HELD_OUT = (
    "the figures of held-out records are covered for one record, which is either trained on or "
    "held out; a run with them has no guarantee for groups"
)


@dataclass(frozen=True)
class Converted:
    """A guarantee for other neighbours."""

    neighbours: str
    epsilon: float
    delta: float
    exact: bool  # losses of the mechanisms were composed, not the guarantee as a whole


def composes(plan: Plan) -> bool:
    """Whether a plan is a composition of single mechanisms, all of which are charged."""
    selects = plan.typical.gate is not None and plan.accounting != "every-trial"
    return plan.filter is None and not selects


def for_group(plan: Plan, records: int, unit: str = "record") -> Converted:
    """The guarantee for data sets that differ by this many records.

    Formal guarantee: as of the plan, for adding or removing all of them.
    """
    checks.at_least_one("group_size", records)
    name = f"add or remove a group of {records} {unit}s"
    epsilon, delta = plan.epsilon(), plan.budget.delta
    if records == 1 or not math.isfinite(epsilon):
        return Converted(name, epsilon, delta, exact=True)
    # A value that a whole group shares passes a threshold more easily than one of a single record.
    learned = any(isinstance(event, ThresholdedGaussian) for event, _ in plan.charges())
    if composes(plan) and not learned:
        charges = [(grouped(event, records), count) for event, count in plan.charges()]
        found = accounting_named("every-trial").epsilon(charges, delta)
        if math.isfinite(found):
            return Converted(name, found, delta, exact=True)
    with_each = delta * math.expm1(min(records * epsilon, 700.0)) / math.expm1(epsilon)
    return Converted(name, records * epsilon, min(1.0, with_each), exact=False)


def grouped(event: Event, records: int) -> Event:
    """What an event is for a group of records, each of which is sampled on its own."""
    match event:
        case Gaussian(noise_multiplier=sigma):
            return Gaussian(sigma / records)
        case SampledGaussian():
            return replace(event, records=records * event.records)
        case LossTest(sample_rate=q):  # the difference is clipped as a whole
            return replace(event, sample_rate=any_joins(q, records))
        case NoisyChoice(sample_rate=q, choice_epsilon=epsilon):
            return NoisyChoice(any_joins(q, records), records * epsilon)
        case Menu(choices=choices):
            several = (replace(one, records=records * one.records) for one in choices)
            return replace(event, choices=tuple(several))
        case Trial(update=update, test=test):
            tested = None if test is None else grouped(test, records)
            return Trial(grouped(update, records), tested)  # type: ignore[arg-type]
    return event  # without privacy


def for_replacement(plan: Plan, unit: str = "record") -> Converted:
    """The guarantee for data sets of one size in which one record is another.

    Formal guarantee: as of the plan. To replace a record is to remove one and to add one, so that
    delta is at most delta(a) + e^a delta(b) at epsilon a + b.
    """
    name = f"replace one {unit}"
    epsilon, delta = plan.epsilon(), plan.budget.delta
    if not math.isfinite(epsilon):
        return Converted(name, epsilon, delta, exact=True)
    if composes(plan) and not any(isinstance(e, NonPrivate) for e, _ in plan.charges()):
        charges = plan.charges()
        tail = accounting_named("every-trial").noise_tail(charges)

        def fits(half: float) -> bool:
            return (1 + math.exp(half)) * (pld.composed_delta(charges, half) + tail) <= delta

        tried = accumulate([1.5] * 5, operator.mul, initial=max(epsilon, 1e-6))
        low, high = 0.0, next(filter(fits, tried), math.inf)
        while high < math.inf and high - low > 1e-4 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        if high < math.inf:
            return Converted(name, 2 * high, delta, exact=True)
    return Converted(name, 2 * epsilon, min(1.0, delta * (1 + math.exp(epsilon))), exact=False)


# --- which sampler, and how many records of a person ----------------------------------------------


@dataclass(frozen=True)
class PersonSampling:
    """A way to protect persons, and what its noise is to a mean gradient."""

    sampling: str  # "person" or "record", as `fit` takes it
    records_per_person: int  # at most this many are used
    batch_size: float  # expected number of persons, or of records
    noise_multiplier: float  # the least that fits the budget
    noise: float  # standard deviation of a mean gradient's noise over the clipping norm


def samplings_of_persons(
    budget: Budget,
    persons: int,
    records: int,
    most: Sequence[int],
    *,
    updates: int,
    rate: float,
    setup: tuple[Event, ...] = (),
) -> list[PersonSampling]:
    """Both samplers for each bound on records per person, best first, by public facts alone.

    All draw at one rate, so that every choice does at most the work of all `records`. Best is the
    least noise. Where two are within a twentieth, that is the one with more records per person,
    whose gradients vary less.
    """
    found = []
    accounting, before = accounting_named("every-trial"), [(event, 1) for event in setup]
    for records_each in most:
        used = min(records, records_each * persons)
        for sampling, units, joining in (("person", persons, 1), ("record", used, records_each)):
            if sampling == "record" and records_each == 1:
                continue  # the same

            def charges(noise: float, joining: int = joining) -> Charges:
                return [*before, (SampledGaussian(rate, noise, joining), updates)]

            noise = fitted_noise(charges, accounting, budget, by_tail=True)
            if noise is not None:
                size = rate * units
                found.append(PersonSampling(sampling, records_each, size, noise, noise / size))
    if not found:
        raise BudgetError(
            f"no noise is enough for epsilon {budget.epsilon:g}", code="budget-too-small"
        )
    near = 1.05 * min(one.noise for one in found)
    return sorted(found, key=lambda one: (one.noise * (one.noise > near), -one.records_per_person))
