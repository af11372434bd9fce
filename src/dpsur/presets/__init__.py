"""Settings by name: the paper's, and the best that are known here."""

from collections.abc import Callable
from typing import Final

from dpsur.errors import InvalidInputError
from dpsur.presets.base import Preset
from dpsur.presets.best import best_preset
from dpsur.presets.paper import paper_preset
from dpsur.presets.settings import EPSILONS

PAPER, BEST = "paper", "best"
PRESETS: Final[dict[str, Callable[[str, str, int], Preset]]] = {
    PAPER: paper_preset,
    BEST: best_preset,
}


def preset_named(name: str, method: str, task: str, epsilon: float) -> Preset:
    """The preset of a method on a task at a budget, or an error that says which there are."""
    if name not in PRESETS:
        raise InvalidInputError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    if epsilon not in EPSILONS:
        known = ", ".join(str(value) for value in EPSILONS)
        raise InvalidInputError(
            f"preset {name} has no settings for epsilon {epsilon:g}; choose one of {known}, or "
            "leave the preset out"
        )
    return PRESETS[name](method, task, int(epsilon))


__all__ = ["BEST", "PAPER", "PRESETS", "Preset", "preset_named"]
