"""Functions captured as CUDA graphs: all their kernels are launched at once.

What two functions do beside each other becomes two branches of the graph.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpsur.per_example.kernels.products import launches_are_captured

# The first loads kernels and makes tables of the data, the second shows that nothing is left.
WARM_UP_CALLS = 2
# One stream per device for whatever is captured while the default stream is the current one.
_streams: dict[int, torch.cuda.Stream] = {}
# For every stream that work is begun beside, the one that this work goes to.
_companions: dict[torch.cuda.Stream, torch.cuda.Stream] = {}
One = TypeVar("One")
Other = TypeVar("Other")


def capture_graph(
    function: Callable[[], None],
    device: torch.device,
    before_capture: Callable[[], None] = lambda: None,
    pool: Any = None,
    warm_up: int = WARM_UP_CALLS,
) -> Callable[[], None]:
    """Warm a function up, capture it and return its replay. The capture itself makes no call.

    `before_capture` can undo what the warm-up did. What the function works on must stay alive.
    Graphs that are never replayed at the same time can share a `pool` of memory
    (`torch.cuda.graph_pool_handle()`).
    """
    return capture_graphs([function], device, before_capture, pool, warm_up)[0]


def capture_graphs(
    functions: Sequence[Callable[[], None]],
    device: torch.device,
    before_capture: Callable[[], None] = lambda: None,
    pool: Any = None,
    warm_up: int = WARM_UP_CALLS,
    *,
    try_out: bool = False,
) -> list[Callable[[], None]]:
    """The same for functions that are called in turn, such as a forward and a backward pass.

    With `try_out` they are called once more, and what would wait for the device raises: code that
    is not ours is better refused before a capture than by one.
    """
    outer, stream = torch.cuda.current_stream(device), capture_stream(device)
    stream.wait_stream(outer)
    replays = []
    with launches_are_captured():
        try:
            with torch.cuda.stream(stream):
                for _ in range(warm_up):
                    for function in functions:
                        function()
                if try_out:
                    with waiting_raises():
                        for function in functions:
                            function()
        finally:  # after an error too: memory that is freed now may still be read on the stream
            outer.wait_stream(stream)
        before_capture()
        for function in functions:
            graph = torch.cuda.CUDAGraph()
            try:
                with _nothing_collected(), torch.cuda.graph(graph, stream=stream, pool=pool):
                    function()
            except BaseException:
                _after_failure(outer, device)
                raise
            replays.append(graph.replay)
    return replays


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep the garbage collector from a capture: a graph of before that it frees would end it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def fill(place: Tensor, values: Tensor, count: int) -> Tensor:
    """Copy some rows into place, and the first of them where there is room left."""
    place[:count].copy_(values, non_blocking=True)
    if 0 < count < len(place):
        place[count:].copy_(place[:1].expand_as(place[count:]))
    return place


@contextmanager
def waiting_raises() -> Iterator[None]:
    """Let an operation raise that waits for the device, as `.item()` does."""
    before = torch.cuda.get_sync_debug_mode()
    _set_waiting("error")
    try:
        yield
    finally:
        _set_waiting(before)


def _set_waiting(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says, once, that it does not find every wait
        torch.cuda.set_sync_debug_mode(mode)


# Captures that have failed. Graphs from before do not draw from the generator that follows one.
failures = 0


def _after_failure(stream: torch.cuda.Stream, device: torch.device) -> None:
    """Put back what PyTorch leaves behind a capture that failed: its stream, and its generator.

    The generator would refuse every later draw, since it counts as being captured.
    """
    global failures
    failures += 1
    torch.cuda.set_stream(stream)
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
    generator.seed()


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream, or another one where that is the default stream.

    Kernels of matrix products share the scratch memory of the stream that they were captured on. So
    graphs that are replayed at the same time must be captured on streams of their own, and those
    that are replayed on the default stream, one after the other, need only one.
    """
    current = torch.cuda.current_stream(device)
    if current != torch.cuda.default_stream(device):
        return current
    if current.device_index not in _streams:
        _streams[current.device_index] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[current.device_index]


def run_concurrently(
    device: torch.device, one: Callable[[], One], other: Callable[[], Other]
) -> tuple[One, Other]:
    """Call two functions that do not need each other; on CUDA they run at the same time.

    `one` should be the smaller: its kernels fill the gaps between those of `other`.
    """
    if device.type != "cuda":
        return one(), other()
    current = torch.cuda.current_stream(device)
    # The stream beside it has priority: this one has more to do. Streams are lent from one store
    # for each priority, in turn. So a companion is never the stream of another graph, whose scratch
    # memory it would share.
    if current not in _companions:
        _companions[current] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    companion = _companions[current]
    # What `one` leaves to be freed is taken again only by work of the companion, and that waits
    # here for all that came before it. So no memory has to be watched across the two streams.
    companion.wait_stream(current)
    try:
        with torch.cuda.stream(companion):
            first = one()
        second = other()
    finally:  # a capture that ends with its companion still out would hide the error behind it
        current.wait_stream(companion)
    return first, second
