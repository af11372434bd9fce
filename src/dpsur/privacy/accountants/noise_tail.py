"""What is set aside of delta for the missing tail of the noise.

Normal draws of earlier versions were made in pairs from uniform draws of 53 bits, so that a pair
ended at a radius of 8.57 standard deviations. Where a record moves a sum beyond what noise can
reach, its presence is certain. Integer noise ends at 12.9; the charge is more than it needs, and
the same for all releases. docs/privacy.md, section 15, states the bound that is computed.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from scipy.special import gammaincc, gammaln, xlogy

from dpsur.errors import BudgetError
from dpsur.privacy.accountants.pld import joining
from dpsur.privacy.events import (
    Event,
    Gaussian,
    LossTest,
    Menu,
    SampledGaussian,
    ThresholdedGaussian,
    Trial,
)

# A pair of draws of the transform of Box and Muller has a radius of at most sqrt(-2 log 2^-53).
LARGEST_RADIUS = math.sqrt(106 * math.log(2))
# Figures are computed for so many weights, so that they need not know the network.
_CHARGED_WEIGHTS: Final = 2**28
# Networks of up to this many are covered. Integer noise (`mechanism/noise_table.py`) differs from a
# discrete Gaussian by 2^-123 a weight, which for all of these is far less than what is charged.
# Larger ones are refused: the kernel counts a vector's numbers in 31 bits.
MOST_WEIGHTS: Final = 2**31
# Of Poisson weights: their mean is at most 35 where they are summed.
_TERMS = 400


def noise_tail(charges: Sequence[tuple[Event, int]], *, verdicts_charged: bool) -> float:
    """What events, each repeated a number of times fixed in advance, add to delta; at most 1.

    `verdicts_charged` says that verdicts are outputs. Otherwise a trial behind a gate is charged as
    an accepted update, which selection can make likelier by the ratio of its gate.
    """
    lost = math.fsum(count * _lost(event, verdicts_charged) for event, count in charges if count)
    return min(lost, 1.0)


def check_tail(tail: float, noise_multiplier: float, count: int, delta: float) -> None:
    if tail >= delta:
        raise BudgetError(
            f"noise multiplier {noise_multiplier:g} is too small for delta {delta:g}: noise ends "
            f"at {LARGEST_RADIUS:.2f} standard deviations, and over {count} charged trials or "
            f"updates what lies beyond adds {tail:.2g} to delta; raise the noise multiplier or "
            "delta, or make fewer updates",
            code="noise-tail",
        )


@lru_cache(maxsize=4096)
def _lost(event: Event, verdicts_charged: bool) -> float:
    match event:
        case ThresholdedGaussian(noise_multiplier=sigma, delta=delta):
            return out_of_reach(1.0, sigma) + delta
        case Gaussian(noise_multiplier=sigma):
            return out_of_reach(1.0, sigma)
        case SampledGaussian(records=1, sample_rate=q, noise_multiplier=sigma):
            return out_of_reach(q, sigma)
        case SampledGaussian(noise_multiplier=sigma):
            found = [(n, chance) for n, chance in zip(*joining(event), strict=True) if n]
            return math.fsum(chance * out_of_reach(1.0, sigma / n) for n, chance in found)
        case LossTest(sample_rate=q, noise_multiplier=sigma):
            return out_of_reach(q, sigma, coordinates=1)
        case Menu(choices=choices, repeats=repeats):
            return repeats * max(_lost(choice, verdicts_charged) for choice in choices)
        case Trial(update=update):
            gate, lost = event.gate, _lost(update, verdicts_charged)
            if gate is None:
                return lost
            if verdicts_charged:
                return lost + _lost(gate, verdicts_charged)
            least = gate.accept_min or 1.0  # a gate that may never accept is refused by name
            return lost * gate.accept_max / least
    return 0.0  # a coin, or a choice, has no Gaussian noise


def out_of_reach(
    sample_rate: float, noise_multiplier: float, coordinates: int = _CHARGED_WEIGHTS
) -> float:
    """The chance that one noisy sum is where it can be with, or without, one record only.

    Formal guarantee: an upper bound for every gradient of the record within the clip norm.
    """
    shift = 1 / noise_multiplier if noise_multiplier > 1e-150 else math.inf
    if shift**2 > LARGEST_RADIUS**2 - 4:  # beyond it the sum over pairs is not bounded by one pair
        return sample_rate
    one_pair = _beyond(LARGEST_RADIUS, shift)
    # What pairs lose at the edge of the disc, both ways, however many share the shift.
    edge = LARGEST_RADIUS * math.exp(-(LARGEST_RADIUS**2) / 2) / math.pi
    pairs = (coordinates + 1) // 2
    return sample_rate * min(1.0, one_pair + 2 * edge * math.sqrt(pairs) * shift)


def _beyond(radius: float, shift: float) -> float:
    """The chance that a pair of normal draws, shifted by so much, lies outside of a disc.

    The survival function of a noncentral chi-square distribution, as a sum over Poisson weights of
    positive terms, rounded up. SciPy's is in a module that takes half a second to import.
    """
    half, terms = shift**2 / 2, np.arange(_TERMS)
    weights = np.exp(xlogy(terms, half) - half - gammaln(terms + 1))
    return float(weights @ gammaincc(terms + 1, radius**2 / 2)) * (1 + 1e-12)
