"""Functions captured as CUDA graphs: all their kernels are launched at once."""

from collections.abc import Callable, Iterable

import torch

WARM_UP_CALLS = 3
# One stream per device for whatever is captured while the default stream is the current one.
_streams: dict[int, torch.cuda.Stream] = {}


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
