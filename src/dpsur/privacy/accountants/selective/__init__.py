"""The Rényi divergence of one accepted update of a selective release, from above and from below.

`divergence` returns a certified upper and an attained lower value; docs/privacy.md has the proof.
"""

from dpsur.privacy.accountants.selective.divergence import (
    COARSE,
    FINE,
    Accuracy,
    Interval,
    divergence,
)
from dpsur.privacy.accountants.selective.pair import Direction

__all__ = ["COARSE", "FINE", "Accuracy", "Direction", "Interval", "divergence"]
