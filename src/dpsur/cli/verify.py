"""`dpsur verify`: does a release follow from its own statement?"""

import argparse
import json

from dpsur.runs.verification import verify

DESCRIPTION = """\
Check a release against itself: recompute every epsilon from the parameters in privacy.json, hold
its texts, counts, settings and warnings against them, compare PRIVACY.md with it, and check that
the weights are the stated ones.

This is not a signature. It finds a statement that does not follow from its own parameters, and
weights that are not the stated ones. It cannot tell whether the run was made as stated.
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.add_argument("folder", metavar="DIR", help="a run folder, or the release folder in it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was found; status 1 if anything is wrong."""
    faults, epsilon = verify(options.folder)
    if options.json:
        print(json.dumps({"ok": not faults, "faults": faults, "epsilon": epsilon}))
    else:
        for fault in faults:
            print(f"FAULT: {fault}")
        if not faults:
            print("the statement follows from its parameters, and the weights are the stated ones")
    return 1 if faults else 0
