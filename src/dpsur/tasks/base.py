"""What every task is: records to train on, public records to test on, and its networks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dpsur.features import TABLE, PixelScale, TableLayout
from dpsur.features.encoder import DIMENSION, SCATTERING_DIMENSION
from dpsur.functional.problem import LossFunction
from dpsur.functional.records import Examples

# Kind of records that are rows of norm 1, of weighted words.
WORD_ROWS = "words"
# Names of what a network sees.
PIXELS, SCATTERING, TOKENS, VECTORS = "pixels", "scattering", "tokens", "vectors"
ENCODER, ZOOMED = "encoder", "encoder-zoom"
WHITENED, SCATTERING_ENCODER = "whitened-scattering", "scattering+encoder"
# A hidden layer on wider vectors has more parameters than their noise allows.
WIDEST_FOR_HIDDEN_LAYER = 256
HIDDEN = 32


def linear_heads(shape: tuple[int, int, int], classes: int) -> dict[str, dict[str, Any]]:
    """Linear models for the features of the encoder, for images of a shape."""
    channels = shape[0]
    encoder = DIMENSION if channels in (1, 3) else DIMENSION * channels
    scattering = SCATTERING_DIMENSION if channels in (1, 3) else SCATTERING_DIMENSION * channels
    inputs = {
        ENCODER: encoder,
        ZOOMED: encoder,
        WHITENED: scattering,
        SCATTERING_ENCODER: scattering + encoder,
    }
    return {
        name: {"name": "linear-head", "inputs": count, "classes": classes}
        for name, count in inputs.items()
    }


@dataclass(frozen=True)
class Task:
    """A data set with the networks and settings that suit it.

    `networks` maps a kind of features to the description of the network for them; the first is the
    default. `load` takes the folder of the data, or None for the usual places, and returns the
    training records and the test records, or None where a user's own data has no test records.
    `settings` maps a method's name to hyper-parameters that suit its default features better than
    the method's own defaults do. `public` is what the user declared to be public about the records,
    such as the number of classes; a release states it. `pixel_scale` is what images were
    standardised with, None for images in [0, 1]. `records`, `shape` and `classes` are the number of
    training records, the shape of one and the number of classes, where they are known beforehand.
    `kind` says what the records are where their shape does not: `words` are rows of norm 1.
    `models` are networks that can be chosen by name instead of the default. `better` names a task
    on the same records whose model is more accurate. Of a table, `target` is what is predicted
    (`classes`, `labels` or `number`) and by how many outputs, and `table` where its numbers are.
    `private` are counts of the training records for the private folder, `warnings` what the public
    test records show. `persons` are numbers of the persons whom the training records belong to,
    where a column names them; `records` then counts persons.
    """

    name: str
    summary: str
    networks: Mapping[str, Mapping[str, Any]]
    load: Callable[[Path | None], tuple[Examples, Examples | None]]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loss: LossFunction = F.cross_entropy
    public: Mapping[str, Any] = field(default_factory=dict)
    pixel_scale: PixelScale | None = None
    records: int | None = None
    shape: tuple[int, ...] | None = None
    classes: int | None = None
    kind: str | None = None
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    better: str | None = None
    target: tuple[str, int] | None = None
    table: TableLayout | None = None
    private: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    persons: Tensor | None = None

    @property
    def default_features(self) -> str:
        """The kind of features that is used unless another is asked for."""
        return next(iter(self.networks))

    @property
    def auto_features(self) -> str:
        """The kind of features of the model `auto`: of a table rows of soft bins."""
        return TABLE if TABLE in self.networks else self.default_features
