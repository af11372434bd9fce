"""Settings that are chosen from public facts alone, with the reasons.

The name of a task plays no part: renaming a data set changes nothing. Rows of norm 1 (features of
images, weighted words) get a linear model and plain DP-SGD, whose learning rate is known by a rule.
Tables get the same on noisy quantiles in soft bins, with gradients of all records. Any other model
gets the gate `block`, which finds its learning rate and clip norm within the budget.

A private linear model of a table, on noisy quantiles in soft bins.

One setting for all tables, from the number of records, what is predicted, epsilon and delta. It was
chosen on held-out training records of nine tables; docs/tables/tables-rule.md has what other
settings give, and what leaving a table out would choose.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dpsur.errors import InvalidInputError
from dpsur.features import FEATURES, MEAN, NONE, QUANTILES, TABLE
from dpsur.presets.base import DataFacts, Preset
from dpsur.privacy.events import single_release_noise

TABLE_UPDATES = 150
# Gradients of a cross entropy on rows of norm 1 have a norm of at most the root of 2: a clip norm
# of 1 keeps the sizes of nearly all. Much smaller ones make the model overconfident.
TABLE_CLIP_NORM = 1.0
# The noise that all updates together leave in a weight, without momentum.
WEIGHT_NOISE = 0.13
# Learning rates beyond are unstable for some rows of norm 1, at momentum 0.9: half of
# 2 (1 + momentum) over the largest curvature, which is 1/2 for a cross entropy and 2 for a square.
MOST_STABLE = {"classes": 4.0, "labels": 8.0, "number": 1.0}


def table_options(facts: DataFacts) -> dict[str, Any]:
    """Hyper-parameters of a linear model from zero on the features of a table.

    Every batch has all records, where their number is exactly known, else nearly all: draws leave
    fewer than expected by ten standard deviations at most.
    """
    assert facts.records is not None
    kind, outputs = facts.target or ("classes", 1)
    clip, stable = TABLE_CLIP_NORM, MOST_STABLE[kind]
    if kind == "labels":  # the loss is a mean over them
        clip, stable = clip / math.sqrt(outputs), stable * outputs
    noise = single_release_noise(*(facts.budget or (1.0, 1e-5)))
    batch = facts.records
    if not facts.whole:
        batch = max(1, batch - math.ceil(5 * math.sqrt(batch)))
    rate = WEIGHT_NOISE * facts.records / (noise * TABLE_UPDATES * clip)
    return {
        "batch_size": batch,
        "updates": TABLE_UPDATES,
        "max_grad_norm": clip,
        "learning_rate": min(rate, stable),
        "schedule": "cosine",
        "momentum": 0.9,
        "gate": "none",
    }


WORDS = "words"
NAME = "auto"
METHODS = ("dpsgd", "dpsur")
# Expected batches of a seventh of the records, rounded to a power of two: 8,192 of 50,000 to
# 60,000. Batches twice as large, and half or twice the updates, are within 0.1 points.
RECORDS_PER_BATCH_RECORD = 7
UPDATES = 600
CLIP_NORM = 0.2
# Features whose rows have norm 1.
UNIT_ROWS = tuple(name for name, features in FEATURES.items() if features.of_images)
# Seconds of one CPU core for an image.
ENCODER_SECONDS = 0.05
BLOCK_OPTIONS: Mapping[str, Any] = {"gate": "block"}


def auto_preset(method: str, facts: DataFacts | None) -> Preset:
    """The settings of a method for data and a model of which these facts are public."""
    check_method(NAME, method)
    if facts is None or facts.records is None or facts.own_model:
        return _without_rate(facts, facts.features if facts else None)
    if facts.features is None and facts.kind == WORDS:
        return words_preset(facts.records)
    features = facts.features
    if features == TABLE or (features is None and facts.kind == TABLE):
        return Preset(table_options(facts), TABLE, QUANTILES)
    if features is None and facts.shape is not None and len(facts.shape) == 3:
        features = image_features(facts)
    if features == WORDS:
        return replace(words_preset(facts.records), features=WORDS)
    if features in UNIT_ROWS:
        return Preset(linear_options(facts.records), features, MEAN)
    return _without_rate(facts, features)


def _without_rate(facts: DataFacts | None, features: str | None) -> Preset:
    """For a model whose learning rate is not known. A short try has no room for a search."""
    short = facts is not None and facts.short
    return Preset({} if short else BLOCK_OPTIONS, features, None)


def explain_auto(
    facts: DataFacts,
    features: str | None,
    normalisation: str | None,
    options: Mapping[str, Any],
    budget: tuple[float, float],
) -> tuple[str, ...]:
    """What was chosen and why, in at most four lines. `options` are those of the method."""
    epsilon, delta = budget
    known = [*_known(facts), f"epsilon {epsilon:g}", f"delta {delta:g}"]
    lines = [f"auto: settings chosen from public facts only: {', '.join(known)}"]
    if facts.short and options["gate"] == "none" and options["updates"] is None:
        lines.append(
            "a short run (max_updates): the method's defaults, without a search for a learning rate"
        )
    elif options["gate"] == "block":
        lines += _about_blocks(facts, features, options)
    else:
        lines += _about_rows(facts, features, normalisation, options)
    return tuple(lines)


def _known(facts: DataFacts) -> list[str]:
    shape = f" of shape {' x '.join(map(str, facts.shape))}" if facts.shape else ""
    known = [f"{facts.records} {facts.unit}s{shape}"] if facts.records else []
    known += [f"{facts.classes} classes"] if facts.classes else []
    return [*known, "a GPU" if facts.gpu else "no GPU"]


def _about_rows(
    facts: DataFacts,
    features: str | None,
    normalisation: str | None,
    options: Mapping[str, Any],
) -> list[str]:
    mean = "; a noisy mean of the features is subtracted, which costs about 1% of the precision"
    rate = options["learning_rate"]
    if features == TABLE:
        return [
            "linear model from zero on noisy quantiles in soft bins: histograms of the numbers, if "
            "there are any, are charged and find where in the declared ranges the records are",
            f"all {facts.unit}s in every batch of {options['updates']} updates, clip norm "
            f"{options['max_grad_norm']:g}, {options['schedule']} decay, learning rate {rate:.3g}",
            *_kept(options),
        ]
    return [
        f"linear model from zero on {features}{_cost(facts, features)}"
        + (mean if normalisation == MEAN else ""),
        f"expected batch size {options['batch_size']}, {options['updates']} updates, clip norm "
        f"{options['max_grad_norm']:g}, {options['schedule']} decay, "
        "learning rate "
        + ("by the rule for linear models" if rate == "linear-head" else f"{rate:g}"),
        *_kept(options),
    ]


def _kept(options: Mapping[str, Any]) -> list[str]:
    if options["gate"] == "none":
        return [
            "plain DP-SGD, every update is kept: testing updates does not pay for a linear model"
        ]
    return [f"updates are tested (gate {options['gate']}), as requested"]


def _cost(facts: DataFacts, features: str | None) -> str:
    """What features cost beside privacy, and what was not chosen for its cost."""
    if features not in UNIT_ROWS:
        return " (weighted words, rows of norm 1)"
    text = " features, which need no training data and cost no privacy"
    if facts.gpu or facts.records is None:
        return text
    minutes = max(1, round(facts.records * ENCODER_SECONDS / 60))
    if features == "whitened-scattering":
        return f"{text} (better, but {minutes} core-minutes: --features scattering+encoder)"
    return f"{text} ({minutes} core-minutes to compute, then cached)"


def _about_blocks(facts: DataFacts, features: str | None, options: Mapping[str, Any]) -> list[str]:
    model = "your model" if facts.own_model else "the task's model"
    batch = options["batch_size"] or "about 8 sqrt(N)"
    updates = f"{options['updates']} updates" if options["updates"] else "20 epochs"
    return [
        f"{model}{f' on {features}' if features else ''}: a good learning rate is not known",
        "gate block: short blocks of updates try several learning rates, a noisy test on all "
        "records picks the best, and it trains the model; every update and test is charged",
        f"expected batch size {batch}, {updates}, clip norm from a noisy histogram of gradient "
        f"norms, {options['schedule']} decay",
    ]


def encoder_preset(method: str, facts: DataFacts | None) -> Preset:
    """The settings of a method for images of which these facts are public.

    The learning rate is left to the rule for linear models. Every update is kept, with either
    method: the settings were measured so.
    """
    check_method("encoder", method)
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
