"""What is done with releases: `dpsur evaluate` tests them, `dpsur compare` lists them side by side.

`dpsur predict`: predictions for new records. `dpsur export`: a program that needs no dpsur.
"""

import argparse
import csv
import io
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpsur.errors import CheckpointError, InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.privacy.statement import format_epsilon, group_rows
from dpsur.runs.evaluation import (
    check_fits,
    describe_scores,
    evaluate,
    objection,
    shown_scores,
)
from dpsur.runs.files import MALFORMED, check_release, finite, write_atomically
from dpsur.runs.release import SIGNATURE, Predictions, Predictor, load, read_release
from dpsur.runs.result import run_rows
from dpsur.runs.session import choose_device
from dpsur.runs.verification import read_statement, statement_faults
from dpsur.status import status
from dpsur.tasks import TASKS, load_test_records


def set_up(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Load a release and test it on public records: the test set of its task, all records of a\n"
        "table by the schema of the release, or the test part that a schema file declares.\n"
        "Several releases are compared in a table. Figures have no noise: do not publish those of\n"
        "private records.\n\n"
        "  dpsur evaluate run\n  dpsur evaluate run --task npz:test.npz --json\n"
        "  dpsur evaluate run --task csv:new.csv\n  dpsur evaluate one two\n"
    )
    parser.add_argument(
        "folders", metavar="DIR", nargs="+", help="a run folder, or the release folder in it"
    )
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


def run(options: argparse.Namespace) -> int:
    tested = [_test(folder, options) for folder in options.folders]
    if options.json:
        found = [
            {name: getattr(each, name) for name in ("task", "records", "scores")}
            | {"guarantee": each.statement["guarantee"]}
            for each in tested
        ]
        print(json.dumps(finite(found if len(found) > 1 else found[0]), allow_nan=False))
    elif len(tested) > 1:
        print("\n".join(_comparison(tested)))
    else:
        print(f"{tested[0].task}: {describe_scores(tested[0].scores, tested[0].records)}")
        if (text := objection(tested[0].scores)) is not None:
            print(f"warning: {text}")
        print(describe_guarantee(tested[0].statement))
    return 0


@dataclass(frozen=True)
class _Tested:
    folder: str
    task: str
    records: int
    scores: dict[str, float]
    statement: dict[str, Any]


def _test(folder: str, options: argparse.Namespace) -> _Tested:
    device = choose_device(options.device)
    model, statement, origin = read_release(folder)
    faults, _ = statement_faults(statement)
    if faults:  # a guarantee that does not follow from its own parameters is not printed
        raise CheckpointError(
            f"the privacy statement in {folder} does not follow from its own parameters "
            f"({faults[0]}); see: dpsur verify {shlex.quote(folder)}"
        )
    name = options.task or origin.task
    if name is None or (options.task is None and name not in TASKS):
        raise InvalidInputError(
            f"{folder} names no task to test on; name it with --task, such as npz:FILE or csv:FILE"
        )
    test, loss = load_test_records(name, options.data_dir, options.schema, statement["public"])
    model = model.to(device)
    check_fits(model, test, loss, name)
    test = test.to(device)
    problem = Problem(model, loss, test)
    scores = evaluate(problem, problem.initial_params(), test)
    return _Tested(folder, name, len(test), scores, statement)


# What two runs share if only the test of candidates, and the noise it leaves room for, differ.
_SAME = ("batch_size", "updates", "learning_rate", "schedule", "max_grad_norm", "momentum")


def _comparison(tested: Sequence[_Tested]) -> list[str]:
    """A table of releases, and what the test of candidates did where one run is without it."""
    head = ["run", "method", "test score", "epsilon (paper)", "epsilon (proven)", "updates"]
    rows = [head]
    for each in tested:
        statement, (name, figure) = each.statement, shown_scores(each.scores)[0]
        gate = statement["settings"].get("gate") or "none"
        method = statement["method"] + ("" if gate == "none" else f", gate {gate}")
        guarantee, figures = statement["guarantee"], statement["epsilon"]
        proven = guarantee["epsilon"] if guarantee["proved"] else figures["proven"]
        epsilons = ("-" if e is None else format_epsilon(e) for e in (figures["published"], proven))
        updates = str(statement["accepted_updates"])
        rows.append([Path(each.folder).name, method, f"{name} {figure}", *epsilons, updates])
    lines = _aligned(rows)
    selective = next((each for each in tested if _is_selective(each.statement)), None)
    plain = next((each for each in tested if selective and _is_counterpart(each, selective)), None)
    if selective is None or plain is None:
        return lines
    gain = 100 * (selective.scores["accuracy"] - plain.scores["accuracy"])
    return [
        *lines,
        "",
        f"Testing candidates {'gained' if gain > 0 else 'cost'} {abs(gain):.1f} points here: "
        f"{Path(plain.folder).name} is the same run without the test, at the same budget and with "
        "the lower noise that this leaves room for (one run of each).",
    ]


def _is_counterpart(plain: _Tested, selective: _Tested) -> bool:
    one, other = plain.statement, selective.statement
    return (
        one["settings"].get("gate") == "none"
        and all(one["settings"].get(name) == other["settings"].get(name) for name in _SAME)
        and one["budget"] == other["budget"]
        and plain.task == selective.task
        and "accuracy" in plain.scores
    )


def _is_selective(statement: Mapping[str, Any]) -> bool:
    """Whether candidates had to pass a test to be kept, by Algorithm 1 or with a coin."""
    trial = statement["mechanism"].get("trial") or {}
    return (trial.get("test") or {}).get("kind") in ("LossTest", "CoinTest")


def describe_guarantee(statement: Mapping[str, Any]) -> str:
    """One line on the privacy of a release, and one on groups; never better than it is."""
    guarantee, figures = statement["guarantee"], statement["epsilon"]
    epsilon = guarantee["epsilon"]
    if epsilon is None or math.isinf(epsilon):
        line = "privacy: none; epsilon is infinite, the records may show in the weights"
    elif guarantee["proved"]:
        line = (
            f"privacy: epsilon {format_epsilon(epsilon)} at delta {guarantee['delta']:g}, "
            f"accounting {guarantee['accounting']} (proved)"
        )
        if _is_selective(statement) and figures["published"] is not None:
            published = format_epsilon(figures["published"])
            line += f"; the paper's analysis says {published}, which is not proved"
    else:
        proven = figures["proven"]
        beside = "not computed" if proven is None else f"epsilon {format_epsilon(proven)}"
        line = (
            f"privacy: proven {beside} at delta {guarantee['delta']:g}; claimed by the paper's "
            f"analysis, not proved: epsilon {format_epsilon(epsilon)} at delta "
            f"{guarantee['delta']:g}, accounting {guarantee['accounting']}"
        )
    return "\n".join([line, *(f"{name}: {value}" for name, value in group_rows(statement))])


COMPARE_TEXT = """\
Print finished runs side by side: accuracy on public test records, epsilon, and the settings that
differ. Each run has spent its own budget: together they cost at most the sum of their epsilons.

  dpsur compare run other
"""
WIDEST = 28
# What is shown of every run, whether they differ in it or not.
ALWAYS = ("method", "records", "epsilon", "delta", "proved", "updates")


def set_up_compare(parser: argparse.ArgumentParser) -> None:
    parser.description = COMPARE_TEXT
    parser.add_argument("folders", metavar="RUN", nargs="+", help="run folders, or releases")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_compare(options: argparse.Namespace) -> int:
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
    print("\n".join(_aligned([heads, *rows])))
    return 0


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def facts_of(folder: Path) -> dict[str, Any]:
    """What is public about a finished run: the last scores on public records, and its statement."""
    check_release(folder)
    statement = read_statement(folder)
    try:
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
        raise CheckpointError(
            f"{folder} is damaged ({reason}); see: dpsur verify", code="damaged-release"
        ) from error
    evaluations = [row for row in run_rows(folder) if row["kind"] == "evaluation"]
    shown = shown_scores(evaluations[-1]) if evaluations else ()
    scores = {f"test {name}": text for name, text in shown}
    return {**scores, **facts, **settings}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


PREDICT_TEXT = """\
Predict for new records with a release. It costs no privacy, however often it is done.

  dpsur predict run new.csv                     a table, by the schema of the release
  dpsur predict run notes.jsonl --proba         texts, with the probability of each class
  dpsur predict run scans/ --out found.csv      a folder of images
  dpsur predict run new.npz                     the array x of a file

The answer has a line for each record, in the order of the file: CSV, or JSON Lines if --out ends in
.jsonl. The file needs no target; of a table, only the columns of the schema are read.
"""
JSON_LINES = (".jsonl", ".ndjson")


def set_up_predict(parser: argparse.ArgumentParser) -> None:
    parser.description = PREDICT_TEXT
    parser.add_argument("folder", metavar="RELEASE", help="a run folder, or the release in it")
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="new records, or a folder of images"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write a file (default: print)")
    parser.add_argument(
        "--proba", action="store_true", help="add the probability of each class or label"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")


def run_predict(options: argparse.Namespace) -> int:
    out: Path | None = options.out
    if out is not None and not out.parent.is_dir():
        raise InvalidInputError(f"there is no folder {out.parent}; create it, or choose another")
    device = choose_device(options.device)
    model = load(options.folder)
    model.module.to(device)
    found = model.predictions(options.file)
    if options.proba and found.probabilities is None:
        raise InvalidInputError("this model predicts numbers, which have no --proba; leave it out")
    names, rows = table_of(model, found, probabilities=options.proba)
    as_json = out is not None and out.suffix in JSON_LINES
    written = io.StringIO()
    if as_json:
        for row in rows:
            line = json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False)
            written.write(f"{line}\n")
    else:
        csv.writer(written, lineterminator="\n").writerows([names, *rows])
    if out is None:
        print(written.getvalue(), end="")
        return 0
    write_atomically(out, written.getvalue().encode())
    print(f"{out}: predictions for {len(found.values)} records", file=sys.stderr)
    return 0


def table_of(
    model: Predictor, found: Predictions, *, probabilities: bool
) -> tuple[list[str], list[list[Any]]]:
    first = "record" if found.names is None else "file"
    targets = ["prediction"]
    if found.values.ndim == 2:
        width = found.values.shape[1]
        targets = [f"prediction_{place}" for place in range(width)] if width > 1 else targets
        if model.schema is not None and len(model.schema.target) == width:
            targets = list(model.schema.target)
    columns: list[Any] = [found.values] if found.values.ndim == 1 else [*found.values.T]
    if found.values.ndim > 2:
        raise InvalidInputError(
            "the outputs of this model are no table; use dpsur.load(RELEASE).outputs(records)"
        )
    if probabilities and found.probabilities is not None:
        shares = found.probabilities.reshape(len(found.values), -1)
        labels = model.classes or targets
        targets = [*targets, *(f"p_{label}" for label in labels)]
        columns += [*shares.T]
    records = range(len(found.values)) if found.names is None else found.names
    rows = [[name, *map(_plain, row)] for name, *row in zip(records, *columns, strict=True)]
    return [first, *targets], rows


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    return float(f"{value:.6g}") if isinstance(value, float) else value


EXPORT_TEXT = """\
Export a release as a program that needs no dpsur, features included.

  dpsur export run --out exported          a program of torch.export, with its signature
  dpsur export run --out exported --onnx   also an ONNX file (pip install 'dpsur[onnx]')

The folder gets model.pt2, signature.json (what goes in and comes out) and, for texts, words.py,
which counts words and needs numpy alone. The program is compared with the model before it is
written. In Python, without dpsur:

  import torch
  program = torch.export.load("exported/model.pt2").module()
  probabilities = program(records)
"""


def set_up_export(parser: argparse.ArgumentParser) -> None:
    parser.description = EXPORT_TEXT
    parser.add_argument("folder", metavar="RELEASE", help="a run folder, or the release in it")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new folder")
    parser.add_argument("--onnx", action="store_true", help="write an ONNX file too")
    parser.add_argument(
        "--example",
        metavar="FILE",
        type=Path,
        help="records in an npz or npy file, where the release does not describe its inputs",
    )
    parser.add_argument("--json", action="store_true", help="print the signature as JSON")


def run_export(options: argparse.Namespace) -> int:
    model = load(options.folder)
    example = None
    if options.example is not None:
        if not options.example.is_file():
            raise InvalidInputError(f"there is no file {options.example} with an example")
        example = model.inputs.read(options.example).rows
    with status("exporting the model, and comparing both"):
        folder = model.export(options.out, example=example, onnx=options.onnx)
    found = json.loads((folder / SIGNATURE).read_text(encoding="utf-8"))
    if options.json:
        print(json.dumps(found))
        return 0
    shape = ", ".join(map(str, found["takes"]["shape"]))
    print(f"{folder}: takes ({shape}) of {found['takes']['type']}, returns {found['returns']}")
    print(f"checked against the model; see {folder / SIGNATURE}")
    return 0
