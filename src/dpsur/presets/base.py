"""What a preset is."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dpsur.features import NONE


@dataclass(frozen=True)
class DataFacts:
    """What is public about a run before it starts; None is what is not known.

    The number of records, the shape of one, the number of classes, the kind of records (`words`)
    where the shape does not say it; whether there is a GPU, whether the model is the user's own,
    the features that were asked for, whether the run is a short try (`max_updates`), epsilon and
    delta. Of a table also what is predicted (`classes`, `labels` or `number`) and by how many
    outputs. `whole` says that `records` is the exact number, `unit` what it counts: a record
    or a person.
    """

    records: int | None
    shape: tuple[int, ...] | None
    classes: int | None
    kind: str | None = None
    gpu: bool = True
    own_model: bool = False
    features: str | None = None
    short: bool = False
    target: tuple[str, int] | None = None
    whole: bool = True
    budget: tuple[float, float] | None = None
    unit: str = "record"


@dataclass(frozen=True)
class Preset:
    """What a run is asked to do: hyper-parameters, features and changes of the network.

    `chosen` are the hyper-parameters among the options that were chosen by trying several, and
    `given` those that hold where others are tried.
    """

    given: Mapping[str, Any]
    features: str | None
    normalisation: str | None = NONE
    network: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        return {**self.given, **self.chosen}

    def tuned(self, chosen: Mapping[str, Any]) -> "Preset":
        """The preset with hyper-parameters that were chosen by trying several."""
        return replace(self, chosen={**self.chosen, **chosen})

    def changed(self, changes: Mapping[str, Any]) -> "Preset":
        """The preset with hyper-parameters that hold whatever is chosen."""
        rest = {name: value for name, value in self.chosen.items() if name not in changes}
        return replace(self, given={**self.given, **changes}, chosen=rest)
