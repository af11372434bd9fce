"""The command as a process of its own: `dpsur`, or `python -m dpsur`."""

import sys


def main() -> int:
    """Import the command and run it; Ctrl-C during the import is no traceback."""
    try:
        from dpsur.cli import main as run_command

        return run_command()
    except KeyboardInterrupt:
        print("dpsur: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
