"""Runs of a procedure alone, for experiments, audits and tests; `fit` has its own driver."""

from collections.abc import Callable, Sequence

from dpsur.mechanism.cuda_graph_loop import Loop
from dpsur.mechanism.state import Procedure, Verdict
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import EagerLoop, Progress, check_completed, start
from dpsur.privacy.plan import Plan

OnBlock = Callable[[Progress, Sequence[Verdict]], None]


def run_loop(loop: Loop, plan: Plan, on_block: OnBlock = lambda *_: None) -> Progress:
    """Make all trials of a plan and return where the run ended.

    Formal guarantee: the returned state satisfies the plan's (epsilon, delta) under the plan's
    accounting, for adding or removing one record. Raises NothingReleasedError if the cap on trials
    came first: that event is as improbable as the plan says, provided nothing is released.
    """
    try:
        while not loop.finished:
            loop.launch()
            verdicts = loop.collect()
            on_block(loop.progress, verdicts)
    finally:
        loop.close()
    check_completed(plan, loop.progress)
    return loop.progress


def train(
    procedure: Procedure,
    plan: Plan,
    streams: Streams,
    progress: Progress | None = None,
    on_block: OnBlock = lambda *_: None,
) -> Progress:
    """Make all trials one by one; same guarantee as `run_loop`. `progress` is left as it is."""
    owned = progress is None
    progress = start(procedure) if progress is None else progress
    loop = EagerLoop(procedure, plan, streams, progress, owned=owned)
    del progress
    return run_loop(loop, plan, on_block)
