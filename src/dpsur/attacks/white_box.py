"""White-box attack with partial knowledge (Nasr et al. 2019).

The adversary holds the target itself, some of the records that it was trained on and some that it
was not. Each record is described by the answer, the loss, the label and the gradient of the last
layer, each through a branch of its own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.attacks.classifier import Fitting, fit_committee
from dpsur.attacks.features import last_layer_gradients
from dpsur.attacks.metrics import Scores
from dpsur.functional.records import Examples

FITTING = Fitting(learning_rate=1e-3)
DROPOUT, FILTERS = 0.2, 16


class WhiteBoxNetwork(nn.Module):
    """Four branches of 64, then 256 -> 128 -> 64 -> 2."""

    def __init__(self, classes: int, hidden: int) -> None:
        super().__init__()
        self.answers = _branch(classes)
        self.loss = _branch(1)
        self.label = _branch(classes)
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


def _branch(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 128), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(128, 64), nn.ReLU()
    )


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
    fitting: Fitting = FITTING,
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
