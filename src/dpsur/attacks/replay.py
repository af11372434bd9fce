"""Steps of training that are replayed, so that a device does not wait for the host."""

from collections.abc import Callable, Sequence

from torch import Tensor

from dpsur.core.graphs import graph_of


def replayed(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """A step as a CUDA graph. `state`, which the step changes, is as before afterwards."""
    before = [value.clone() for value in state]

    def restore() -> None:
        for value, old in zip(state, before, strict=True):
            value.copy_(old)

    return graph_of(step, state[0].device, before_capture=restore)
