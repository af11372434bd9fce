"""An exponential moving average of released weights: post-processing, so free of charge."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpsur import checks
from dpsur.core.flat import elementwise
from dpsur.core.types import Params


def followed(
    rule: "WeightAverage | None", average: Params | None, params: Params, updates: Tensor
) -> Params | None:
    """The average after one more update; None where none is kept."""
    return None if rule is None or average is None else rule(average, params, updates)


@dataclass(frozen=True)
class WeightAverage:
    """Average with a decay that warms up, so that the initial weights are soon forgotten."""

    decay: float

    def __post_init__(self) -> None:
        checks.fraction_below_one("average_decay", self.decay)

    def __call__(self, average: Params, params: Params, updates: Tensor) -> Params:
        """The average after one more accepted update."""
        warm = (1 + updates.double()) / (10 + updates.double())
        decay = torch.minimum(torch.full_like(warm, self.decay), warm)
        return elementwise(
            lambda old, new: torch.lerp(new, old, decay.to(old.dtype)), average, params
        )
