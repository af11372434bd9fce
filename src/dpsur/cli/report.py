"""`dpsur report` and `dpsur plot`: an HTML page about a finished run, and figures of runs.

`dpsur statement`: the privacy statement of a release, in the form that a reviewer asks for.
"""

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

from dpsur.cli.parser import figure_path
from dpsur.errors import InvalidInputError
from dpsur.privacy.conversion import NOT_HELD_OUT, for_group, for_replacement
from dpsur.privacy.statement import plan_from_statement, render_markdown, unit_of
from dpsur.reports.formats import as_text, converted, nist, registry
from dpsur.reports.html import NOTES, Notes, read_report, render_report
from dpsur.runs.files import check_release, finite, write_atomically
from dpsur.runs.result import KINDS, RunCurves, plot_runs
from dpsur.runs.session import choose_device
from dpsur.runs.verification import read_statement
from dpsur.status import silenced, status

DESCRIPTION = """\
Write one self-contained HTML page about a finished run.

  dpsur report run
  dpsur report run --out privacy.html
  dpsur report run --private
  dpsur report run --task csv:people.csv --schema schema.json
  dpsur report run --purpose "triage of scans" --controller "City Hospital" --earlier none

The page holds public values only: the guarantee in plain words, epsilon by update, accuracy on the
public test set, settings, limits, and how to verify it. It needs no network. With --private the
page adds losses and acceptance of the run, which must not be published.
"""


# The name of a page in the folder of its run.
REPORT = "report.html"


def set_up(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("folder", metavar="DIR", help="a run folder, or the release folder in it")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page to write (default: DIR/report.html, or DIR/private/report.html)",
    )
    parser.add_argument("--task", help="public test set, where the release does not name it")
    parser.add_argument(
        "--schema", type=Path, metavar="FILE", help="the columns of csv:FILE or parquet:FILE"
    )
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="folder of the data")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    for name, (_, text) in NOTES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="TEXT", help=text)
    parser.add_argument(
        "--private", action="store_true", help="add private diagnostics; do not share the page"
    )
    parser.add_argument("--json", action="store_true", help="print the path as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing")


def run(options: argparse.Namespace) -> int:
    folder = Path(options.folder)
    default = folder / "private" / REPORT if options.private else folder / REPORT
    out: Path = options.out or default
    check_release(folder)
    if not out.parent.is_dir():
        raise InvalidInputError(
            f"there is no folder {out.parent}; create it, or choose another --out"
        )
    with silenced(options.quiet or options.json):
        write_report(
            folder,
            out,
            task=options.task,
            schema=options.schema,
            data_dir=options.data_dir,
            private=options.private,
            device=choose_device(options.device),
            notes={name: getattr(options, name) for name in NOTES},
        )
    if options.json:
        print(json.dumps({"report": str(out), "private": options.private}))
    elif not options.quiet:
        note = "private: do not share it" if options.private else "public values only"
        print(f"report: {out} ({note})")
    return 0


def write_report(folder: Path, out: Path, notes: Notes | None = None, **given: Any) -> None:
    """Write the page of a finished run; `given` is what `read_report` takes."""
    notes = dict(notes or {})
    notes["date"] = notes.get("date") or date.today().isoformat()
    with status("computing the figures of the report"):
        contents = read_report(folder, notes=notes, **given)
    text = render_report(contents)
    write_atomically(out, text.encode("utf-8"), mode=0o600 if contents.private else 0o644)


PLOT = """\
Plot one or several finished runs.

  dpsur plot run --out epsilon.svg
  dpsur plot run other --kind accuracy --out accuracy.png
  dpsur plot run --kind tradeoff --out attack.pdf

"""
PLOT += "\n".join(f"  {name:<12}{text}" for name, text in KINDS.items())


def set_up_plot(parser: argparse.ArgumentParser) -> None:
    parser.description = PLOT
    parser.add_argument("folders", metavar="DIR", nargs="+", help="run folders")
    parser.add_argument("--kind", choices=tuple(KINDS), default="epsilon", help="default: epsilon")
    parser.add_argument(
        "--out", type=figure_path, metavar="FILE", help="svg, png or pdf (default: KIND.svg)"
    )
    parser.add_argument("--json", action="store_true", help="print the path as JSON")
    parser.add_argument("--quiet", action="store_true", help="print nothing")


def run_plot(options: argparse.Namespace) -> int:
    out: Path = options.out or Path(f"{options.kind}.svg")
    with silenced(options.quiet or options.json), status("computing the curves"):
        figure = plot_runs([RunCurves.read(folder) for folder in options.folders], options.kind)
    figure.savefig(out, dpi=160)
    if options.json:
        print(json.dumps({"plot": str(out), "kind": options.kind}))
    elif not options.quiet:
        note = " (private: do not publish)" if options.kind == "acceptance" else ""
        print(f"plot: {out}{note}")
    return 0


STATEMENT_TEXT = """\
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


def set_up_statement(parser: argparse.ArgumentParser) -> None:
    parser.description = STATEMENT_TEXT
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


def run_statement(options: argparse.Namespace) -> int:
    statement = read_statement(options.folder)
    if options.group_size is not None and options.adjacency is not None:
        raise InvalidInputError("give --group-size or --adjacency, not both")
    if options.group_size is not None or options.adjacency is not None:
        if "holdout" in statement:
            raise InvalidInputError(NOT_HELD_OUT)
        plan, unit = plan_from_statement(statement), unit_of(statement)
        if options.group_size is None:
            fields = converted(statement, for_replacement(plan, unit))
        else:
            fields = converted(statement, for_group(plan, options.group_size, unit))
    elif options.format == "text" and not options.json:
        print(render_markdown(statement))
        return 0
    else:
        known = {"nist": nist, "registry": registry}
        fields = known[options.format](statement) if options.format in known else statement
    if options.json or options.format == "json":
        print(json.dumps(finite(fields), indent=2))
    else:
        print(as_text(fields))
    return 0
