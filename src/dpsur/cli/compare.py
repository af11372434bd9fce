"""`dpsur compare`: finished runs side by side."""

import argparse
import json
from pathlib import Path
from typing import Any

from dpsur.errors import CheckpointError
from dpsur.privacy.statement import format_epsilon
from dpsur.runs.evaluation import shown_scores
from dpsur.runs.files import STATEMENT, finite, from_json, release_folder
from dpsur.runs.plots import read_rows
from dpsur.runs.release import MALFORMED, check_release

DESCRIPTION = """\
Print finished runs side by side: accuracy on public test records, epsilon, and the settings that
differ. Each run has spent its own budget: together they cost at most the sum of their epsilons.

  dpsur compare run other
"""
WIDEST = 28
# What is shown of every run, whether they differ in it or not.
ALWAYS = ("method", "records", "epsilon", "delta", "proved", "updates")


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.add_argument("folders", metavar="RUN", nargs="+", help="run folders, or releases")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    found = {str(folder): facts_of(Path(folder)) for folder in options.folders}
    if options.json:
        print(json.dumps(finite(found), allow_nan=False))
        return 0
    names = list(dict.fromkeys(name for facts in found.values() for name in facts))
    rows = []
    for name in names:
        values = [_shown(facts.get(name)) for facts in found.values()]
        told = name in ALWAYS or name.startswith("test ")
        if not told and len(set(values)) == 1 and len(found) > 1:
            continue  # a setting that all of them share
        rows.append([name, *values])
    heads = ["", *(Path(folder).name or folder for folder in found)]
    widths = [max(len(row[place]) for row in [heads, *rows]) for place in range(len(heads))]
    for row in [heads, *rows]:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return 0


def facts_of(folder: Path) -> dict[str, Any]:
    """What is public about a finished run: the last scores on public records, and its statement."""
    check_release(folder)
    file = release_folder(folder) / STATEMENT
    try:
        statement = from_json(file.read_bytes())
        guarantee = statement["guarantee"]
        epsilon = guarantee["epsilon"]
        facts = {
            "method": statement["method"],
            "records": statement["dataset_size"],
            "epsilon": "infinite" if epsilon is None else format_epsilon(epsilon),
            "delta": guarantee["delta"],
            "proved": guarantee["proved"],
            "updates": statement["accepted_updates"],
        }
        settings = {name.replace("_", " "): value for name, value in statement["settings"].items()}
    except MALFORMED as error:
        reason = type(error).__name__
        raise CheckpointError(f"{file} is damaged ({reason}); see: dpsur verify") from error
    evaluations = [row for row in read_rows(folder) if row["kind"] == "evaluation"]
    shown = shown_scores(evaluations[-1]) if evaluations else ()
    scores = {f"test {name}": text for name, text in shown}
    return {**scores, **facts, **settings}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
