"""Attacks on one target, with what each adversary knows kept apart, and the targets.

Attacks that score records: correctness, confidence, likelihood ratio, relative likelihood. A target
is trained by a run on a part of the records, as are the shadow models of some attacks.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.attacks.metrics import SHUFFLED, Array, Flags, Scores
from dpsur.config import RunConfig
from dpsur.errors import InvalidInputError
from dpsur.features import compute, features_named
from dpsur.functional.persons import DEFAULT_RECORDS, Groups, numbered
from dpsur.functional.records import Examples
from dpsur.methods import Method
from dpsur.runs.fit import run_together
from dpsur.runs.result import Run
from dpsur.runs.tasks import TaskRecords, build_task_session
from dpsur.status import status
from dpsur.tasks import Task
from dpsur.tasks.base import PIXELS, TOKENS, VECTORS

ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Models:
    """One or more trained models of the same form, in evaluation mode."""

    modules: Sequence[nn.Module]

    def outputs(self, inputs: Tensor) -> Tensor:
        """Scores per class, of shape (models, records, classes), in microbatches."""
        found, parts = [], torch.split(inputs, ROWS_AT_ONCE)
        with torch.no_grad():
            for module in self.modules:
                device = next(module.parameters()).device
                found.append(torch.cat([module(part.to(device)) for part in parts]))
        return torch.stack(found)


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
    ends = [round(part * sum(SHARES[:k])) for k in range(5)]
    parts = [order[start:end] for start, end in pairwise(ends)]
    if persons is not None:
        parts = [torch.isin(persons, chosen).nonzero().flatten() for chosen in parts]
    return Split(pool, parts[0], parts[1], parts[2], parts[3], persons)


def count_persons(persons: Tensor) -> int:
    return len(set(persons.tolist()))


def whole_persons(persons: Tensor, count: int, seed: int) -> Tensor:
    known = torch.tensor(sorted(set(persons.tolist())))
    return torch.isin(persons, as_many(known, count, seed)).nonzero().flatten()


def join(*sets: Examples) -> Examples:
    return Examples(
        torch.cat([part.inputs for part in sets]), torch.cat([part.targets for part in sets])
    )


def as_many(rows: Tensor, count: int, seed: int) -> Tensor:
    """At most `count` of the rows, drawn at random."""
    if len(rows) <= count:
        return rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows[order[:count]]


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
    return pool.select(as_many(torch.arange(len(pool)), most, POOL_SEED))


def plain_features(task: Task) -> str:
    """The name of the task's inputs as they are."""
    for features in (PIXELS, TOKENS, VECTORS):
        if features in task.networks:
            return features
    raise InvalidInputError(f"task {task.name} has no network for its inputs as they are")


def as_seen_by(method: Method, task: Task) -> tuple[dict[str, Any], Examples, Examples | None]:
    """The network that a method trains on a task, and the records as the features it sees.

    Features are the method's own, or the inputs as they are.
    """
    train, test = task.load(None)
    name = method.features or plain_features(task)
    features = features_named(name)
    train = Examples(compute(features, train.inputs), train.targets)
    if test is not None:
        test = Examples(compute(features, test.inputs), test.targets)
    return {**task.networks[name], **method.network_changes()}, train, test


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
            groups, most = None, self.run.records_per_person or DEFAULT_RECORDS
            if self.persons is not None:
                groups = Groups(numbered(self.persons[part]), most)
            chosen = pool.select(part.to(pool.inputs.device))
            records = TaskRecords(chosen, None, self.featured, groups=groups)
            run = replace(self.run, seed=1000 * seed + index, device=str(self.device))
            sessions.append(build_task_session(run, records))
        models = []
        for outcome in run_together(sessions):
            if not isinstance(outcome, Run):
                raise outcome
            models.append(outcome.model.to(self.device).eval())
        return Models(models)


def right_answers(target: Models, examples: Examples) -> Tensor:
    """1 for each record that the first model classifies correctly, else 0."""
    answers = target.outputs(examples.inputs)[0].argmax(1)
    right: Tensor = answers == examples.targets.to(answers.device)
    return right.double().cpu()


def gap_attack(target: Models, members: Examples, others: Examples) -> Scores:
    inside, outside = (right_answers(target, each).numpy() for each in (members, others))
    return Scores(inside, outside, 0.5)


def confidence_attack(target: Models, members: Examples, others: Examples) -> Scores:
    """A threshold on the loss (Yeom et al. 2018)."""
    return Scores.halved(target_log_odds(target, members), target_log_odds(target, others))


SMALLEST_DEVIATION = 1e-3


@dataclass(frozen=True)
class Shadows:
    """Log-odds under shadow models, (models, records), and which had which record."""

    odds: Array
    member: Flags
    outputs: Tensor


def train_shadows(
    trainer: Trainer, pool: Examples, candidates: Tensor, size: int, models: int, seed: int
) -> Shadows:
    """Train shadow models on random parts of the pool, each of the target's size."""
    if models < 2:
        raise InvalidInputError(f"the attack compares models with and without: got {models} models")
    rows = random_parts(len(pool), size, models, seed)
    trained = trainer(pool, rows, seed)
    chosen = pool.select(candidates.to(pool.inputs.device))
    outputs = trained.outputs(chosen.inputs)
    member = torch.zeros(models, len(pool), dtype=torch.bool)
    for model, part in zip(member, rows, strict=True):
        model[part] = True
    odds = log_odds(outputs, chosen.targets).cpu().numpy()
    return Shadows(odds, member[:, candidates].numpy(), outputs)


def random_parts(pool: int, size: int, parts: int, seed: int) -> list[Tensor]:
    """Random parts of equal size that cover every record equally often, but for one.

    One shuffled deck after another is dealt out. A part that runs over the end of a deck continues
    with the next, less the records that it has already.
    """
    generator = torch.Generator().manual_seed(seed)
    deck = torch.randperm(pool, generator=generator)
    found: list[Tensor] = []
    while len(found) < parts:
        part, deck = deck[:size], deck[size:]
        if len(part) < size:
            fresh = torch.randperm(pool, generator=generator)
            repeated = torch.isin(fresh, part)
            fresh = torch.cat([fresh[~repeated], fresh[repeated]])
            part, deck = torch.cat([part, fresh[: size - len(part)]]), fresh[size - len(part) :]
        found.append(part)
    return found


def lira_online(target_odds: Array, shadows: Shadows) -> Array:
    """Log-likelihood ratio of in against out, with means a record and deviations in common."""
    inside, outside = (
        _normals(shadows.odds, chosen) for chosen in (shadows.member, ~shadows.member)
    )
    return _log_density(target_odds, *inside) - _log_density(target_odds, *outside)


def lira_offline(target_odds: Array, shadows: Shadows) -> Array:
    """How many deviations the target is surer of a record than models that do not know it."""
    mean, deviation = _normals(shadows.odds, ~shadows.member)
    return np.asarray((target_odds - mean) / deviation)


def target_log_odds(target: Models, examples: Examples) -> Array:
    return log_odds(target.outputs(examples.inputs)[0], examples.targets).cpu().numpy()


def _normals(odds: Array, chosen: Flags) -> tuple[Array, Array]:
    """Means by record and one deviation for all, which few models estimate better than many.

    A record that no chosen model covers gets the mean of all.
    """
    counts = chosen.sum(0)
    sums = np.where(chosen, odds, 0.0).sum(0)
    overall = float(odds[chosen].mean())
    mean = np.where(counts > 0, sums / np.maximum(counts, 1), overall)
    residual = np.where(chosen, odds - mean, 0.0)
    free = max(1, int(np.maximum(counts - 1, 0).sum()))
    deviation = max(float(np.sqrt((residual**2).sum() / free)), SMALLEST_DEVIATION)
    return mean, np.full_like(mean, deviation)


def _log_density(values: Array, mean: Array, deviation: Array) -> Array:
    return np.asarray(-0.5 * ((values - mean) / deviation) ** 2 - np.log(deviation))


# Offline, models that know the record are not there; their likelihood is taken as a line through
# that of the models that do not: p_in = a p_out + (1 - a).
OFFLINE_SLOPE = 0.3


def true_probability(outputs: Tensor, targets: Tensor) -> Tensor:
    """Probability of the true class; `outputs` may have further dimensions in front."""
    probabilities = outputs.double().softmax(-1)
    index = targets.to(outputs.device).expand(outputs.shape[:-1]).unsqueeze(-1)
    return probabilities.gather(-1, index).squeeze(-1).clamp(min=1e-30)


def relative_likelihood(target: Tensor, shadows: Tensor, member: Tensor, *, online: bool) -> Tensor:
    """Likelihood under the target over the average of models that know a record and that do not.

    `shadows` is (models, records); `member` says which model knows which record. Offline, models
    that know a record are not asked about it.
    """
    if member.all(0).any() or (online and (~member).all(0).any()):
        raise InvalidInputError("some record is in all shadow models or in none; train more")
    member = member.to(shadows.device)
    outside = torch.where(member, 0.0, shadows).sum(0) / (~member).sum(0)
    if online:
        inside = torch.where(member, shadows, 0.0).sum(0) / member.sum(0)
    else:
        inside = OFFLINE_SLOPE * outside + (1 - OFFLINE_SLOPE)
    return target / (0.5 * (inside + outside))


def rmia_scores(records: Tensor, population: Tensor) -> Array:
    """Share of the population whose relative likelihood is at most as large."""
    ordered = torch.sort(population).values
    below = torch.searchsorted(ordered, records, right=True)
    # ties of saturated shares are broken by the likelihood itself, which orders them the same way
    share = below.double() / len(ordered)
    tie_break = 1e-6 * torch.sigmoid(records.log())
    return np.asarray((share + tie_break).cpu().numpy())


# attack -> what it does
ATTACKS = {
    "gap": "whoever is classified correctly is taken for a member",
    "confidence": "whoever gets a high probability for the true class",
    "lira-online": "likelihood ratio, by shadow models with and without each record",
    "lira-offline": "likelihood, by shadow models without the record",
    "rmia-online": "relative likelihood against a population, few shadow models",
    "rmia-offline": "the same, by shadow models without the record",
}
BY_SHADOWS = tuple(name for name in ATTACKS if name.startswith(("lira", "rmia")))


@dataclass(frozen=True)
class AttackScores:
    """Scores by attack; an attack with a shuffled control has a second entry for it."""

    scores: dict[str, Scores]
    train_accuracy: float
    test_accuracy: float

    @staticmethod
    def of(
        target: Models, members: Examples, others: Examples, found: dict[str, Scores], seed: int
    ) -> "AttackScores":
        """With controls, and the accuracies of the target on both sides."""
        scores: dict[str, Scores] = {}
        for name, values in found.items():
            scores[name] = values
            if name != "gap":
                scores[name + SHUFFLED] = shuffled(values, seed)
        inside, outside = (
            float(right_answers(target, examples).mean()) for examples in (members, others)
        )
        return AttackScores(scores, inside, outside)


def check_attacks(names: Sequence[str], known: Collection[str] = tuple(ATTACKS)) -> None:
    for name in names:
        if name not in known:
            raise InvalidInputError(f"unknown attack {name!r}; choose among {', '.join(known)}")


def attack_trained(
    target: Models,
    split: Split,
    trainer: Trainer,
    names: Sequence[str],
    seed: int,
    shadow_models: int,
) -> AttackScores:
    """Attack a target of this split; `trainer` makes the shadow models that some attacks need."""
    members = split.members(seed)
    sides = split.examples(members), split.examples(split.target_test)
    scores = attack_answers(target, *sides, names)
    if any(name in BY_SHADOWS for name in names):
        found = _by_shadows(split, trainer, target, members, seed, shadow_models)
        scores |= {name: found[name] for name in names if name in found}
    if split.persons is not None:
        scores = on_persons(scores, split.persons[members], split.persons[split.target_test])
    sides = split.examples(split.target_train), split.examples(split.target_test)
    return AttackScores.of(target, *sides, scores, seed)


def attack_answers(
    target: Models, members: Examples, others: Examples, names: Sequence[str]
) -> dict[str, Scores]:
    """The attacks that need the target's answers and nothing else."""
    known = {"gap": gap_attack, "confidence": confidence_attack}
    return {name: known[name](target, members, others) for name in known if name in names}


def on_persons(scores: dict[str, Scores], members: Tensor, others: Tensor) -> dict[str, Scores]:
    return {
        name: found.of_persons(members.numpy(), others.numpy()) for name, found in scores.items()
    }


def shuffled(scores: Scores, seed: int) -> Scores:
    """The control: the same scores, their membership drawn by lot."""
    both = np.concatenate([scores.members, scores.others])
    lots = torch.randperm(len(both), generator=torch.Generator().manual_seed(seed)).numpy()
    count = len(scores.members)
    return Scores(both[lots[:count]], both[lots[count:]], scores.threshold)


def _by_shadows(
    split: Split, trainer: Trainer, target: Models, members: Tensor, seed: int, count: int
) -> dict[str, Scores]:
    """The scores of every attack, all from the same shadow models."""
    candidates = torch.cat([members, split.target_test])
    asked = torch.cat([candidates, split.shadow_test])  # the last are the population of RMIA
    size = len(split.target_train)
    with status(f"training {count} shadow models"):
        shadows = train_shadows(trainer, split.pool, asked, size, count, seed + 1)
    examples = split.examples(asked)
    odds = target_log_odds(target, examples)
    found = {"lira-online": lira_online(odds, shadows), "lira-offline": lira_offline(odds, shadows)}
    own = true_probability(target.outputs(examples.inputs)[0], examples.targets)
    theirs = true_probability(shadows.outputs, examples.targets)
    for online, name in ((True, "rmia-online"), (False, "rmia-offline")):
        ratio = relative_likelihood(own, theirs, torch.from_numpy(shadows.member), online=online)
        found[name] = rmia_scores(ratio[: len(candidates)], ratio[len(candidates) :])
    scores = {
        name: Scores.halved(values[: len(members)], values[len(members) : len(candidates)])
        for name, values in found.items()
    }
    # a likelihood ratio has a natural threshold; the others guess the upper half
    scores["lira-online"] = replace(scores["lira-online"], threshold=0.0)
    return scores
