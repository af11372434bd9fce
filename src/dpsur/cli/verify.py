"""`dpsur verify`: does a release follow from its own statement?"""

import argparse
import json
import textwrap
from collections.abc import Sequence

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

{WHAT_IS_CHECKED}"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.add_argument("folder", metavar="DIR", help="a run folder, or the release folder in it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was found; status 1 if anything is wrong."""
    with status("computing every epsilon again, and planning the run again"):
        faults, epsilon, opinions = verification(options.folder)
    if options.json:
        lists = {"checked": CHECKED, "not_checked": NOT_CHECKED}
        independent = [opinion.to_json() for opinion in opinions]
        found = {"ok": not faults, "faults": faults, "epsilon": epsilon, "independent": independent}
        print(json.dumps({**found, **lists}))
    else:
        for fault in faults:
            print(f"FAULT: {fault}")
        if not faults:
            print("the statement follows from its parameters, and the weights are the stated ones")
            for opinion in opinions:
                print(opinion.describe())
            print("what this checks, and what a release cannot show: dpsur verify --help")
    return 1 if faults else 0
