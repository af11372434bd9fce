"""The paper's own analysis, as functions: what it proves, and where its formulas lead.

Section 3 (minimal clipping and the threshold), section 4 (Gaussian mechanism with selective
release) and the appendix. These are true statements about a scalar that is noised and truncated;
why they do not carry over to Algorithm 1 is said in docs/privacy.md.
"""

import math
from collections.abc import Callable
from typing import Literal

from scipy.optimize import minimize_scalar
from scipy.special import log_ndtr

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.privacy.events import LossTest

Direction = Literal["zero-first", "shifted-first"]


def selective_gaussian(
    value: float,
    mu: float,
    sigma: float,
    below: float,
    gauss: Callable[[], float],
    above: float = -math.inf,
) -> float:
    """Algorithm 2: clip to [0, mu] and add noise N(0, (mu sigma)^2) until it falls in an interval.

    `gauss` draws a standard normal. Formal guarantee (paper, theorem on selective release): for
    above = -inf the result satisfies (alpha, alpha / (2 sigma^2))-RDP, f(D) being fixed.
    """
    checks.positive("mu", mu)
    checks.positive("sigma", sigma)
    if not above < below:
        raise InvalidInputError(f"the interval [{above}, {below}] is empty")
    clipped = min(max(value, 0.0), mu)
    while True:
        noisy = clipped + mu * sigma * gauss()
        if above <= noisy <= below:
            return noisy


def _log_interval(low: float, high: float) -> float:
    """log(Phi(high) - Phi(low)), kept accurate in both tails."""
    if low > 0:
        low, high = -high, -low
    top, bottom = float(log_ndtr(high)), float(log_ndtr(low))
    return top + math.log(-math.expm1(bottom - top))


def truncated_gaussian_rdp(
    alpha: float,
    sigma: float,
    direction: Direction,
    below: float,
    above: float = -math.inf,
    mu: float = 1.0,
) -> float:
    """Rényi divergence between N(0, (mu sigma)^2) and N(mu, (mu sigma)^2), both truncated.

    The paper's appendix, for either order of the two laws.
    """
    checks.positive("sigma", sigma)
    checks.positive("mu", mu)
    if not alpha > 1:
        raise InvalidInputError(f"the order must be above 1, got {alpha}")

    def mass(mean: float) -> float:
        return _log_interval((above - mean) / (mu * sigma), (below - mean) / (mu * sigma))

    if direction == "zero-first":
        first, second, tilted = 0.0, mu, (1 - alpha) * mu
    else:
        first, second, tilted = mu, 0.0, alpha * mu
    log_factor = (alpha - 1) * mass(second) + mass(tilted) - alpha * mass(first)
    return alpha / (2 * sigma**2) + log_factor / (alpha - 1)


def log_cdf_ratio(alpha: float, sigma: float, direction: Direction, below: float) -> float:
    """log A or log B of the paper's theorem on the normal CDF (mu = 1); never above zero."""
    gain = truncated_gaussian_rdp(alpha, sigma, direction, below) - alpha / (2 * sigma**2)
    return (alpha - 1) * gain


def acceptance_gap(accept_threshold: float, val_noise_multiplier: float) -> float:
    """How much likelier a better candidate is to pass the paper's gate than a worse one."""
    test = LossTest(1.0, val_noise_multiplier, accept_threshold)
    return test.accept_max - test.accept_min


def best_threshold(val_noise_multiplier: float) -> float:
    """The threshold that makes that gap largest.

    It is 0 for every noise: the gap is the normal mass of an interval of fixed width around
    beta / (2 sigma_v), which is largest where it is centred. The paper marks -1.
    """
    found = minimize_scalar(
        lambda beta: -acceptance_gap(beta, val_noise_multiplier),
        bounds=(-10.0, 10.0),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return float(found.x)
