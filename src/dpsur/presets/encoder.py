"""A private linear model on rows of norm 1: features of images, or words; for any epsilon.

One setting for all data: it follows from the number of records and the shape of an image, which are
public, and was chosen on held-out training records of CIFAR-10 and Fashion-MNIST
(docs/features.md).
"""

from typing import Any

from dpsur.errors import InvalidInputError
from dpsur.features import MEAN, NONE
from dpsur.presets.base import DataFacts, Preset

METHODS = ("dpsgd", "dpsur")
NAME = "encoder"
# Expected batches of a seventh of the records, rounded to a power of two: 8,192 of 50,000 to
# 60,000. Batches twice as large, and half or twice the updates, are within 0.1 points.
RECORDS_PER_BATCH_RECORD = 7
UPDATES = 600
CLIP_NORM = 0.2


def encoder_preset(method: str, facts: DataFacts | None) -> Preset:
    """The settings of a method for images of which these facts are public.

    The learning rate is left to the rule for linear models. Every update is kept, with either
    method: the settings were measured so.
    """
    check_method(NAME, method)
    if facts is None or facts.records is None or facts.shape is None or len(facts.shape) != 3:
        raise InvalidInputError(
            "preset encoder needs images of shape (channels, height, width), and this task has "
            "other records; leave the preset out"
        )
    features = "scattering+encoder" if facts.shape[0] == 1 else "encoder"
    return Preset(linear_options(facts.records), features, MEAN)


def image_features(facts: DataFacts) -> str:
    """Features of images by what they cost: of grey ones scattering, and the encoder on a GPU.

    Without a GPU the encoder takes fifty times as long as scattering, whose linear models of grey
    images lose little without it.
    """
    assert facts.shape is not None
    if facts.shape[0] != 1:
        return "encoder"
    return "scattering+encoder" if facts.gpu else "whitened-scattering"


def words_preset(records: int) -> Preset:
    """The same linear model for rows of words, which have norm 1 as well."""
    return Preset(linear_options(records), "vectors", NONE, {"name": "linear-head"})


def check_method(preset: str, method: str) -> None:
    """Refuse methods that have no such settings."""
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise InvalidInputError(
            f"preset {preset} has no settings for method {method}; it has {known}"
        )


def linear_options(records: int) -> dict[str, Any]:
    """Hyper-parameters of a linear model from zero on rows of norm 1."""
    return {
        "batch_size": batch_size(records),
        "updates": UPDATES,
        "max_grad_norm": CLIP_NORM,
        "learning_rate": "linear-head",
        "schedule": "cosine",
        "momentum": 0.9,
        "gate": "none",
    }


def batch_size(records: int) -> int:
    """The power of two nearest to a seventh of the records, on the logarithmic scale."""
    size = 1
    while size * 2**0.5 < records / RECORDS_PER_BATCH_RECORD:
        size *= 2
    return size
