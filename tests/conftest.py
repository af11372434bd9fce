"""Small problems that every part of the suite can train on in milliseconds."""

import gc
import os
import tempfile
from collections.abc import Iterator

# Accounting results are stored on disk; tests must not read what another run left there.
os.environ.pop("DPSUR_CACHE", None)
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="dpsur-test-cache-")

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import reproduction  # noqa: F401 - registers the methods of the paper's comparison
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism.streams import NOISE, Stream, Streams
from dpsur.privacy.search import ignore_cache

# One thread for each of the two processes that `make test` starts.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    no_data = pytest.mark.skip(reason="needs the full data sets: set DPSUR_DATA")
    for item in items:
        # Markers, not keywords: those hold the names of folders too.
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("data") and not os.environ.get("DPSUR_DATA"):
            item.add_marker(no_data)


def pytest_collection_finish() -> None:
    """Garbage collections need not look at what stays: a hundred thousand functions and tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_initial_weights() -> None:
    """Modules made in a test start alike each time: no test may pass or fail by their luck."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_calibration() -> Iterator[None]:
    """Tests change the accounting, which noise that was stored by another test knows nothing of."""
    with ignore_cache():
        yield


@pytest.fixture(scope="session", autouse=True)
def patient() -> Iterator[None]:
    """On a busy machine a command would say what it computes, which tests do not expect."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpsur.status.PATIENCE", 600.0)
        yield


def blobs(size: int = 200, seed: int = 1) -> Examples:
    """Three well separated classes in the plane."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % 3
    centres = torch.tensor([[3.0, 0.0], [-3.0, 2.0], [0.0, -3.0]])
    points = centres[labels] + torch.randn(size, 2, generator=generator)
    return Examples(points, labels)


def small_model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))


def stream(seed: int = 0, purpose: str = NOISE, step: int = 1) -> Stream:
    """Random numbers of one purpose in one step."""
    return Streams(seed, torch.device("cpu")).at(step)[purpose]


@pytest.fixture
def problem() -> Problem:
    return Problem(small_model(), F.cross_entropy, blobs())


class StopAt:
    """An observer that breaks a run off, as a crash would."""

    def __init__(self, trial):
        self.at = trial

    def started(self, plan, progress):
        pass

    def evaluated(self, progress, scores, epsilon):
        pass

    def trials(self, progress, verdicts):
        if progress.ledger.trials >= self.at:
            raise KeyboardInterrupt
