"""What a preset is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpsur.runs.preparation import NONE


@dataclass(frozen=True)
class Preset:
    """What a run is asked to do: hyper-parameters, features and changes of the network."""

    options: Mapping[str, Any]
    features: str
    normalisation: str = NONE
    network: Mapping[str, Any] = field(default_factory=dict)
