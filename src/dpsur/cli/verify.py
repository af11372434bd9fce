"""`dpsur verify`: does a release follow from its own statement?

`dpsur sign`: vouch for a release with a key.
"""

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.runs.files import RunFolder, finite, new_key, release_folder, sign, signature_faults
from dpsur.runs.verification import CHECKED, NOT_CHECKED, verification
from dpsur.status import status

if TYPE_CHECKING:
    from dpsur.runs.replay import Replayed


def _listed(items: Sequence[str]) -> str:
    return "\n".join(
        textwrap.fill(item, 88, initial_indent="  - ", subsequent_indent="    ") for item in items
    )


DESCRIPTION = f"""\
Check a release against itself.

  dpsur verify run
  dpsur verify run --json
  dpsur verify run --key hospital.pem.pub    signed by this key, with every file unchanged
  dpsur verify run --replay 20               were 20 of its steps made as stated?

A release that `dpsur sign` has signed must be what was signed, with or without --key.

--replay is for whoever may read the records and the private folder of a run that was trained with
--replayable. It recomputes N random steps from the state before them. If a share f of all steps was
not made as stated, N steps miss it with probability (1-f)^N. On the same device and versions bits
are compared, elsewhere the distance in clip norms.

Checked:
{_listed(CHECKED)}

Not checked, because a release cannot show it:
{_listed(NOT_CHECKED)}
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("folder", metavar="DIR", help="a run folder, or the release folder in it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--key", metavar="FILE", help="the public key that must have signed it")
    again = parser.add_argument_group("with the records")
    again.add_argument(
        "--replay", type=int, metavar="N", help="recompute N steps, chosen at random"
    )
    again.add_argument(
        "--private", metavar="DIR", help="the run's private folder (default: beside the release)"
    )
    again.add_argument(
        "--data", metavar="PATH", help="where the records are now (default: as then)"
    )
    again.add_argument("--device", help="cpu, cuda or auto (default: as then)")


def run(options: argparse.Namespace) -> int:
    """Print what was found; status 1 if anything is wrong."""
    faults, signer = signature_faults(options.folder, options.key)
    with status("recomputing every epsilon and the plan"):
        found, epsilon, opinions = verification(options.folder)
    faults += found
    again = None
    if options.replay is not None and not faults:
        again = _replayed(options)
        faults += again.faults
    if options.json:
        lists = {"checked": CHECKED, "not_checked": NOT_CHECKED}
        independent = [opinion.to_json() for opinion in opinions]
        verdict = {"ok": not faults, "faults": faults, "epsilon": epsilon, "signed_by": signer}
        if again is not None:
            verdict["replay"] = {"exact": again.exact, "steps": finite(again.distances)}
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
            if again is not None:
                print(again.describe())
            print("what this checks, and what a release cannot show: dpsur verify --help")
    return 1 if faults else 0


def _replayed(options: argparse.Namespace) -> "Replayed":
    # with them torch, which nothing else here needs
    from dpsur.cli.run_options import config_in
    from dpsur.runs.replay import replay, stated_commitments
    from dpsur.runs.tasks import build_task_session

    checks.at_least_one("replay", options.replay)
    release = release_folder(options.folder)
    folder = RunFolder(release.absolute().parent)
    folder.release = release
    if options.private is not None:
        folder.private = Path(options.private)
    stated_commitments(folder)
    if not folder.config.exists():
        raise InvalidInputError(
            f"{folder.private} is no private folder of a run of the command line; give --private, "
            "or replay a run that was started from Python there: dpsur.fit(..., replay=N)"
        )
    config = replace(config_in(folder), ledger=None)  # nothing is spent
    if options.device is not None:
        config = replace(config, device=options.device)
    if options.data is not None:
        kind, own, _ = (config.task or "").partition(":")
        moved = {"task": f"{kind}:{options.data}"} if own else {"data_dir": Path(options.data)}
        config = replace(config, **moved)
    with status("recomputing steps"):
        session = build_task_session(config, replayed=folder)
        return replay(session, folder, options.replay)


SIGN_TEXT = """\
Sign every file of a release with an Ed25519 key, so that a later change is noticed.

  dpsur sign --new-key hospital.pem          a secret key, and hospital.pem.pub for your readers
  dpsur sign run --key hospital.pem          writes run/release/signature.json
  dpsur verify run --key hospital.pem.pub    what a reader does

A signature says who vouches for the release, not that the run was made as stated. Keep the secret
key away from the release; keys that openssl made and encrypted work too.
"""


def set_up_sign(parser: argparse.ArgumentParser) -> None:
    parser.description = SIGN_TEXT
    parser.add_argument(
        "folder", metavar="DIR", nargs="?", help="a run folder, or the release folder in it"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--key", metavar="FILE", help="the secret key, in PEM")
    what.add_argument("--new-key", metavar="FILE", help="write a new key here, and sign nothing")


def run_sign(options: argparse.Namespace) -> int:
    if options.new_key is not None:
        if options.folder is not None:
            raise InvalidInputError("--new-key signs nothing; leave out the folder")
        public = new_key(options.new_key)
        print(f"wrote {options.new_key} (keep it secret) and {public} (for your readers)")
        return 0
    if options.folder is None:
        raise InvalidInputError("give the folder of the run whose release is to be signed")
    print(f"wrote {sign(options.folder, options.key)}")
    return 0
