"""All attacks on one target, with what each adversary knows kept apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dpsur.attacks.learned_attacks import learn_from_shadow, shadow_attack, white_box_attack
from dpsur.attacks.metrics import SHUFFLED, Scores
from dpsur.attacks.models import Models, SeparateModels, Trainer
from dpsur.attacks.score_attacks import (
    gap_attack,
    lira_offline,
    lira_online,
    relative_likelihood,
    rmia_scores,
    target_log_odds,
    train_shadows,
    true_probability,
)
from dpsur.attacks.targets import Split, as_many
from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples
from dpsur.status import status

Guess = Callable[[Examples, Examples], Scores]
# attack -> what it does
ATTACKS = {
    "gap": "whoever is classified correctly is taken for a member",
    "shadow": "black-box: learns on a shadow model what answers to members look like",
    "white-box": "holds part of the training set, and reads gradients of the last layer",
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


def check_attacks(names: Sequence[str]) -> None:
    for name in names:
        if name not in ATTACKS:
            raise InvalidInputError(f"unknown attack {name!r}; choose among {', '.join(ATTACKS)}")


def attack_target(
    split: Split, trainer: Trainer, names: Sequence[str], seed: int, shadow_models: int = 16
) -> AttackScores:
    """Train a target and what the attacks need, with one trainer for all, and attack."""
    check_attacks(names)
    rows = [split.target_train]
    if "shadow" in names:
        rows.append(split.shadow_train)
    with status("training the target" + (" and a shadow model" if len(rows) > 1 else "")):
        models = trainer(split.pool, rows, seed)
    target = SeparateModels([models.module(0)])
    scores: dict[str, Scores] = {}
    members = as_many(split.target_train, len(split.target_test), seed)
    sides = split.examples(members), split.examples(split.target_test)
    if "gap" in names:
        scores["gap"] = gap_attack(target, *sides)
    if "shadow" in names:
        shadow = SeparateModels([models.module(1)])
        known = split.examples(split.shadow_train), split.examples(split.shadow_test)
        with status("fitting the attack shadow"):
            learned = learn_from_shadow(shadow, *known, seed)
        scores |= _with_control("shadow", partial(shadow_attack, target, learned), *sides, seed)
    if "white-box" in names:
        scores |= with_white_box(target, split.examples(split.target_train), sides[1], seed)
    if any(name in BY_SHADOWS for name in names):
        found = _by_shadows(split, trainer, target, members, seed, shadow_models)
        for name in names:
            scores |= found.get(name, {})
    return AttackScores.of(
        target, split.examples(split.target_train), split.examples(split.target_test), scores
    )


def with_white_box(
    target: Models, members: Examples, others: Examples, seed: int
) -> dict[str, Scores]:
    """The white-box attack and its control. Of members there may be more than of others."""
    attack = partial(_white_box, target, seed=seed)
    with status("fitting the attack white-box and its control; on a wide last layer: minutes"):
        return _with_control("white-box", attack, members, others, seed)


def _with_control(
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


def _white_box(target: Models, members: Examples, others: Examples, seed: int) -> Scores:
    """Guess as many members as others, half of the smaller side; the adversary holds the rest."""
    count = min(len(members), len(others)) // 2
    guessed, known = zip(*(_parted(part, count, seed) for part in (members, others)), strict=True)
    return white_box_attack(
        target.module(0),
        known_members=known[0],
        known_others=known[1],
        members=guessed[0],
        others=guessed[1],
        seed=seed,
    )


def _parted(examples: Examples, count: int, seed: int) -> tuple[Examples, Examples]:
    """So many of the records, drawn at random, and the others."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))
    order = order.to(examples.inputs.device)
    return examples.select(order[:count]), examples.select(order[count:])


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
