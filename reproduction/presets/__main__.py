"""`python -m reproduction.presets` writes the preset tables of the library.

Each has one row per method, task and epsilon. The numbers come from `paper_settings.csv`, the
paper's table of settings, from Tramer and Boneh's commands, and from `tuned_settings.csv`, which
`python -m reproduction.experiments.tuning` chose on held-out training records.
"""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import dpsur
from dpsur.errors import InvalidInputError
from dpsur.presets import COLUMNS, TABLES, Preset
from reproduction.presets import paper, tuned
from reproduction.presets.settings import DATASET_SIZES, EPSILONS

FOLDER = Path(dpsur.__file__).parent / "presets"
_BUILDERS: dict[str, tuple[Callable[[str, str, int], Preset], tuple[str, ...], tuple[str, ...]]] = {
    "paper": (paper.paper_preset, tuple(paper.BUILDERS), tuple(DATASET_SIZES)),
    "tramer-boneh": (paper.tramer_boneh_preset, ("dpsgd-ts",), tuple(paper.TEMPERED)),
    "tuned": (tuned.tuned_preset, tuple(tuned.METHODS), tuple(tuned.MODELS)),
}


def table(name: str) -> str:
    """A preset as CSV."""
    build, methods, tasks = _BUILDERS[name]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for method in methods:
        for task in tasks:
            for epsilon in EPSILONS:
                try:
                    preset = build(method, task, epsilon)
                except InvalidInputError:
                    continue  # text has no scattering features
                values = (preset.network, preset.given, preset.chosen)
                objects = [json.dumps(dict(each)) if each else "" for each in values]
                records = (preset.features, preset.normalisation)
                writer.writerow((method, task, epsilon, *records, *objects))
    return text.getvalue()


def main() -> None:
    """Write all tables."""
    for name in TABLES:
        (FOLDER / f"{name}.csv").write_text(table(name), encoding="utf-8")


if __name__ == "__main__":
    main()
