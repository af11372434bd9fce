"""Black-box attack with a shadow model (Salem et al. 2019).

The adversary trains a model of the same kind on records of its own, learns there how answers to
members differ from answers to others, and applies that to the target's answers.
"""

import torch
from torch import Tensor, nn

from dpsur.attacks.classifier import Committee, Fitting, fit_committee
from dpsur.attacks.features import posteriors
from dpsur.attacks.metrics import Scores
from dpsur.attacks.models import Models
from dpsur.functional.records import Examples

FITTING = Fitting()


class ShadowNetwork(nn.Module):
    """Sorted posteriors and a correctness bit, each through a branch of its own."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.answers = _branch(classes)
        self.correct = _branch(1)
        self.head = nn.Sequential(
            nn.Linear(128, 256),
            nn.ReLU(),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, 2),
        )

    def forward(self, answers: Tensor, correct: Tensor) -> Tensor:
        """Scores of being another and of being a member."""
        joined = torch.cat([self.answers(answers), self.correct(correct)], dim=1)
        result: Tensor = self.head(joined)
        return result


def _branch(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())


def shadow_features(models: Models, examples: Examples, index: int = 0) -> tuple[Tensor, Tensor]:
    """Sorted posteriors, as log-probabilities, and whether the answer is right.

    The logarithm is a monotone map that keeps apart what saturates near one.
    """
    answers = posteriors(models, examples, index)
    right = answers.argmax(1) == examples.targets.to(answers.device)
    ordered = answers.sort(1, descending=True).values.clamp(min=1e-30).log()
    return ordered.float(), right.float().unsqueeze(1)


def learn_from_shadow(
    shadow: Models, members: Examples, others: Examples, seed: int = 0, fitting: Fitting = FITTING
) -> Committee:
    """Learn on the shadow model, whose members are known, what answers to members look like."""
    known = [shadow_features(shadow, part) for part in (members, others)]
    classes = known[0][0].shape[1]
    return fit_committee(lambda: ShadowNetwork(classes), known[0], known[1], fitting, seed)


def shadow_attack(
    target: Models, learned: Committee, members: Examples, others: Examples
) -> Scores:
    """Guess about the target's records by what was learned on the shadow model."""
    scores = [learned.scores(shadow_features(target, part)).numpy() for part in (members, others)]
    return Scores(scores[0], scores[1], 0.0)
