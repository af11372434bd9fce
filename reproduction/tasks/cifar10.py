"""CIFAR-10: 50,000 colour photographs of ten kinds of thing to train on, 10,000 to test."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dpsur.functional.records import Examples
from dpsur.tasks.base import PIXELS, SCATTERING, Task, linear_heads
from dpsur.tasks.npz import Array
from reproduction.datasets import CIFAR10, load_arrays
from reproduction.datasets.readers import BATCHES

# Means and deviations of another public data set (ImageNet), so they cost no privacy.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Images that are normalised at a time: few enough to stay in a processor's cache.
FEW = 250


def load(data_dir: Path | None = None) -> tuple[Examples, Examples]:
    """Training and test records: normalised images of three channels, and kinds of thing."""
    arrays = load_arrays(CIFAR10, data_dir)
    *train, test = (arrays[name] for name in BATCHES)
    return _examples(train), _examples([test])


def _examples(batches: Sequence[Array]) -> Examples:
    labels = np.concatenate([records[:, 0] for records in batches]).astype(np.int64)
    inputs = torch.empty(len(labels), 3, 32, 32)
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    position = 0
    for records in map(torch.from_numpy, batches):
        for start in range(0, len(records), FEW):
            rows = records[start : start + FEW, 1:].view(-1, 3, 32, 32)
            images = inputs[position : position + len(rows)]
            images.copy_(rows).div_(255).sub_(mean).div_(deviation)
            position += len(rows)
    return Examples(inputs, torch.from_numpy(labels))


CIFAR10_TASK = Task(
    name="cifar10",
    summary="CIFAR-10 photographs (50,000 to train, 10,000 to test)",
    networks={
        SCATTERING: {"name": "cifar-scattering-cnn"},
        PIXELS: {"name": "cifar-pixel-cnn"},
        **linear_heads((3, 32, 32), classes=10),
    },
    load=load,
    pixel_scale=(MEAN, DEVIATION),
    records=50_000,
    shape=(3, 32, 32),
    classes=10,
)
