"""DPSUR (Fu et al., VLDB 2024): a DPSGD candidate, released only if it passes a noisy test."""

from dataclasses import dataclass

from dpsur.methods.gradient_method import GATE_HELP, GATES, GradientMethod
from dpsur.options import option


@dataclass(frozen=True, repr=False)
class Dpsur(GradientMethod):
    """DPSGD with selective update and release (the paper's Algorithm 1).

    Formal guarantee of one trial: a sampled Gaussian for the candidate, and a test that accepts
    with a probability in a known interval. What a run of them costs is the accounting's business.
    """

    name = "dpsur"
    summary = "selective update and release (Fu et al. 2024): an update must pass a test to count"

    gate: str | None = option(None, GATE_HELP, GATES)
