"""`dpsur verify`: does a release follow from its own statement?"""

import argparse
import json
import textwrap
from collections.abc import Sequence

from dpsur.runs.signing import signature_faults
from dpsur.runs.verification import CHECKED, NOT_CHECKED, verification
from dpsur.status import status


def _listed(items: Sequence[str]) -> str:
    return "\n".join(
        textwrap.fill(item, 88, initial_indent="  - ", subsequent_indent="    ") for item in items
    )


WHAT_IS_CHECKED = f"""\
Checked:
{_listed(CHECKED)}

Not checked, because a release cannot show it:
{_listed(NOT_CHECKED)}
"""
DESCRIPTION = f"""\
Check a release against itself.

  dpsur verify run
  dpsur verify run --json
  dpsur verify run --key hospital.pem.pub    signed by this key, with every file unchanged

A release that `dpsur sign` has signed must be what was signed, with or without --key.

{WHAT_IS_CHECKED}"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.add_argument("folder", metavar="DIR", help="a run folder, or the release folder in it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--key", metavar="FILE", help="the public key that must have signed it")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was found; status 1 if anything is wrong."""
    faults, signer = signature_faults(options.folder, options.key)
    with status("computing every epsilon again, and planning the run again"):
        found, epsilon, opinions = verification(options.folder)
    faults += found
    if options.json:
        lists = {"checked": CHECKED, "not_checked": NOT_CHECKED}
        independent = [opinion.to_json() for opinion in opinions]
        verdict = {"ok": not faults, "faults": faults, "epsilon": epsilon, "signed_by": signer}
        print(json.dumps({**verdict, "independent": independent, **lists}))
    else:
        for fault in faults:
            print(f"FAULT: {fault}")
        if not faults:
            print("the statement follows from its parameters, and the weights are the stated ones")
            if signer is not None:
                known = "the given key" if options.key else f"{signer}: is that whom you expect?"
                print(f"every file is as it was signed, by {known}")
            for opinion in opinions:
                print(opinion.describe())
            print("what this checks, and what a release cannot show: dpsur verify --help")
    return 1 if faults else 0
