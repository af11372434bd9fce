"""The public data sets on disk: found, fetched, decoded once and checked."""

from reproduction.datasets.download import fetch
from reproduction.datasets.published import CIFAR10, DATA_SETS, FASHION_MNIST, IMDB, MNIST
from reproduction.datasets.store import load_arrays

__all__ = ["CIFAR10", "DATA_SETS", "FASHION_MNIST", "IMDB", "MNIST", "fetch", "load_arrays"]
