"""The public data sets on disk: found, fetched, decoded once and checked."""

from dpsur.tasks.datasets.fetch import fetch
from dpsur.tasks.datasets.load import load_arrays
from dpsur.tasks.datasets.published import CIFAR10, DATA_SETS, FASHION_MNIST, IMDB, MNIST

__all__ = ["CIFAR10", "DATA_SETS", "FASHION_MNIST", "IMDB", "MNIST", "fetch", "load_arrays"]
