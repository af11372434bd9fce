"""What a run would cost and roughly give, before any private record is read.

    prospect(method, records, budget, "proven", setup)      # noise, length, limit on attacks
    Simulation.of(records, width, classes).lost(budget, "cpu")

Noise and the limit on attacks follow from public facts. What privacy costs in accuracy is simulated
for tables: the same training on synthetic tables of the same number of records, columns and
classes, on which a linear model without privacy is right in about 95, 85 and 75% of the cases. A
real table is none of these, so the range is a guide and no promise.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dpsur.errors import InvalidInputError
from dpsur.methods import Method
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event
from dpsur.runs.fit import fit
from dpsur.runs.plots import guess_bound, tradeoff
from dpsur.status import silenced
from dpsur.tasks.columns import Category, Number
from dpsur.tasks.schema import Schema

# How often a linear model without privacy is right on the synthetic tables; two classes or more.
DIFFICULTIES = (0.95, 0.85, 0.75)
TEST_RECORDS = 4000
# A simulation of more numbers than these takes minutes.
MOST_NUMBERS = 4_000_000


@dataclass(frozen=True)
class Prospect:
    """What is to be expected at one epsilon.

    `run` describes updates and noise, `right_guesses` is the largest share of right guesses about
    membership at even odds (None where it is not known), and `lost` the least and the most accuracy
    that privacy cost on synthetic tables, as shares of the records (None without a simulation).
    """

    epsilon: float
    run: str
    right_guesses: float | None
    lost: tuple[float, float] | None = None


def prospect(
    method: Method, records: int, budget: Budget, accounting: str, setup: tuple[Event, ...]
) -> Prospect:
    """What follows from public facts alone."""
    _, plan = method.resolve(records, budget, accounting, setup)
    curve = tradeoff(plan)
    share = None if curve is None else guess_bound(curve)
    return Prospect(budget.epsilon, plan.describe(), share)


@dataclass(frozen=True)
class Simulation:
    """Synthetic tables of one shape, and what a linear model without privacy makes of them."""

    tables: Sequence[Any]
    references: Sequence[float]
    schema: Schema

    @classmethod
    def of(cls, records: int, width: int, classes: int, seed: int = 0) -> "Simulation":
        """Tables of this many records and columns of numbers; some records are added for a test."""
        if records * width > MOST_NUMBERS:
            raise InvalidInputError(
                f"{records} records of {width} numbers are too many to simulate here; give "
                f"--records of at most {MOST_NUMBERS // width}, or leave out the simulation"
            )
        names = [f"x{place}" for place in range(width)]
        schema = Schema({name: Number(-1, 1) for name in names}, {"y": Category([*range(classes)])})
        made = [_table(records + TEST_RECORDS, width, classes, d, seed) for d in DIFFICULTIES]
        references = [_reference(x, y, records, classes) for x, y in made]
        tables = [({**dict(zip(names, x.T, strict=True)), "y": y}) for x, y in made]
        return cls(tables, references, schema)

    def lost(self, budget: Budget, device: str, seed: int = 0) -> tuple[float, float, float]:
        """The least and the most accuracy that privacy costs, and the seconds of one run."""
        found, begun = [], time.perf_counter()
        for table, reference in zip(self.tables, self.references, strict=True):
            train, test = (
                {name: values[part] for name, values in table.items()}
                for part in (slice(TEST_RECORDS, None), slice(TEST_RECORDS))
            )
            with silenced():
                run = fit(
                    *("auto", train),
                    schema=self.schema,
                    test_set=test,
                    budget=budget,
                    device=device,
                    seed=seed,
                )
            assert run.scores is not None
            found.append(reference - run.scores["accuracy"])
        seconds = (time.perf_counter() - begun) / len(self.tables)
        return max(0.0, min(found)), max(0.0, *found), seconds


def _table(records: int, width: int, classes: int, right: float, seed: int) -> tuple[Any, Any]:
    """Uniform columns, of which later ones matter less, and classes by a linear model.

    The scale of the linear model is such that its best guess is right as often as `right` says, or
    half way from chance to certainty where chance is higher.
    """
    draws = np.random.default_rng(seed)
    inputs = draws.uniform(-1, 1, (records, width)).astype(np.float32)
    weights = draws.normal(size=(width, classes)) / np.sqrt(1 + np.arange(width))[:, None]
    scores = inputs @ weights
    scores = (scores - scores.mean(0)) / scores.std(0)
    low, high, wanted = 0.0, 200.0, max(right, 0.5 + 0.5 / classes)
    for _ in range(40):
        scale = (low + high) / 2
        best = F.softmax(torch.from_numpy(scale * scores), 1).amax(1).mean()
        low, high = (scale, high) if best < wanted else (low, scale)
    chances = F.softmax(torch.from_numpy(scale * scores), 1)
    drawn = torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(seed))
    return inputs, drawn.flatten().numpy()


def _reference(inputs: Any, labels: Any, records: int, classes: int) -> float:
    """The accuracy of logistic regression without privacy, on the records for the test."""
    x, y = torch.from_numpy(inputs), torch.from_numpy(labels)
    train, test = slice(TEST_RECORDS, TEST_RECORDS + records), slice(TEST_RECORDS)
    layer = torch.nn.Linear(x.shape[1], classes)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(layer(x[train]), y[train])
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return float((layer(x[test]).argmax(1) == y[test]).double().mean())
