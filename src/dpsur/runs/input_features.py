"""What happens to the inputs once, before training: features, and their normalisation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.errors import CheckpointError, InvalidInputError
from dpsur.features import (
    GROUP,
    MEAN,
    NONE,
    NORMALISATIONS,
    PRIVATE,
    QUANTILES,
    TABLE,
    PixelScale,
    compute,
    features_named,
)
from dpsur.features.layers import Centre, ChannelNorm, apply_layers, build_layers
from dpsur.features.statistics import (
    channel_moments,
    channel_statistics,
    private_levels,
    private_mean,
    private_quantile,
)
from dpsur.features.table import TableLayout, TableRows
from dpsur.functional.persons import Persons
from dpsur.functional.records import Examples, StreamedExamples
from dpsur.mechanism.streams import FEATURES, SETUP, Stream, Streams
from dpsur.privacy import events
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    Event,
    feature_histograms,
    feature_histograms_noise,
    feature_mean,
    feature_mean_noise,
    feature_statistics,
)
from dpsur.runs.checkpoint import Statistics

SCATTERING = "scattering"
# Names of released statistics.
CHANNEL_MEAN, DEVIATION, CENTRE, LEVELS = "mean", "deviation", "centre", "levels"
STATISTICS_OF = {PRIVATE: {CHANNEL_MEAN, DEVIATION}, MEAN: {CENTRE}, QUANTILES: {LEVELS}}
# Public limits of the grid that clip bounds are chosen from.
LEAST_BOUND, MOST_BOUND, BOUND_STEPS = 1e-4, 1e4, 256
# Groups of channels, and the noise of statistics where no budget says it.
GROUPS, NOISE = 27, {PRIVATE: 8.0, MEAN: 40.0, QUANTILES: 10.0}


@dataclass(frozen=True)
class InputFeatures:
    """Which features, and how they are normalised: by default scattering in groups, else not.

    `group` normalises groups of channels of each record alone and costs nothing. `private` uses
    the mean and variance of each channel over all records, released with noise: Formal guarantee:
    the Gaussian mechanisms in `setup`, two for the statistics and two for their clip bounds. `mean`
    subtracts the mean of all records (each clipped to norm 1), released with noise, and brings the
    rows to norm 1. Formal guarantee: the one Gaussian mechanism in `setup`. `quantiles` replaces
    the numbers of a table by noisy quantiles, by histograms of all columns together, where a table
    has numbers. Formal guarantee: the one Gaussian mechanism in `setup`.

    The noise of a mean and of histograms suits the `budget`; `noise` is another. `scale` is what
    images were standardised with, for features that need pixels in [0, 1]. `table` is where the
    numbers of a table are, for its features.
    """

    features: str | None = None
    normalisation: str | None = None
    budget: Budget | None = None
    scale: PixelScale | None = None
    table: TableLayout | None = None
    noise: float | None = None

    def __post_init__(self) -> None:
        if self.normalisation is not None:
            checks.one_of("normalisation", self.normalisation, NORMALISATIONS)
        checks.positive_each(self, "noise")
        if self.features is not None:
            features_named(self.features)

    @property
    def kind(self) -> str:
        """The normalisation that was asked for, or that suits the features."""
        if self.normalisation is not None:
            return self.normalisation
        return {SCATTERING: GROUP, TABLE: QUANTILES}.get(self.features or "", NONE)

    @property
    def binned(self) -> TableLayout | None:
        """Where the numbers are that get quantiles, for features of a table."""
        if self.table is None or self.features != TABLE:
            return None
        layout = self.table.binned()
        return layout if self.kind == QUANTILES else replace(layout, numbers=())

    @property
    def setup(self) -> tuple[Event, ...]:
        """What it costs before the first trial."""
        if self.kind == PRIVATE:
            return feature_statistics(self.noise_multiplier)
        if self.binned is not None and self.binned.numbers:
            return feature_histograms(self.noise_multiplier)
        return feature_mean(self.noise_multiplier) if self.kind == MEAN else ()

    @property
    def noise_multiplier(self) -> float:
        if self.noise is not None:
            return self.noise
        if self.budget is None or self.kind == PRIVATE:
            return NOISE[self.kind]
        suited = feature_mean_noise if self.kind == MEAN else feature_histograms_noise
        return suited(self.budget.epsilon, self.budget.delta)

    @property
    def charges(self) -> tuple[Event, ...]:
        """The same, after what the schema of a table cost if it was learned."""
        return (*(() if self.table is None else self.table.charged), *self.setup)

    def check(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one record's features, or an error where the inputs do not suit them."""
        if self.features is not None and not shape:
            raise InvalidInputError(
                f"features {self.features} need inputs of one tensor; use features none"
            )
        if self.features is not None:
            shape = features_named(self.features).output_shape(shape)
        if TABLE in (self.features, {QUANTILES: TABLE}.get(self.kind)):
            if self.binned is None or shape != (self.binned.width,):
                raise InvalidInputError(
                    f"features {TABLE} and normalisation {QUANTILES} are for each other and for "
                    "tables with a schema; pass one, or choose others"
                )
            if self.kind not in (NONE, QUANTILES):
                raise InvalidInputError(
                    f"features {TABLE} cannot be normalised by {self.kind}; use {QUANTILES} or "
                    f"{NONE}"
                )
            return (self.binned.features,)
        if self.kind == MEAN and len(shape) != 1:
            raise InvalidInputError(
                f"normalisation {MEAN} needs one row of features for each record, as the features "
                f"encoder have, but a record has the shape {shape}; use normalisation {NONE}"
            )
        if self.kind in (GROUP, PRIVATE) and len(shape) < 2:
            raise InvalidInputError(
                f"normalisation {self.kind} needs channels, but a record has the shape "
                f"{shape}; use normalisation {NONE}"
            )
        if self.kind == GROUP:
            build_layers([_group_norm(shape[0])])
        return shape

    def check_held(self, sets: Mapping[str, Examples]) -> None:
        """Refuse records that are streamed where something is computed from all of them first."""
        if not self.features and self.kind == NONE:
            return
        what = f"features {self.features}" if self.features else f"normalisation {self.kind}"
        for name, examples in sets.items():
            if isinstance(examples, StreamedExamples):
                raise InvalidInputError(
                    f"{what} cannot be used: they are computed once for records in memory, but "
                    f"{name} is streamed; leave them out, or compute them in the data set"
                )

    def check_pixels(self, inputs: Tensor, name: str) -> None:
        """Refuse images with pixels of a range that the features are not made for."""
        if self.features is not None:
            features_named(self.features).check_pixels(inputs, self.scale, name)


def _group_norm(channels: int) -> Mapping[str, Any]:
    return {"name": "group-norm", "groups": GROUPS, "channels": channels}


def like_features(train: Examples, shape: tuple[int, ...]) -> Examples:
    """Synthetic records of the shape of the features, to check a model with."""
    if shape == train.record_shape:
        return train
    return Examples(torch.zeros(1, *shape).expand(len(train), *shape), train.targets)


@dataclass(frozen=True)
class Inputs:
    """Inputs ready for training, and the layers that map raw inputs to them."""

    train: Examples
    test: Examples | None
    layers: nn.Sequential
    descriptions: tuple[Mapping[str, Any], ...]
    statistics: Statistics


def compute_inputs(
    asked: InputFeatures,
    train: Examples,
    test: Examples | None,
    streams: Streams,
    released: Statistics | None = None,
    persons: Persons | None = None,
) -> Inputs:
    """Compute features of all records, and normalise them.

    `released` are the statistics of a run that is resumed: they were drawn, and paid for, when it
    was started. With `persons` every statistic is of the means over each person's records, which
    have the bounds of a record. Formal guarantee: the Gaussian mechanisms in `asked.setup`, nothing
    else, and nothing at all where statistics are given.
    """
    descriptions: list[Mapping[str, Any]] = []
    device = streams.device
    if asked.features is not None:
        features = features_named(asked.features)
        descriptions += features.described(train.record_shape, asked.scale)

        def computed(examples: Examples) -> Examples:
            found = compute(features, examples.inputs, device=device, scale=asked.scale)
            return Examples(found, examples.targets)

        train, test = computed(train), None if test is None else computed(test)
    statistics: Statistics = {}
    if asked.setup:
        stream = streams.at(SETUP)[FEATURES]
        # What is drawn must be what the plan was charged for.
        if released is None and asked.kind == PRIVATE:
            assert persons is None  # refused before
            statistics = _private_statistics(asked, train.inputs, stream)
        elif released is None and asked.kind == MEAN:
            rows = train.inputs if persons is None else persons.means(train.inputs)
            mean, event = private_mean(rows, asked.noise_multiplier, stream)
            assert (event,) == asked.setup
            statistics = {CENTRE: mean.cpu()}
        elif released is None:
            assert asked.binned is not None
            numbers = train.inputs[:, list(asked.binned.numbers)]
            weights = None if persons is None else persons.weights
            levels, event = private_levels(numbers, asked.noise_multiplier, stream, weights)
            assert (event,) == asked.setup
            statistics = {LEVELS: levels.cpu()}
        else:
            if set(released) != STATISTICS_OF[asked.kind]:
                raise CheckpointError(
                    "the checkpoint holds no private statistics of features, so this run was not "
                    f"started with normalisation {asked.kind}; resume it with the settings that it "
                    "was started with"
                )
            statistics = released
    norm = _normalisation(asked, next(iter(train.record_shape), 0), statistics)
    layers = build_layers(descriptions)
    if norm is not None:
        layer, description = norm

        def normalised(examples: Examples) -> Examples:
            inputs = apply_layers(nn.Sequential(layer), examples.inputs, device=device)
            return Examples(inputs, examples.targets)

        train, test = normalised(train), None if test is None else normalised(test)
        layers.append(layer)
        descriptions.append(description)
    return Inputs(train, test, layers, tuple(descriptions), statistics)


def _normalisation(
    asked: InputFeatures, channels: int, statistics: Statistics
) -> tuple[nn.Module, Mapping[str, Any]] | None:
    if asked.binned is not None:
        shape = asked.binned
        rows = TableRows(shape.width, shape.columns, shape.numbers, statistics.get(LEVELS))
        layout = {"width": shape.width, "columns": shape.columns, "numbers": list(shape.numbers)}
        return rows, {"name": TABLE, **layout}
    if asked.kind == NONE:
        return None
    if asked.kind == GROUP:
        description = _group_norm(channels)
        return build_layers([description])[0], description
    if asked.kind == MEAN:
        return Centre(channels, statistics[CENTRE]), {"name": "centre", "features": channels}
    layer = ChannelNorm(channels, statistics[CHANNEL_MEAN], statistics[DEVIATION])
    return layer, {"name": "channel-norm", "channels": channels}


def _private_statistics(asked: InputFeatures, inputs: Tensor, stream: Stream) -> Statistics:
    (mean_bound, mean_event), (square_bound, square_event) = (
        private_quantile(
            rows.norm(dim=1),
            0.5,
            least=LEAST_BOUND,
            most=MOST_BOUND,
            noise_multiplier=events.CLIP_BOUND_NOISE,
            stream=stream,
            steps=BOUND_STEPS,
        )
        for rows in channel_moments(inputs, stream.device)
    )
    found = channel_statistics(
        inputs,
        mean_bound=mean_bound,
        square_bound=square_bound,
        noise_multiplier=asked.noise_multiplier,
        stream=stream,
    )
    assert (mean_event, square_event, *found.events) == asked.setup
    return {CHANNEL_MEAN: found.mean.cpu(), DEVIATION: found.deviation.cpu()}
