"""`dpsur tasks`: what can be trained."""

import argparse

from dpsur.tasks import DEFAULT_TASK, TASKS


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = "List the tasks that can be trained."
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a line per task."""
    del options
    for name, task in TASKS.items():
        default = " (default)" if name == DEFAULT_TASK else ""
        print(f"{name:<12} {task.summary}{default}")
    return 0
