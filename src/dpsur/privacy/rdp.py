"""The paper's accountant: Rényi divergences at integer orders and its conversion lemma.

Used for the `published` accounting, which reproduces the paper's tables. The paper's theorem on the
privacy loss of DPSUR is not proved for its Algorithm 1 (docs/privacy.md says why).
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, logsumexp

from dpsur.errors import InvalidInputError
from dpsur.privacy.events import (
    Event,
    Gaussian,
    LossTest,
    NonPrivate,
    SampledGaussian,
    Trial,
    precision,
)

PAPER_ORDERS = tuple(range(2, 65))


@lru_cache(maxsize=4096)
def sampled_gaussian_rdp(q: float, sigma: float, alpha: int) -> float:
    """Rényi divergence of order alpha of a sampled Gaussian mechanism (paper, eq. for A_alpha)."""
    if q == 1.0 or math.isinf(precision(sigma)):
        return alpha / 2 * precision(sigma)
    k = np.arange(alpha + 1)
    log_binomial = gammaln(alpha + 1) - gammaln(k + 1) - gammaln(alpha - k + 1)
    log_terms = (
        log_binomial
        + (alpha - k) * math.log1p(-q)
        + k * math.log(q)
        + (k * k - k) * precision(sigma) / 2
    )
    return max(0.0, float(logsumexp(log_terms))) / (alpha - 1)


def event_rdp(event: Event, alpha: int) -> float:
    """What the paper charges for one event. A trial is charged both its parts."""
    match event:
        case NonPrivate():
            return math.inf
        case Gaussian(noise_multiplier=sigma):
            return alpha / 2 * precision(sigma)
        case SampledGaussian(sample_rate=q, noise_multiplier=sigma):
            return sampled_gaussian_rdp(q, sigma, alpha)
        case LossTest(sample_rate=q, noise_multiplier=sigma):
            return sampled_gaussian_rdp(q, sigma, alpha)
        case Trial(update=update, test=test):
            tested = 0.0 if test is None else event_rdp(test, alpha)
            return event_rdp(update, alpha) + tested
    raise InvalidInputError(f"unknown privacy event: {event!r}")


def epsilon_from_rdp(rdp: float, alpha: int, delta: float) -> float:
    """Convert (alpha, rdp)-RDP to epsilon at delta by the paper's conversion lemma."""
    return rdp + math.log((alpha - 1) / alpha) - (math.log(delta) + math.log(alpha)) / (alpha - 1)


def composed_epsilon(charges: Sequence[tuple[Event, int]], delta: float) -> float:
    """Smallest epsilon over the paper's orders for events, each repeated a number of times."""
    if all(count == 0 for _, count in charges):
        return 0.0
    totals = (
        (alpha, sum(count * event_rdp(event, alpha) for event, count in charges if count))
        for alpha in PAPER_ORDERS
    )
    return max(0.0, min(epsilon_from_rdp(total, alpha, delta) for alpha, total in totals))
