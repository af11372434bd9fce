"""`dpsur evaluate`: load a release and test it on the task's public test set."""

import argparse
import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpsur.errors import CheckpointError, InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.privacy.statement import format_epsilon
from dpsur.runs.build_session import choose_device
from dpsur.runs.evaluation import check_fits, describe_scores, evaluate, objection
from dpsur.runs.files import finite
from dpsur.runs.release import read_release
from dpsur.runs.verification import statement_faults
from dpsur.tasks import TASKS, load_test_records


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = (
        "Load a release and test it on public records: the test set of its task, all records of a\n"
        "table by the schema of the release, or the test part that a schema file declares.\n"
        "Figures have no noise: do not publish those of private records.\n\n"
        "  dpsur evaluate run\n  dpsur evaluate run --task npz:test.npz --json\n"
        "  dpsur evaluate run --task csv:new.csv\n"
    )
    parser.add_argument("folder", metavar="DIR", help="a run folder, or the release folder in it")
    parser.add_argument(
        "--task", help="the task to test on (default: the one that the release names)"
    )
    parser.add_argument(
        "--schema",
        type=Path,
        metavar="FILE",
        help="take the test part that this schema declares (default: all records of csv:FILE or "
        "parquet:FILE, by the schema in the release)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="folder of the data (default: $DPSUR_DATA, or the downloads in the cache)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print accuracy and privacy."""
    device = choose_device(options.device)
    model, statement, origin = read_release(options.folder)
    _check_statement(options.folder, statement)
    name = options.task or origin.task
    if name is None or (options.task is None and name not in TASKS):
        raise InvalidInputError(
            f"{options.folder} names no task to test on; name it with --task, such as npz:FILE or "
            "csv:FILE"
        )
    test, loss = load_test_records(name, options.data_dir, options.schema, statement.get("public"))
    model = model.to(device)
    check_fits(model, test, loss, name)
    test = test.to(device)
    problem = Problem(model, loss, test)
    scores = evaluate(problem, problem.initial_params(), test)
    guarantee = statement["guarantee"]
    if options.json:
        found = {
            "task": name,
            "records": len(test),
            "scores": scores,
            "guarantee": guarantee,
        }
        print(json.dumps(finite(found), allow_nan=False))
        return 0
    print(f"{name}: {describe_scores(scores, len(test))}")
    if (text := objection(scores)) is not None:
        print(f"warning: {text}")
    print(describe_guarantee(statement))
    return 0


def _check_statement(folder: str, statement: dict[str, Any]) -> None:
    """Refuse to print a guarantee that does not follow from its own parameters."""
    faults, _ = statement_faults(statement)
    if faults:
        raise CheckpointError(
            f"the privacy statement in {folder} does not follow from its own parameters "
            f"({faults[0]}); see: dpsur verify {shlex.quote(folder)}"
        )


def describe_guarantee(statement: Mapping[str, Any]) -> str:
    """One line on the privacy of a release, which never sounds better than it is."""
    guarantee = statement["guarantee"]
    epsilon = guarantee["epsilon"]
    if epsilon is None or math.isinf(epsilon):
        return "privacy: none; epsilon is infinite, the records may show in the weights"
    figure = f"epsilon {format_epsilon(epsilon)} at delta {guarantee['delta']:g}"
    if guarantee["proved"]:
        return f"privacy: {figure}, accounting {guarantee['accounting']} (proved)"
    proven = statement["epsilon"]["proven"]
    beside = "not computed" if proven is None else f"epsilon {format_epsilon(proven)}"
    return (
        f"privacy: proven {beside} at delta {guarantee['delta']:g}; claimed by the paper's "
        f"analysis, not proved: {figure}, accounting {guarantee['accounting']}"
    )
