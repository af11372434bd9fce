"""What a run was asked to do: from the command line, or from the folder of an interrupted run."""

import argparse
import json
import os
import secrets
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from dpsur import checks
from dpsur.cli.options import build_method, flag, method_options
from dpsur.errors import CheckpointError, InvalidInputError
from dpsur.methods import METHODS, Method, method_named
from dpsur.presets import Preset, preset_named
from dpsur.privacy.accounting import DEFAULT_ACCOUNTING
from dpsur.privacy.budget import Budget
from dpsur.privacy.plans.rejections import NOT_HIDDEN
from dpsur.runs.files import RunFolder, start_command
from dpsur.runs.session import Pace, Speed
from dpsur.runs.tasks import TaskRun
from dpsur.tasks import DEFAULT_TASK, Task, task_named
from dpsur.tasks.npz import PREFIX

# Where runs go that are given no folder.
RUNS = "runs"

# Options of a new run that --resume takes from the folder instead.
SETTINGS = (
    "task",
    "method",
    "preset",
    "features",
    "normalisation",
    "activation",
    "model",
    "data_dir",
    "classes",
    "keep_fraction",
    "max_updates",
    "epsilon",
    "delta",
    "accounting",
    "hide_rejections",
    "device",
    "seed",
    "checkpoint_every",
    "evaluate_every",
    "capture",
    "tf32",
    "bf16",
)


@dataclass(frozen=True)
class Settings:
    """What a run was asked to do. Kept in the private folder: it may hold the seed.

    `network_seed` draws the initial weights of an unseeded run, and nothing else.
    """

    task: str = DEFAULT_TASK
    method: str = "dpsur"
    options: dict[str, Any] = field(default_factory=dict)
    preset: str | None = None
    network: dict[str, Any] = field(default_factory=dict)
    features: str | None = None
    normalisation: str | None = None
    activation: str | None = None
    model: str | None = None
    data_dir: str | None = None
    classes: int | None = None
    keep_fraction: float | None = None
    max_updates: int | None = None
    epsilon: float = 3.0
    delta: float = 1e-5
    accounting: str = DEFAULT_ACCOUNTING
    hide_rejections: str = NOT_HIDDEN
    device: str = "auto"
    seed: int | None = None
    network_seed: int | None = None
    checkpoint_every: int = 25
    evaluate_every: int | None = None
    capture: bool = True
    tf32: bool = False
    bf16: bool = False


def new_settings(options: argparse.Namespace) -> tuple[Settings, RunFolder]:
    """Settings from the command line, and the new folder, which is checked but not made."""
    given = {
        name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None
    }
    method = method_named(given.get("method", Settings.method))
    task = task_named(given.get("task", Settings.task), given.get("classes"))
    preset = _preset(given, method.name, task.name)
    usual = _usual_options(given, method, task) if preset is None else preset.options
    chosen = {**usual, **method_options(options, method)}
    if preset is not None:
        own = {"features": preset.features, "normalisation": preset.normalisation}
        given = {**own, **given, "network": dict(preset.network)}
    folder = RunFolder(options.out) if options.out else UnnamedFolder(task.name, method.name)
    folder.check_new()
    own_seed = secrets.randbits(62) if given.get("seed") is None else None
    return Settings(**given, options=chosen, network_seed=own_seed), folder


class UnnamedFolder(RunFolder):
    """A folder below `RUNS`, named after what is trained; numbered where that name is taken."""

    def __init__(self, task: str, method: str) -> None:
        own = Path(task.removeprefix(PREFIX)).stem if task.startswith(PREFIX) else task
        self._name = f"{own}-{method}"
        self._ours = False
        super().__init__(self._free())

    def _free(self) -> Path:
        names = chain([self._name], (f"{self._name}-{number}" for number in count(2)))
        return next(path for name in names if not os.path.lexists(path := Path(RUNS) / name))

    def create(self) -> None:
        """Make the folder, under the next name where another run has taken this one meanwhile."""
        with suppress(OSError):  # the folder itself says what is wrong
            Path(RUNS).mkdir(exist_ok=True)
            while not (self._ours or _made(self.root)):
                super().__init__(self._free())
            self._ours = True
        super().create()


def _made(folder: Path) -> bool:
    """Make a folder, unless it is there."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _usual_options(given: dict[str, Any], method: type[Method], task: Task) -> Mapping[str, Any]:
    """Hyper-parameters that suit a task, as long as its own features and network are used."""
    features = given.get("features") or method.features or task.default_features
    if features != task.default_features or given.get("model") is not None:
        return {}
    return task.settings.get(method.name, {})


def _preset(given: dict[str, Any], method: str, task: str) -> Preset | None:
    if given.get("preset") is None:
        return None
    epsilon = given.get("epsilon", Settings.epsilon)
    return preset_named(given["preset"], method, task, epsilon)


def stored_settings(options: argparse.Namespace) -> tuple[Settings, RunFolder]:
    """Settings from the folder of an interrupted run."""
    given = [
        name
        for name in ("out", *SETTINGS, *(f.name for m in METHODS.values() for f in m.options()))
        if getattr(options, name) is not None
    ]
    if given:
        raise InvalidInputError(
            f"--resume takes the settings from its folder; leave out {flag(given[0])}"
        )
    folder = RunFolder(options.resume)
    if folder.finished:
        raise InvalidInputError(
            f"the run in {folder.root} has finished; its result is in {folder.release}"
        )
    try:
        values = json.loads(folder.config.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidInputError(_nothing_to_resume(folder)) from None
    except (ValueError, RecursionError):
        raise CheckpointError(_damaged(folder, "it is not JSON")) from None
    settings = _settings_from(values, folder)
    if not folder.checkpoint.exists() and not folder.unstarted:
        raise CheckpointError(
            f"{folder.root} cannot be resumed: {folder.checkpoint} is missing; start a new run in "
            "another folder"
        )
    return settings, folder


def _nothing_to_resume(folder: RunFolder) -> str:
    if folder.checkpoint.exists():
        return (
            f"the run in {folder.root} was started from Python, or {folder.config} was removed; "
            f"resume it with {folder.how_to_resume()}"
        )
    return (
        f"{folder.root} holds no run to resume ({folder.config} is missing); start one with: "
        f"{start_command(folder.root)}"
    )


def _settings_from(values: Any, folder: RunFolder) -> Settings:
    """Stored settings; a file that someone else has changed may hold anything."""
    if not isinstance(values, dict):
        raise CheckpointError(_damaged(folder, "it is not a table of settings"))
    kinds = typing.get_type_hints(Settings)
    for name, value in values.items():
        if name not in kinds:
            raise CheckpointError(_damaged(folder, f"there is no setting {name!r}"))
        if not _is_of_kind(value, kinds[name]):
            raise CheckpointError(_damaged(folder, f"{name} cannot be {_shown(value)}"))
    settings = Settings(**values)
    if settings.method not in METHODS:
        raise CheckpointError(_damaged(folder, f"there is no method {_shown(settings.method)}"))
    try:
        task_run(settings)
    except (InvalidInputError, TypeError) as error:
        raise CheckpointError(_damaged(folder, str(error))) from error
    return settings


def _is_of_kind(value: Any, kind: Any) -> bool:
    allowed = {typing.get_origin(k) or k for k in typing.get_args(kind) or (kind,)}
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict)
    return type(value) in (allowed | {int} if float in allowed else allowed)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _damaged(folder: RunFolder, reason: str) -> str:
    again = "start a new run in another folder"
    if folder.unstarted:
        again = f"start the run again with: {start_command(folder.root)}"
    return f"{folder.config} is damaged ({reason}); put back what was there, or {again}"


def task_run(settings: Settings) -> TaskRun:
    """The run that settings ask for."""
    checks.at_least_one("checkpoint_every", settings.checkpoint_every)
    if settings.evaluate_every is not None:
        checks.at_least_one("evaluate_every", settings.evaluate_every)
    return TaskRun(
        task=settings.task,
        method=build_method(settings.method, settings.options),
        budget=Budget(settings.epsilon, settings.delta),
        accounting=settings.accounting,
        features=settings.features,
        normalisation=settings.normalisation,
        network=_network(settings),
        model=settings.model,
        data_dir=None if settings.data_dir is None else Path(settings.data_dir),
        classes=settings.classes,
        keep_fraction=settings.keep_fraction,
        max_updates=settings.max_updates,
        hide_rejections=settings.hide_rejections,
        seed=settings.seed,
        network_seed=settings.network_seed,
        device=settings.device,
        pace=Pace(settings.checkpoint_every, settings.evaluate_every),
        speed=Speed(capture=settings.capture, tf32=settings.tf32, bf16=settings.bf16),
    )


def _network(settings: Settings) -> dict[str, Any]:
    """Changes of the task's network: the preset's, and what was asked for beside it."""
    asked = {} if settings.activation is None else {"activation": settings.activation}
    return {**settings.network, **asked}
