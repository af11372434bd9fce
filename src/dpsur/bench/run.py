"""The grid: every arm on every network and batch size, as rows."""

from collections.abc import Callable, Iterator
from typing import Any

from dpsur.bench.arms import OPACUS, PLAIN, arm_named
from dpsur.bench.cell import Cell, Step
from dpsur.bench.company import Company
from dpsur.bench.memory import probe, release
from dpsur.bench.networks import network_named
from dpsur.bench.outcome import OK, TOO_SLOW, UNSUPPORTED, Outcome, outcome_of
from dpsur.bench.settings import Settings, machine, origin_of
from dpsur.bench.timing import Timing, interleaved

EXPERIMENT = "bench"
LONGEST_STEP = 30.0


def rows(
    settings: Settings, say: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """Measure cell by cell; one row per network, batch size and arm, whatever becomes of it."""
    for network, _ in settings.grid:
        network_named(network)
    for arm in settings.arms:
        arm_named(arm)
    origin = origin_of(settings)
    seen: dict[tuple[str, str], tuple[int, float]] = {}
    with machine(settings):
        for network, batch_size in settings.grid:
            outcomes = {}
            for arm in settings.arms:
                say(f"{network}, batch {batch_size}: {arm}")
                outcomes[arm] = _probe(settings, network, batch_size, arm, seen.get((network, arm)))
                if (seconds := outcomes[arm].seconds) is not None:
                    seen[network, arm] = (batch_size, seconds)
            say(f"{network}, batch {batch_size}: timing")
            company = Company()
            timings = _timings(settings, network, batch_size, outcomes)
            others = {"cores_used_by_others": company.cores(), **origin}
            yield from _cell_rows(network, batch_size, outcomes, timings, others)


def _probe(
    settings: Settings, network: str, batch_size: int, arm: str, seen: tuple[int, float] | None
) -> Outcome:
    refusal = arm_named(arm).refusal(batch_size, settings.device)
    if refusal is not None:
        return Outcome(UNSUPPORTED, refusal)
    if seen is not None:
        smaller, seconds = seen
        expected = seconds * batch_size / smaller
        if expected > LONGEST_STEP:
            return Outcome(
                TOO_SLOW,
                f"a step took {seconds:.3g} s at batch {smaller}, so about {expected:.3g} s here",
            )
    return probe(network, batch_size, arm, settings)


def _timings(
    settings: Settings, network: str, batch_size: int, outcomes: dict[str, Outcome]
) -> dict[str, Timing]:
    """Time the arms that can make the step; those that fail meanwhile change their outcome."""
    described = network_named(network)
    cell = Cell(described, described.batch(batch_size, settings.device))
    steps: dict[str, Step] = {}
    for arm in [name for name, outcome in outcomes.items() if outcome.status == OK]:
        try:
            steps[arm] = arm_named(arm).make(cell)
        except Exception as error:  # for example, no room beside the other arms
            outcomes[arm] = outcome_of(error)
    timings = {}
    for arm, found in interleaved(steps, settings.repetitions, settings.device).items():
        if isinstance(found, Timing):
            timings[arm] = found
        else:
            outcomes[arm] = found
    steps.clear()
    release(settings.device)
    return timings


def _cell_rows(
    network: str,
    batch_size: int,
    outcomes: dict[str, Outcome],
    timings: dict[str, Timing],
    origin: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    for arm, outcome in outcomes.items():
        timing = timings.get(arm)
        yield {
            "experiment": EXPERIMENT,
            "network": network,
            "parameters": network_named(network).parameters,
            "batch_size": batch_size,
            "arm": arm,
            "status": outcome.status,
            "reason": outcome.reason,
            "step_seconds": None if timing is None else timing.median,
            "step_seconds_least": None if timing is None else min(timing.seconds),
            "step_seconds_quartiles": None if timing is None else list(timing.quartiles),
            "samples_per_second": None if timing is None else batch_size / timing.median,
            "peak_memory_bytes": outcome.peak_bytes,
            "time_over_plain": _ratio(timing, timings.get(PLAIN)),
            "time_over_opacus": _ratio(timing, timings.get(OPACUS)),
            "memory_over_plain": _memory_ratio(outcome, outcomes.get(PLAIN)),
            "repetitions": 0 if timing is None else len(timing.seconds),
            "steps_per_repetition": 0 if timing is None else timing.burst,
            **origin,
        }


def _ratio(timing: Timing | None, other: Timing | None) -> float | None:
    return None if timing is None or other is None else timing.median / other.median


def _memory_ratio(outcome: Outcome, other: Outcome | None) -> float | None:
    if other is None or outcome.peak_bytes is None or not other.peak_bytes:
        return None
    return outcome.peak_bytes / other.peak_bytes
