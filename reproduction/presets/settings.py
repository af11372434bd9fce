"""Settings as data: the paper's, and those that the paper does not give, as they were chosen."""

import csv
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dpsur.privacy.events import Event, Gaussian, LossTest, SampledGaussian, Trial

DATASET_SIZES = {"mnist": 60_000, "fmnist": 60_000, "cifar10": 50_000, "imdb": 25_000}
EPSILONS = (1, 2, 3, 4)
DELTA = 1e-5
TUNED = "tuned_settings.csv"
# An arm, a task and the epsilon at which settings were tried.
Block = tuple[str, str, int]
# "private-norm(sigma=8)" in the table: means and mean squares of the features, noised with this.
STATISTICS_NOISE = 8.0


@dataclass(frozen=True)
class PaperSetting:
    """What the paper trains with on one data set at one budget."""

    dataset: str
    epsilon: int
    batch_size: int
    noise_multiplier: float
    val_batch_size: int
    val_noise_multiplier: float
    accept_threshold: float
    private_statistics: bool
    optimizer: str
    learning_rate: float
    momentum: float | None
    max_grad_norm: float
    loss_clip: float

    @property
    def dataset_size(self) -> int:
        """Training records, N."""
        return DATASET_SIZES[self.dataset]

    @property
    def trial(self) -> Trial:
        """The repeated event."""
        return Trial(
            SampledGaussian(self.batch_size / self.dataset_size, self.noise_multiplier),
            LossTest(
                self.val_batch_size / self.dataset_size,
                self.val_noise_multiplier,
                self.accept_threshold,
            ),
        )

    @property
    def setup(self) -> tuple[Event, ...]:
        """Events before training."""
        return (Gaussian(STATISTICS_NOISE),) * 2 if self.private_statistics else ()


def paper_settings() -> list[PaperSetting]:
    """All sixteen, in the order of the table."""
    text = (Path(__file__).parent / "paper_settings.csv").read_text(encoding="utf-8")
    return [
        PaperSetting(
            dataset=row["dataset"],
            epsilon=epsilon,
            batch_size=int(row["batch"]),
            noise_multiplier=float(row[f"sigma_t_eps{epsilon}"]),
            val_batch_size=int(row["val_batch"]),
            val_noise_multiplier=float(row[f"sigma_v_eps{epsilon}"]),
            accept_threshold=float(row["beta"]),
            private_statistics="private-norm" in row["features"],
            optimizer=row["optimizer"],
            learning_rate=float(row["lr"]),
            momentum=float(row["momentum"]) if row["momentum"] else None,
            max_grad_norm=float(row["clip_norm"]),
            loss_clip=float(row["loss_clip"]),
        )
        for row in csv.DictReader(text.splitlines())
        for epsilon in EPSILONS
    ]


def paper_setting(dataset: str, epsilon: int) -> PaperSetting:
    """One of the sixteen."""
    return next(s for s in paper_settings() if (s.dataset, s.epsilon) == (dataset, epsilon))


@cache
def tuned_settings() -> dict[Block, dict[str, Any]]:
    """The chosen hyper-parameters by arm, task and epsilon."""
    text = (Path(__file__).parent / TUNED).read_text(encoding="utf-8")
    return {
        (row["arm"], row["task"], int(row["epsilon"])): json.loads(row["settings"])
        for row in csv.DictReader(text.splitlines())
    }


def tuned_setting(arm: str, task: str, epsilon: int) -> dict[str, Any]:
    """What was chosen at this epsilon, else at the nearest that was tried; nothing if none was."""
    tried = [block for block in tuned_settings() if block[:2] == (arm, task)]
    if not tried:
        return {}
    return dict(tuned_settings()[min(tried, key=lambda block: abs(block[2] - epsilon))])
