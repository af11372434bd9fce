"""Settings by name: chosen from public facts, or read from a table.

`auto`: settings that are chosen from public facts alone, with the reasons. The name of a task plays
no part: renaming a data set changes nothing. Rows of norm 1 (features of images, weighted words)
get a linear model and plain DP-SGD, whose learning rate is known by a rule. Tables get the same on
noisy quantiles in soft bins, with gradients of all records: one setting for all tables, which was
chosen on held-out training records of nine (docs/tables/tables-rule.md has what other settings
give, and what leaving a table out would choose). Any other model gets the gate `block`, which finds
its learning rate and clip norm within the budget.

A table is a CSV file with the settings of a method on a task at one epsilon, in the columns

    method, task, epsilon    what the row is for
    features, normalisation  how records are prepared; empty: as the task has them
    network                  changes of the task's network, a JSON object
    given, chosen            hyper-parameters, two JSON objects: those that stand in a paper, and
                             those that were chosen by trying several

`paper`, `tramer-boneh` and `tuned` are such files beside this module. They are written by
`python -m reproduction.presets` in the repository, which also says where each number is from. A
file of yours is named by its path: `--preset settings.csv`.
"""

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from dpsur.errors import InvalidInputError
from dpsur.features import FEATURES, MEAN, NONE, QUANTILES, TABLE
from dpsur.privacy.events import single_release_noise


@dataclass(frozen=True)
class DataFacts:
    """What is public about a run before it starts; None is what is not known.

    The number of records, the shape of one, the number of classes, the kind of records (`words`)
    where the shape does not say it; whether there is a GPU, whether the model is the user's own,
    the features that were asked for, whether the run is a short try (`max_updates`), epsilon and
    delta. Of a table also what is predicted (`classes`, `labels` or `number`) and by how many
    outputs. `whole` says that `records` is the exact number, `unit` what it counts: a record
    or a person.
    """

    records: int | None
    shape: tuple[int, ...] | None
    classes: int | None
    kind: str | None = None
    gpu: bool = True
    own_model: bool = False
    features: str | None = None
    short: bool = False
    target: tuple[str, int] | None = None
    whole: bool = True
    budget: tuple[float, float] | None = None
    unit: str = "record"


@dataclass(frozen=True)
class Preset:
    """What a run is asked to do: hyper-parameters, features and changes of the network.

    `chosen` are the hyper-parameters among the options that were chosen by trying several, and
    `given` those that hold where others are tried.
    """

    given: Mapping[str, Any]
    features: str | None
    normalisation: str | None = NONE
    network: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        return {**self.given, **self.chosen}


TABLES = ("paper", "tramer-boneh", "tuned")
ENCODER, AUTO = "encoder", "auto"
# Of linear models from zero on rows of norm 1.
LINEAR: Mapping[str, Any] = {"schedule": "cosine", "momentum": 0.9, "gate": "none"}
PRESETS: Final = (*TABLES, ENCODER, AUTO)
COLUMNS = (
    *("method", "task", "epsilon", "features", "normalisation"),
    *("network", "given", "chosen"),
)
Rows = dict[tuple[str, str, float], Preset]


def table_preset(name: str, method: str, task: str, epsilon: float) -> Preset:
    """The row of a table, or an error that says what the table has."""
    text, shown = _text(name)
    rows = _rows(text, shown)
    wanted = (method, task, epsilon)
    if wanted in rows:
        return rows[wanted]
    methods, tasks = [row[0] for row in rows], [row[1] for row in rows]
    for kind, value, known in (("task", task, tasks), ("method", method, methods)):
        if value not in known:
            raise InvalidInputError(
                f"preset {shown} has no settings for {kind} {value}; it has {_list(known)}. "
                f"Without a preset: dpsur train --method {method} --task {task}"
            )
    epsilons = [row[2] for row in rows if row[:2] == (method, task)]
    if not epsilons:
        known = [row[1] for row in rows if row[0] == method]
        raise InvalidInputError(
            f"preset {shown} has no settings for method {method} on task {task}; it has "
            f"{_list(known)}"
        )
    raise InvalidInputError(
        f"preset {shown} has no settings for epsilon {epsilon:g}; choose one of "
        f"{', '.join(f'{value:g}' for value in epsilons)}, or leave the preset out"
    )


def _list(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _text(name: str) -> tuple[str, str]:
    if name in TABLES:
        return (files("dpsur.presets") / f"{name}.csv").read_text(encoding="utf-8"), name
    try:
        return Path(name).read_text(encoding="utf-8"), name
    except (OSError, UnicodeError) as error:
        raise InvalidInputError(f"cannot read preset {name}: {error}") from None


@cache
def _rows(text: str, shown: str) -> Rows:
    table = csv.DictReader(text.splitlines())
    if missing := [column for column in COLUMNS if column not in (table.fieldnames or ())]:
        raise InvalidInputError(f"preset {shown} lacks the column {missing[0]}")
    rows: Rows = {}
    for row in table:
        try:
            rows[row["method"], row["task"], float(row["epsilon"])] = _preset(row)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"preset {shown}, line {table.line_num}: {error or 'a value is missing'}"
            ) from None
    return rows


def _preset(row: dict[str, Any]) -> Preset:
    network, given, chosen = (
        json.loads(row[column] or "{}") for column in ("network", "given", "chosen")
    )
    if not all(isinstance(values, dict) for values in (network, given, chosen)):
        raise ValueError("network, given and chosen must be JSON objects")
    return Preset(given, row["features"] or None, row["normalisation"] or None, network, chosen)


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
        **LINEAR,
    }


WORDS = "words"
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
    check_method(AUTO, method)
    features = None if facts is None else facts.features
    if facts is not None and facts.records is not None and not facts.own_model:
        rows = linear_options(facts.records)
        if features is None and facts.kind == WORDS:
            return Preset(rows, "vectors", NONE, {"name": "linear-head"})
        if features == WORDS:
            return Preset(rows, WORDS, NONE, {"name": "linear-head"})
        if features == TABLE or (features is None and facts.kind == TABLE):
            return Preset(table_options(facts), TABLE, QUANTILES)
        if features is None and facts.shape is not None and len(facts.shape) == 3:
            # Without a GPU the encoder takes fifty times as long as scattering, whose linear models
            # of grey images lose little without it.
            grey = "scattering+encoder" if facts.gpu else "whitened-scattering"
            features = grey if facts.shape[0] == 1 else "encoder"
        if features in UNIT_ROWS:
            return Preset(rows, features, MEAN)
    # a model whose learning rate is not known; a short try has no room for a search
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
    shape = f" of shape {' x '.join(map(str, facts.shape))}" if facts.shape else ""
    known = [f"{facts.records} {facts.unit}s{shape}"] if facts.records else []
    known += [f"{facts.classes} classes"] if facts.classes else []
    known += ["a GPU" if facts.gpu else "no GPU", f"epsilon {epsilon:g}", f"delta {delta:g}"]
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


def _about_rows(
    facts: DataFacts,
    features: str | None,
    normalisation: str | None,
    options: Mapping[str, Any],
) -> list[str]:
    rate, gate = options["learning_rate"], options["gate"]
    settings = (
        f"{options['updates']} updates, clip norm {options['max_grad_norm']:g}, "
        f"{options['schedule']} decay, learning rate "
    )
    kept = f"updates are tested (gate {gate}), as requested"
    if gate == "none":
        kept = "plain DP-SGD, every update is kept: testing updates does not pay for a linear model"
    if features == TABLE:
        return [
            "linear model from zero on noisy quantiles in soft bins: histograms of the numbers, if "
            "there are any, are charged and find where in the declared ranges the records are",
            f"all {facts.unit}s in every batch of {settings}{rate:.3g}",
            kept,
        ]
    mean = "; a noisy mean of the features is subtracted, which costs about 1% of the precision"
    return [
        f"linear model from zero on {features}{_cost(facts, features)}"
        + (mean if normalisation == MEAN else ""),
        f"expected batch size {options['batch_size']}, {settings}"
        + ("by the rule for linear models" if rate == "linear-head" else f"{rate:g}"),
        kept,
    ]


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
    """The learning rate is left to the rule for linear models.

    Every update is kept, with either method: the settings were measured so.
    """
    check_method(ENCODER, method)
    if facts is None or facts.records is None or facts.shape is None or len(facts.shape) != 3:
        raise InvalidInputError(
            "preset encoder needs images of shape (channels, height, width), and this task has "
            "other records; leave the preset out"
        )
    features = "scattering+encoder" if facts.shape[0] == 1 else "encoder"
    return Preset(linear_options(facts.records), features, MEAN)


def check_method(preset: str, method: str) -> None:
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise InvalidInputError(
            f"preset {preset} has no settings for method {method}; it has {known}"
        )


def linear_options(records: int) -> dict[str, Any]:
    """Hyper-parameters of a linear model from zero on rows of norm 1."""
    size = 1  # the power of two nearest to a seventh of the records, on the logarithmic scale
    while size * 2**0.5 < records / RECORDS_PER_BATCH_RECORD:
        size *= 2
    return {
        "batch_size": size,
        "updates": UPDATES,
        "max_grad_norm": CLIP_NORM,
        "learning_rate": "linear-head",
        **LINEAR,
    }


def preset_named(
    name: str, method: str, task: str, epsilon: float, facts: DataFacts | None = None
) -> Preset:
    """The preset of a method on a task at a budget, or an error that says which there are.

    `auto` and `encoder` follow from public facts: neither the task's name nor epsilon matters.
    """
    if name == AUTO:
        return auto_preset(method, facts)
    if name == ENCODER:
        return encoder_preset(method, facts)
    if name in TABLES or name.endswith(".csv"):
        return table_preset(name, method, task, epsilon)
    raise InvalidInputError(
        f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}, or a file: settings.csv"
    )
