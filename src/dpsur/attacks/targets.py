"""Targets of attacks: records that were and were not trained on, and models trained on them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.config import RunConfig
from dpsur.errors import InvalidInputError
from dpsur.features import compute, features_named
from dpsur.functional.persons import DEFAULT_RECORDS, Groups, numbered
from dpsur.functional.records import Examples
from dpsur.methods import Method
from dpsur.runs.fit import run_together
from dpsur.runs.result import Run
from dpsur.runs.tasks import TaskRecords, build_task_session
from dpsur.tasks import Task
from dpsur.tasks.base import PIXELS, TOKENS, VECTORS

ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Models:
    """One or more trained models of the same form, in evaluation mode."""

    modules: Sequence[nn.Module]

    def outputs(self, inputs: Tensor) -> Tensor:
        """Scores per class, of shape (models, records, classes), in microbatches."""
        with torch.no_grad():
            return torch.stack([torch.cat(self._parts(module, inputs)) for module in self.modules])

    @staticmethod
    def _parts(module: nn.Module, inputs: Tensor) -> list[Tensor]:
        device = next(module.parameters()).device
        return [module(part.to(device)) for part in torch.split(inputs, ROWS_AT_ONCE)]


# Trains one model on each of several sets of rows of a pool, all equally many, with everything that
# is random drawn from the seed.
Trainer = Callable[[Examples, Sequence[Tensor], int], Models]

SHARES = (2, 1, 2, 1)


@dataclass(frozen=True)
class Split:
    """Rows of the pool: what the target and the shadow model are trained and tested on.

    With `persons`, a number for every record, all records of a person are in one part.
    """

    pool: Examples
    target_train: Tensor
    target_test: Tensor
    shadow_train: Tensor
    shadow_test: Tensor
    persons: Tensor | None = None

    def members(self, seed: int) -> Tensor:
        """Rows that the target was trained on, of as many records or persons as it was not."""
        if self.persons is None:
            return as_many(self.target_train, len(self.target_test), seed)
        count = count_persons(self.persons[self.target_test])
        return self.target_train[whole_persons(self.persons[self.target_train], count, seed)]

    def examples(self, rows: Tensor) -> Examples:
        return self.pool.select(rows.to(self.pool.inputs.device))


def split_pool(pool: Examples, seed: int, persons: Tensor | None = None) -> Split:
    count = len(pool) if persons is None else int(persons.max()) + 1
    if count < sum(SHARES):
        unit = "records" if persons is None else "persons"
        raise InvalidInputError(f"a pool of {count} {unit} cannot be cut into four parts")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    part = count / sum(SHARES)
    ends = [round(part * sum(SHARES[: k + 1])) for k in range(4)]
    parts = [order[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if persons is not None:
        parts = [torch.isin(persons, chosen).nonzero().flatten() for chosen in parts]
    return Split(pool, parts[0], parts[1], parts[2], parts[3], persons)


def count_persons(persons: Tensor) -> int:
    """Of how many persons there are records."""
    return len(set(persons.tolist()))


def whole_persons(persons: Tensor, count: int, seed: int) -> Tensor:
    """The rows of at most `count` persons, drawn at random."""
    known = torch.tensor(sorted(set(persons.tolist())))
    return torch.isin(persons, as_many(known, count, seed)).nonzero().flatten()


def join(*sets: Examples) -> Examples:
    """Several sets of records as one pool."""
    return Examples(
        torch.cat([part.inputs for part in sets]), torch.cat([part.targets for part in sets])
    )


def as_many(rows: Tensor, count: int, seed: int) -> Tensor:
    """At most `count` of the rows, drawn at random."""
    if len(rows) <= count:
        return rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows[order[:count]]


def posteriors(models: Models, examples: Examples, index: int = 0) -> Tensor:
    """Probabilities of the classes, as one of the models gives them."""
    return models.outputs(examples.inputs)[index].double().softmax(1)


def log_odds(outputs: Tensor, targets: Tensor) -> Tensor:
    """log(p / (1 - p)) of the true class, without ever forming p.

    `outputs` may have further dimensions in front of (records, classes).
    """
    outputs = outputs.double()
    index = targets.to(outputs.device).expand(outputs.shape[:-1]).unsqueeze(-1)
    true = outputs.gather(-1, index)
    rest = outputs.scatter(-1, index, float("-inf"))
    return true.squeeze(-1) - rest.logsumexp(-1)


POOL_SEED = 2024


def attacked_pool(task: Task, most: int | None = None) -> Examples:
    """Training and test records of a task together, or this many of them, drawn once for all."""
    train, test = task.load(None)
    pool = train if test is None else join(train, test)
    if most is None:
        return pool
    checks.at_least_one("max_records", most)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(POOL_SEED))
    return pool.select(order[:most]) if most < len(pool) else pool


def plain_features(task: Task) -> str:
    """The name of the task's inputs as they are."""
    for features in (PIXELS, TOKENS, VECTORS):
        if features in task.networks:
            return features
    raise InvalidInputError(f"task {task.name} has no network for its inputs as they are")


def plain_network(task: Task) -> Mapping[str, Any]:
    return task.networks[plain_features(task)]


def as_seen_by(method: Method, task: Task) -> tuple[dict[str, Any], Examples, Examples | None]:
    """The network that a method trains on a task, and the records as the features it sees.

    Features are the method's own, or the inputs as they are.
    """
    train, test = task.load(None)
    if method.features is None:
        return {**plain_network(task), **method.network_changes()}, train, test
    features = features_named(method.features)
    train = Examples(compute(features, train.inputs), train.targets)
    if test is not None:
        test = Examples(compute(features, test.inputs), test.targets)
    return {**task.networks[method.features], **method.network_changes()}, train, test


@dataclass(frozen=True)
class RunTrainer:
    """Trains models as a run on a task would be, each with its own seed, side by side on a GPU.

    `featured` says that the pool holds the run's features already, which the models then take.
    `persons` number the person of every record of the pool, who are then the unit of the run.
    """

    run: RunConfig
    device: torch.device
    featured: bool = False
    persons: Tensor | None = None

    def __call__(self, pool: Examples, rows: Sequence[Tensor], seed: int) -> Models:
        """Train on each set of rows. Without `featured` the models take raw inputs."""
        sessions = []
        for index, part in enumerate(rows):
            groups = None
            if self.persons is not None:
                most = self.run.records_per_person or DEFAULT_RECORDS
                groups = Groups(numbered(self.persons[part]), most)
            chosen = pool.select(part.to(pool.inputs.device))
            records = TaskRecords(chosen, None, self.featured, groups=groups)
            run = replace(self.run, seed=1000 * seed + index, device=str(self.device))
            sessions.append(build_task_session(run, records)[0])
        models = []
        for outcome in run_together(sessions):
            if not isinstance(outcome, Run):
                raise outcome
            models.append(outcome.model.to(self.device).eval())
        return Models(models)
