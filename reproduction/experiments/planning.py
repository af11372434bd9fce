"""What `dpsur plan` says before a run, against what the run then gives, costs and takes."""

import os
import resource
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reproduction.base import Cell, OneByOne, Options, Row
from reproduction.experiments import tables

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5
TRAIN, PLAN = "train", "plan"
# Training records: parts of the public data sets that a processor trains on in minutes, and every
# table whole (None).
SIZES: Mapping[str, Sequence[int | None]] = {
    **dict.fromkeys(tables.TARGETS, (None,)),
    "mnist": (1000, 4000, 16_000),
    "fmnist": (1000, 4000, 16_000),
    "cifar10": (1000, 4000),
    "imdb": (1000, 4000, 25_000),
}
TEST_RECORDS = {"mnist": 5000, "fmnist": 5000, "cifar10": 2000, "imdb": 5000}
# What the weights of the model without privacy may cost; one is chosen on held-out records.
DECAYS = (1e-3, 1e-4, 1e-5, 1e-6)


class Data(NamedTuple):
    """Records to train and to test on, as a user passes them, and what else `fit` is given."""

    train: Any
    test: Any
    declared: Mapping[str, Any]


class Planning(OneByOne):
    """One row per data set and number of records: of training, or of a plan."""

    name = "planning"
    partial = True
    identity = ("data", "records", "arm", "seed")

    def cells(self, options: Options) -> Iterator[Cell]:
        """Training first."""
        for arm in (TRAIN, PLAN):
            for data, sizes in SIZES.items():
                for records in sizes:
                    if options.ask_for(data, arm, None):
                        for seed in options.seeds or (0,):
                            yield {"data": data, "records": records, "arm": arm, "seed": seed}

    def measure(self, cell: Cell, options: Options) -> Row:
        """In a process of its own, whose memory is its own."""
        del options
        work = {TRAIN: trained}[cell["arm"]]
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(work, cell["data"], cell["records"], cell["seed"]).result()

    def render(self, rows: Sequence[Row]) -> list[Any]:
        """Nothing yet."""
        del rows
        return []


EXPERIMENT = Planning()


def trained(name: str, records: int | None, seed: int) -> Row:
    """Train at every epsilon. What a run costs is measured first, without records to test on."""
    import dpsur
    from dpsur.status import silenced

    data = read(name, records)
    before = _most_memory()

    def fit(epsilon: float, test: Any) -> Any:
        with silenced(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dpsur.fit(
                *("auto", data.train),
                test_set=test,
                budget=dpsur.Budget(epsilon, DELTA),
                seed=seed,
                device="cpu",
                progress=False,
                **data.declared,
            )

    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # features are computed, as in any first run
        begun = time.process_time(), time.perf_counter()
        fit(1.0, None)
        used = time.process_time() - begun[0], time.perf_counter() - begun[1]
        memory = _most_memory()
        runs = {f"{epsilon:g}": fit(epsilon, data.test) for epsilon in EPSILONS}
    return {
        "accuracy": {name: run.scores["accuracy"] for name, run in runs.items()},
        "without_privacy": _without_privacy(runs[f"{EPSILONS[-1]:g}"], data),
        "processor_seconds": round(used[0], 2),
        "seconds": round(used[1], 2),
        "memory_mb": round(memory / 1e6),
        "memory_before_mb": round(before / 1e6),
        "threads": torch.get_num_threads(),
    }


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _without_privacy(run: Any, data: Data) -> float:
    """The same linear model on the same features, by logistic regression."""
    from dpsur.features import apply_layers

    def rows(part: Any) -> tuple[Tensor, Tensor]:
        if "schema" in data.declared:
            schema = data.declared["schema"]
            targets, kept = schema.targets(part)
            inputs = schema.inputs(part)[kept] if len(kept) != len(part) else schema.inputs(part)
        elif isinstance(part[0], list):
            from dpsur.features import words

            inputs, targets = (
                words(part[0]),
                torch.tensor([data.declared["classes"].index(label) for label in part[1]]),
            )
        else:
            inputs, targets = part
        layers = getattr(run.model, "features", None)
        return (inputs if layers is None else apply_layers(layers, inputs)), targets

    (x, y), (x_test, y_test) = rows(data.train), rows(data.test)
    held = np.random.default_rng(0).random(len(x)) < 0.2
    held = torch.from_numpy(held)

    def right(weights: Tensor, inputs: Tensor, targets: Tensor) -> float:
        return float((inputs @ weights).argmax(1).eq(targets).double().mean())

    classes = int(y.max()) + 1
    chosen = max(
        DECAYS,
        key=lambda decay: right(_logistic(x[~held], y[~held], classes, decay), x[held], y[held]),
    )
    return right(_logistic(x, y, classes, chosen), x_test, y_test)


def _logistic(x: Tensor, y: Tensor, classes: int, decay: float) -> Tensor:
    weights = torch.zeros(x.shape[1], classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=60, history_size=10)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(x @ weights, y) + decay / 2 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach()


def read(name: str, records: int | None) -> Data:
    """A table whole, or the first records of a public data set in a drawn order."""
    if name in tables.TARGETS:
        train, test, schema = tables.read_data(name)
        return Data(train, test, {"schema": schema})
    from dpsur.tasks.datasets import CIFAR10, FASHION_MNIST, IMDB, MNIST, load_arrays

    arrays = load_arrays(
        {"mnist": MNIST, "fmnist": FASHION_MNIST, "cifar10": CIFAR10, "imdb": IMDB}[name]
    )
    parts: list[Any]
    if name == "imdb":
        parts = [_reviews(arrays, part) for part in ("train", "test")]
        declared: dict[str, Any] = {"classes": ["negative", "positive"]}
    elif name == "cifar10":
        *batches, last = (np.asarray(arrays[key]) for key in sorted(arrays) if "batch" in key)
        parts = [_photographs(np.concatenate(batches)), _photographs(last)]
        declared = {"classes": 10}
    else:
        parts = [
            (
                torch.from_numpy(np.asarray(arrays[f"{part}_images"])).unsqueeze(1),
                torch.from_numpy(arrays[f"{part}_labels"].astype(np.int64)),
            )
            for part in ("train", "test")
        ]
        declared = {"classes": 10}
    train, test = parts
    return Data(_drawn(train, records), _drawn(test, TEST_RECORDS[name]), declared)


def _reviews(arrays: Any, part: str) -> tuple[list[str], list[str]]:
    from dpsur.tasks.imdb import spelled, word_list

    texts = spelled(arrays[f"{part}_tokens"], arrays[f"{part}_offsets"], word_list())
    return texts, [("negative", "positive")[int(one)] for one in arrays[f"{part}_labels"]]


def _photographs(records: Any) -> tuple[Tensor, Tensor]:
    found = torch.from_numpy(records)
    return found[:, 1:].reshape(-1, 3, 32, 32), found[:, 0].long()


def _drawn(part: Any, count: int | None) -> Any:
    """So many records in an order that has nothing to do with theirs."""
    order = np.random.default_rng(1).permutation(len(part[1]))[:count]
    if isinstance(part[0], list):
        return [part[0][one] for one in order], [part[1][one] for one in order]
    inputs = part[0][order]
    return (inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs), part[1][order]
