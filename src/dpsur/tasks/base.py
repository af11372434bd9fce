"""What every task is: records to train on, public records to test on, and a network."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F

from dpsur.core.types import Examples, LossFunction


@dataclass(frozen=True)
class Task:
    """A data set with the network and settings that suit it.

    `settings` maps a method's name to hyper-parameters that differ from the method's defaults.
    """

    name: str
    summary: str
    network: Mapping[str, Any]
    load: Callable[[], tuple[Examples, Examples]]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loss: LossFunction = F.cross_entropy
