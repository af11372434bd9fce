"""All attacks on one target, with what each adversary knows kept apart."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dpsur.attacks.metrics import SHUFFLED, Scores
from dpsur.attacks.models import Models, Trainer
from dpsur.attacks.score_attacks import (
    confidence_attack,
    gap_attack,
    lira_offline,
    lira_online,
    relative_likelihood,
    rmia_scores,
    target_log_odds,
    train_shadows,
    true_probability,
)
from dpsur.attacks.targets import Split
from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples
from dpsur.status import status

Guess = Callable[[Examples, Examples], Scores]
# attack -> what it does
ATTACKS = {
    "gap": "whoever is classified correctly is taken for a member",
    "confidence": "whoever gets a high probability for the true class",
    "lira-online": "likelihood ratio, by shadow models with and without each record",
    "lira-offline": "likelihood, by shadow models without the record",
    "rmia-online": "relative likelihood against a population, few shadow models",
    "rmia-offline": "the same, by shadow models without the record",
}
# A likelihood ratio has a natural threshold; the others guess the upper half.
THRESHOLDS = {"lira-online": 0.0}
BY_SHADOWS = tuple(name for name in ATTACKS if name.startswith(("lira", "rmia")))


@dataclass(frozen=True)
class AttackScores:
    """Scores by attack; an attack with a shuffled control has a second entry for it."""

    scores: dict[str, Scores]
    train_accuracy: float
    test_accuracy: float

    @staticmethod
    def of(
        target: Models, members: Examples, others: Examples, scores: dict[str, Scores]
    ) -> "AttackScores":
        """With the accuracies of the target on both sides."""
        return AttackScores(scores, _accuracy(target, members), _accuracy(target, others))


def check_attacks(names: Sequence[str], known: Collection[str] = tuple(ATTACKS)) -> None:
    for name in names:
        if name not in known:
            raise InvalidInputError(f"unknown attack {name!r}; choose among {', '.join(known)}")


def attack_target(
    split: Split, trainer: Trainer, names: Sequence[str], seed: int, shadow_models: int = 16
) -> AttackScores:
    """Train a target and what the attacks need, with one trainer for all, and attack."""
    check_attacks(names)
    with status("training the target"):
        target = trainer(split.pool, [split.target_train], seed)
    return attack_trained(target, split, trainer, names, seed, shadow_models)


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
    scores = attack_answers(target, *sides, names, seed)
    if any(name in BY_SHADOWS for name in names):
        found = _by_shadows(split, trainer, target, members, seed, shadow_models)
        for name in names:
            scores |= found.get(name, {})
    if split.persons is not None:
        scores = on_persons(scores, split.persons[members], split.persons[split.target_test], seed)
    return AttackScores.of(
        target, split.examples(split.target_train), split.examples(split.target_test), scores
    )


def attack_answers(
    target: Models, members: Examples, others: Examples, names: Sequence[str], seed: int
) -> dict[str, Scores]:
    """The attacks that need the target's answers and nothing else."""
    scores: dict[str, Scores] = {}
    if "gap" in names:
        scores["gap"] = gap_attack(target, members, others)
    if "confidence" in names:
        attack = partial(confidence_attack, target)
        scores |= with_control("confidence", attack, members, others, seed)
    return scores


def on_persons(
    scores: dict[str, Scores], members: Tensor, others: Tensor, seed: int
) -> dict[str, Scores]:
    """The same attacks on the persons of these records; controls draw persons by lot."""
    found: dict[str, Scores] = {}
    for name, of_records in scores.items():
        if name.endswith(SHUFFLED):
            of_persons = found[name.removesuffix(SHUFFLED)]
            both = np.concatenate([of_persons.members, of_persons.others])
            lots = torch.randperm(len(both), generator=torch.Generator().manual_seed(seed))
            found[name] = Scores.apart(both, (lots < len(of_persons.members)).numpy())
        else:
            found[name] = of_records.of_persons(members.numpy(), others.numpy())
    return found


def with_control(
    name: str, attack: Guess, members: Examples, others: Examples, seed: int
) -> dict[str, Scores]:
    """The attack, and the same attack on records whose membership was drawn by lot."""
    lots = torch.randperm(
        len(members) + len(others), generator=torch.Generator().manual_seed(seed)
    ).to(members.inputs.device)
    inputs = torch.cat([members.inputs, others.inputs])
    targets = torch.cat([members.targets, others.targets])
    both = Examples(inputs, targets)
    shuffled = both.select(lots[: len(members)]), both.select(lots[len(members) :])
    return {
        name: attack(members, others),
        name + SHUFFLED: attack(*shuffled),
    }


def _by_shadows(
    split: Split, trainer: Trainer, target: Models, members: Tensor, seed: int, count: int
) -> dict[str, dict[str, Scores]]:
    """By attack, its scores and those of its control, all from the same shadow models."""
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
    is_member = torch.arange(len(candidates)) < len(members)
    lots = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
    sides = {"": is_member.numpy(), SHUFFLED: is_member[lots].numpy()}
    return {
        name: {
            name + control: Scores.apart(values[: len(candidates)], flags, THRESHOLDS.get(name))
            for control, flags in sides.items()
        }
        for name, values in found.items()
    }


def _accuracy(models: Models, examples: Examples) -> float:
    answers = models.outputs(examples.inputs)[0].argmax(1)
    return float((answers == examples.targets.to(answers.device)).double().mean())
