"""The methods of the library that step along noisy sums of clipped gradients.

DP-SGD (Abadi et al. 2016), the same on handcrafted features (Tramèr and Boneh 2021), and DPSUR (Fu
et al., VLDB 2024): a DP-SGD candidate that is kept only if it passes a noisy test.
"""

from dataclasses import dataclass

from dpsur.mechanism import gates
from dpsur.methods.gradient_method import GATE_HELP, GATES, NO_GATE, GradientMethod
from dpsur.options import GATE, option


@dataclass(frozen=True, repr=False)
class Dpsgd(GradientMethod):
    """Differentially private stochastic gradient descent.

    Formal guarantee of one step: a sampled Gaussian mechanism at rate batch_size / N.
    """

    name = "dpsgd"
    summary = "DP-SGD (Abadi et al. 2016): clipped, noisy gradients, every update kept"


@dataclass(frozen=True, repr=False)
class DpsgdHf(GradientMethod):
    """DP-SGD on scattering features of images, which need no training and cost no privacy.

    The features are all that differs from DPSGD. Where they are normalised by statistics of the
    records, those are private and charged before training. Formal guarantee of one step: a sampled
    Gaussian mechanism at rate batch_size / N.
    """

    name = "dpsgd-hf"
    summary = "handcrafted features (Tramèr, Boneh 2021): DP-SGD on scattering coefficients"
    features = "scattering"


@dataclass(frozen=True, repr=False)
class Dpsur(GradientMethod):
    """DP-SGD with selective update and release (the paper's Algorithm 1).

    The gate is the paper's, `loss` with C_v = 0.001 and beta = -1, unless another is named or
    implied by an option that belongs to it (`accept_ratio`: the gate `coin`, which is ours).

    Formal guarantee of one trial: a sampled Gaussian for the candidate, and a test that accepts
    with a probability in a known interval. What a run of them costs is the accounting's business.
    """

    name = "dpsur"
    summary = "selective update and release (Fu et al. 2024): an update must pass a test to count"

    gate: str | gates.Gate | None = option(
        None,
        GATE_HELP,
        GATES,
        group=GATE,
        common=True,
    )

    @property
    def label(self) -> str:
        """`dpsgd` where nothing is tested: that is what then runs."""
        return Dpsgd.name if self.gate == NO_GATE else self.name
