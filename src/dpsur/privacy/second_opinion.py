"""A second opinion on epsilon: what dp-accounting, another library, says of the same run.

Figures of this package come from its own accountants. dp-accounting knows compositions of Gaussian
mechanisms, with and without Poisson sampling. Where that is the whole run, it answers the same
question and must find no larger epsilon. Selective release, menus and filters are known here only.
Each of them covers a simpler run that dp-accounting knows, which must not cost more either.

Importing dp-accounting takes a second, so it is imported when an opinion is asked for, and never
to train.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

from dpsur.environment import ABSENT, package_version
from dpsur.privacy.accountants import pld
from dpsur.privacy.accountants.pld import joining
from dpsur.privacy.accounting import ACCOUNTINGS, Accounting, Charges
from dpsur.privacy.events import (
    Gaussian,
    Menu,
    NoisyChoice,
    SampledGaussian,
    Trial,
    event_from_json,
    mechanisms,
)
from dpsur.privacy.plan import Plan
from dpsur.privacy.statement import format_epsilon

# How far a figure may lie below that of dp-accounting, relative to it and beside 0. On the same
# cells it was never lower by more than a hundredth of this.
TOLERANCE: Final = 1e-4
NEARLY_ZERO: Final = 1e-9
# dp-accounting weighs losses by e^-loss, which is no floating-point number above 745.
LARGEST_EPSILON: Final = 700.0
UNDERFLOW: Final = "privacy losses above 745 underflow there"
# Each part takes dp-accounting about a twentieth of a second.
MOST_PARTS: Final = 64
# What is composed in place of what dp-accounting does not know. It costs no more.
UNSELECTED: Final = "the same updates without selection"
WITHOUT_CHOICES: Final = "the same updates without the choices of a step length"
ONE_CHOICE: Final = "always the same choice of the menu, the costliest one"
AS_FIXED: Final = "the steps that were made, as if fixed in advance"

Parts = tuple[tuple[Gaussian | SampledGaussian, int], ...]


@dataclass(frozen=True)
class Opinion:
    """What dp-accounting says of figures that have one value.

    `independent` is its epsilon, or None where it `cannot_tell`, and why. `instead` says what was
    composed, where it does not know the whole; that costs no more than the whole.
    """

    figures: tuple[str, ...]
    epsilon: float
    library: str
    independent: float | None
    instead: str | None = None
    cannot_tell: str | None = None

    @property
    def refuted(self) -> bool:
        if self.independent is None:
            return False
        return self.epsilon < self.independent * (1 - TOLERANCE) - NEARLY_ZERO

    def describe(self) -> str:
        figure = f"epsilon {format_epsilon(self.epsilon)} ({', '.join(self.figures)})"
        if self.independent is None:
            return f"{figure}: {self.library} cannot tell: {self.cannot_tell}"
        found = format_epsilon(self.independent)
        if self.refuted:
            composed = self.instead or "the same composition"
            return f"{figure} is too low: {self.library} finds {found} for {composed}"
        if self.instead is None:
            return f"{figure} confirmed by {self.library}: {found}"
        return f"{figure} is not below what {self.library} finds for {self.instead}: {found}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "refuted": self.refuted, "says": self.describe()}


def statement_opinions(
    plan: Plan, mechanism: Mapping[str, Any], stated: Mapping[str, float | None]
) -> list[Opinion]:
    charges: Charges = plan.charges()
    if plan.filter is not None:  # it has one figure, for the steps that were made
        own = plan.accounting.replace("-", "_")
        charges = [(event, 1) for event in plan.setup]
        for row in mechanism["filter"]["steps"]:
            charges.append((event_from_json(row["step"]), row["charged"]))
        stated = {own: stated.get(own)}
    figures = {key: (epsilon, charges) for key, epsilon in stated.items() if epsilon is not None}
    return opinions(figures, plan.budget.delta, filtered=plan.filter is not None)


def opinions(
    figures: Mapping[str, tuple[float, Charges]], delta: float, *, filtered: bool = False
) -> list[Opinion]:
    """Opinions on figures by name, each with what was charged; equal ones are said once.

    The paper's figure and the lower end of a proven one are no guarantees: there is none on them.
    """
    found: dict[Opinion, tuple[str, ...]] = {}
    for name, (epsilon, charges) in figures.items():
        accounting = ACCOUNTINGS.get(name.replace("_", "-"))  # none of a lower end
        if accounting is not None and accounting.proved and math.isfinite(epsilon):
            given = _opinion(epsilon, charges, accounting, delta, filtered)
            found[given] = (*found.get(given, ()), name)
    return [replace(given, figures=names) for given, names in found.items()]


def _opinion(
    epsilon: float, charges: Charges, accounting: Accounting, delta: float, filtered: bool
) -> Opinion:
    installed = package_version("dp-accounting")
    selected = not accounting.verdicts_charged
    made = [event for event, count in charges if count]
    trials = [event for event in made if isinstance(event, Trial)]
    instead = None
    if filtered:
        instead = AS_FIXED
    elif selected and any(trial.gate is not None for trial in trials):
        instead = UNSELECTED
    elif any(isinstance(trial.test, NoisyChoice) for trial in trials):
        instead = WITHOUT_CHOICES
    elif any(isinstance(event, Menu) for event in made):
        instead = ONE_CHOICE
    left = delta - accounting.noise_tail(charges)
    answer = Opinion((), epsilon, f"dp-accounting {installed}", None, instead)
    if installed == ABSENT:
        return replace(answer, cannot_tell="it is not installed")
    found = 0.0
    for parts in filter(None, _known_parts(charges, selected)):  # a run may have done nothing
        width = pld.cell_width(parts)
        if width > pld.WIDEST_CELL or epsilon > LARGEST_EPSILON:
            return replace(answer, cannot_tell=UNDERFLOW)
        if len(parts) > MOST_PARTS:
            return replace(answer, cannot_tell=f"there are {len(parts)} different steps")
        if left <= 2 * pld.rounding(parts):
            return replace(answer, cannot_tell="delta is too small for its transforms")
        try:
            found = max(found, independent_epsilon(parts, width, left))
        except ArithmeticError:  # of noise near the largest number
            return replace(answer, cannot_tell="its numbers overflow")
    if not found <= LARGEST_EPSILON:
        return replace(answer, cannot_tell=UNDERFLOW)
    return replace(answer, independent=found)


def _known_parts(charges: Charges, selected: bool) -> Iterator[Parts]:
    """What dp-accounting can compose: one sequence, or one for every choice of a menu.

    What is left out makes it cheaper, never costlier.
    """
    made = [(event, count) for event, count in charges if count]
    offered = max((len(menu.choices) for menu, _ in made if isinstance(menu, Menu)), default=1)
    for choice in range(offered):
        parts: Counter[Gaussian | SampledGaussian] = Counter()
        for event, count in made:
            gated = selected and isinstance(event, Trial) and event.gate is not None
            for part in mechanisms(event)[: 1 if gated else None]:  # the update comes first
                if isinstance(part, Menu):
                    parts[part.choices[min(choice, len(part.choices) - 1)]] += part.repeats * count
                elif isinstance(part, Gaussian | SampledGaussian):
                    parts[part] += count
        yield tuple(parts.items())


@lru_cache(maxsize=16)
def independent_epsilon(parts: Parts, width: float, delta: float) -> float:
    """Epsilon of Gaussian mechanisms by the accountant of dp-accounting, on cells of a width."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=width)
    # Noise near the largest number overflows on the way: then there is no figure, or infinity.
    with np.errstate(all="ignore"):
        for part, count in parts:
            event = dp_accounting.GaussianDpEvent(part.noise_multiplier)
            if isinstance(part, SampledGaussian) and part.records > 1:
                counts, chances = joining(part)
                event = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
                    part.noise_multiplier, counts, chances / chances.sum()
                )
            elif isinstance(part, SampledGaussian):
                event = dp_accounting.PoissonSampledDpEvent(part.sample_rate, event)
            accountant.compose(event, count)
        return float(accountant.get_epsilon(delta))
