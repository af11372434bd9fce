"""Settings by name: chosen from public facts, or read from a table."""

from typing import Final

from dpsur.errors import InvalidInputError
from dpsur.presets.auto import auto_preset, encoder_preset, explain_auto
from dpsur.presets.base import TABLES, DataFacts, Preset, is_table, table_preset

ENCODER, AUTO = "encoder", "auto"
PRESETS: Final = (*TABLES, ENCODER, AUTO)


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
    if is_table(name):
        return table_preset(name, method, task, epsilon)
    raise InvalidInputError(
        f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}, or a file: settings.csv"
    )


__all__ = ["AUTO", "ENCODER", "PRESETS", "DataFacts", "Preset", "explain_auto", "preset_named"]
