"""Functions captured as CUDA graphs: all their kernels are launched at once."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

WARM_UP_CALLS = 3
# One stream per device for whatever is captured while the default stream is the current one.
_streams: dict[int, torch.cuda.Stream] = {}
# For every stream on which something was begun beside its own work, the one that it was begun on.
_companions: dict[torch.cuda.Stream, torch.cuda.Stream] = {}


def graph_of(
    function: Callable[[], None],
    device: torch.device,
    generators: Iterable[torch.Generator] = (),
    before_capture: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Warm a function up, capture it and return its replay. The capture itself makes no call.

    `before_capture` can undo what the warm-up did. What the function works on must stay alive.
    """
    outer, stream = torch.cuda.current_stream(device), capture_stream(device)
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            function()
    outer.wait_stream(stream)
    before_capture()
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph.replay


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


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Do what stands inside beside what follows. On CUDA it fills what that leaves free.

    What it makes may be used after `rejoin`, and what it reads must not change until then. Captured
    work has to be rejoined before the capture ends.
    """
    if device.type != "cuda":
        yield
        return
    companion = _companion(device)
    companion.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(companion):
        yield


def rejoin(device: torch.device) -> None:
    """Let what follows wait for what was begun beside it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_companion(device))


def _companion(device: torch.device) -> torch.cuda.Stream:
    """The same one for a stream every time: each takes scratch memory for matrix products."""
    current = torch.cuda.current_stream(device)
    if current not in _companions:
        _companions[current] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _companions[current]
