"""Random waiting after accepted updates, as the paper suggests against who watches the clock."""

import math
import random
import time
from collections.abc import Callable, Sequence

from dpsur.core.loop import Progress
from dpsur.core.types import Verdict
from dpsur.privacy.plans import AnyPlan, Plan


class RandomDelays:
    """An observer that waits after every accepted update, before those after it are told.

    A delay takes as long as a search for another update would where candidates are accepted least
    often: a geometric number of trials. It is not drawn from the streams of the run, which it
    leaves as they are.
    """

    def __init__(
        self,
        wait: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._wait, self._clock = wait, clock
        self._random = random.SystemRandom()
        self._accept = 1.0
        self._worked, self._made = 0.0, 0
        self._since = clock()

    def started(self, plan: AnyPlan, progress: Progress) -> None:  # noqa: ARG002
        """Note how rarely a candidate may be accepted."""
        assert isinstance(plan, Plan)
        assert plan.trial.gate is not None
        self._accept = plan.trial.gate.accept_min
        self._since = self._clock()

    def trials(self, progress: Progress, verdicts: Sequence[Verdict]) -> None:  # noqa: ARG002
        """Wait once for every accepted update of a block, in units of what a trial took so far."""
        self._worked += self._clock() - self._since
        self._made += len(verdicts)
        for verdict in verdicts:
            if verdict.accept:
                self._wait(self._search() * self._worked / self._made)
        self._since = self._clock()

    def _search(self) -> int:
        """Trials until one is accepted, with the least probability there is."""
        if self._accept == 1:
            return 1
        return math.ceil(self._random.expovariate(-math.log1p(-self._accept)))

    def evaluated(self, progress: Progress, scores: dict[str, float], epsilon: float) -> None:
        """Nothing."""
