"""The gap attack: whoever is classified correctly is taken for a member.

It needs no training and no second model. What an attack reaches beyond it is what it has learned.
"""

import torch

from dpsur.attacks.features import posteriors
from dpsur.attacks.metrics import Scores
from dpsur.attacks.models import Models
from dpsur.core.types import Examples


def gap_attack(target: Models, members: Examples, others: Examples) -> Scores:
    """Score 1 for a correct answer of the first model, else 0."""

    def correct(examples: Examples) -> torch.Tensor:
        answers = posteriors(target, examples)
        return (answers.argmax(1) == examples.targets.to(answers.device)).double().cpu()

    return Scores(correct(members).numpy(), correct(others).numpy(), 0.5)
