"""What a mechanism did to the data, in the terms an accountant needs, and how often: the ledger.

Mechanisms emit events, accountants read them. An event is a plain frozen value: it knows nothing of
tensors and can be written to a file and read back. A ledger counts the steps of a run.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, get_args

from dpsur import checks
from dpsur.errors import InvalidInputError


def precision(noise_multiplier: float) -> float:
    """1 / noise^2, rounded up to a floating-point number where it is none: never too low."""
    if noise_multiplier < 1e-150:
        return math.inf
    return 1 / min(noise_multiplier, 1e150) ** 2


def any_joins(sample_rate: float, records: int) -> float:
    if sample_rate == 1:
        return 1.0
    return min(1.0, -math.expm1(records * math.log1p(-sample_rate)))


@dataclass(frozen=True)
class NonPrivate:
    """Data used without protection. Every accountant charges infinity."""


@dataclass(frozen=True)
class Gaussian:
    """Gaussian noise on a query over all records; the multiplier is relative to its sensitivity."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        checks.positive("noise_multiplier", self.noise_multiplier)


@dataclass(frozen=True)
class ThresholdedGaussian(Gaussian):
    """Gaussian noise on counts of values that nobody declared; those above a threshold are listed.

    A value that one record alone has is listed with a chance of at most `delta`, which comes on top
    of what a Gaussian costs.
    """

    delta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.probability("delta", self.delta)


@dataclass(frozen=True)
class SampledGaussian:
    """Gaussian noise on a query over a Poisson sample of the records.

    A person may have several `records`, each of which joins on its own. The multiplier is relative
    to what one of them changes: how many of them join is binomial, and a sum moves by as many.
    """

    sample_rate: float
    noise_multiplier: float
    records: int = 1

    def __post_init__(self) -> None:
        checks.sample_rate("sample_rate", self.sample_rate)
        checks.positive("noise_multiplier", self.noise_multiplier)
        checks.at_least_one("the records of a person", self.records)

    @property
    def as_one(self) -> "SampledGaussian":
        """One record that costs no less: all of a person's join whenever one of them does."""
        if self.records == 1:
            return self
        rate = any_joins(self.sample_rate, self.records)
        return SampledGaussian(rate, self.noise_multiplier / self.records)


@dataclass(frozen=True)
class LossTest:
    """The paper's noisy test of a loss difference on a fresh Poisson sample (Alg. 1, L9-14).

    The clipped difference has sensitivity 2 C_v and noise 2 C_v sigma_v, so that the clip bound
    C_v cancels from every probability.
    """

    sample_rate: float
    noise_multiplier: float
    accept_threshold: float

    def __post_init__(self) -> None:
        checks.sample_rate("val_sample_rate", self.sample_rate)
        checks.positive("val_noise_multiplier", self.noise_multiplier)
        if math.isnan(self.accept_threshold):
            raise InvalidInputError("accept_threshold must be a number, got nan")

    @property
    def noisy_difference(self) -> SampledGaussian:
        """What a verdict is a function of: charging it is an upper bound by post-processing."""
        return SampledGaussian(self.sample_rate, self.noise_multiplier)

    def acceptance(self, clipped_difference: float) -> float:
        """Probability of accepting, the difference given in units of the clip bound, in [-1, 1]."""
        if not -1 <= clipped_difference <= 1:
            raise InvalidInputError(
                f"a clipped difference lies in [-1, 1] clip bounds, got {clipped_difference}"
            )
        distance = self.accept_threshold - clipped_difference
        return 0.5 * math.erfc(-distance / (2 * self.noise_multiplier) / math.sqrt(2))

    @property
    def accept_min(self) -> float:
        """Acceptance probability of the worst candidate, a_min.

        Noise ends at some radius, which 2^-53 of all pairs of draws would exceed: what is accepted
        only with unusual noise is accepted less often by no more than that.
        """
        found = self.acceptance(1.0)
        return found if found >= 0.5 else max(0.0, found - 2.0**-53)

    @property
    def accept_max(self) -> float:
        """Acceptance probability of the best candidate, a_max."""
        return self.acceptance(-1.0)


@dataclass(frozen=True)
class CoinTest:
    """A test without noise on the loss: an improvement passes, a worsening with probability 1 / r.

    Its verdict on its own is not private, since an improvement is never rejected. What is accepted
    is: the acceptance probability lies in [1 / r, 1] for any sample.
    """

    sample_rate: float
    accept_ratio: float

    def __post_init__(self) -> None:
        checks.sample_rate("val_sample_rate", self.sample_rate)
        if not 1 <= self.accept_ratio < math.inf:
            raise InvalidInputError(
                f"accept_ratio must be a finite number of at least 1, got {self.accept_ratio}"
            )

    accept_max: ClassVar[float] = 1.0  # of an improvement

    @property
    def accept_min(self) -> float:
        """Acceptance probability of a worsening."""
        return 1 / self.accept_ratio


Test = LossTest | CoinTest


@dataclass(frozen=True)
class NoisyChoice:
    """The exponential mechanism on a Poisson sample: the least of several noisy clipped losses.

    Scores are sums over the sample of values in [0, C], and one is chosen with a probability in
    proportion to exp(-epsilon * score / C). A record moves all scores the same way, by at most C,
    so that the log-likelihood ratio of a choice has a range of epsilon.
    """

    sample_rate: float
    choice_epsilon: float

    def __post_init__(self) -> None:
        checks.sample_rate("choice_sample_rate", self.sample_rate)
        checks.positive("choice_epsilon", self.choice_epsilon)

    @property
    def amplified(self) -> float:
        """The range of the log-likelihood ratio with the sampling in it.

        A ratio x becomes 1 - q + q x. Where x lies in [s, s e^epsilon] and 1 is in between, the
        logarithm of that has its widest range at s = 1.
        """
        q, epsilon = self.sample_rate, self.choice_epsilon
        if epsilon > 700.0:  # where e^epsilon is no floating-point number
            return epsilon + math.log(q + (1 - q) * math.exp(-epsilon))
        return math.log1p(q * math.expm1(epsilon))


@dataclass(frozen=True)
class Trial:
    """One candidate update and, where there is one, the test that it must pass.

    A choice among candidates is no test in the sense of selective release: it is always charged.
    """

    update: SampledGaussian | NonPrivate
    test: Test | NoisyChoice | None = None

    @property
    def gate(self) -> Test | None:
        """The test that decides whether the candidate is released at all."""
        return None if isinstance(self.test, NoisyChoice) else self.test


@dataclass(frozen=True)
class Menu:
    """One of several sampled Gaussians, chosen by what was released before, then repeated.

    The choices and the repeats are fixed in advance; which choice it is need not be.
    """

    choices: tuple[SampledGaussian, ...]
    repeats: int = 1

    def __post_init__(self) -> None:
        if not self.choices:
            raise InvalidInputError("a menu needs at least one choice")
        if not all(isinstance(choice, SampledGaussian) for choice in self.choices):
            raise InvalidInputError(f"a menu offers sampled Gaussians, got {self.choices!r}")
        checks.at_least_one("the repeats of a choice", self.repeats)

    @property
    def worst(self) -> SampledGaussian:
        """What no choice exceeds: divergence rises with the rate and falls with the noise."""
        return SampledGaussian(
            max(choice.sample_rate for choice in self.choices),
            min(choice.noise_multiplier for choice in self.choices),
        )

    def nearest(self, rate: float) -> SampledGaussian:
        return min(self.choices, key=lambda c: abs(math.log(c.sample_rate / rate)))

    def scaled(self, factor: float) -> "Menu":
        choices = (replace(c, noise_multiplier=factor * c.noise_multiplier) for c in self.choices)
        return replace(self, choices=tuple(choices))


Event = NonPrivate | Gaussian | SampledGaussian | LossTest | CoinTest | NoisyChoice | Trial | Menu
# What a run does in one go: a trial, or a noisy figure that later trials are steered by.
Step = Trial | SampledGaussian | Gaussian


def mechanisms(event: Event) -> tuple[Event, ...]:
    """Those of an event, one after the other; a trial is its update and its test."""
    parts: tuple[Event | None, ...] = (event,)
    if isinstance(event, Trial):
        alone = isinstance(event.update, NonPrivate)  # beside which nothing counts
        parts = (event.update, None if alone else event.test)
    plain = (part.noisy_difference if isinstance(part, LossTest) else part for part in parts)
    return tuple(part for part in plain if part is not None)


# Noise of the histograms that the clip bounds of feature statistics are read from. Two of them cost
# less than a twelfth of what the statistics themselves do at their usual noise of 8.
CLIP_BOUND_NOISE = 40.0


def feature_statistics(noise_multiplier: float) -> tuple[Event, ...]:
    """What private statistics of features cost: two clip bounds, means and mean squares."""
    bound, statistic = Gaussian(CLIP_BOUND_NOISE), Gaussian(noise_multiplier)
    return (bound, bound, statistic, statistic)


def feature_mean(noise_multiplier: float) -> tuple[Event, ...]:
    """What a private mean of features of norm 1 costs: their sum has sensitivity 1."""
    return (Gaussian(noise_multiplier),)


def feature_histograms(noise_multiplier: float) -> tuple[Event, ...]:
    """What noisy histograms of all numbers of a table cost, scaled to sensitivity 1 together."""
    return (Gaussian(noise_multiplier),)


def single_release_noise(epsilon: float, delta: float) -> float:
    """About the noise of one Gaussian release of this budget (Dwork and Roth, 2014)."""
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def feature_histograms_noise(epsilon: float, delta: float) -> float:
    """Noise at which histograms cost 5 to 8 hundredths of the precision that a budget buys."""
    return max(1.0, round(3.5 * single_release_noise(epsilon, delta), 2))


def feature_mean_noise(epsilon: float, delta: float) -> float:
    """Noise at which a mean costs about a hundredth of the precision that a budget buys."""
    return max(1.0, round(10 * single_release_noise(epsilon, delta), 2))


@dataclass(frozen=True)
class Entry:
    """How often one kind of step was made, and how often it was accepted.

    A step that is no trial, such as a noisy norm that steers later trials, is always kept.
    """

    step: Step
    trials: int
    updates: int

    def __post_init__(self) -> None:
        if not 0 <= self.updates <= self.trials:
            raise InvalidInputError(
                f"a ledger holds 0 <= updates <= trials, got {self.updates} and {self.trials}"
            )
        if not isinstance(self.step, Trial) and self.updates != self.trials:
            raise InvalidInputError(
                f"{self.step} is always kept, but {self.updates} of {self.trials} were noted so"
            )


@dataclass(frozen=True, repr=False)
class Ledger:
    """Setup events, each once, and the steps in the order they were made.

    A ledger is a value: recording returns a new one. The number of rejected trials in it is private
    unless every trial is charged.
    """

    setup: tuple[Event, ...] = ()
    entries: tuple[Entry, ...] = ()

    def __repr__(self) -> str:
        return f"Ledger({len(self.setup)} setup events, {len(self.entries)} kinds of steps)"

    @property
    def last(self) -> Step | None:
        return self.entries[-1].step if self.entries else None

    @property
    def steps(self) -> int:
        return sum(entry.trials for entry in self.entries)

    @property
    def trials(self) -> int:
        """Candidates drawn, accepted or not."""
        return sum(entry.trials for entry in self.entries if isinstance(entry.step, Trial))

    @property
    def updates(self) -> int:
        return sum(entry.updates for entry in self.entries if isinstance(entry.step, Trial))

    @property
    def kept(self) -> int:
        """Steps that were not rejected: updates, and figures that were released between them."""
        return sum(entry.updates for entry in self.entries)

    def record(self, step: Step, *, updates: int, trials: int = 1) -> "Ledger":
        new = Entry(step, trials=trials, updates=updates)
        if self.last != step:
            return replace(self, entries=(*self.entries, new))
        *before, last = self.entries
        new = Entry(step, last.trials + trials, last.updates + updates)
        return replace(self, entries=(*before, new))

    def to_json(self) -> dict[str, Any]:
        return {
            "setup": [event_to_json(event) for event in self.setup],
            "entries": [
                {"step": event_to_json(e.step), "trials": e.trials, "updates": e.updates}
                for e in self.entries
            ],
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Ledger":
        entries = []
        for row in values["entries"]:
            step = event_from_json(row["step"])
            if not isinstance(step, (Trial, SampledGaussian, Gaussian)):
                raise InvalidInputError(f"a ledger entry must be a step, got {row['step']!r}")
            entries.append(Entry(step, trials=row["trials"], updates=row["updates"]))
        setup = tuple(event_from_json(event) for event in values["setup"])
        return Ledger(setup=setup, entries=tuple(entries))


_KINDS = {kind.__name__: kind for kind in (*get_args(Event), ThresholdedGaussian)}


def event_to_json(event: Event) -> dict[str, Any]:
    if isinstance(event, Trial):
        test = None if event.test is None else event_to_json(event.test)
        return {"kind": "Trial", "update": event_to_json(event.update), "test": test}
    if isinstance(event, Menu):
        choices = [event_to_json(choice) for choice in event.choices]
        return {"kind": "Menu", "choices": choices, "repeats": event.repeats}
    values = {"kind": type(event).__name__, **asdict(event)}
    if values.get("records") == 1:  # as events were always written
        del values["records"]
    return values


def event_from_json(values: Mapping[str, Any]) -> Event:
    """Read what `event_to_json` wrote; anything else is an error, never a guess."""
    fields: dict[str, Any] = dict(values)
    kind = fields.pop("kind", None)
    try:
        if kind == "Trial":
            test = fields["test"]
            fields["test"] = None if test is None else event_from_json(test)
            fields["update"] = event_from_json(fields["update"])
        if kind == "Menu":
            fields["choices"] = tuple(map(event_from_json, fields["choices"]))
        return _KINDS[kind](**fields)  # type: ignore[no-any-return]
    except (KeyError, TypeError) as error:
        raise InvalidInputError(f"not a privacy event: {dict(values)!r}") from error
