"""A run that is killed in the middle, and resumed from its folder without spending more."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dpsur


def train(folder: str, resume: bool, kill_after: int | None = None) -> None:
    """The same call begins the run and resumes it."""
    torch.manual_seed(0)
    labels = torch.randint(0, 2, (1500,))
    points = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])[labels] + torch.randn(1500, 2)
    run = dpsur.fit(
        nn.Linear(2, 2),
        (points[:1200], labels[:1200]),
        test_set=(points[1200:], labels[1200:]),
        budget=dpsur.Budget(epsilon=2.0, delta=1e-4),
        method=dpsur.Dpsgd(updates=60, batch_size=100, learning_rate=1.0),
        out=folder,
        resume=resume,
        intervals=dpsur.Intervals(checkpoint_every=10),
        observers=[] if kill_after is None else [Kill(kill_after)],
    )
    print(f"finished: accuracy {run.scores['accuracy']:.1%}, release in {run.saved.name}/")


class Kill:
    """Stands for a power failure after some updates."""

    def __init__(self, after: int) -> None:
        self.after = after

    def started(self, plan: object, progress: object) -> None:
        """Nothing."""

    def trials(self, progress: Any, verdicts: object) -> None:
        """Kill this process without warning."""
        if progress.ledger.updates >= self.after:
            os.kill(os.getpid(), signal.SIGKILL)

    def evaluated(self, progress: object, scores: object, epsilon: float) -> None:
        """Nothing."""


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--killed":
        train(sys.argv[2], resume=False, kill_after=35)
    with tempfile.TemporaryDirectory() as parent:
        folder = str(Path(parent) / "run")
        first = subprocess.run([sys.executable, __file__, "--killed", folder], check=False)
        print(f"the first process ended with {first.returncode}")
        # from the last checkpoint: the same random numbers, so nothing is spent twice
        train(folder, resume=True)
        faults, _ = dpsur.verify(Path(folder) / "release")
        print(f"faults of the release: {faults or 'none'}")
