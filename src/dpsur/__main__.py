"""Run the command with `python -m dpsur`."""

import sys

try:
    from dpsur.cli import main

    status = main()
except KeyboardInterrupt:  # before the command could take care of it
    status = 130
sys.exit(status)
