"""`dpsur reproduce`: the paper's tables and figures."""

import argparse
from importlib import import_module
from pathlib import Path

from dpsur.experiments.rows import read_rows, write_rows

DESCRIPTION = """\
Make the rows of an experiment and render its page.

  accounting   the paper's sixteen settings under each accounting (seconds)
  demo         what `make demo` reaches, over seeds and against its peers (minutes)
"""
# name -> module and page; imported when run, since some need torch and some do not
EXPERIMENTS = {
    "accounting": ("dpsur.experiments.accounting", "accounting_table.md"),
    "demo": ("dpsur.experiments.demo", "demo_table.md"),
}


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.add_argument("names", nargs="+", choices=[*EXPERIMENTS, "all"], metavar="NAME")
    parser.add_argument(
        "--results", default="results", metavar="DIR", help="rows (default: results)"
    )
    parser.add_argument("--docs", default="docs", metavar="DIR", help="pages (default: docs)")
    parser.add_argument(
        "--render-only", action="store_true", help="render from the rows that are there"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make and render."""
    names = list(EXPERIMENTS) if "all" in options.names else options.names
    for name in names:
        module, page = EXPERIMENTS[name]
        experiment = import_module(module)
        path = Path(options.results) / f"{name}.jsonl"
        if not options.render_only:
            write_rows(path, experiment.rows())
        target = Path(options.docs) / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(experiment.render(read_rows(path)))
        print(f"{path} -> {target}")
    return 0
