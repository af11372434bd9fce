"""From repetitions with and without a record to a lower bound on epsilon."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.special import betaincinv

from dpsur.audits.bounds import Array
from dpsur.audits.training import ONE_RUN, ceiling
from dpsur.errors import InvalidInputError

Direction = Literal["add", "remove"]
THRESHOLDS = 400
# The event is chosen on this share of the runs, by bounds of this error: a strict one keeps the
# choice away from events so rare that they look better than they are.
CHOICE_SHARE = 1 / 3
CHOICE_ERROR = 1e-4


@dataclass(frozen=True)
class Event:
    """What an audit looks for: scores from the threshold up (`add`) or down (`remove`)."""

    direction: Direction
    threshold: float

    def hits(self, scores: Array) -> int:
        if self.direction == "add":
            return int((scores >= self.threshold).sum())
        return int((scores <= self.threshold).sum())


@dataclass(frozen=True)
class LowerBound:
    """An epsilon that the mechanism exceeds, at a delta and a confidence, and how it was found.

    `likelier` of `repetitions` runs showed the event in the world where it is likelier (with the
    record for `add`), `rarer` in the other.
    """

    epsilon: float
    delta: float
    confidence: float
    event: Event
    likelier: int
    rarer: int
    repetitions: int

    def contradicts(self, claimed: float) -> bool:
        """Whether a claim of (claimed, delta)-DP is refuted at the confidence."""
        return self.epsilon > claimed


def epsilon_lower_bound(
    with_record: Array, without_record: Array, delta: float, confidence: float = 0.95
) -> LowerBound:
    """Hold scores of runs with the record against those of runs without.

    The event is chosen on the first third of the runs and counted on the others, so that the choice
    costs no confidence. Formal guarantee: if the mechanism that made the scores is
    (epsilon, delta)-DP and the runs are independent, the bound is above epsilon with probability at
    most 1 - confidence.
    """
    if not 0 <= delta < 1:
        raise InvalidInputError(f"delta must be in [0, 1), got {delta}")
    if not 0 < confidence < 1:
        raise InvalidInputError(f"confidence must be in (0, 1), got {confidence}")
    runs = min(len(with_record), len(without_record))
    first = math.ceil(CHOICE_SHARE * runs)
    if first >= runs:
        raise InvalidInputError("an audit needs at least two runs with and two without the record")
    event = _best_event(with_record[:first], without_record[:first], delta)
    error = (1 - confidence) / 2  # for each of the two proportions
    worlds = (with_record, without_record)
    if event.direction == "remove":
        worlds = worlds[::-1]
    likelier, rarer = (event.hits(scores[first:runs]) for scores in worlds)
    rest = runs - first
    epsilon = float(
        epsilon_of_counts(np.array([likelier]), np.array([rarer]), rest, delta, error)[0]
    )
    return LowerBound(max(0.0, epsilon), delta, confidence, event, likelier, rarer, rest)


def _best_event(with_record: Array, without_record: Array, delta: float) -> Event:
    trials = len(with_record)
    with_sorted, without_sorted = np.sort(with_record), np.sort(without_record)
    pooled = np.unique(np.concatenate([with_sorted, without_sorted]))
    places = np.linspace(0, len(pooled) - 1, min(THRESHOLDS, len(pooled))).astype(int)
    thresholds = pooled[places]
    best = Event("add", float(pooled[-1]))
    best_epsilon = -math.inf
    directions: tuple[Direction, ...] = ("add", "remove")
    for direction in directions:
        if direction == "add":
            first, second = (
                trials - np.searchsorted(s, thresholds, "left")
                for s in (with_sorted, without_sorted)
            )
        else:
            first, second = (
                np.searchsorted(s, thresholds, "right") for s in (without_sorted, with_sorted)
            )
        found = epsilon_of_counts(first, second, trials, delta, CHOICE_ERROR)
        place = int(np.argmax(found))
        if found[place] > best_epsilon:
            best_epsilon = float(found[place])
            best = Event(direction, float(thresholds[place]))
    return best


def proportion_lower(hits: Array, trials: int, error: float) -> Array:
    """Clopper-Pearson: exceeds the true probability with probability at most `error`."""
    hits = np.asarray(hits, dtype=np.float64)
    inside = np.maximum(hits, 1.0)
    bound = betaincinv(inside, trials - inside + 1.0, error)
    return np.asarray(np.where(hits > 0, bound, 0.0))


def proportion_upper(hits: Array, trials: int, error: float) -> Array:
    """Clopper-Pearson: falls below the true probability with probability at most `error`."""
    return 1.0 - proportion_lower(trials - np.asarray(hits, dtype=np.float64), trials, error)


def epsilon_of_counts(
    likelier: Array, rarer: Array, trials: int, delta: float, error: float
) -> Array:
    """Epsilon by how often an event was seen in two worlds, each proportion with its own error."""
    excess = proportion_lower(likelier, trials, error) - delta
    rare = proportion_upper(rarer, trials, error)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(excess > 0, np.log(np.maximum(excess, 1e-300) / rare), -math.inf)


def largest_bound(repetitions: int, delta: float, confidence: float) -> float:
    """The bound if all counted runs show the event with the record, and none without."""
    error = (1 - confidence) / 2
    found = epsilon_of_counts(np.array([repetitions]), np.zeros(1), repetitions, delta, error)
    return max(0.0, float(found[0]))


def most_shown(finding: Mapping[str, Any]) -> float | None:
    """The lower bound if every run or guess had spoken for it; None where a law was computed.

    `finding` is a row of `Finding`. Where this is below the claim, and there is no p-value, the
    audit could not have contradicted it.
    """
    details = finding["details"]
    if finding["audit"] == ONE_RUN:
        return ceiling(finding)
    if "repetitions" in details:
        return largest_bound(details["repetitions"], finding["delta"], finding["confidence"])
    return None
