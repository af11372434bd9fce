"""Fashion-MNIST: 60,000 articles of clothing to train on, 10,000 to test."""

from pathlib import Path

from dpsur.core.types import Examples
from dpsur.tasks.base import Task
from dpsur.tasks.datasets import FASHION_MNIST, load_arrays
from dpsur.tasks.mnist import NETWORKS, grey_examples


def load(data_dir: Path | None = None) -> tuple[Examples, Examples]:
    """Training and test records: images scaled to [0, 1], and kinds of clothing."""
    return grey_examples(load_arrays(FASHION_MNIST, data_dir))


FMNIST_TASK = Task(
    name="fmnist",
    summary="Fashion-MNIST articles of clothing (60,000 to train, 10,000 to test)",
    networks=NETWORKS,
    load=load,
)
