"""What guesses about many canaries in one training run say about epsilon.

m canaries are in the records or not, each by a fair coin. After training the auditor guesses r of
the coins and abstains on the others. If the training is private, few guesses can be better than
chance. Two bounds on the number of correct ones:

- Steinke, Nasr and Jagielski (2023), for (epsilon, delta)-DP: given what was released, the guesses
  are no better than independent ones that are right with probability e^eps / (1 + e^eps), but for
  delta, which can help a few canaries at a time.
- Mahloujifar, Melis and Chaudhuri (2024), for f-DP: tighter, for it uses a whole trade-off curve.

Proof of the second. Let p_j be the probability of j correct guesses out of r, and let
f-DP mean P(A | coin = s) <= g(P(A | other coin)) for every event A, g = 1 - f concave and rising.
For canary i and a set T of counts let A be: the guess on i is s, and j - 1 of the other guesses
are right for some j in T. Averaging over s, the other coins and i, with g concave,

    sum over j in T of j p_j / m  <=  g( sum over j in T of (r - j + 1) p_{j-1} / m ).

Take T = {t, ..., r} and write R_t = sum over j >= t of j p_j / m, H_t likewise with r - j. Then
H_{t-1} >= g^{-1}(R_t), R_{t-1} = R_t + (t-1)/(r-t+1) (H_{t-1} - H_t) and R_0 + H_0 = r/m. Suppose
P(at least v correct) = tau. Start from R_v = tau v/m, H_v = tau (r-v)/m and take equality in every
step. By induction R_t - a H_t is at least what this gives, for all 0 <= a <= t/(r-t): so if the
result for R_0 + H_0 exceeds r/m, the supposition was wrong.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from dpsur.errors import InvalidInputError

Array = NDArray[np.float64]


CONTRADICTED = "contradicted"
NOT_CONTRADICTED = "not contradicted"


@dataclass(frozen=True)
class Finding:
    """A claim of (claimed, delta)-DP and the evidence against it.

    `lower` is exceeded by the true epsilon at the stated confidence; `exact`, where the law of the
    output is known, for certain. `p_value`, where there is one, is the probability of evidence as
    strong as this if the claim held, for the whole claimed curve and not only one point of it.
    """

    audit: str
    subject: str
    accounting: str
    claimed: float
    delta: float
    lower: float
    confidence: float
    exact: float | None = None
    p_value: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Whether the claim stands. That it stands does not prove it."""
        broken = self.lower > self.claimed or (self.exact or 0.0) > self.claimed
        # the other half of the error belongs to the bound
        broken |= self.p_value is not None and self.p_value < (1 - self.confidence) / 2
        return CONTRADICTED if broken else NOT_CONTRADICTED

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


# g^{-1}: the smallest false positive rate at which a test can have this power
Inverse = Callable[[Array], Array]
_ROUNDS, _GRID = 4, 33


def _check(canaries: int, guesses: int, correct: int) -> None:
    if not 0 <= correct <= guesses <= canaries:
        raise InvalidInputError(
            f"{correct} correct guesses of {guesses} about {canaries} canaries: there must be at "
            "most as many correct as made, and as many made as canaries"
        )


def tail_probability(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """An upper bound on P(at least `correct` right), for any (epsilon, delta)-DP training."""
    _check(canaries, guesses, correct)
    right = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, right))
    if delta == 0 or correct == 0:
        return min(1.0, tail)
    # P(correct > Bin >= correct - i) / i, at its largest: delta may help i canaries at a time,
    # with a probability of at most 2 m delta / i.
    helped = np.arange(1, correct + 1)
    within = np.cumsum(binom.pmf(correct - helped, guesses, right))
    return min(1.0, tail + 2 * canaries * delta * float((within / helped).max()))


def tail_probability_under(inverse: Inverse, canaries: int, guesses: int, correct: int) -> float:
    """An upper bound on P(at least `correct` right), for any training with this trade-off curve.

    Found on a grid of probabilities, rounded up.
    """
    _check(canaries, guesses, correct)
    if correct == 0:
        return 1.0
    low, high = -300.0, 0.0  # logarithms to base 10
    if not _impossible(np.ones(1), inverse, canaries, guesses, correct)[0]:
        return 1.0
    for _ in range(_ROUNDS):
        exponents = np.linspace(low, high, _GRID)
        refuted = _impossible(10.0**exponents, inverse, canaries, guesses, correct)
        place = int(np.argmax(refuted))  # the smallest that is refuted; the largest always is
        low, high = exponents[max(place - 1, 0)], exponents[place]
    return float(10.0**high)


def _impossible(
    probabilities: Array, inverse: Inverse, canaries: int, guesses: int, correct: int
) -> Array:
    """Whether at least `correct` right with these probabilities contradicts the curve."""
    right = probabilities * correct / canaries
    wrong = probabilities * (guesses - correct) / canaries
    for count in range(correct - 1, -1, -1):
        more = np.asarray(inverse(np.minimum(right, 1.0)))
        if count < correct - 1:
            more = np.maximum(more, wrong)  # H_t cannot fall as t falls
        right = right + count / (guesses - count) * (more - wrong)
        wrong = more
    return np.asarray(right + wrong > guesses / canaries)


def claimed_curve(points: Sequence[tuple[float, float]]) -> Inverse:
    """The trade-off curve of a mechanism that is (epsilon, delta)-DP for each of these pairs."""

    def inverse(power: Array) -> Array:
        best = np.zeros_like(power)
        for epsilon, delta in points:
            best = np.maximum(best, math.exp(-epsilon) * (power - delta))
            best = np.maximum(best, 1 - delta - math.exp(min(epsilon, 700.0)) * (1 - power))
        return best

    return inverse


def gaussian_curve(mu: float) -> Inverse:
    """The trade-off curve of telling N(0, 1) from N(mu, 1)."""
    return lambda power: np.asarray(ndtr(ndtri(power) - mu))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Delta of a Gaussian mechanism of shift mu at epsilon."""
    if mu == 0:
        return 0.0
    first, second = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    return float(ndtr(first) - math.exp(min(epsilon, 700.0)) * ndtr(second))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism of shift mu at delta."""
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(mu, high) > delta:
        high *= 2
    return float(brentq(lambda epsilon: gaussian_delta(mu, epsilon) - delta, 0.0, high))


def epsilon_of_guesses(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """An epsilon that the training exceeds at this confidence, whatever its trade-off curve."""
    error = 1 - confidence

    def consistent(epsilon: float) -> bool:
        return tail_probability(canaries, guesses, correct, epsilon, delta) > error

    return _least(consistent)


def gaussian_epsilon_of_guesses(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """The same for trainings whose trade-off curve is that of some Gaussian mechanism."""
    level = np.array([1 - confidence])

    def consistent(mu: float) -> bool:
        if correct == 0:
            return True
        return not _impossible(level, gaussian_curve(mu), canaries, guesses, correct)[0]

    return gaussian_epsilon(_least(consistent), delta)


def _least(consistent: Callable[[float], bool]) -> float:
    """The smallest parameter that excuses what was seen, rounded down."""
    if consistent(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not consistent(high):
        low, high = high, 2 * high
    while high - low > 1e-4:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if consistent(middle) else (middle, high)
    return low
