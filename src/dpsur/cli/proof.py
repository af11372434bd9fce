"""`dpsur proof`: the theorem behind epsilon, with its proof and its limits."""

import argparse
from importlib.resources import files

DESCRIPTION = """\
Print the page that a release cites: the theorem behind each accounting, its proof, what is assumed
and what is not covered (docs/privacy.md, Markdown).
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.add_argument("--path", action="store_true", help="print where the page lies instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the page, or its place."""
    page = files("dpsur") / "privacy" / "privacy.md"
    print(page if options.path else page.read_text(encoding="utf-8"))
    return 0
