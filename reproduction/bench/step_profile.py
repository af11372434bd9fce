"""Where the time of a step goes: the operations, or the kernels of a GPU, that take most of it."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from reproduction.bench.basic_arms import Cell, Settings, arm_named, machine
from reproduction.bench.measurement import release, synchronize

WARM_UP_STEPS, STEPS = 5, 10
_WIDTH = 100


def kernel_lines(settings: Settings, count: int) -> Iterator[str]:
    """Profile every arm of every cell; `count` lines for each, after a line with the sum."""
    with machine(settings):
        for network, batch_size in settings.grid:
            described = settings.network(network)
            cell = Cell(described, described.batch(batch_size, settings.device))
            for arm in settings.arms:
                head = f"{network} {batch_size} {arm}"
                if (refusal := arm_named(arm).refusal(batch_size, settings.device)) is not None:
                    yield f"{head}: {refusal}"
                    continue
                yield from _profiled(head, cell, arm, count)
                release(settings.device)


def _profiled(head: str, cell: Cell, arm: str, count: int) -> Iterator[str]:
    device = cell.device
    try:
        step = arm_named(arm).make(cell)
        for _ in range(WARM_UP_STEPS):
            step()
        synchronize(device)
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as found:
            for _ in range(STEPS):
                step()
            synchronize(device)
    except Exception as error:  # an arm that cannot make the step is reported, the others continue
        yield f"{head}: {type(error).__name__}: {str(error).splitlines()[0]}"
        return
    rows = [
        (_seconds(event, device), event.count, event.key)
        for event in found.key_averages()
        if _seconds(event, device) > 0
    ]
    rows.sort(reverse=True)
    total, launched = sum(row[0] for row in rows), sum(row[1] for row in rows)
    yield f"{head}: {1e3 * total / STEPS:.3f} ms in {launched / STEPS:.0f} operations a step"
    for seconds, calls, name in rows[:count]:
        yield f"  {1e6 * seconds / STEPS:9.1f} us  {calls / STEPS:6.1f} x  {name[:_WIDTH]}"


def _seconds(event: Any, device: torch.device) -> float:
    """Time of an operation itself: on a GPU that of its kernels, not of their launch."""
    if device.type != "cuda":
        return 1e-6 * float(event.self_cpu_time_total)
    on_device = str(event.device_type).endswith("CUDA")
    return 1e-6 * float(event.self_device_time_total) if on_device else 0.0
