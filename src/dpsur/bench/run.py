"""Every arm on every network and batch size of a grid, as rows."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dpsur.bench.arms import OPACUS, PLAIN, arm_named
from dpsur.bench.measurement import (
    OK,
    TOO_SLOW,
    UNSUPPORTED,
    Outcome,
    Timing,
    interleaved,
    outcome_of,
    release,
)
from dpsur.bench.memory import probe
from dpsur.bench.settings import Cell, CpuContention, Network, Settings, Step, machine

LONGEST_STEP = 30.0


def rows(
    settings: Settings, say: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """Measure cell by cell; one row per network, batch size and arm, whatever becomes of it."""
    for network, _ in settings.grid:
        settings.network(network)
    for arm in settings.arms:
        arm_named(arm)
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
            contention = CpuContention()
            timings = _timings(settings, network, batch_size, outcomes)
            cores = contention.cores()
            described = settings.network(network)
            for row in _cell_rows(described, batch_size, outcomes, timings):
                yield {**row, "cores_used_by_others": cores}


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
    described = settings.network(network)
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
    network: Network,
    batch_size: int,
    outcomes: dict[str, Outcome],
    timings: dict[str, Timing],
) -> Iterator[dict[str, Any]]:
    for arm, outcome in outcomes.items():
        timing = timings.get(arm)
        yield {
            "network": network.name,
            "parameters": network.parameters,
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
        }


def _ratio(timing: Timing | None, other: Timing | None) -> float | None:
    return None if timing is None or other is None else timing.median / other.median


def _memory_ratio(outcome: Outcome, other: Outcome | None) -> float | None:
    if other is None or outcome.peak_bytes is None or not other.peak_bytes:
        return None
    return outcome.peak_bytes / other.peak_bytes


def line(row: Mapping[str, Any]) -> str:
    """What a reader wants to see of a row while it is being measured."""
    head = f"{row['network']:<17}{row['batch_size']:>6}  {row['arm']:<15}"
    if row["status"] != OK:
        return f"{head}{row['status']}: {row['reason']}"
    lower, upper = (1e3 * value for value in row["step_seconds_quartiles"])
    parts = [
        f"{1e3 * row['step_seconds']:9.2f} ms [{lower:.2f}, {upper:.2f}]",
        f"{row['peak_memory_bytes'] / 2**20:8.0f} MiB",
        f"{row['samples_per_second']:10.0f} samples/s",
    ]
    for key, label in (("time_over_plain", "x plain"), ("time_over_opacus", "x Opacus")):
        if row[key] is not None:
            parts.append(f"{row[key]:.2f} {label}")
    return head + "  ".join(parts)
