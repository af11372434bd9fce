"""Processes of a run as `torchrun` would start them, and a script for them to run."""

import os
import socket
import subprocess
import sys


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(size, arguments, **more):
    """One process per rank, each with its output in pipes."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                **more,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def outcomes(started, timeout=120):
    """Exit status and output of each process."""
    found = []
    for process in started:
        out, err = process.communicate(timeout=timeout)
        found.append((process.returncode, out, err))
    return found
