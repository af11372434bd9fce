"""The accountings by name: what each charges, what it assumes, and whether it is proved.

| name          | charges          | proved                                                   |
|---------------|------------------|----------------------------------------------------------|
| `every-trial` | every trial      | yes; the number of trials is fixed in advance            |
| `published`   | accepted updates | no: the paper's analysis, kept to reproduce its figures  |
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from dpsur.errors import InvalidInputError
from dpsur.privacy import pld, rdp
from dpsur.privacy.events import Event, Trial
from dpsur.privacy.ledger import Ledger

Charges = Sequence[tuple[Event, int]]


class Accounting(ABC):
    """Turns what happened into epsilon.

    `charges` says which count is fixed in advance and paid for: all trials, or accepted updates.
    """

    name: ClassVar[str]
    charges: ClassVar[Literal["trials", "updates"]]
    proved: ClassVar[bool]
    assumes: ClassVar[str]

    @abstractmethod
    def epsilon(self, charges: Charges, delta: float) -> float:
        """Epsilon at delta for events, each repeated a fixed number of times."""

    def planned(self, setup: tuple[Event, ...], trial: Trial, count: int, delta: float) -> float:
        """Epsilon of a run of `count` charged trials after its setup."""
        return self.epsilon([*((event, 1) for event in setup), (trial, count)], delta)

    def spent(self, ledger: Ledger, delta: float) -> float:
        """Epsilon of what a ledger holds."""
        counts = [
            (entry.trial, entry.trials if self.charges == "trials" else entry.updates)
            for entry in ledger.entries
        ]
        return self.epsilon([*((event, 1) for event in ledger.setup), *counts], delta)


class EveryTrial(Accounting):
    """Plain composition of every trial, accepted or not, by privacy loss distributions.

    Formal guarantee: with the number of trials fixed in advance, the run satisfies
    (epsilon, delta)-DP under adding or removing one record, even if every verdict and every
    noisy gradient were published.
    """

    name = "every-trial"
    charges = "trials"
    proved = True
    assumes = (
        "The number of trials is fixed before training and each one is charged its noisy gradient "
        "and its noisy test, accepted or not. Nothing is conditioned on acceptance, so verdicts "
        "and their counts may be public."
    )

    def epsilon(self, charges: Charges, delta: float) -> float:
        """Epsilon at delta by privacy loss distributions."""
        return pld.composed_epsilon(charges, delta)


class Published(Accounting):
    """The paper's analysis: accepted updates only, each as if nothing had been selected.

    Formal guarantee: none. The released update is conditioned on a test that reads the data again,
    which the paper's theorem does not cover; the figure is too low.
    """

    name = "published"
    charges = "updates"
    proved = False
    assumes = (
        "Only accepted updates are charged, each as one sampled Gaussian for the gradient and one "
        "for the test. The paper does not prove this for the algorithm it runs: conditioning on "
        "acceptance can raise the privacy loss above this figure."
    )

    def epsilon(self, charges: Charges, delta: float) -> float:
        """Epsilon at delta as the paper computes it."""
        return rdp.composed_epsilon(charges, delta)


ACCOUNTINGS: dict[str, Accounting] = {
    accounting.name: accounting for accounting in (EveryTrial(), Published())
}
DEFAULT_ACCOUNTING = "every-trial"
PUBLISHED_WARNING = (
    "the published accounting is not proved for selective release; its epsilon is a claim of the "
    "paper, not a guarantee (proven: not computed)"
)


def accounting_named(name: str) -> Accounting:
    """Look an accounting up by name."""
    try:
        return ACCOUNTINGS[name]
    except KeyError:
        known = ", ".join(ACCOUNTINGS)
        raise InvalidInputError(f"unknown accounting {name!r}; choose one of {known}") from None
