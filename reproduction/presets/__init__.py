"""The presets `paper`, `tramer-boneh` and `tuned`; importing this registers them by name.

The numbers come from `paper_settings.csv`, the paper's table of settings, from Tramèr and Boneh's
commands, and from `tuned_settings.csv`, which `python -m reproduction.experiments.tuning` chose on
held-out training records.
"""

from collections.abc import Callable, Collection

from dpsur.errors import InvalidInputError
from dpsur.presets import PRESETS, DataFacts, Preset
from reproduction.presets import paper, tuned
from reproduction.presets.settings import DATASET_SIZES, EPSILONS


def _register(
    name: str,
    build: Callable[[str, str, int], Preset],
    methods: Collection[str],
    tasks: Collection[str],
) -> None:
    def preset(method: str, task: str, epsilon: float, _: DataFacts | None) -> Preset:
        for kind, value, known in (("task", task, tasks), ("method", method, methods)):
            if value not in known:
                raise InvalidInputError(
                    f"preset {name} has no settings for {kind} {value}; it has {', '.join(known)}. "
                    f"Without a preset: dpsur train --method {method} --task {task}"
                )
        if epsilon not in EPSILONS:
            raise InvalidInputError(
                f"preset {name} has no settings for epsilon {epsilon:g}; choose one of "
                f"{', '.join(map(str, EPSILONS))}, or leave the preset out"
            )
        return build(method, task, int(epsilon))

    PRESETS[name] = preset


_register("paper", paper.paper_preset, paper.BUILDERS, DATASET_SIZES)
_register("tramer-boneh", paper.tramer_boneh_preset, ("dpsgd-ts",), paper.TEMPERED)
_register("tuned", tuned.tuned_preset, tuned.METHODS, tuned.MODELS)
