"""`dpsur export`: a release as a program that needs no dpsur."""

import argparse
import json
from pathlib import Path

from dpsur.errors import InvalidInputError
from dpsur.runs.predictor import SIGNATURE, export, load
from dpsur.status import status

DESCRIPTION = """\
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


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the program and say what it takes."""
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
