"""Who else used the processor meanwhile: on a shared machine times mean little."""

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
# user, nice, system, idle, iowait, irq, softirq, steal
_FIELDS, _IDLE = 8, (3, 4)


class Company:
    """Counts, from its creation on, the cores that other processes kept busy.

    Threads of one step wait for each other, so a neighbour on one core delays all of them, steadily
    enough for the quartiles to stay close. Hence this figure; load averages are too slow for it.
    """

    def __init__(self) -> None:
        self._start = self._read()

    def cores(self) -> float | None:
        """The mean number of cores in use by others; None where the system does not tell."""
        if self._start is None:
            return None
        now = self._read()
        assert now is not None
        wall, others = (late - early for late, early in zip(now, self._start, strict=True))
        return max(0.0, others / wall) if wall > 0 else 0.0

    @staticmethod
    def _read() -> tuple[float, float] | None:
        if not _STAT.exists():
            return None
        ticks = [
            int(word)
            for word in _STAT.read_text(encoding="utf-8").splitlines()[0].split()[1 : _FIELDS + 1]
        ]
        busy = sum(ticks) - sum(ticks[place] for place in _IDLE)
        own = os.times()
        seconds = busy / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), seconds - own.user - own.system
