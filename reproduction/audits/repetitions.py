"""From repetitions with and without a record to a lower bound on epsilon."""

import math
from dataclasses import dataclass

import numpy as np

from dpsur.audits.bounds import Array, Direction, epsilon_of_counts
from dpsur.errors import InvalidInputError

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
