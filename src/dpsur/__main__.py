"""Run the command with `python -m dpsur`."""

import sys

from dpsur.cli import main

sys.exit(main())
