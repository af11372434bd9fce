"""`dpsur explain`: which per-example engine serves a model, and why not a faster one."""

import argparse

from dpsur.cli.run_options import add_method_options, add_run_options, config_of
from dpsur.options import DATA, MODEL
from dpsur.per_example import engine_report
from dpsur.runs.tasks import sample_problem

DESCRIPTION = """\
Print how per-example gradients of a model are computed, and why no faster engine is used.

  dpsur explain --task mnist-5k
  dpsur explain --task npz:data.npz --model mymodule:make

engines, fastest first: one-pass computes norms and clipped sums from one backward pass, by rules of
the layers; one-by-one calls the model once per example, and names the module that is the cause.
Both give the same results. The engine is chosen with synthetic inputs of the task's shape: no
record is used.
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = DESCRIPTION
    parser.usage = "dpsur explain [--task TASK] [--model MODULE:FUNCTION] [options]"
    add_run_options(parser, [DATA, MODEL])
    parser.add_argument("--device", help="cpu, cuda or auto (default: auto)")
    parser.add_argument(
        "--bf16", action="store_true", default=None, help="as with `dpsur train --bf16`"
    )
    add_method_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the engine, and how it serves each module."""
    problem = sample_problem(config_of(options))
    print(f"model: {type(problem.model).__name__}")
    print(engine_report(problem))
    return 0
