"""What `dpsur plan` says before a run, against what the run then gives, costs and takes."""

import json
import os
import resource
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reproduction.artifacts import Artifact, Column, Page, Table
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
    "imdb": (1000, 4000),
}
TEST_RECORDS = {"mnist": 5000, "fmnist": 5000, "cifar10": 2000, "imdb": 5000}
SHAPES = {
    "mnist": ["--image-size", "1x28x28", "--classes", "10"],
    "fmnist": ["--image-size", "1x28x28", "--classes", "10"],
    "cifar10": ["--image-size", "3x32x32", "--classes", "10"],
    "imdb": ["--texts"],
}
# Tables on which the synthetic ones were chosen: all but the first five of the list.
CHOSEN_ON = tuple(tables.TARGETS)[5:]
KINDS = {
    "table": "five tables that played no part in the plan",
    "chosen": "seven tables (marked *) on which the synthetic tables were chosen",
    "public": "four public data sets, planned from the other three",
}
TEXT = """\
# Plans and what became of them

`dpsur plan` says what a run would cost before any record is read. Here are its ranges beside what
training with `dpsur.fit("auto", ...)` then gave: points of accuracy that privacy cost, at epsilon
0.5 to 8 and delta 1e-5, against the same linear model on the same features without privacy
(logistic regression), with the range of the plan in brackets. Bold figures are outside of it. Of
the public data sets parts were used, which processors can train on, and at most 5,000 test records;
one seed. A loss below zero counts as none.

For a table the range goes from nothing to what privacy cost on the harder of two synthetic tables
with the same columns (`dpsur plan --schema`). For images and texts it surrounds what privacy cost
on public data at the same product of records and epsilon, by the factor that one of these needs to
be in the range of the others (3.3). Here a data set takes no part in its plan: neither its losses
nor the factor, which then is between 3.3 and 5.9.

Ranges of images and texts span a factor of ten and more: without any record, no more is known than
that data sets differ. The upper ends for tables are often generous: real columns tell less, and
more of the same, than the synthetic ones do. What was missed: of diamonds the loss hardly depends
on epsilon, since 150 updates are not enough for 43,000 records; of DoctorVisits and credit_data it
is a point, less than the standard error of an accuracy on so few test records.
"""
COSTS_TEXT = """
## Time and memory

Processor seconds of a run at epsilon 1 without test records, features included, and the largest
memory of its process, on one thread of a machine that did other work too.
"""
END = """\
Rendered by `python -m reproduction planning` from the rows of results/planning.jsonl.
`$DPSUR_TABLES` names the folder of the tables, `$DPSUR_DATA` that of the public data sets.
"""
ACCURACY = (
    Column("data", "data"),
    Column("records", "records", ",d"),
    Column("without privacy", "reference", ".1f"),
    *(Column(f"epsilon {epsilon:g}", f"{epsilon:g}") for epsilon in EPSILONS),
)
COSTS = (
    Column("data", "data"),
    Column("records", "records", ",d"),
    Column("seconds", "seconds"),
    Column("planned seconds", "planned_seconds"),
    Column("GB", "memory"),
    Column("planned GB", "planned_memory"),
)
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
        work = {TRAIN: trained, PLAN: planned}[cell["arm"]]
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(work, cell["data"], cell["records"], cell["seed"]).result()

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """A page with a table of accuracies and one of costs."""
        pairs = compared(rows)
        accuracies, costs = accuracy_records(pairs), cost_records(pairs)
        parts = [
            *(TEXT, accuracy_text(pairs) + "\n", Table(ACCURACY, accuracies).markdown() + "\n"),
            *(COSTS_TEXT, costs_text(pairs) + "\n", Table(COSTS, costs).markdown() + "\n", END),
        ]
        return [Page("tables/planning.md", "\n".join(parts))]


EXPERIMENT = Planning()


def compared(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """What training gave, and what the plan said, where there are both."""
    found = {(row["data"], row["records"], row["arm"]): row for row in rows}
    keys = [(name, size) for name, sizes in SIZES.items() for size in sizes]
    return [
        (found[*key, TRAIN], found[*key, PLAN])
        for key in keys
        if (*key, TRAIN) in found and (*key, PLAN) in found
    ]


def lost(row: Row, epsilon: str) -> float:
    """The accuracy that privacy cost; nothing where the private model was better."""
    return max(0.0, float(row["without_privacy"] - row["accuracy"][epsilon]))


def held(trained_row: Row, planned_row: Row, epsilon: str) -> bool:
    """Whether what privacy cost was in the range."""
    least, most = planned_row["lost"][epsilon]
    return bool(least <= lost(trained_row, epsilon) <= most)


def public_data(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """`dpsur.runs.planning.PUBLIC_DATA`: the means at each product of records and epsilon."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["arm"] == TRAIN and row["data"] in TEST_RECORDS:
            for epsilon in row["accuracy"]:
                product = int(row["records"] * float(epsilon))
                points = found.setdefault(row["data"], {})
                points.setdefault(product, []).append(lost(row, epsilon))
    return {
        name: {product: float(f"{np.mean(points[product]):.2g}") for product in sorted(points)}
        for name, points in found.items()
    }


def _kind(name: str) -> str:
    return "public" if name in TEST_RECORDS else "chosen" if name in CHOSEN_ON else "table"


def accuracy_text(pairs: Sequence[tuple[Row, Row]]) -> str:
    """How often the ranges held, of each kind of data."""
    lines = []
    for kind, title in KINDS.items():
        some = [pair for pair in pairs if _kind(pair[0]["data"]) == kind]
        cases = [held(*pair, f"{epsilon:g}") for pair in some for epsilon in EPSILONS]
        if cases:
            lines.append(f"- {title}: the range held in **{sum(cases)} of {len(cases)}** cases;")
    return "\n".join(lines)[:-1] + "." if lines else ""


def costs_text(pairs: Sequence[tuple[Row, Row]]) -> str:
    """How often seconds and memory were in their ranges."""
    seconds = [_within(one["processor_seconds"], plan["seconds"]) for one, plan in pairs]
    memory = [_within(one["memory_mb"] * 1e6, plan["memory_bytes"]) for one, plan in pairs]
    return (
        f"The seconds were in their range in **{sum(seconds)} of {len(pairs)}** cases, the memory "
        f"in **{sum(memory)} of {len(pairs)}**."
    )


def _within(value: float, ends: Sequence[float]) -> bool:
    return ends[0] <= value <= ends[1]


def _name(row: Row) -> str:
    return str(row["data"].partition("_")[2] or row["data"])


def accuracy_records(pairs: Sequence[tuple[Row, Row]]) -> list[dict[str, Any]]:
    """A line for each data set and number of records; what was outside its range is bold."""
    records = []
    for one, plan in pairs:
        record: dict[str, Any] = {
            "data": _name(one) + ("*" if _kind(one["data"]) == "chosen" else ""),
            "records": plan["train_records"],
            "reference": 100 * one["without_privacy"],
        }
        for epsilon in map("{:g}".format, EPSILONS):
            least, most = plan["lost"][epsilon]
            value = f"{100 * (one['without_privacy'] - one['accuracy'][epsilon]):.1f}"
            value = value if held(one, plan, epsilon) else f"**{value}**"
            record[epsilon] = f"{value} ({100 * least:.1f} to {100 * most:.1f})"
        records.append(record)
    return records


def cost_records(pairs: Sequence[tuple[Row, Row]]) -> list[dict[str, Any]]:
    """Seconds and memory of a run, beside what was planned."""
    return [
        {
            "data": _name(one),
            "records": plan["train_records"],
            "seconds": f"{one['processor_seconds']:.1f}",
            "planned_seconds": "{:.1f} to {:.1f}".format(*plan["seconds"]),
            "memory": f"{one['memory_mb'] / 1e3:.2f}",
            "planned_memory": "{:.2f} to {:.2f}".format(*(b / 1e9 for b in plan["memory_bytes"])),
        }
        for one, plan in pairs
    ]


def planned(name: str, records: int | None, seed: int) -> Row:
    """What `dpsur plan` prints. Of a public data set its own figures are left out."""
    del seed
    from dpsur.cli import main
    from dpsur.runs.planning import lost_on_public_data

    words = ["plan", "--json", "--device", "cpu"]
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()) as printed:
        if name in tables.TARGETS:
            train, _, schema = tables.read_data(name)
            schema.save(f"{folder}/schema.json")
            records = len(train)
            words += ["--schema", f"{folder}/schema.json"]
        else:
            words += SHAPES[name]
        assert main([*words, "--records", str(records)]) == 0
    found = json.loads(printed.getvalue())
    lost = {f"{row['epsilon']:g}": row["lost"] for row in found["epsilons"]}
    if name in TEST_RECORDS:
        assert records is not None
        classes = 2 if name == "imdb" else 10
        lost = {
            one: lost_on_public_data(records, classes, float(one), without=[name]) for one in lost
        }
    return {
        "train_records": records,
        "lost": lost,
        "seconds": found["seconds"],
        "memory_bytes": found["memory_bytes"],
    }


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
    from dpsur.features.layers import apply_layers

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
    held = torch.from_numpy(np.random.default_rng(0).random(len(x)) < 0.2)

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
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach()


def read(name: str, records: int | None) -> Data:
    """A table whole, or the first records of a public data set in a drawn order."""
    if name in tables.TARGETS:
        train, test, schema = tables.read_data(name)
        return Data(train, test, {"schema": schema})
    from reproduction.datasets import CIFAR10, FASHION_MNIST, IMDB, MNIST, load_arrays

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
    from reproduction.tasks.imdb import spelled, word_list

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
