"""`dpsur predict`: predictions of a release for new records.

`dpsur export`: a release as a program that needs no dpsur.
"""

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpsur.errors import InvalidInputError
from dpsur.runs.build_session import choose_device
from dpsur.runs.files import write_atomically
from dpsur.runs.predictor import SIGNATURE, Predictions, Predictor, export, load
from dpsur.status import status

DESCRIPTION = """\
Predict for new records with a release. It costs no privacy, however often it is done.

  dpsur predict run new.csv                     a table, by the schema of the release
  dpsur predict run notes.jsonl --proba         texts, with the probability of each class
  dpsur predict run scans/ --out found.csv      a folder of images
  dpsur predict run new.npz                     the array x of a file

The answer has a line for each record, in the order of the file: CSV, or JSON Lines if --out ends in
.jsonl. The file needs no target; of a table, only the columns of the schema are read.
"""
JSON_LINES = (".jsonl", ".ndjson")


def set_up(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("folder", metavar="RELEASE", help="a run folder, or the release in it")
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="new records, or a folder of images"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write a file (default: print)")
    parser.add_argument(
        "--proba", action="store_true", help="add the probability of each class or label"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
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
    text = "".join(_json_lines(names, rows) if as_json else _csv_lines(names, rows))
    if out is None:
        print(text, end="")
        return 0
    write_atomically(out, text.encode())
    print(f"{out}: predictions for {len(found.values)} records", file=sys.stderr)
    return 0


def table_of(
    model: Predictor, found: Predictions, *, probabilities: bool
) -> tuple[list[str], list[list[Any]]]:
    first = "record" if found.names is None else "file"
    targets = ["prediction"]
    if found.values.ndim == 2:
        width = found.values.shape[1]
        several = model.schema is not None and len(model.schema.target) == width
        targets = list(model.schema.target) if several and model.schema else _numbered(width)
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


def _numbered(count: int) -> list[str]:
    return [f"prediction_{place}" for place in range(count)] if count > 1 else ["prediction"]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _csv_lines(names: list[str], rows: list[list[Any]]) -> Iterator[str]:
    for row in [names, *rows]:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(row)
        yield line.getvalue()


def _json_lines(names: list[str], rows: list[list[Any]]) -> Iterator[str]:
    for row in rows:
        yield json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n"


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
    parser.set_defaults(run=run_export)


def run_export(options: argparse.Namespace) -> int:
    model = load(options.folder)
    example = None
    if options.example is not None:
        if not options.example.is_file():
            raise InvalidInputError(f"there is no file {options.example} with an example")
        example = model.inputs.read(options.example).rows
    with status("exporting the model, and comparing both"):
        folder = export(model, options.out, example=example, onnx=options.onnx)
    found = json.loads((folder / SIGNATURE).read_text(encoding="utf-8"))
    if options.json:
        print(json.dumps(found))
        return 0
    shape = ", ".join(map(str, found["takes"]["shape"]))
    print(f"{folder}: takes ({shape}) of {found['takes']['type']}, returns {found['returns']}")
    print(f"checked against the model; see {folder / SIGNATURE}")
    return 0
