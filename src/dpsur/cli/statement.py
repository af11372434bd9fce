"""`dpsur statement`: the privacy statement of a release, in the form that a reviewer asks for."""

import argparse
import json

from dpsur.errors import InvalidInputError
from dpsur.privacy.conversion import NOT_HELD_OUT, for_group, for_replacement
from dpsur.privacy.page import render_markdown
from dpsur.privacy.statement import plan_from_statement, unit_of
from dpsur.reports.formats import as_text, converted, nist, registry
from dpsur.runs.files import finite
from dpsur.runs.verification import read_statement

DESCRIPTION = """\
Print the privacy statement of a release.

  dpsur statement run                          as it is in PRIVACY.md
  dpsur statement run --format nist            by the parts of NIST SP 800-226
  dpsur statement run --format registry        a draft for the deployments registry
  dpsur statement run --group-size 7           for persons with up to 7 records, no identifiers
  dpsur statement run --adjacency replace-one  for neighbours of the same size

A conversion is a property of the run that was made. It is mostly larger than the epsilon of a run
that protects persons from the start: dpsur train --group-by COLUMN. The statement is read, not
checked: dpsur verify does that.
"""
FORMATS = ("text", "json", "nist", "registry")
REPLACE_ONE = "replace-one"


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.add_argument("folder", metavar="DIR", help="a run folder, or the release folder in it")
    parser.add_argument("--format", choices=FORMATS, default="text", help="(default: text)")
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="K",
        help="the guarantee for adding or removing K records, by their exact privacy loss",
    )
    parser.add_argument(
        "--adjacency",
        choices=(REPLACE_ONE,),
        help="the guarantee for data sets in which one record is another",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print it."""
    statement = read_statement(options.folder)
    if options.group_size is not None and options.adjacency is not None:
        raise InvalidInputError("give --group-size or --adjacency, not both")
    if options.group_size is not None or options.adjacency is not None:
        if "holdout" in statement:
            raise InvalidInputError(NOT_HELD_OUT)
        plan, unit = plan_from_statement(statement), unit_of(statement)
        other = (
            for_replacement(plan, unit)
            if options.group_size is None
            else for_group(plan, options.group_size, unit)
        )
        fields = converted(statement, other)
    elif options.format == "nist":
        fields = nist(statement)
    elif options.format == "registry":
        fields = registry(statement)
    else:
        fields = statement
        if options.format == "text" and not options.json:
            print(render_markdown(statement))
            return 0
    if options.json or options.format == "json":
        print(json.dumps(finite(fields), indent=2))
    else:
        print(as_text(fields))
    return 0
