"""`dpsur sign`: vouch for a release with a key."""

import argparse

from dpsur.errors import InvalidInputError
from dpsur.runs.files import new_key, sign

DESCRIPTION = """\
Sign every file of a release with an Ed25519 key, so that a later change is noticed.

  dpsur sign --new-key hospital.pem          a secret key, and hospital.pem.pub for your readers
  dpsur sign run --key hospital.pem          writes run/release/signature.json
  dpsur verify run --key hospital.pem.pub    what a reader does

A signature says who vouches for the release, not that the run was made as stated. Keep the secret
key away from the release; keys that openssl made and encrypted work too.
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "folder", metavar="DIR", nargs="?", help="a run folder, or the release folder in it"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--key", metavar="FILE", help="the secret key, in PEM")
    what.add_argument("--new-key", metavar="FILE", help="write a new key here, and sign nothing")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
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
