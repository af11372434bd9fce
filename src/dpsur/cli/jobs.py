"""One command as several processes, each with a part of the work."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory

from dpsur.errors import DpsurError

THREADS = "OMP_NUM_THREADS"


def run_parts(arguments: Sequence[str], jobs: int) -> None:
    """Run `dpsur ARGUMENTS --shard K/JOBS --claims DIR` for every K, and wait for all of them.

    In the folder they note what they have begun, so that who is done first takes more. Whatever
    ends this process ends the others: none is left behind.
    """
    command = [sys.executable, "-m", "dpsur", *arguments]
    parts: list[subprocess.Popen[bytes]] = []
    with TemporaryDirectory() as claims:
        try:
            for part in range(jobs):
                own = ["--claims", claims, "--shard", f"{part}/{jobs}"]
                parts.append(subprocess.Popen([*command, *own], env=_shared(os.environ, jobs)))
            failed = [part for part, process in enumerate(parts) if process.wait()]
        finally:
            for process in parts:
                process.terminate()
                process.wait()
    if failed:
        raise DpsurError(
            f"{len(failed)} of {jobs} processes failed, for reasons printed above; rows that were "
            "made are kept: run the command again to go on"
        )


def _shared(environment: Mapping[str, str], jobs: int) -> dict[str, str]:
    """The same environment, with a share of the cores: threads of one process wait for others."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    return {THREADS: threads, **environment}
