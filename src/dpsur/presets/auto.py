"""Settings that are chosen from public facts alone, with the reasons.

The name of a task plays no part: renaming a data set changes nothing. Rows of norm 1 (features of
images, weighted words) get a linear model and plain DP-SGD, whose learning rate is known by a rule.
Any other model gets the gate `block`, which finds its learning rate and clip norm within the
budget.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dpsur.features import FEATURES, MEAN
from dpsur.presets.base import DataFacts, Preset
from dpsur.presets.encoder import (
    check_method,
    image_features,
    linear_options,
    words_preset,
)

WORDS = "words"
NAME = "auto"
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
    """What was chosen and why, in at most five lines. `options` are those of the method."""
    epsilon, delta = budget
    lines = [f"auto: {_known(facts)}, epsilon {epsilon:g}, delta {delta:g}; nothing else was used"]
    if facts.short and options["gate"] is None:
        lines.append("a short try (max_updates): the method's own settings, no search for a rate")
    elif options["gate"] == "block":
        lines += _about_blocks(facts, features, options)
    else:
        lines += _about_rows(facts, features, normalisation, options)
    return (*lines, "every choice can be overridden by its option; naming a method turns auto off")


def _known(facts: DataFacts) -> str:
    known = [f"{facts.records} records" if facts.records else "records"]
    known += [f"of shape {' x '.join(map(str, facts.shape))}"] if facts.shape else []
    text = " ".join(known)
    text += f", {facts.classes} classes" if facts.classes else ""
    return f"{text}, {'a GPU' if facts.gpu else 'no GPU'}"


def _about_rows(
    facts: DataFacts,
    features: str | None,
    normalisation: str | None,
    options: Mapping[str, Any],
) -> list[str]:
    mean = "; their noisy mean is subtracted, for about a hundredth of the precision"
    rate = options["learning_rate"]
    return [
        f"linear model from zero on {features}{_cost(facts, features)}"
        + (mean if normalisation == MEAN else ""),
        f"batches of {options['batch_size']} (a seventh of the records), {options['updates']} "
        f"updates, clip norm {options['max_grad_norm']:g}, {options['schedule']} decay, learning "
        f"rate {'from the noise, by the rule for linear models' if rate is None else f'{rate:g}'}",
        "every update is kept (plain DP-SGD): a linear model needs no test of its updates, and no "
        "part of the budget goes to tests"
        if options["gate"] == "none"
        else f"updates are tested (gate {options['gate']}), as was asked for",
    ]


def _cost(facts: DataFacts, features: str | None) -> str:
    """What features cost beside privacy, and what was not chosen for its cost."""
    if features not in UNIT_ROWS:
        return ": rows of weighted words have norm 1"
    text = ", which is made without any collected data and costs no privacy"
    if facts.gpu or facts.records is None:
        return text
    minutes = max(1, round(facts.records * ENCODER_SECONDS / 60))
    if features == "whitened-scattering":
        return f"{text} (--features scattering+encoder takes {minutes} core-minutes without a GPU)"
    return f"{text} ({minutes} core-minutes without a GPU, once)"


def _about_blocks(facts: DataFacts, features: str | None, options: Mapping[str, Any]) -> list[str]:
    model = "your model" if facts.own_model else "the task's model"
    batch = options["batch_size"] or "about 8 sqrt(N)"
    updates = options["updates"] or "20 epochs of"
    return [
        f"{model}{f' on {features}' if features else ''}, for which no learning rate is known",
        "gate block: short blocks at several learning rates are tested on all records, and the "
        "best rate trains the model; every update and test is charged",
        f"batches of {batch} records, {updates} updates, clip norm from a noisy histogram of "
        f"gradient norms, {options['schedule']} decay",
    ]
