"""DP-SGD (Abadi et al. 2016), and on handcrafted features (Tramèr and Boneh 2021)."""

from dataclasses import dataclass

from dpsur.methods.gradient_method import GradientMethod


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
