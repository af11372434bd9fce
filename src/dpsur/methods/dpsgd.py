"""DPSGD (Abadi et al. 2016): a noisy sum of clipped gradients, every update kept."""

from dataclasses import dataclass

from dpsur.methods.gradient_method import GradientMethod


@dataclass(frozen=True, repr=False)
class Dpsgd(GradientMethod):
    """Differentially private stochastic gradient descent.

    Formal guarantee of one step: a sampled Gaussian mechanism at rate batch_size / N.
    """

    name = "dpsgd"
    summary = "DP-SGD (Abadi et al. 2016): clipped, noisy gradients, every update kept"
