"""The command line of a run: options from the declarations, and the config that they give."""

import argparse
import json
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from dpsur.cli.parser import Parser
from dpsur.config import RunConfig, check_method_options
from dpsur.distributed import Ranks, connect, is_distributed, restarted
from dpsur.errors import CheckpointError, InvalidInputError
from dpsur.methods import METHODS, Method, method_named
from dpsur.options import DATA, MODEL, PERFORMANCE, PRIVACY, RUN, Option, by_heading, declared, flag
from dpsur.runs.files import RunFolder, command_in, numbered
from dpsur.runs.session import choose_device
from dpsur.tasks import DEFAULT_TASK, OWN, TASKS, Declared, Task

# Where runs go that are given no folder.
RUNS = "runs"
METAVARS = {int: "COUNT", float: "NUMBER"}


def add_run_options(parser: argparse.ArgumentParser, groups: Iterable[str]) -> None:
    """Add the options of `RunConfig` under these headings. Options that are not given are None."""
    defaults = RunConfig()
    for heading in groups:
        group = parser.add_argument_group(heading)
        for found in declared(RunConfig).values():
            if found.group != heading or not found.command_line:
                continue
            settings: dict[str, Any] = {"help": _run_help(found, defaults).replace("%", "%%")}
            if found.kind is bool:
                settings["action"] = argparse.BooleanOptionalAction
            else:
                settings |= {"metavar": found.metavar}
                settings["type"] = str if found.kind is Method else found.kind
            action = group.add_argument(found.flag, **settings)
            if not found.common and isinstance(parser, Parser):
                parser.show_in_full_help(action)


def add_data_options(parser: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """Add `--task` and what can be declared about your records, and whose they are."""
    parser.add_argument("--task", default=DEFAULT_TASK, help=f"default: {DEFAULT_TASK}")
    for found in declared(Declared).values():
        parser.add_argument(found.flag, type=found.kind, metavar=found.metavar, help=found.help)


def _run_help(found: Option, defaults: RunConfig) -> str:
    default = found.value(defaults)
    parts = [f"one of: {', '.join(found.names)}"] if found.names else []
    parts += [found.help] if found.help else []
    text = "; ".join(parts) if not found.help.startswith("or ") else ", ".join(parts)
    if default is None or "(default:" in text:
        return text
    return f"{text} (default: {default.name if isinstance(default, Method) else default})"


def add_method_options(parser: argparse.ArgumentParser) -> None:
    """Add the hyper-parameters of all methods, each once, saying which methods have it."""
    owners = _owners()
    options = {name: declared(METHODS[methods[0]])[name] for name, methods in owners.items()}
    for heading, listed in by_heading(options.values()).items():
        group = parser.add_argument_group(heading)
        for found in listed:
            action = group.add_argument(
                found.flag,
                type=found.kind,
                choices=found.choices,
                metavar=None if found.choices else METAVARS.get(found.kind),
                help=_method_help(owners[found.name], found.name).replace("%", "%%"),
            )
            if not found.common and isinstance(parser, Parser):
                parser.show_in_full_help(action)


def given_method_options(options: argparse.Namespace) -> dict[str, Any]:
    found = {name: getattr(options, name, None) for name in _owners()}
    return {name: value for name, value in found.items() if value is not None}


def build_method(options: argparse.Namespace, task: Task) -> Method:
    """The method with what suits the task, as far as nothing else is given."""
    method, given = method_named(options.method), given_method_options(options)
    check_method_options(method, given)
    return method(**{**task.settings.get(method.name, {}), **given})


def _owners() -> dict[str, list[str]]:
    """The methods that have an option, by its name."""
    owners: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        for each in fields(method):
            owners.setdefault(each.name, []).append(name)
    return owners


def _method_help(owners: list[str], name: str) -> str:
    """What the option means, its default, and which methods have it or mean something else."""
    usual = declared(METHODS[owners[0]])[name]
    text = usual.help
    shown = text + default_of(usual)
    for owner in owners[1:]:
        own = declared(METHODS[owner])[name]
        if own.help != text:
            shown += f"; {owner}: {own.help}{default_of(own)}"
        elif own.default != usual.default and own.default is not None and "(default:" not in text:
            shown += f", for {owner} {own.default}"
    without = [method for method in METHODS if method not in owners]
    if not without:
        return shown
    if len(without) < len(owners):
        return f"{shown} [not {', '.join(without)}]"
    return f"{shown} [{', '.join(owners)}]"


def default_of(found: Option) -> str:
    if found.default is None or found.default is MISSING or "(default:" in found.help:
        return ""
    by_task = any(found.name in own for task in TASKS.values() for own in task.settings.values())
    own = "the task's, else " if by_task else ""
    return f" (default: {own}{found.default})"


def join_ranks(options: argparse.Namespace) -> Ranks:
    """Join the other processes of this run, if `torchrun` has started several.

    A run in a folder that was named is resumed after an elastic restart.
    """
    if is_distributed() and not (options.out or options.resume):
        raise InvalidInputError(
            "a run of several processes needs a folder that all of them can name; set --out"
        )
    if restarted() and options.resume is None and options.out is not None:
        folder = RunFolder(options.out)
        if folder.checkpoint.exists() and folder.config.exists():
            for name in (*_given(options), *given_method_options(options)):
                if name != "rank_timeout":
                    setattr(options, name, None)
            options.resume = str(folder.root)
    device = choose_device(options.device or RunConfig().device)
    return connect(device, options.rank_timeout or RunConfig().intervals.rank_timeout)


def agreed_config(options: argparse.Namespace, ranks: Ranks) -> tuple[RunConfig, RunFolder]:
    """The config of a new or resumed run and its folder, as rank 0 finds them.

    The folder of a new run is checked, but not made.
    """

    def found() -> tuple[RunConfig, RunFolder]:
        if options.resume is not None:
            return stored_config(options)
        config = config_of(options, auto=True)
        if config.seed is None:
            config = replace(config, network_seed=secrets.randbits(62))
        assert config.task is not None
        name = config.method.label
        folder = RunFolder(config.out) if config.out else UnnamedFolder(config.task, name)
        folder.check_new()
        return config, folder

    if ranks.size == 1:
        return found()

    def stored() -> bytes:
        config, folder = found()
        return json.dumps({"config": config.to_json(), "folder": str(folder.root)}).encode()

    agreed = json.loads(ranks.from_main(stored))
    return RunConfig.from_json(agreed["config"]), RunFolder(agreed["folder"])


def config_of(options: argparse.Namespace, *, auto: bool = False) -> RunConfig:
    """The config that the command line asks for; with `auto`, that is the preset by default."""
    values = _given(options)
    method = values.pop("method", None)
    return RunConfig.from_names(values, method, auto=auto, **given_method_options(options))


def stored_config(options: argparse.Namespace) -> tuple[RunConfig, RunFolder]:
    """The config of an interrupted run, from its folder."""
    for name in (*_given(options), *given_method_options(options)):
        if name == "rank_timeout":  # how long to wait for others is no part of the run
            continue
        raise InvalidInputError(
            f"--resume takes the settings from its folder; leave out {flag(name)}"
        )
    folder = RunFolder(options.resume)
    if folder.finished:
        raise InvalidInputError(
            f"the run in {folder.root} has finished; its result is in {folder.release}"
        )
    config = config_in(folder)
    if not folder.checkpoint.exists() and not folder.unstarted:
        raise CheckpointError(
            f"{folder.root} cannot be resumed: {folder.checkpoint} is missing; start a new run in "
            "another folder"
        )
    return config, folder


def config_in(folder: RunFolder) -> RunConfig:
    try:
        return RunConfig.from_json(json.loads(folder.config.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        why = (
            f"{folder.root} holds no run to resume ({folder.config} is missing); start one with: "
            f"{command_in(folder.root, '--out')}"
        )
        if folder.checkpoint.exists():
            why = (
                f"the run in {folder.root} was started from Python, or {folder.config} was "
                f"removed; resume it with {folder.how_to_resume()}"
            )
        raise InvalidInputError(why) from None
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, InvalidInputError) else "it is not JSON"
        again = "start a new run in another folder"
        if folder.unstarted:
            again = f"start the run again with: {command_in(folder.root, '--out')}"
        raise CheckpointError(
            f"{folder.config} is damaged ({reason}); restore the file, or {again}"
        ) from error


def _given(options: argparse.Namespace) -> dict[str, Any]:
    names = (n for n, found in declared(RunConfig).items() if found.command_line)
    found = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


class UnnamedFolder(RunFolder):
    """A folder below `RUNS`, named after the task and the method; numbered if that name exists."""

    def __init__(self, task: str, method: str) -> None:
        own = Path(task.partition(":")[2]).stem if task.startswith(OWN) else task
        self._name = f"{own}-{method}"
        self._ours = False
        super().__init__(self._free())

    def _free(self) -> Path:
        paths = (Path(RUNS) / name for name in numbered(self._name))
        return next(path for path in paths if not os.path.lexists(path))

    def create(self) -> None:
        """Make the folder, under the next name if another run has taken this one meanwhile."""
        with suppress(OSError):  # `RunFolder.create` reports what is wrong
            Path(RUNS).mkdir(exist_ok=True)
            while not self._ours:
                try:
                    self.root.mkdir()
                    self._ours = True
                except FileExistsError:
                    super().__init__(self._free())
        super().create()


ALL_GROUPS = (DATA, MODEL, PRIVACY, RUN, PERFORMANCE)
