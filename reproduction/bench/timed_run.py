"""Time the paper's MNIST settings at epsilon 3 from start to end.

    python -m reproduction.bench.timed_run OUT [DEVICE]

One run, seeded, with the kernels that repeat bit for bit and once with the faster ones. Seconds
are those of the training itself, captured where the device allows it; preparing the records is
stated apart. A row for each is appended to OUT.
"""

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from dpsur.config import Performance
from dpsur.runs.fit import execute
from dpsur.runs.tasks import build_task_session
from reproduction.arms import ARMS
from reproduction.rows import provenance
from reproduction.training import TrainingCell, device_name, task_run


def timed(performance: Performance, device: str) -> dict[str, object]:
    """One run and how long its parts took."""
    config = TrainingCell("mnist", ARMS["published"].name, 3, 0).config()
    run = task_run(config, 0, device)
    started = time.perf_counter()
    session = build_task_session(replace(run, performance=performance))
    prepared = time.perf_counter()
    result = execute(session)
    ended = time.perf_counter()
    assert result.scores is not None
    return {
        "experiment": "timed-run",
        "config": config,
        "speed": asdict(performance),
        "seed": 0,
        "device": device_name(session.streams.device),
        "trials": result.private.ledger.trials,
        "updates": result.private.ledger.updates,
        "accuracy": result.scores["accuracy"],
        "epsilon": dict(result.epsilon),
        "seconds_preparing": round(prepared - started, 2),
        "seconds": round(ended - prepared, 2),
        **provenance(),
    }


def main() -> None:
    """Append a row for each way of running."""
    out, device = Path(sys.argv[1]), (sys.argv[2] if len(sys.argv) > 2 else "cuda")
    with out.open("a") as file:
        timed(
            Performance(), device
        )  # once for nothing: kernels are compiled when they are first used
        for speed in (Performance(), Performance(repeatable=False)):
            file.write(json.dumps(timed(speed, device)) + "\n")


if __name__ == "__main__":
    main()
