"""The command as a process of its own: `dpsur`, or `python -m dpsur`.

In a checkout of the repository it also knows the methods that the paper compares with, and the
paper's data sets (`reproduction/`), which are not installed.
"""

import sys
from pathlib import Path

# Commands that know methods and tasks by name; others need not wait for them to be imported.
_NAMING = (
    *("train", "plan", "evaluate", "predict", "export", "attack", "audit", "verify"),
    *("methods", "tasks", "compare", "report"),
)


def main() -> int:
    """Import the command and run it; Ctrl-C during the import is no traceback."""
    try:
        from dpsur.cli import main as run_command
        from dpsur.cli.terminal import interrupts_exit_at_once

        checkout = Path(__file__).parents[2]
        named = "--method" in sys.argv or any(word in _NAMING for word in sys.argv[1:2])
        if named and (checkout / "reproduction" / "__init__.py").is_file():
            sys.path.append(str(checkout))
            with interrupts_exit_at_once():
                import reproduction  # noqa: F401  registers them

        return run_command()
    except KeyboardInterrupt:
        print("dpsur: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
