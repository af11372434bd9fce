"""Attacks that learn on records whose membership is known, with small networks.

Black box, with a shadow model (Salem et al. 2019): the adversary trains a model of the same kind on
other records, learns there how answers to members differ from answers to others, and applies that
to the target's answers.

White box, with partial knowledge (Nasr et al. 2019): the adversary holds the target itself, some of
the records that it was trained on and some that it was not. Each record is described by the answer,
the loss, the label and the gradient of the last layer, with one branch for each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.attacks.classifier import Committee, Fitting, fit_committee
from dpsur.attacks.metrics import Scores
from dpsur.attacks.models import Models
from dpsur.attacks.targets import last_layer_gradients, posteriors
from dpsur.functional.records import Examples

SHADOW_FITTING = Fitting()
WHITE_BOX_FITTING = Fitting(learning_rate=1e-3)
DROPOUT, FILTERS = 0.2, 16


def _branch(width: int, *between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), *between, nn.Linear(128, 64), nn.ReLU())


class ShadowNetwork(nn.Module):
    """Sorted posteriors and a correctness bit, with one branch for each."""

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


def shadow_features(models: Models, examples: Examples, index: int = 0) -> tuple[Tensor, Tensor]:
    """Sorted posteriors, as log-probabilities, and whether the answer is right.

    The logarithm is a monotone map that keeps apart what saturates near one.
    """
    answers = posteriors(models, examples, index)
    right = answers.argmax(1) == examples.targets.to(answers.device)
    ordered = answers.sort(1, descending=True).values.clamp(min=1e-30).log()
    return ordered.float(), right.float().unsqueeze(1)


def learn_from_shadow(
    shadow: Models,
    members: Examples,
    others: Examples,
    seed: int = 0,
    fitting: Fitting = SHADOW_FITTING,
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


class WhiteBoxNetwork(nn.Module):
    """Four branches of 64, then 256 -> 128 -> 64 -> 2."""

    def __init__(self, classes: int, hidden: int) -> None:
        super().__init__()
        self.answers = _branch(classes, nn.Dropout(DROPOUT))
        self.loss = _branch(1, nn.Dropout(DROPOUT))
        self.label = _branch(classes, nn.Dropout(DROPOUT))
        # A convolution along the hidden units, whose filters span all classes: a product for each
        # unit, and written as one, which is faster where many networks are trained at once.
        self.gradient = nn.Sequential(
            nn.Linear(classes, FILTERS),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(DROPOUT),
            nn.Linear(FILTERS * hidden, 128),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(128, 64),
            nn.ReLU(),
        )
        self.head = nn.Sequential(
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(64, 2),
        )

    def forward(self, answers: Tensor, loss: Tensor, label: Tensor, gradient: Tensor) -> Tensor:
        """Scores of being another and of being a member."""
        parts = [
            self.answers(answers),
            self.loss(loss),
            self.label(label),
            self.gradient(gradient.transpose(1, 2)),
        ]
        result: Tensor = self.head(torch.cat(parts, dim=1))
        return result


def white_box_features(module: nn.Module, examples: Examples) -> tuple[Tensor, ...]:
    """Sorted log-posteriors, loss, label and the last layer's gradient, a row a record each."""
    outputs, gradients = last_layer_gradients(module, examples)
    targets = examples.targets.to(outputs.device)
    logs = outputs.double().log_softmax(1).clamp(min=-70.0)
    loss = F.nll_loss(logs, targets, reduction="none").unsqueeze(1)
    label = F.one_hot(targets, outputs.shape[1])
    return (
        logs.sort(1, descending=True).values.float(),
        loss.float(),
        label.float(),
        gradients.float(),
    )


def white_box_attack(
    target: nn.Module,
    *,
    known_members: Examples,
    known_others: Examples,
    members: Examples,
    others: Examples,
    seed: int = 0,
    fitting: Fitting = WHITE_BOX_FITTING,
) -> Scores:
    """Learn on the records that the adversary holds, guess about the rest."""
    known = [list(white_box_features(target, part)) for part in (known_members, known_others)]
    size = known[0][3].flatten(1).norm(dim=1).mean().clamp(min=1e-12)
    for part in known:
        part[3] = part[3] / size
    shape = known[0][3].shape[1:]
    learned = fit_committee(lambda: WhiteBoxNetwork(*shape), known[0], known[1], fitting, seed)
    scores = []
    for examples in (members, others):
        *plain, gradients = white_box_features(target, examples)
        scores.append(learned.scores([*plain, gradients / size]).numpy())
    return Scores(scores[0], scores[1], 0.0)
