"""Settings that are chosen from public facts alone, with the reasons: images, so far.

The name of a task plays no part: renaming a data set changes nothing.
"""

from dpsur.errors import InvalidInputError
from dpsur.presets.base import DataFacts, Preset
from dpsur.presets.encoder import encoder_preset, words_preset

WORDS = "words"
NEEDS_IMAGES = (
    "preset auto knows images so far, of shape (channels, height, width), and this task has other "
    "records; leave the preset out"
)


def auto_preset(method: str, facts: DataFacts | None) -> Preset:
    """The settings of a method for data of which these facts are public."""
    if facts is not None and facts.kind == WORDS:
        return words_preset(method, facts)
    if facts is None or len(facts.shape) != 3:
        raise InvalidInputError(NEEDS_IMAGES)
    return encoder_preset(method, facts)


def explain_auto(
    method: str, facts: DataFacts | None, epsilon: float, delta: float
) -> tuple[str, ...]:
    """What was chosen and why, in five lines."""
    preset = auto_preset(method, facts)
    assert facts is not None
    options = preset.options
    channels, height, width = facts.shape
    return (
        f"auto: {facts.records} images of {channels} x {height} x {width}, {facts.classes} "
        f"classes, epsilon {epsilon:g}, delta {delta:g}; nothing else was used to choose",
        f"features {preset.features}: made from procedural images, so they cost no privacy; "
        "linear model from zero",
        f"normalisation {preset.normalisation}: the noisy mean of the features, charged before "
        "training, for about a hundredth of the precision",
        f"batches of {options['batch_size']} (a seventh of the records), {options['updates']} "
        f"updates, clip norm {options['max_grad_norm']:g}, momentum {options['momentum']:g}, "
        f"{options['schedule']} decay; learning rate from the noise, by the rule for linear models",
        "every update is kept (plain DP-SGD): these settings were measured so, and no part of the "
        "budget goes to tests",
    )
