"""Settings by name: the paper's, Tramèr and Boneh's, and the best that are known here."""

from collections.abc import Callable
from typing import Final

from dpsur.errors import InvalidInputError
from dpsur.presets.auto import auto_preset, explain_auto
from dpsur.presets.base import DataFacts, Preset
from dpsur.presets.encoder import encoder_preset
from dpsur.presets.paper import paper_preset, tramer_boneh_preset
from dpsur.presets.settings import EPSILONS
from dpsur.presets.tuned import tuned_preset

PAPER, TRAMER_BONEH, TUNED = "paper", "tramer-boneh", "tuned"
ENCODER, AUTO = "encoder", "auto"
Builder = Callable[[str, str, float, DataFacts | None], Preset]


def _of_table(name: str, preset: Callable[[str, str, int], Preset]) -> Builder:
    """A preset that was chosen for tasks by name, at some values of epsilon."""

    def build(method: str, task: str, epsilon: float, facts: DataFacts | None) -> Preset:
        del facts
        if epsilon not in EPSILONS:
            known = ", ".join(str(value) for value in EPSILONS)
            raise InvalidInputError(
                f"preset {name} has no settings for epsilon {epsilon:g}; choose one of {known}, or "
                "leave the preset out"
            )
        return preset(method, task, int(epsilon))

    return build


def _of_facts(preset: Callable[[str, DataFacts | None], Preset]) -> Builder:
    """A preset that follows from public facts: neither the task's name nor epsilon matters."""

    def build(method: str, task: str, epsilon: float, facts: DataFacts | None) -> Preset:
        del task, epsilon
        return preset(method, facts)

    return build


PRESETS: Final[dict[str, Builder]] = {
    PAPER: _of_table(PAPER, paper_preset),
    TRAMER_BONEH: _of_table(TRAMER_BONEH, tramer_boneh_preset),
    TUNED: _of_table(TUNED, tuned_preset),
    ENCODER: _of_facts(encoder_preset),
    AUTO: _of_facts(auto_preset),
}


def preset_named(
    name: str, method: str, task: str, epsilon: float, facts: DataFacts | None = None
) -> Preset:
    """The preset of a method on a task at a budget, or an error that says which there are."""
    if name not in PRESETS:
        raise InvalidInputError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name](method, task, epsilon, facts)


__all__ = [
    "AUTO",
    "ENCODER",
    "PAPER",
    "PRESETS",
    "TRAMER_BONEH",
    "TUNED",
    "DataFacts",
    "Preset",
    "explain_auto",
    "preset_named",
]
