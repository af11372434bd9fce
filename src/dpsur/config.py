"""The configuration of a run: one frozen value, built once and passed down whole.

`RunConfig` declares every option of a run that can be written down. Beside it a run on your own
data gets objects: a model, records and a loss (see `dpsur.fit`).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch

from dpsur import checks
from dpsur.distributed.ranks import DEFAULT_TIMEOUT
from dpsur.errors import InvalidInputError
from dpsur.features import FEATURES, NORMALISATIONS, features_named
from dpsur.methods import METHODS, Dpsgd, Dpsur, Method, Nonprivate, method_named
from dpsur.options import (
    DATA,
    MODEL,
    PERFORMANCE,
    PRIVACY,
    RUN,
    build,
    check_options,
    flag,
    from_plain,
    option,
    to_plain,
)
from dpsur.presets import AUTO, ENCODER, PRESETS, DataFacts, Preset, explain_auto, preset_named
from dpsur.privacy.accounting import ACCOUNTINGS, DEFAULT_ACCOUNTING, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.conversion import NOT_HELD_OUT
from dpsur.privacy.plan import NOT_HIDDEN, WAYS_TO_HIDE
from dpsur.privacy.statement import PERSON, RECORD
from dpsur.tasks import DEFAULT_TASK, TASKS, Declared, Task, task_named
from dpsur.tasks.base import NOTHING

DEFAULT_BUDGET = Budget(3.0, 1e-5)
# Options of a test of every candidate, and the accountings that cover the gate block.
PAPER_GATE_OPTIONS = (
    *("val_batch_size", "val_noise_multiplier", "loss_clip", "accept_threshold"),
    *("accept_ratio", "on_reject", "trials"),
)
STEERING_ACCOUNTINGS = ("proven", "every-trial")


@dataclass(frozen=True, repr=False)
class Intervals(checks.NamedArguments):
    """How often to save checkpoints and to evaluate. The result does not depend on it.

    CUDA graphs make trials in blocks, and what is due comes when a block is done. A `replayable`
    run makes them one by one, with kernels that give the same bits every time.
    """

    checkpoint_every: int = option(
        25, "trials between checkpoints", check=checks.at_least_one, metavar="TRIALS", group=RUN
    )
    evaluate_every: int | None = option(
        None,
        "updates between evaluations on the public test set (default: 20 evaluations in a run)",
        check=checks.at_least_one,
        metavar="UPDATES",
        group=RUN,
    )
    replayable: bool = option(
        False,
        "keep the state after every update in private/ and commit to it in the release, so that "
        "`dpsur verify --replay` can recompute updates; trials are not captured (default: no)",
        group=RUN,
    )
    rank_timeout: float = option(
        DEFAULT_TIMEOUT,
        "seconds that a process of a distributed run waits for the others before it gives up",
        check=checks.positive,
        metavar="SECONDS",
        group=RUN,
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, repr=False)
class Performance(checks.NamedArguments):
    """Performance options. They do not change the result beyond rounding.

    `capture` replays whole trials as a CUDA graph where that is possible. `tf32` lets matrix
    products and convolutions round their inputs to 10 bits, and False forbids it; without either
    PyTorch's own settings stay, which round convolutions on CUDA. `bf16` computes the layers of a
    training pass with 8 bits; norms, sums and noise keep float32, and so do tests of candidates.
    The privacy statement records both. `data_bytes` is the device memory that the records may take
    (default: half of what is free on a GPU): where they need more they stay on the host, and
    their batches are copied to the device one ahead. A data set that takes more than that (default:
    2 GiB of host memory) is never held: `workers` processes read its batches while the device
    computes, none (0) or some (default: up to 4). Set `workers` to have any data set read that way.
    `repeatable` makes seeded runs on CUDA use slower kernels that give the same bits every time.
    """

    capture: bool = option(
        True, "replay whole trials as a CUDA graph where possible (default: yes)", group=PERFORMANCE
    )
    tf32: bool | None = option(
        None,
        "let CUDA round products to TF32; the statement records it (default: as PyTorch is set, "
        "which rounds convolutions)",
        group=PERFORMANCE,
    )
    repeatable: bool = option(
        True, "use kernels that give the same bits every time in seeded runs", command_line=False
    )
    bf16: bool = option(
        False,
        "compute layers in bfloat16, but norms, sums, noise and tests in float32; the statement "
        "records it (default: no)",
        group=PERFORMANCE,
    )
    data_bytes: int | None = option(
        None,
        "device memory that the records may take",
        check=checks.at_least_one,
        command_line=False,
    )
    workers: int | None = option(
        None,
        "processes that read a data set while the device computes",
        check=lambda name, value: checks.whole(name, value, 0),
        command_line=False,
    )

    def __post_init__(self) -> None:
        check_options(self)


def _is_method(name: str, value: Any) -> None:
    if not isinstance(value, Method):
        known = ", ".join(f"dpsur.{kind.__name__}()" for kind in METHODS.values())
        raise InvalidInputError(
            f"{name} must be an instance of a method, got {checks.shown(value)}; choose one of "
            f"{known}"
        )


def check_kind(name: str, value: Any, kind: type, example: str = "()") -> None:
    """Refuse a value of another class, such as an epsilon without its delta for a budget."""
    if not isinstance(value, kind):
        raise InvalidInputError(
            f"{name} must be a dpsur.{kind.__name__}, got {checks.shown(value)}; "
            f"write dpsur.{kind.__name__}{example}"
        )


def check_budget(value: Any) -> None:
    check_kind("budget", value, Budget, "(epsilon=3.0, delta=1e-5)")


def _is_device(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise InvalidInputError(f"unknown {name} {value!r}; use cpu, cuda or auto")


def _is_path(name: str, value: Any) -> None:
    if not isinstance(value, (str, PathLike)):
        raise InvalidInputError(
            f"{name} must be a path, got {checks.shown(value)}; write {name}='folder'"
        )


@dataclass(frozen=True, repr=False)
class RunConfig(checks.NamedArguments):
    """The configuration of a run. None leaves the choice to the task or the method.

    `task` names a task, or is None where a model and records are given as objects. `keep_fraction`
    is the share of its records to train on. Of a `holdout` fraction of the private records noisy
    figures are released, within epsilon. `network` changes arguments of the task's network.
    `network_seed` fixes the initial weights of an unseeded run, so that the same network can be
    built when it is resumed; it has no part in sampling or noise. The config is
    private: it may hold the seed.
    """

    task: str | None = option(
        DEFAULT_TASK,
        "or npz:FILE, csv:FILE, parquet:FILE, jsonl:FILE or images:DIR for your data",
        names=TASKS,
        group=DATA,
        common=True,
    )
    method: Method = option(
        Dpsur,
        "(default: dpsgd; dpsur with --preset paper or with an option of the gates loss and coin)",
        names=METHODS,
        check=_is_method,
        stored=False,
        group=MODEL,
        common=True,
    )
    budget: Budget = DEFAULT_BUDGET
    accounting: str | None = option(
        None,
        "published is the paper's analysis, which is not proved (default: proven, and proven-pld, "
        "which is tighter, behind the gates loss and coin)",
        check=lambda _, value: accounting_named(value),
        names=ACCOUNTINGS,
        group=PRIVACY,
    )
    features: str | None = option(
        None,
        "features to train on (default: the method's, else the task's)",
        check=lambda _, value: features_named(value),
        names=FEATURES,
        group=MODEL,
        common=True,
    )
    normalisation: str | None = option(
        None,
        "how to normalise features; private statistics and the mean (of the encoder's features) "
        "are charged (default: group for scattering, else none)",
        NORMALISATIONS,
        group=MODEL,
    )
    preset: str | None = option(
        None,
        "settings that other options override: auto and encoder choose from public facts, paper, "
        "tramer-boneh, tuned and a FILE.csv are tables by method, task and epsilon (default: auto, "
        "unless a method or the gate loss or coin is named)",
        names=PRESETS,
        group=MODEL,
        common=True,
    )
    network: Mapping[str, Any] = option(dict, "changes of the network", command_line=False)
    activation: str | None = option(
        None, "of the task's network: tanh or relu (default: tanh)", group=MODEL
    )
    model: str | None = option(
        None,
        "your function without arguments that returns the network; for a table also linear or mlp "
        "(default: the task's network)",
        metavar="MODULE:FUNCTION",
        group=MODEL,
        common=True,
    )
    data_dir: Path | None = option(
        None,
        "folder of the data (default: $DPSUR_DATA, or the downloads in the cache)",
        metavar="DIR",
        group=DATA,
    )
    keep_fraction: float | None = option(
        None,
        "train on a random subset of about this fraction, by a keyed hash of each record; the "
        "fraction is public, and epsilon covers the records that are kept",
        check=checks.sample_rate,
        metavar="F",
        group=DATA,
    )
    records_per_person: int | None = option(
        None,
        "with --group-by, use at most K records of a person; public (default: 16)",
        check=checks.at_least_one,
        metavar="K",
        group=PRIVACY,
    )
    sampling: str = option(
        PERSON,
        "with --group-by: draw persons for a batch, each of whom adds one gradient, or records, "
        "each of which adds its own; record needs --records, method dpsgd and the gate none",
        (PERSON, RECORD),
        group=PRIVACY,
    )
    group_size: int | None = option(
        None,
        "state the guarantee for groups of K records too, as those of a person whom no column "
        "names; it is converted from the guarantee for one record",
        check=checks.at_least_one,
        metavar="K",
        group=PRIVACY,
    )
    records: int | None = option(
        None,
        "a public size of the data set where the true number of records (or of persons) is not "
        "public; rates, noise and delta follow from it alone",
        check=checks.at_least_one,
        metavar="N",
        group=PRIVACY,
    )
    ledger: str | PathLike[str] | None = option(
        None,
        "book what the run may spend in this ledger of the data set before it starts, and refuse "
        "a run above the ledger's total; make one with `dpsur ledger create`",
        check=_is_path,
        metavar="PATH",
        group=PRIVACY,
    )
    holdout: float | None = option(
        None,
        "hold out about this fraction of the private records and release noisy test figures of "
        "them (accuracy, AUC, clipped log loss) within epsilon",
        check=checks.sample_rate,
        metavar="F",
        group=PRIVACY,
    )
    max_updates: int | None = option(
        None,
        "end the planned run after N updates, for a trial run; noise stays as planned",
        check=checks.at_least_one,
        metavar="N",
        group=RUN,
    )
    hide_rejections: str = option(
        NOT_HIDDEN,
        "for runs that can be watched: constant runs a fixed number of trials, so that run time "
        "reveals nothing about rejections; delay is the paper's random wait, which blurs it",
        WAYS_TO_HIDE,
        metavar="WAY",
        group=PRIVACY,
    )
    out: str | PathLike[str] | None = option(
        None,
        "new folder for the run (default: runs/TASK-METHOD, numbered where that exists)",
        check=_is_path,
        metavar="DIR",
        stored=False,
        group=RUN,
        common=True,
    )
    device: str = option("auto", "cpu, cuda or auto", check=_is_device, group=RUN, common=True)
    seed: int | None = option(
        None,
        "make the run repeatable; anyone who knows the seed can subtract the noise (default: none)",
        group=RUN,
        common=True,
    )
    network_seed: int | None = option(None, "of the initial weights", command_line=False)
    declared: Declared = NOTHING
    intervals: Intervals = Intervals()
    performance: Performance = Performance()

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_kind("intervals", self.intervals, Intervals)
        check_kind("performance", self.performance, Performance)
        check_options(self)
        column, most = self.declared.group_by, self.records_per_person
        if self.task is not None and column is None and self.sampling == RECORD:
            raise InvalidInputError("sampling record needs --group-by COLUMN")
        if self.task is not None and column is None and most is not None:
            raise InvalidInputError(f"records_per_person {most} needs --group-by COLUMN")
        for name in ("holdout", "keep_fraction"):
            if column is not None and getattr(self, name) is not None:
                raise InvalidInputError(
                    f"{name} {getattr(self, name):g} parts the records of a person; leave it out "
                    f"with --group-by {column}"
                )
        if self.intervals.replayable and self.seed is not None:
            raise InvalidInputError(
                "a replayable run commits to the key of its random numbers, and a key that follows "
                f"from a seed can be guessed; leave out seed {self.seed} or replayable"
            )
        if self.group_size is not None and self.holdout is not None:
            raise InvalidInputError(f"{NOT_HELD_OUT}; leave out group_size or holdout")
        if self.holdout is not None and isinstance(self.method, Nonprivate):
            raise InvalidInputError(
                f"holdout {self.holdout:g} is for private runs; method {self.method.name} is none: "
                "leave it out, and test on a part of your records"
            )
        if math.isinf(self.budget.epsilon) and not isinstance(self.method, Nonprivate):
            raise InvalidInputError(
                f"epsilon must be finite for method {self.method.name}, got {self.budget.epsilon}; "
                f"to train without privacy use method {Nonprivate.name}"
            )

    @classmethod
    def from_names(
        cls,
        values: Mapping[str, Any],
        method: str | None = None,
        *,
        auto: bool = False,
        **options: Any,
    ) -> Self:
        """A config from plain values by name, as a command line gives them.

        `options` are hyper-parameters of the method. What is not given comes from the preset, if
        one is named, else from the task's settings for the method. With `auto`, that preset is
        taken where neither a preset nor a method is named. Where no method is named, presets for
        runs without a test of candidates are for DP-SGD, and others for DPSUR.
        """
        accounting = values.get("accounting") or DEFAULT_ACCOUNTING
        if auto and values.get("preset") is None and method is None:
            # a test of every candidate has settings of its own
            paper_gate = options.get("gate") in ("loss", "coin") or any(
                options.get(name) is not None for name in PAPER_GATE_OPTIONS
            )
            if accounting in STEERING_ACCOUNTINGS and not paper_gate:
                values = {**values, "preset": AUTO}
        unnamed = Dpsgd if values.get("preset") in (AUTO, ENCODER) else Dpsur
        kind = method_named(method or unnamed.name)
        check_method_options(kind, options)
        task = task_named(values.get("task", DEFAULT_TASK), declared=Declared.among(values))
        if values.get("preset") is None:
            # those that suit a task, as long as its own features and network are used
            features = values.get("features") or kind.features or task.default_features
            own = features == task.default_features and values.get("model") is None
            usual = task.settings.get(kind.name, {}) if own else {}
            return build(cls, values, method=kind(**{**usual, **options}))
        epsilon = values.get("epsilon", DEFAULT_BUDGET.epsilon)
        facts = data_facts(task, values)
        preset = preset_named(values["preset"], kind.name, task.name, epsilon, facts)
        usual = {"features": preset.features, "normalisation": preset.normalisation}
        values = {**usual, **values, "network": dict(preset.network)}
        usual = preset.options
        if "noise_multiplier" in options and values["preset"] == AUTO:
            usual.pop("updates", None)  # they follow from the budget
        return build(cls, values, method=kind(**{**usual, **options}))

    @property
    def charged_by(self) -> str:
        """The accounting: the one that is named, or the usual one of the method."""
        return self.accounting or self.method.usual_accounting

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values, except the output folder."""
        method = {"method": self.method.name, "options": asdict(self.method)}
        return {**method, **to_plain(self)}

    @classmethod
    def from_json(cls, stored: Any) -> Self:
        """A config from what `to_json` wrote. Anything else is refused by name."""
        if not isinstance(stored, dict):
            raise InvalidInputError("it must hold a JSON object")
        values = dict(stored)
        name, options = values.pop("method", Dpsur.name), values.pop("options", {})
        if not isinstance(name, str) or name not in METHODS:
            raise InvalidInputError(f"there is no method {checks.shown(name)}")
        if not isinstance(options, dict):
            raise InvalidInputError(f"options cannot be {checks.shown(options)}")
        method = METHODS[name](**from_plain(METHODS[name], options))
        return build(cls, from_plain(cls, values), method=method)


def check_method_options(method: type[Method], options: Mapping[str, Any]) -> None:
    """Refuse hyper-parameters that the method does not have, and name the methods that do."""
    known = {each.name for each in fields(method)}
    for name in options:
        if name not in known:
            owners = [
                kind.name
                for kind in METHODS.values()
                if name in {each.name for each in fields(kind)}
            ]
            remedy = (
                f", which belongs to {', '.join(owners)}; leave it out or choose --method "
                f"{owners[0]}"
                if owners
                else f"; it has {', '.join(sorted(known))}"
            )
            raise InvalidInputError(f"method {method.name} has no option {flag(name)}{remedy}")


def data_facts(task: Task, values: Mapping[str, Any] | None = None) -> DataFacts:
    """What is public about a run on a task, with these options of `RunConfig`."""
    given = values or {}
    by_record = given.get("sampling") == RECORD
    records, budget = task.records, given.get("budget", DEFAULT_BUDGET)
    if given.get("records") is not None:
        records = given["records"]
    elif records is not None:
        kept = (given.get("keep_fraction") or 1) * (1 - (given.get("holdout") or 0))
        records = max(1, round(records * kept))
    return DataFacts(
        records,
        task.shape,
        task.classes,
        task.kind,
        gpu=uses_gpu(given.get("device", "auto")) if values is not None else True,
        own_model=given.get("model") is not None,
        features=given.get("features"),
        short=given.get("max_updates") is not None,
        target=task.target,
        whole=given.get("keep_fraction") in (None, 1) and given.get("holdout") is None,
        budget=(given.get("epsilon", budget.epsilon), given.get("delta", budget.delta)),
        unit=given.get("unit", RECORD if task.persons is None or by_record else PERSON),
    )


def uses_gpu(device: str) -> bool:
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def choose_method(
    facts: DataFacts,
    features: str | None,
    normalisation: str | None,
    accounting: str,
    *,
    own_model: bool,
) -> tuple[Method, Preset, tuple[str, ...]]:
    """What `fit` chooses from public facts where its user names no method, with the reasons.

    `own_model` says that the model was given as an object, also if it is one linear layer.
    """
    if accounting not in STEERING_ACCOUNTINGS:
        return Dpsur(), Preset({}, features, normalisation), ()
    assert facts.budget is not None
    found = preset_named(AUTO, Dpsgd.name, "", facts.budget[0], facts)
    normalisation = found.normalisation if normalisation is None else normalisation
    found = replace(found, features=found.features or features, normalisation=normalisation)
    method, shown = Dpsgd(**found.options), replace(facts, own_model=own_model)
    lines = explain_auto(shown, found.features, normalisation, asdict(method), facts.budget)
    remedy = (
        "to choose the settings yourself, pass a method, such as dpsur.Dpsgd(learning_rate=0.5)"
    )
    return method, found, (*lines, remedy)
