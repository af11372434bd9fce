"""What every task is: records to train on, public records to test on, and its networks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from dpsur.functional.problem import LossFunction
from dpsur.functional.records import Examples

# Names of what a network sees.
PIXELS, SCATTERING, TOKENS, VECTORS = "pixels", "scattering", "tokens", "vectors"


@dataclass(frozen=True)
class Task:
    """A data set with the networks and settings that suit it.

    `networks` maps a kind of features to the description of the network for them; the first is the
    default. `load` takes the folder of the data, or None for the usual places, and returns the
    training records and the test records, or None where a user's own data has no test records.
    `settings` maps a method's name to hyper-parameters that suit its default features better than
    the method's own defaults do. `public` is what the user declared to be public about the records,
    such as the number of classes; a release states it.
    """

    name: str
    summary: str
    networks: Mapping[str, Mapping[str, Any]]
    load: Callable[[Path | None], tuple[Examples, Examples | None]]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loss: LossFunction = F.cross_entropy
    public: Mapping[str, Any] = field(default_factory=dict)

    @property
    def default_features(self) -> str:
        """The kind of features that is used unless another is asked for."""
        return next(iter(self.networks))
