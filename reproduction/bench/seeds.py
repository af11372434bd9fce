"""Time several seeds at once in one process.

    python -m reproduction.bench.seeds [cuda|cpu] [counts ...]

Made-up records of the shape of the paper's MNIST features, its network and its batch sizes. The
figures are seconds a trial, over all runs together; the first run of all pays for tables and plans.
"""

import sys
import time

import torch
import torch.nn.functional as F

from dpsur.config import Performance, RunConfig
from dpsur.methods import Dpsur
from dpsur.privacy.budget import Budget
from dpsur.runs.fit import run_together
from dpsur.runs.result import Run
from dpsur.runs.session import Session, build_session
from reproduction.bench.networks import network_named

RECORDS, UPDATES = {"cuda": 60_000, "cpu": 3_000}, {"cuda": 300, "cpu": 5}


def session(
    seed: int | None, device: str, data: tuple[torch.Tensor, torch.Tensor], capture: bool = True
) -> Session:
    """A run of DPSUR with the paper's batch sizes."""
    network = network_named("scattering-28")
    config = RunConfig(
        task=None,
        budget=Budget(3.0, 1e-5),
        method=Dpsur(
            batch_size=1024, val_batch_size=256, updates=UPDATES[device], noise_multiplier=5.0
        ),
        accounting="proven",
        seed=seed,
        device=device,
        performance=Performance(capture=capture),
    )
    return build_session(config, network.model(torch.device("cpu")), data, loss=F.cross_entropy)


def timed(name: str, sessions: list[Session]) -> None:
    """Run sessions at once and print what a trial took."""
    start = time.perf_counter()
    found = run_together(sessions)
    seconds = time.perf_counter() - start
    trials = sum(run.private.ledger.trials for run in found if isinstance(run, Run))
    print(f"{name}: {trials} trials in {seconds:.2f} s, {1e3 * seconds / trials:.3f} ms a trial")


def main() -> None:
    """One run in several ways, then several runs at once."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    counts = [int(count) for count in sys.argv[2:]] or [1, 2, 4, 8]
    made = network_named("scattering-28").batch(RECORDS[device], torch.device(device))
    data = (made.inputs, made.targets)
    timed("first run of all", [session(0, device, data)])
    timed("unseeded", [session(None, device, data)])
    timed("seeded, not captured", [session(0, device, data, capture=False)])
    for count in counts:
        timed(f"{count} seeds at once", [session(seed, device, data) for seed in range(count)])


if __name__ == "__main__":
    main()
