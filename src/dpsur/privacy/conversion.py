"""From a Rényi divergence to (epsilon, delta)."""

import math


def epsilon_at(order: float, divergence: float, delta: float) -> float:
    """The smallest epsilon that two lemmas grant to a pair with D_order(P || Q) <= divergence.

    Let S be the event that maximises P(S) - e^eps Q(S), p = P(S) and t = Q(S). Data processing
    gives p^a t^(1-a) + (1-p)^a (1-t)^(1-a) <= M = exp((a-1) D). Dropping the second term is
    Proposition 12 of arXiv:2004.00010. Keeping (1-p)^a >= 1 - a p of it instead gives p^a t^(1-a)
    <= M - 1 + a p, and the worst p is again explicit; this is better when M is near 1. Finally
    delta >= sqrt(1 - exp(-D)) is total variation.
    """
    a, d = order, divergence
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    if a <= 1.0:
        raise ValueError(f"order must be above 1, got {a}")
    if math.isnan(d) or d == math.inf:
        return math.inf
    d = max(d, 0.0)
    if delta * delta + math.expm1(-d) >= 0.0:
        return 0.0
    best = d + math.log1p(-1.0 / a) - (math.log(delta) + math.log(a)) / (a - 1.0)
    exponent = (a - 1.0) * d
    if exponent < 600.0:
        m = math.expm1(exponent)
        rest = m - a * (a - 1.0) * delta
        p = min(1.0, a * m * delta / rest) if rest > 0.0 else 1.0
        if p > delta:
            best = min(
                best, math.log(p - delta) - (a * math.log(p) - math.log(m + a * p)) / (a - 1.0)
            )
    return max(0.0, best) * (1.0 + 1e-12)
