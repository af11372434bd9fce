"""The accountings by name: what each charges, what it assumes, and whether it is proved.

| name          | charges          | proved                                                   |
|---------------|------------------|----------------------------------------------------------|
| `proven`      | accepted updates | yes; their number is fixed in advance                    |
| `proven-pld`  | accepted updates | yes; the same by privacy loss distributions, tighter     |
| `every-trial` | every trial      | yes; the number of trials is fixed in advance            |
| `published`   | accepted updates | no: the paper's analysis, kept to reproduce its figures  |
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Final, Literal

from dpsur.errors import InvalidInputError
from dpsur.privacy.accountants import pld, proven, rdp
from dpsur.privacy.accountants.noise_tail import noise_tail
from dpsur.privacy.events import CoinTest, Event, Test, Trial

Charges = Sequence[tuple[Event, int]]

# What a rejected trial leaves behind: nothing, or what the optimizer learned from it.
RESTORE: Final = "restore"
KEEP_MOMENTUM: Final = "keep-momentum"

# The share of delta that is set aside for a run that hits its cap on trials.
CAP_SHARE: Final = 1e-3


class Accounting(ABC):
    """Turns what happened into epsilon.

    `charges` says which count is fixed in advance and paid for: all trials, or accepted updates.
    `verdicts_charged` says whether a test is charged as a mechanism beside its update.
    """

    name: ClassVar[str]
    charges: ClassVar[Literal["trials", "updates"]]
    proved: ClassVar[bool]
    verdicts_charged: ClassVar[bool] = True
    # The accounting whose figure this one makes smaller, in seconds: it is shown where asked for.
    refines: ClassVar[str | None] = None
    # Why the coin gate is not covered, where it is not.
    no_coin: ClassVar[str | None] = None

    @abstractmethod
    def ideal_epsilon(self, charges: Charges, delta: float) -> float:
        """Epsilon at delta for events, each so many times, as if noise had no end."""

    def epsilon(self, charges: Charges, delta: float) -> float:
        """The same for the noise that is drawn, whose missing tail is charged to delta."""
        left = delta - self.noise_tail(charges)
        return self.ideal_epsilon(charges, left) if left > 0 else math.inf

    def noise_tail(self, charges: Charges) -> float:
        return noise_tail(charges, verdicts_charged=self.verdicts_charged)

    def check(self, trial: Trial, on_reject: str) -> None:
        """Refuse a kind of trial that this accounting does not cover, and say why."""
        if self.charges == "updates" and on_reject != RESTORE:
            raise InvalidInputError(
                f"on_reject {on_reject} is not covered by the {self.name} accounting: a rejected "
                "gradient would reach released weights without being charged; use on_reject "
                f"{RESTORE}, or the every-trial accounting",
                code="not-covered",
            )
        if self.no_coin and isinstance(trial.test, CoinTest):
            raise InvalidInputError(
                f"the coin gate is not covered by the {self.name} accounting{self.no_coin}; use "
                "the gate loss, or the proven accounting",
                code="not-covered",
            )

    def test_epsilon(self, test: Test, count: int, delta: float) -> float:
        """Epsilon of the tests alone, as if the candidates did not depend on the records."""
        return self.epsilon([(test, count)], delta)

    def planned(self, setup: tuple[Event, ...], trial: Trial, count: int, delta: float) -> float:
        return self.epsilon(planned_charges(setup, trial, count), delta)


class Proven(Accounting):
    """Accepted updates only, at the certified price of an update that was selected.

    Formal guarantee: with the number of accepted updates fixed in advance and everything a rejected
    trial touched restored, the released weights satisfy (epsilon, delta)-DP under adding or
    removing one record. A thousandth of delta is set aside for the cap on trials, or more where a
    run may give up so early that it needs more.
    """

    name = "proven"
    charges = "updates"
    proved = True
    verdicts_charged = False

    def ideal_epsilon(self, charges: Charges, delta: float) -> float:
        return self._ideal_bounds(charges, delta, CAP_SHARE, attained=False).upper

    def epsilon(self, charges: Charges, delta: float) -> float:
        return self.bounds(charges, delta).upper

    def bounds(
        self, charges: Charges, delta: float, early_end: float = 0.0
    ) -> proven.EpsilonBounds:
        """The guarantee, and what an adversary attains at the same orders.

        `early_end` is the largest probability, for any records, that the run gives up at
        its cap on trials. It turns delta into delta + (1 + e^epsilon) early_end, so the share that
        is set aside grows until it pays for that.
        """
        left, share = delta - self.noise_tail(charges), CAP_SHARE
        while share < 1 and left - share * delta > 0:
            found = self._ideal_bounds(charges, left, share * delta / left)
            if (1 + math.exp(min(found.upper, 700.0))) * early_end <= share * delta:
                return found
            share *= 2
        return proven.EpsilonBounds(math.inf, math.inf)

    def _ideal_bounds(
        self, charges: Charges, delta: float, share: float, *, attained: bool = True
    ) -> proven.EpsilonBounds:
        """By privacy loss distributions where nothing is selected."""
        if not any(n and isinstance(e, Trial) and e.test is not None for e, n in charges):
            plain = pld.composed_epsilon(charges, delta)
            return proven.EpsilonBounds(plain, plain)
        whole = proven.compose(charges)
        return proven.composed_epsilon(whole, delta * (1 - share), attained=attained)

    def test_epsilon(self, test: Test, count: int, delta: float) -> float:
        """The same by the theorem with a training rate of zero."""
        alone = proven.Composition(((proven.SelectiveUpdate.of(0.0, 1.0, test), count),))
        return proven.composed_epsilon(alone, delta * (1 - CAP_SHARE), attained=False).upper


class ProvenPld(Proven):
    """The guarantee of `proven`, composed by privacy loss distributions.

    Formal guarantee: as of `proven`, under the same conditions. Epsilon is never larger than that
    of `proven`, and mostly 5 to 8% smaller; computing it takes about a second.
    """

    name = "proven-pld"
    refines = "proven"

    def _ideal_bounds(
        self, charges: Charges, delta: float, share: float, *, attained: bool = True
    ) -> proven.EpsilonBounds:
        known = super()._ideal_bounds(charges, delta, share, attained=attained)
        if not any(n and isinstance(e, Trial) and e.gate is not None for e, n in charges):
            return known
        upper = min(known.upper, pld.accepted_epsilon(charges, delta * (1 - share)))
        return replace(known, lower=0.0, upper=upper)


class EveryTrial(Accounting):
    """Plain composition of every trial, accepted or not, by privacy loss distributions.

    Formal guarantee: with the number of trials fixed in advance, the run satisfies
    (epsilon, delta)-DP under adding or removing one record, even if every verdict and every
    noisy gradient were published.
    """

    name = "every-trial"
    charges = "trials"
    proved = True
    no_coin = (
        ", where verdicts are outputs: it never rejects an improvement, so a verdict can tell "
        "almost for certain whether a record is there"
    )

    def ideal_epsilon(self, charges: Charges, delta: float) -> float:
        return pld.composed_epsilon(charges, delta)


class Published(Accounting):
    """The paper's analysis: accepted updates only, each as if nothing had been selected.

    Formal guarantee: none. The released update is conditioned on a test that reads the data again,
    which the paper's theorem does not cover; the figure is too low.
    """

    name = "published"
    charges = "updates"
    proved = False
    no_coin = ": the paper analyses a test with Gaussian noise only"

    def ideal_epsilon(self, charges: Charges, delta: float) -> float:
        return rdp.composed_epsilon(charges, delta)


ACCOUNTINGS: dict[str, Accounting] = {
    accounting.name: accounting for accounting in (Proven(), EveryTrial(), Published(), ProvenPld())
}
DEFAULT_ACCOUNTING = "proven"
# Where candidates are tested one by one and nothing is steered by released values.
SELECTIVE_ACCOUNTING = "proven-pld"
FIGURES: Final = ("published", "proven", "proven_lower", "every_trial")


def planned_charges(setup: tuple[Event, ...], trial: Trial, count: int) -> Charges:
    return [*((event, 1) for event in setup), (trial, count)]


def accounting_named(name: str) -> Accounting:
    try:
        return ACCOUNTINGS[name]
    except KeyError:
        known = ", ".join(ACCOUNTINGS)
        raise InvalidInputError(
            f"unknown accounting {name!r}; choose one of {known}", code="unknown-name"
        ) from None


def check_covers_steering(name: str) -> None:
    """Refuse an accounting that proves nothing of parameters chosen on the way."""
    accounting = accounting_named(name)
    if not accounting.proved or accounting.refines:
        raise InvalidInputError(
            f"a method that steers itself by released values is not covered by the {name} "
            "accounting; use proven or every-trial",
            code="not-covered",
        )


def figures(
    setup: tuple[Event, ...],
    trial: Trial,
    delta: float,
    *,
    updates: int | None,
    trials: int | None,
    on_reject: str = RESTORE,
    early_end: float = 0.0,
    requested: str | None = None,
) -> dict[str, float | None]:
    """Epsilon under each accounting, side by side; None where one does not apply.

    An accounting applies if the count that it charges was fixed in advance and it covers the trial.
    `early_end` bounds the probability that the run gives up at its cap on trials. An accounting
    that is computed on request has a figure where it is `requested` by name.
    """
    found: dict[str, float | None] = dict.fromkeys(FIGURES)
    for accounting in ACCOUNTINGS.values():
        if accounting.refines and accounting.name != requested:
            continue
        count = trials if accounting.charges == "trials" else updates
        key = accounting.name.replace("-", "_")
        found.setdefault(key, None)
        try:
            accounting.check(trial, on_reject)
        except InvalidInputError:
            continue
        if count is not None and isinstance(accounting, Proven):
            bounds = accounting.bounds(planned_charges(setup, trial, count), delta, early_end)
            found[key] = bounds.upper
            if not accounting.refines:
                found["proven_lower"] = bounds.lower
        elif count is not None:
            found[key] = accounting.planned(setup, trial, count, delta)
    return found


def only_figure(accounting: str, epsilon: float) -> dict[str, float | None]:
    """The figures of a run whose steps were chosen on the way: one under its own accounting."""
    return {**dict.fromkeys(FIGURES), accounting.replace("-", "_"): epsilon}
