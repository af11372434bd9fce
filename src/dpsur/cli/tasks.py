"""`dpsur tasks`: what can be trained."""

import argparse

from dpsur.tasks import DEFAULT_TASK, TASKS


def set_up(parser: argparse.ArgumentParser) -> None:
    """Describe the command and its options."""
    parser.description = (
        "List the tasks that can be trained, and the features that they have networks for.\n"
        "`dpsur data list` shows whether their data are there."
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a line per task."""
    del options
    for name, task in TASKS.items():
        default = " (default task)" if name == DEFAULT_TASK else ""
        features = " or ".join(task.networks)
        print(f"{name:<12} {task.summary}; {features}{default}")
    print(f"{'npz:FILE':<12} records of your own: arrays x and y, and optional x_test and y_test")
    return 0
