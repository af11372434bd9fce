"""What it costs to protect persons in the place of records, with either sampler.

Linear models on three data sets whose records have owners. All arms have the same network, the same
number of updates and the same sampling rate; the learning rate is chosen on held-out training
persons.
"""

import csv
import lzma
import math
import os
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import dpsur
from dpsur import figure_style as style
from dpsur.errors import InvalidInputError, PrivacyWarning
from dpsur.functional.persons import Groups, choose_records
from dpsur.functional.records import Examples
from reproduction.artifacts import Artifact, Column, Picture, Table, table_page
from reproduction.base import Cell, OneByOne, Options, Row
from reproduction.experiments.tables import FOLDER
from reproduction.series import Look, Point, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEEDS = tuple(range(10))
DELTA, UPDATES, RATE, CLIP = 1e-5, 60, 0.25, 1.0
LEARNING_RATES = (0.5, 2.0, 8.0)
RECORD, PERSON, BY_RECORD, DIVIDED = "record", "person", "by record", "divided"
EPSILONS = {
    "psid": (0.5, 1.0, 3.0, 8.0),
    "movielens": (0.5, 1.0, 3.0, 8.0),
    "fmnist": (3.0,),
}
MOST = {"psid": (1, 3, 7), "movielens": (1, 4, 16), "fmnist": (1, 10)}
LOOKS = {
    RECORD: Look("a record is protected, a person is not", style.GREY, "v", "--"),
    PERSON: Look("persons are drawn", style.BLUE),
    BY_RECORD: Look("records are drawn, mixture of Gaussians", style.GREEN, "^"),
    DIVIDED: Look("epsilon of records divided by k", style.ORANGE, "s", ":"),
}
TITLE = "Persons in the place of records"
TEXT = f"""
Linear models on records that belong to persons: PSID (595 persons with 7 yearly records each: is
the wage above 500?), MovieLens (671 persons with 20 to 2,391 ratings each: is it at least 4, by
genres and year?) and Fashion-MNIST with 10 images for each of 6,000 made-up persons. A fifth of the
persons of a table is for testing; Fashion-MNIST has its own test images. Figures are AUC, on
Fashion-MNIST accuracy, mean and standard deviation over seeds; epsilon is that of the unit, delta
{DELTA:g}. On MovieLens people with many ratings make up most of the test records, and of those that
*record* trains on.

*record* protects one record and uses all of them; it promises persons little. The others protect
persons, of whom at most k records are used. *person* draws persons, each of whom adds the mean
gradient of their records. *by record* draws records, whose number of a person in a batch is
binomial (arXiv 2407.07737). *divided* trains on records with epsilon / k and the delta that group
privacy then needs, which is what is left without either of the two. The page shows, for each arm,
the k that was best on held-out training persons; the table as data has all.

All arms make {UPDATES} updates at a sampling rate of {RATE:g} and clip to {CLIP:g}. The learning
rate is one of {", ".join(f"{rate:g}" for rate in LEARNING_RATES)}, chosen on a fifth of the
training persons that the model was not trained on, with the seed of that choice; this choice is not
charged.
"""


class Owned(NamedTuple):
    """Records with owners, split by owner."""

    inputs: Tensor
    targets: Tensor
    owners: Tensor

    def of(self, chosen: Tensor) -> "Owned":
        """Some of the records."""
        return Owned(*(value[chosen] for value in self))


class Persons(OneByOne):
    """One row per data set, arm, k, budget and seed."""

    name = "persons"
    identity = ("config", "seed")
    partial = True
    shared = True

    def cells(self, options: Options) -> Iterator[Cell]:
        """Data set by data set, first the seeds."""
        for seed in options.seeds or SEEDS:
            for data, budgets in EPSILONS.items():
                for epsilon in budgets:
                    for arm, most in _arms(data):
                        if options.ask_for(data, arm, epsilon):
                            config = {"data": data, "arm": arm, "k": most, "epsilon": epsilon}
                            yield {"config": config, "seed": seed}

    def measure(self, cell: Cell, options: Options) -> Row:  # noqa: ARG002
        """Choose a learning rate on held-out persons, one for all seeds, then train and test."""
        config = cell["config"]
        found = _held_out(config["data"], config["arm"], config["k"], config["epsilon"])
        chosen = max(found, key=lambda rate: found[rate])
        figures = _trained(config, chosen, cell["seed"], *records_of(config["data"]))
        return {"learning_rate": chosen, "held_out": found[chosen], **figures}

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """A page, a table and a figure."""
        found = summary(rows)
        columns = (
            Column("data", "data"),
            Column("epsilon", "epsilon", "g"),
            Column("arm", "arm"),
            Column("k", "k"),
            Column("mean", "mean", ".4f"),
            Column("deviation", "deviation", ".4f"),
            Column("noise multiplier", "noise_multiplier", ".3f"),
            Column("seeds", "seeds"),
        )
        best = Table(columns, best_of(found))
        picture = Picture("persons", lambda: figure(found))
        return table_page("persons", TITLE, TEXT, Table(columns, found), picture, shown=(best,))


EXPERIMENT = Persons()


def _arms(data: str) -> Iterator[tuple[str, int | None]]:
    yield RECORD, None
    for most in MOST[data]:
        yield PERSON, most
        if most > 1:
            yield BY_RECORD, most
        yield DIVIDED, most


# --- data -----------------------------------------------------------------------------------------


@cache
def records_of(data: str) -> tuple[Owned, Owned]:
    """Training and test records, of different persons."""
    if data == "fmnist":
        train, test = (dpsur_task(part) for part in (True, False))
        order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(0))
        owners = torch.empty(len(order), dtype=torch.int64)
        owners[order] = torch.arange(len(order)) // 10
        return Owned(*train, owners), Owned(*test, torch.arange(len(test[0])))
    whole = _psid() if data == "psid" else _movielens()
    return split(whole, 0)


def split(whole: Owned, seed: int) -> tuple[Owned, Owned]:
    """Four fifths of the persons, and the others."""
    people = torch.tensor(sorted(set(whole.owners.tolist())))
    draw = torch.Generator().manual_seed(seed)
    kept = people[torch.randperm(len(people), generator=draw)[len(people) // 5 :]]
    inside = torch.isin(whole.owners, kept)
    return whole.of(inside), whole.of(~inside)


def dpsur_task(train: bool) -> tuple[Tensor, Tensor]:
    """Fashion-MNIST as rows of pixels."""
    from dpsur.tasks import task_named

    parts = task_named("fmnist").load(None)
    found = parts[0 if train else 1]
    assert found is not None
    inputs = found.inputs.flatten(1).float()
    return inputs / inputs.abs().amax(), found.targets


def _table(name: str) -> list[dict[str, str]]:
    path = Path(os.environ.get(FOLDER, "")) / f"{name}.csv.xz"
    if not path.is_file():
        raise InvalidInputError(f"{path} is missing; set {FOLDER} to the folder of the tables")
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _psid() -> Owned:
    rows = _table("AER_PSID7682")
    flags = ("occupation", "industry", "south", "smsa", "married", "gender", "union", "ethnicity")
    inputs = [
        [
            1.0,
            float(row["experience"]) / 50,
            float(row["weeks"]) / 52,
            float(row["education"]) / 17,
            (float(row["year"]) - 1976) / 6,
            *(float(row[name] in ("yes", "white", "male", "afam")) for name in flags),
        ]
        for row in rows
    ]
    targets = [int(float(row["wage"]) > 500) for row in rows]
    owners = [int(row["id"]) for row in rows]
    return Owned(torch.tensor(inputs), torch.tensor(targets), torch.tensor(owners))


GENRES = (
    *("Action", "Adventure", "Animation", "Children", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller"),
    *("War", "Western"),
)


def _movielens() -> Owned:
    rows = [row for row in _table("dslabs_movielens") if row["year"] not in ("", "NA")]
    inputs = torch.zeros(len(rows), len(GENRES) + 2)
    places = {name: place for place, name in enumerate(GENRES)}
    for number, row in enumerate(rows):
        for name in row["genres"].split("|"):
            if name in places:
                inputs[number, places[name]] = 1.0
        inputs[number, -2] = (float(row["year"]) - 1990) / 50
        inputs[number, -1] = 1.0
    targets = torch.tensor([int(float(row["rating"]) >= 4) for row in rows])
    return Owned(inputs, targets, torch.tensor([int(row["userId"]) for row in rows]))


# --- training -------------------------------------------------------------------------------------


@cache
def _held_out(data: str, arm: str, most: int | None, epsilon: float) -> dict[float, float]:
    """The figure of each learning rate on training persons that were held out."""
    config = {"data": data, "arm": arm, "k": most, "epsilon": epsilon}
    train, held = split(records_of(data)[0], 1)
    return {rate: _trained(config, rate, 100, train, held)["figure"] for rate in LEARNING_RATES}


def _trained(
    config: Mapping[str, Any], learning_rate: float, seed: int, train: Owned, test: Owned
) -> Row:
    """Train one arm; its figure on test records."""
    arm, most, epsilon = config["arm"], config["k"], config["epsilon"]
    people = len(set(train.owners.tolist()))
    data, groups, delta = train, {}, DELTA
    if most is not None:
        numbers = torch.unique(train.owners, return_inverse=True)[1]
        kept, _ = choose_records(Examples(train.inputs, train.targets), Groups(numbers, most))
        size = len(kept)
        if arm == DIVIDED:
            data = Owned(kept.inputs, kept.targets, torch.arange(size))
            epsilon = epsilon / most
            delta = DELTA / (most * math.exp((most - 1) * epsilon))
        else:
            groups = {"groups": train.owners, "records_per_person": most}
    if arm == PERSON:
        size = people
    elif arm == RECORD:
        size = len(train.inputs)
    if arm == BY_RECORD:
        groups |= {"sampling": "record", "records": size}
    classes = int(train.targets.max()) + 1
    model = nn.Linear(train.inputs.shape[1], classes, bias=False)
    nn.init.zeros_(model.weight)
    method = dpsur.Dpsgd(
        gate="none",
        updates=UPDATES,
        batch_size=max(1, round(RATE * size)),
        learning_rate=learning_rate,
        momentum=0.0,
        max_grad_norm=CLIP,
        average_decay=0.9,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        run = dpsur.fit(
            model,
            (data.inputs, data.targets),
            budget=dpsur.Budget(epsilon, delta),
            method=method,
            seed=seed,
            device="cpu",
            progress=False,
            **groups,
        )
    with torch.no_grad():
        scores = run.model(test.inputs)
    right = float((scores.argmax(1) == test.targets).double().mean())
    area = None if classes > 2 else auc(scores[:, 1] - scores[:, 0], test.targets)
    return {
        "figure": right if area is None else area,
        "accuracy": right,
        "noise_multiplier": run.plan.update.noise_multiplier,
        "batch_size": method.batch_size,
        "persons": people,
        "test_records": len(test.targets),
    }


def auc(scores: Tensor, labels: Tensor) -> float:
    """The chance that a positive record has the larger score; ties count half."""
    values, ranks = scores.double().numpy(), np.empty(len(scores))
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[inverse]
    positive = labels.numpy() == 1
    above = ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2
    return float(above / (positive.sum() * (~positive).sum()))


# --- pages ----------------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> list[Row]:
    """Means over seeds."""
    grouped: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        config = row["config"]
        grouped[config["data"], config["epsilon"], config["arm"], config["k"]].append(row)
    order = [RECORD, PERSON, BY_RECORD, DIVIDED]
    found = []

    def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        data, epsilon, arm, most = key
        return data, epsilon, order.index(arm), most or 0

    for data, epsilon, arm, most in sorted(grouped, key=place):
        some = grouped[data, epsilon, arm, most]
        figures = [row["figure"] for row in some]
        found.append(
            {
                "data": data,
                "epsilon": epsilon,
                "arm": arm,
                "k": most,
                "mean": statistics.fmean(figures),
                "deviation": statistics.stdev(figures) if len(figures) > 1 else None,
                "noise_multiplier": some[0]["noise_multiplier"],
                "held_out": some[0]["held_out"],
                "seeds": len(figures),
            }
        )
    return found


def best_of(found: Sequence[Row]) -> list[Row]:
    """Of each arm the number of records per person that was best on held-out persons."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in found:
        key = row["data"], row["epsilon"], row["arm"]
        if key not in best or row["held_out"] > best[key]["held_out"]:
            best[key] = row
    return list(best.values())


def figure(found: Sequence[Row]) -> "Figure":
    """AUC by epsilon, for the two tables."""
    import matplotlib.pyplot as plt

    whole, places = plt.subplots(1, 2, figsize=(8.0, 3.2), layout="constrained")
    for place, data in zip(places, ("psid", "movielens"), strict=True):
        _panel(place, data, [row for row in best_of(found) if row["data"] == data])
    handles, labels = places[0].get_legend_handles_labels()
    whole.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return whole


def _panel(place: "Axes", data: str, rows: Sequence[Row]) -> None:
    for arm, look in LOOKS.items():
        points = [
            Point(row["epsilon"], row["mean"], row["deviation"] or 0.0, row["seeds"])
            for row in rows
            if row["arm"] == arm
        ]
        if points:
            draw(place, points, look)
    place.set_title({"psid": "PSID, 476 persons", "movielens": "MovieLens, 537 persons"}[data])
    place.set_xlabel("epsilon of the unit")
    place.set_ylabel("AUC on other persons")
    place.set_xscale("log")
    place.set_xticks(EPSILONS[data], labels=[f"{epsilon:g}" for epsilon in EPSILONS[data]])
    place.minorticks_off()
