"""Targets to attack: trained without privacy, many at once, or by a method under a budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpsur.attacks.many import ManyModels, Recipe
from dpsur.attacks.models import SeparateModels
from dpsur.attacks.split import join
from dpsur.core.types import Examples
from dpsur.errors import InvalidInputError
from dpsur.features import compute, features_named
from dpsur.methods import Method
from dpsur.runs.fit import execute
from dpsur.runs.tasks import Records, TaskRun, prepare_task, subset
from dpsur.tasks import Task, task_named
from dpsur.tasks.base import PIXELS, TOKENS, VECTORS
from dpsur.tasks.networks import build_network

# Models that take a step together: as many as still gain speed on one device.
AT_ONCE = {"cifar10": 4}
USUALLY_AT_ONCE = 16


def attacked_pool(task: Task, most: int | None = None) -> Examples:
    """Training and test records of a task together, or so many of them."""
    train, test = task.load(None)
    return subset(train if test is None else join(train, test), most)


def plain_features(task: Task) -> str:
    """The name of the task's inputs as they are."""
    for features in (PIXELS, TOKENS, VECTORS):
        if features in task.networks:
            return features
    raise InvalidInputError(f"task {task.name} has no network for its inputs as they are")


def plain_network(task: Task) -> Mapping[str, Any]:
    """The task's network for inputs as they are."""
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


def plain_trainer(task: Task, recipe: Recipe, device: torch.device) -> ManyModels:
    """Trains the task's network on its inputs as they are, without privacy."""
    description = plain_network(task)
    at_once = AT_ONCE.get(task.name, USUALLY_AT_ONCE)
    return ManyModels(lambda: build_network(description), task.loss, recipe, device, at_once)


@dataclass(frozen=True)
class PrivateTrainer:
    """Trains one model after another as a run on a task would be, each with its own seed."""

    run: TaskRun
    device: torch.device

    def __call__(self, pool: Examples, rows: Sequence[Tensor], seed: int) -> SeparateModels:
        """Train on each set of rows. The models take raw inputs, features or not."""
        task_named(self.run.task)
        models = []
        for index, part in enumerate(rows):
            records = Records(pool.select(part.to(pool.inputs.device)), None)
            run = replace(self.run, seed=1000 * seed + index, device=str(self.device))
            session, origin = prepare_task(run, records)
            models.append(execute(session, origin=origin).model.to(self.device).eval())
        return SeparateModels(models)
