"""Accuracy with integer noise, and with the floating-point noise that the figures are about."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import Tensor, nn

import dpsur
from dpsur.config import RunConfig
from dpsur.functional.records import Examples
from dpsur.functional.tree import Params
from dpsur.mechanism import gaussian
from dpsur.mechanism.streams import Stream
from dpsur.methods import METHODS
from dpsur.per_example import ClippedSum
from dpsur.privacy.budget import Budget
from dpsur.runs.fit import execute
from dpsur.runs.tasks import build_task_session
from dpsur.tasks import task_named
from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Cell, OneByOne, Options, Row
from reproduction.differences import difference, in_words

SEEDS = range(5)
BUDGET = Budget(3.0, 1e-5)
DEMO = task_named("mnist-5k")
TASKS = ("digits, dpsgd", "digits, Algorithm 1", "a table")
INTEGERS, FLOATS = "integers", "floating point"
TITLE = "Accuracy with integer noise"
TEXT = """
Test accuracy in percent at epsilon 3, mean and standard deviation over seeds: with integer noise on
a grid, rounding and the allowance for floating point included, and with floating-point noise of
exactly the accounted deviation. The digits are those of `make demo`; the table has 4,000 made-up
records of 20 numbers and a network of one hidden layer.
"""
COLUMNS = (
    Column("data", "task"),
    Column("floating point", FLOATS),
    Column("integers", INTEGERS),
    Column("difference", "difference"),
)


def in_floating_point(seed: int) -> Callable[..., Params]:
    """The mechanism over the real numbers, as near as float64 gets."""
    draw = torch.Generator().manual_seed(seed)

    def add_noise(total: ClippedSum, multiplier: float | Tensor, _: Stream) -> Params:
        scale = multiplier * total.sensitivity
        return {
            name: value + (scale * torch.randn(value.shape, generator=draw).double()).to(value)
            for name, value in total.params.items()
        }

    return add_noise


def table() -> tuple[Examples, Examples]:
    """Made-up records whose class is a curved function of a few columns, with some noise."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5000, 20, generator=draw)
    height = x[:, 0] + x[:, 1] * x[:, 2] + 0.5 * torch.randn(5000, generator=draw)
    both = Examples(x, (height > 0).long())
    return both.part(slice(4000)), both.part(slice(4000, 5000))


def accuracy(task: str, seed: int) -> float:
    """Of one run."""
    if task == "a table":
        train, test = table()
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2))
        method = dpsur.Dpsgd(learning_rate=1.0, batch_size=500, updates=200)
        run = dpsur.fit(
            model, train, budget=BUDGET, method=method, test_set=test, seed=seed, progress=False
        )
    else:
        name = "dpsgd" if task == TASKS[0] else "dpsur"
        config = RunConfig(DEMO.name, METHODS[name](**DEMO.settings[name]), BUDGET, seed=seed)
        run = execute(build_task_session(config))
    assert run.scores is not None
    return float(run.scores["accuracy"])


class NoiseAccuracy(OneByOne):
    """One row per run."""

    name = "noise-accuracy"
    identity = ("config", "seed")

    def cells(self, options: Options) -> Iterator[Cell]:
        """Both kinds of noise with every seed."""
        for task in TASKS:
            for noise in (FLOATS, INTEGERS):
                for seed in options.seeds or SEEDS:
                    yield {"config": {"task": task, "noise": noise}, "seed": seed}

    def measure(self, cell: Cell, options: Options) -> Row:  # noqa: ARG002
        """Its accuracy."""
        floats, seed = cell["config"]["noise"] == FLOATS, cell["seed"]
        other = patch.object(gaussian, "add_noise", in_floating_point(seed))
        with other if floats else nullcontext():
            return {"accuracy": accuracy(cell["config"]["task"], seed)}

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """The table."""
        records = []
        for task in TASKS:
            found = {
                noise: [
                    100 * row["accuracy"]
                    for row in rows
                    if row["config"] == {"task": task, "noise": noise}
                ]
                for noise in (FLOATS, INTEGERS)
            }
            if all(len(values) > 1 for values in found.values()):
                shown = {
                    noise: f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
                    for noise, values in found.items()
                }
                apart = in_words(difference(found[INTEGERS], found[FLOATS]))
                records.append({"task": task, **shown, "difference": apart})
        return table_page(self.name, TITLE, TEXT, Table(COLUMNS, records))


EXPERIMENT = NoiseAccuracy()
