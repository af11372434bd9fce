"""Grids of trained runs, which processes can share, and their rows.

What every experiment that trains on a task has in common.
"""

import gc
import json
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from dpsur.config import Intervals, Performance, RunConfig
from dpsur.errors import InvalidInputError
from dpsur.features import PRIVATE, compute, features_named
from dpsur.functional.records import Examples
from dpsur.methods import Nonprivate
from dpsur.privacy.budget import Budget
from dpsur.runs.fit import run_together
from dpsur.runs.result import Run
from dpsur.runs.session import Session, choose_device
from dpsur.runs.tasks import TaskRecords, build_task_session, features_of, load_records, task_of
from reproduction.arms import ARMS
from reproduction.base import Cell, Experiment, Options, Row

DELTA = 1e-5
HOLD_OUT_SEED = 2025
# Trials between two looks at a captured run; evaluations only at the end.
BLOCK, NEVER = 100, 10**9
# The same for a run whose curve is kept: a captured run is evaluated between two blocks.
CURVE_BLOCK = 20
CURVE = ("updates", "epsilon", "loss", "accuracy")
# Where products of full precision would take most of the time of a grid; rows say so.
WITH_TF32 = ("cifar10",)
# Raised whenever private normalisation changes what it makes of the records.
PREPARATION = 2


@dataclass(frozen=True)
class TrainingCell:
    """One run: an arm on a task at a budget, with changes of its preset.

    `evaluations` asks for a curve of about so many points; without it only the end is measured.
    `features` replace those of the preset. `stretch` multiplies the budget and nothing else: the
    preset stays that of `epsilon`.
    """

    task: str
    arm: str
    epsilon: float
    seed: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    hold_out: int = 0
    evaluations: int = 0
    features: str | None = None
    stretch: float = 1  # an int, so that a whole epsilon stays one in the row

    def config(self) -> dict[str, Any]:
        """Everything that the result depends on, as plain values."""
        arm = ARMS[self.arm]
        preset = arm.preset(self.task, self.epsilon)
        # where settings are tried, what was chosen earlier plays no part
        chosen = preset.given if self.hold_out else preset.options
        features = self.features or preset.features or ""
        return {
            "task": self.task,
            "arm": self.arm,
            "method": arm.method.name,
            "epsilon": self.epsilon * self.stretch,
            "delta": DELTA,
            "accounting": arm.accounting,
            "features": features,
            "normalisation": preset.normalisation,
            "network": dict(preset.network),
            "options": {**chosen, **self.changes},
            "tried": dict(self.changes),
            "hold_out": self.hold_out,
            "tf32": self.task in WITH_TF32 and "encoder" not in features,
            **({"preparation": PREPARATION} if preset.normalisation == PRIVATE else {}),
            **({"evaluations": self.evaluations} if self.evaluations else {}),
            **({"stretch": self.stretch} if self.stretch != 1 else {}),
        }


class TrainingGrid(Experiment):
    """An experiment whose cells are runs on tasks; a part of the rows is worth rendering."""

    identity = ("config", "seed")
    partial = True
    shared = True

    @abstractmethod
    def runs(self, seeds: tuple[int, ...] | None) -> Iterable[TrainingCell]:
        """The runs, the most important first."""

    def cells(self, options: Options) -> Iterator[Cell]:
        """A cell for every run on a task that is asked for."""
        for run in self.runs(options.seeds):
            if options.ask_for(run.task, run.arm, run.epsilon):
                yield {"config": run.config(), "seed": run.seed}

    def make(self, cells: Sequence[Cell], options: Options) -> Iterator[Row]:
        """Run this process's share, seeds of one configuration together.

        Configurations on the same records follow each other, so that those are loaded once. Every
        other process begins with the last records: large networks fill a GPU and small ones wait
        for it, so that both at once take less than one after the other.
        """
        limit_gpu_share(options)
        # Shares follow from the place in the whole grid: what is missing changes while others
        # fill it.
        groups: dict[str, list[Cell]] = {
            json.dumps(cell["config"]): [] for cell in self.cells(options)
        }
        for cell in cells:
            groups[json.dumps(cell["config"])].append(cell)
        mine = [group for group in options.share(list(groups.values())) if group]
        in_order = list(dict.fromkeys(_records_of(group) for group in mine))
        for records in in_order[::-1] if options.shard[0] % 2 else in_order:
            for group in mine:
                name = f"{self.name} {json.dumps(group[0]['config'])}"
                if _records_of(group) == records and options.takes(name):
                    yield from _filled(group, options.device)


def _records_of(group: Sequence[Cell]) -> tuple[Any, ...]:
    config = group[0]["config"]
    return config["task"], config["features"], config["hold_out"]


def _filled(group: Sequence[Cell], device: str | None) -> Iterator[Row]:
    config, seeds = group[0]["config"], [cell["seed"] for cell in group]
    for seed, row in trained_rows(config, seeds, device):
        yield {"config": config, "seed": seed, **row}


def limit_gpu_share(options: Options) -> None:
    """Limit a process that makes one of N parts of a grid to an Nth of the GPU's memory.

    Microbatches and tables are sized by what is free. Without a limit the first process would leave
    nothing to the others.
    """
    _, parts = options.shard
    if parts == 1:
        return
    device = choose_device(options.device or "auto")
    if device.type == "cuda":
        # by its number: "the current GPU" is not accepted here
        number = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(1 / parts, number)


def task_run(config: Mapping[str, Any], seed: int, device: str | None) -> RunConfig:
    """The run that a row's configuration describes."""
    return RunConfig(
        task=config["task"],
        method=ARMS[config["arm"]].build(config["options"]),
        budget=Budget(config["epsilon"], config["delta"]),
        accounting=config["accounting"],
        features=config["features"],
        normalisation=config["normalisation"],
        network=config["network"],
        seed=seed,
        device=device or "auto",
        performance=Performance(tf32=config["tf32"], repeatable=False),
        intervals=Intervals(checkpoint_every=BLOCK, evaluate_every=NEVER),
    )


def trained_rows(
    config: Mapping[str, Any], seeds: Sequence[int], device: str | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run a configuration with several seeds at once, as many as fit, and note what came of each.

    Accuracy is that of what is released, the last iterate unless an average is asked for. A run
    that may release nothing has no row.
    """
    found = _made_together(config, seeds, device)
    if found is not None:
        yield from found
        return
    # Every seed has its own copy of the records, normalised with its own noise: halve them.
    torch.cuda.synchronize()  # what other seeds have begun is not over
    gc.collect()
    torch.cuda.empty_cache()
    half = len(seeds) // 2
    for some in (seeds[:half], seeds[half:]):
        yield from trained_rows(config, some, device)


def _made_together(
    config: Mapping[str, Any], seeds: Sequence[int], device: str | None
) -> list[tuple[int, dict[str, Any]]] | None:
    """What came of the seeds at once, or None if a GPU has no room for several."""
    records = loaded_records(config["task"], config["features"], config["hold_out"], device)
    try:
        sessions = [_session(config, seed, device, records) for seed in seeds]
        started = time.perf_counter()
        outcomes = run_together(sessions)
    except RuntimeError as error:
        if len(seeds) == 1 or not is_of_memory(error):
            raise
        return None
    seconds = (time.perf_counter() - started) / len(seeds)
    found = []
    for seed, session, run in zip(seeds, sessions, outcomes, strict=True):
        if isinstance(run, Run):
            curve = {"curve": curve_of(run)} if "evaluations" in config else {}
            made = _row(config["arm"], session, run, seconds, len(seeds))
            found.append((seed, {**made, **curve}))
    return found


def is_of_memory(error: BaseException | None) -> bool:
    """Whether a GPU was full, perhaps while a graph was captured, whose end is an error too."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def _session(
    config: Mapping[str, Any], seed: int, device: str | None, records: TaskRecords
) -> Session:
    session = build_task_session(task_run(config, seed, device), records)
    if "evaluations" not in config:
        return session
    every = max(1, session.plan.length // config["evaluations"])
    pace = Intervals(checkpoint_every=CURVE_BLOCK, evaluate_every=every)
    return replace(session, config=replace(session.config, intervals=pace))


def curve_of(run: Run) -> dict[str, list[float]]:
    """What the evaluations of a run found, and the budget that it had spent by then."""
    found = [row for row in run.private.rows if row["kind"] == "evaluation"]
    return {name: [round(row[name], 6) for row in found] for name in CURVE}


def _figures(arm: str, run: Run) -> dict[str, float | None]:
    """Epsilon under each accounting; of what is no method, the claim that it is run for alone."""
    kept = set(run.epsilon) if ARMS[arm].sound else {ARMS[arm].accounting}
    return {name: figure if name in kept else None for name, figure in run.epsilon.items()}


def _row(arm: str, session: Session, run: Run, seconds: float, together: int) -> dict[str, Any]:
    ledger = run.private.ledger
    assert run.scores is not None
    return {
        "accuracy": run.scores["accuracy"],
        "loss": run.scores["loss"],
        "updates": ledger.updates,
        "trials": ledger.trials,
        "epsilon": _figures(arm, run),
        "seconds": round(seconds, 2),
        "together": together,
        "device": device_name(session.streams.device),
    }


def with_features(config: RunConfig, records: TaskRecords, device: torch.device) -> TaskRecords:
    """The records of a run with their features computed, on a device, for several runs to share."""
    features, scale = features_named(features_of(config)), task_of(config).pixel_scale
    train, test = (
        None
        if part is None
        else Examples(compute(features, part.inputs, device=device, scale=scale), part.targets)
        for part in (records.train, records.test)
    )
    assert train is not None
    return replace(
        records,
        train=train.to(device),
        test=None if test is None else test.to(device),
        featured=True,
    )


def held_out(train: Examples, count: int) -> tuple[Examples, Examples]:
    """Training records without some that are kept back, and those, drawn once for all."""
    if not 0 < count < len(train):
        raise InvalidInputError(
            f"hold_out must be above 0 and below the {len(train)} records, got {count}"
        )
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(HOLD_OUT_SEED))
    order = order.to(train.targets.device)
    return train.select(order[count:]), train.select(order[:count])


@lru_cache(maxsize=1)
def loaded_records(task: str, features: str, hold_out: int, device: str | None) -> TaskRecords:
    """TaskRecords with their features, kept on the device for the next run on the same task."""
    chosen = choose_device(device or "auto")
    run = RunConfig(task, Nonprivate(), Budget(1.0, DELTA), "proven", features=features)
    records = with_features(run, load_records(run), chosen)
    if not hold_out:
        return records
    # Features of all records are in the cache already, those of a part would be computed again.
    train, test = held_out(records.train, hold_out)
    return replace(records, train=train, test=test)


def device_name(device: torch.device) -> str:
    """The device that a run was made on, by name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; zero spread for a single value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
