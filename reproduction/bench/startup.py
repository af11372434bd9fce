"""Time from `import dpsur` to the first update of a user's model, with records in memory.

    python -W ignore -m reproduction.bench.startup OUT [dpsgd|dpsur]

Importing torch and starting CUDA are stated apart. The second run is in the same process, with
calibrations and kernels that are there already. A row is appended to OUT.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

RECORDS, WIDTH, CLASSES, BATCH = 60_000, 784, 10, 512


def measured(method: str) -> dict[str, Any]:
    """Seconds of the parts, in a process that has imported nothing yet."""
    clock = [time.perf_counter()]

    def lap() -> float:
        clock.append(time.perf_counter())
        return round(clock[-1] - clock[-2], 2)

    import torch
    from torch import nn

    row: dict[str, Any] = {"experiment": "startup", "method": method, "seconds_torch": lap()}
    if torch.cuda.is_available():
        (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
    row["seconds_cuda"] = lap()
    import dpsur
    from dpsur import Budget, Dpsgd, Dpsur, fit

    row["seconds_import"] = lap()
    generator = torch.Generator().manual_seed(0)
    records = (
        torch.randn(RECORDS, WIDTH, generator=generator),
        torch.randint(CLASSES, (RECORDS,), generator=generator),
    )
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    chosen = {"dpsgd": Dpsgd, "dpsur": Dpsur}[method](batch_size=BATCH)
    lap()
    for name in ("seconds_first", "seconds_again"):
        fit(model, records, budget=Budget(3.0, 1e-5), method=chosen, max_updates=1)
        row[name] = lap()
    row["version"] = dpsur.__version__
    row["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return row


def main() -> None:
    """Append a row."""
    out, method = Path(sys.argv[1]), (sys.argv[2] if len(sys.argv) > 2 else "dpsgd")
    row = measured(method)
    from reproduction.rows import provenance

    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**row, **provenance()}) + "\n")


if __name__ == "__main__":
    main()
