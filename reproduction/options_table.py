"""The options of docs/api.md: every option of a run, as flag and as Python name, as declared."""

from collections.abc import Iterable
from dataclasses import fields

from dpsur.cli.run_options import ALL_GROUPS, default_of
from dpsur.config import Intervals, Performance, RunConfig
from dpsur.methods import METHODS as REGISTERED
from dpsur.options import Option, by_heading, declared
from dpsur.privacy.budget import Budget
from dpsur.tasks import TASKS

METHODS = {n: kind for n, kind in REGISTERED.items() if kind.__module__.startswith("dpsur.")}
OWN_TASKS = [name for name, task in TASKS.items() if task.load.__module__.startswith("dpsur.")]
_PARTS = {
    **{each.name: f"dpsur.Budget({each.name}=)" for each in fields(Budget)},
    **{each.name: f"dpsur.Intervals({each.name}=)" for each in fields(Intervals)},
    **{each.name: f"dpsur.Performance({each.name}=)" for each in fields(Performance)},
}


def options() -> str:
    """A table for each heading."""
    parts = []
    run = [one for one in declared(RunConfig).values() if one.command_line]
    for heading in ALL_GROUPS:
        parts.append(_section(heading, (one for one in run if one.group == heading), "run"))
    method: dict[str, Option] = {}
    for kind in METHODS.values():
        method = {**declared(kind), **method}
    owners = {
        name: [label for label, kind in METHODS.items() if name in declared(kind)]
        for name in method
    }
    for heading, listed in by_heading(method.values()).items():
        parts.append(_section(heading, listed, "method", owners))
    return "\n".join(parts).rstrip()


def _section(
    heading: str,
    options: Iterable[Option],
    kind: str,
    owners: dict[str, list[str]] | None = None,
) -> str:
    lines = [f"### {heading[0].upper()}{heading[1:]}", "", "| flag | in Python | what it does |"]
    lines.append("|---|---|---|")
    for one in options:
        text = f"{one.help}{default_of(one) if kind == 'method' else ''}"
        names = one.names
        if names is REGISTERED:
            names = METHODS
        if names is TASKS:
            names = OWN_TASKS
        if names and kind == "run":
            text = f"one of {', '.join(names)}; {text}"
        without = [] if owners is None else [n for n in METHODS if n not in owners[one.name]]
        if without and owners is not None and len(without) < len(owners[one.name]):
            text += f" (not {', '.join(without)})"
        python = _PARTS.get(one.name, one.name) if kind == "run" else one.name
        lines.append(f"| `{one.flag}` | `{python}` | {text.replace('|', chr(92) + '|')} |")
    return "\n".join([*lines, ""])
