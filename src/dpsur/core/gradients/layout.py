"""Where tensors hold the examples of a batch, and what is said when nobody knows."""

from dataclasses import dataclass

from torch import Tensor

from dpsur.core.gradients.uses import split, wide


class NotSupportedError(Exception):
    """A layer is used in a way that its rule does not cover; another engine has to take over."""

    def __init__(self, text: str, parameter: str | None = None) -> None:
        super().__init__(text)
        self.parameter = parameter


@dataclass(frozen=True)
class Layout:
    """Where a tensor holds the examples: `fold` entries of dimension `axis` for each of them."""

    axis: int
    fold: int = 1

    def by_example(self, values: Tensor) -> Tensor:
        """View with the shape (examples, fold, ...)."""
        return split(wide(values).movedim(self.axis, 0), 0, (-1, self.fold))


@dataclass(frozen=True)
class Slot:
    """A parameter, or some of its rows."""

    parameter: str
    rows: tuple[int, int] | None = None
