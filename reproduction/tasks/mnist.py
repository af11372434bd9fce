"""MNIST and Fashion-MNIST: 60,000 grey images to train on, 10,000 to test."""

from pathlib import Path

import numpy as np
import torch

from dpsur.functional.records import Examples
from dpsur.tasks.base import PIXELS, SCATTERING, Task, linear_heads
from dpsur.tasks.npz import Array, Arrays
from reproduction.datasets import FASHION_MNIST, MNIST, load_arrays

NETWORKS = {
    SCATTERING: {"name": "scattering-cnn", "classes": 10},
    PIXELS: {"name": "pixel-cnn", "classes": 10},
    **linear_heads((1, 28, 28), classes=10),
}


def load(data_dir: Path | None = None) -> tuple[Examples, Examples]:
    """Training and test records: images scaled to [0, 1], and digits."""
    return grey_examples(load_arrays(MNIST, data_dir))


def grey_examples(arrays: Arrays) -> tuple[Examples, Examples]:
    """Images of one channel in [0, 1] with their classes, from arrays of bytes."""
    return (
        _examples(arrays["train_images"], arrays["train_labels"]),
        _examples(arrays["test_images"], arrays["test_labels"]),
    )


def _examples(images: Array, labels: Array) -> Examples:
    inputs = torch.from_numpy(images).unsqueeze(1).float().div_(255)
    return Examples(inputs, torch.from_numpy(labels.astype(np.int64)))


MNIST_TASK = Task(
    name="mnist",
    summary="MNIST digits (60,000 to train, 10,000 to test)",
    networks=NETWORKS,
    load=load,
    records=60_000,
    shape=(1, 28, 28),
    classes=10,
)


def load_fashion(data_dir: Path | None = None) -> tuple[Examples, Examples]:
    """Training and test records: images scaled to [0, 1], and kinds of clothing."""
    return grey_examples(load_arrays(FASHION_MNIST, data_dir))


FMNIST_TASK = Task(
    name="fmnist",
    summary="Fashion-MNIST articles of clothing (60,000 to train, 10,000 to test)",
    networks=NETWORKS,
    load=load_fashion,
    records=60_000,
    shape=(1, 28, 28),
    classes=10,
)
