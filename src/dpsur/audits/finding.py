"""What an audit found, held against what is claimed."""

from dataclasses import asdict, dataclass, field
from typing import Any

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
        """Plain values, for a file of rows."""
        return {**asdict(self), "verdict": self.verdict}
