"""What procedures draw beside their noise: batches, and whatever random layers draw."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from dpsur.functional.problem import Problem
from dpsur.mechanism.sampling import Draw, padded_batch, steady_batch
from dpsur.mechanism.streams import LAYERS, Streams
from dpsur.per_example import draws_randomness


class Draws:
    """A procedure on data, with the streams that it draws from."""

    def __init__(self, problem: Problem, streams: Streams) -> None:
        self._problem = problem
        self._streams = streams
        self._draw: Draw = steady_batch
        self._random_layers = draws_randomness(problem.model, problem.train)

    def padded(self) -> Self | None:
        """The same on padded batches; not for layers that draw random numbers."""
        if self._random_layers:
            return None
        copied = copy.copy(self)
        copied._draw = padded_batch
        return copied

    def _layer_randomness(self) -> AbstractContextManager[None]:
        """Where layers such as dropout get their draws from."""
        if not self._random_layers:
            return nullcontext()
        return self._streams.global_randomness(LAYERS)
