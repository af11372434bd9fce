"""The sentences of a privacy statement that are the same for every release of a kind."""

import math

from dpsur.privacy.plans.hiding import CONSTANT, DELAY, NOT_HIDDEN

DEFINITION = "(epsilon, delta)-differential privacy in the central model"
# what a release without privacy has in its place
NO_GUARANTEE = "none: the training was not private, and there is no guarantee of any kind"
UNIT = "one record of the training set"
ADJACENCY = "add or remove one record; the number of records N is public"
SAMPLER = (
    "Poisson: every record joins a batch independently, with fresh draws for every training batch "
    "and every test; accounting and implementation use the same rate"
)
ARITHMETIC = (
    "Gradients are clipped and summed in floating point, and noise is drawn and added in float64; "
    "the proofs are over the real numbers. Noise comes from PyTorch's generators, which are not "
    "cryptographically secure."
)
TF32_OFF = "Products were computed in full float32."
TF32_ON = (
    "Products in the layers were computed with inputs rounded to TF32, as asked for; norms and "
    "clipped sums in full float32."
)
BF16_ON = (
    "Layers and their backward pass were computed in bfloat16, as asked for; every gradient was "
    "clipped by the norm of the very numbers that were summed, in float32."
)
ARITHMETICS = tuple(
    f"{ARITHMETIC} {layers}{products}"
    for layers in ("", f"{BF16_ON} Outside of them: ")
    for products in (TF32_OFF, TF32_ON)
)
LAST, AVERAGE = "the last weights", "the average of the weights"
TUNING = (
    "Hyper-parameters chosen by looking at results on the same private records are not covered by "
    "epsilon; only this one run is."
)
WATCHED = {
    NOT_HIDDEN: (
        "The time a run takes, its memory and its power, for whoever can watch the process.",
        "How many trials were rejected, unless every trial was charged.",
    ),
    DELAY: (
        "The time a run takes, its memory and its power, for whoever can watch the process. Random "
        "delays after accepted updates blurred that time, which is no guarantee.",
        "How many trials were rejected.",
    ),
    CONSTANT: (
        "The time single trials take, their memory and their power, for whoever can watch the "
        "process. How many were made was fixed before the run and tells nothing.",
    ),
}
PRIVATE_FOLDER = (
    "Checkpoints, metrics and random-stream positions in the private folder of the run."
)
NOT_COVERED = (
    "Preprocessing done before the records reached this library, and the public test set.",
    "Records that appear more than once, or people with several records.",
)


def side_channels(hide_rejections: str) -> list[str]:
    """What whoever watches a run, or reads its folder, learns beyond the release."""
    return [*WATCHED[hide_rejections], PRIVATE_FOLDER]


def format_epsilon(value: float) -> str:
    """An epsilon to four decimals, rounded up: a shown figure must not be below the real one."""
    if not math.isfinite(value):
        return "infinite"
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}"
