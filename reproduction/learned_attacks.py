"""Attacks that learn on records whose membership is known, with small networks.

Black box, with a shadow model (Salem et al. 2019): the adversary trains a model of the same kind on
other records, learns there how answers to members differ from answers to others, and applies that
to the target's answers.

White box, with partial knowledge (Nasr et al. 2019): the adversary holds the target itself, some of
the records that it was trained on and some that it was not. Each record is described by the answer,
the loss, the label and the gradient of the last layer, with one branch for each.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from dpsur import checks
from dpsur.attacks import suite
from dpsur.attacks.metrics import SHUFFLED, Scores
from dpsur.attacks.suite import (
    AttackScores,
    Models,
    Split,
    Trainer,
    as_many,
)
from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples
from dpsur.functional.tree import Params
from dpsur.status import advance, status
from reproduction.plain_targets import replayed

Features = Sequence[Tensor]
ROWS_AT_ONCE, GRADIENTS_AT_ONCE = 4096, 1024
# Adam's usual memories of slopes and of their squares, and what keeps it from dividing by zero.
_MEMORIES, _LEAST = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class Fitting:
    """How attack networks are trained: Adam, its rate falling to zero, with weight decay.

    The log-odds of `networks`, which start and are shuffled differently, are averaged. Few records
    are gone through more often, until `least_steps` are made. On a CUDA device a step is captured
    once and replayed.
    """

    networks: int = 3
    epochs: int = 20
    batch_size: int = 512
    learning_rate: float = 2e-3
    weight_decay: float = 1e-2
    least_steps: int = 100
    capture: bool = True

    def __post_init__(self) -> None:
        checks.at_least_one("networks", self.networks)
        checks.at_least_one("epochs", self.epochs)
        checks.at_least_one("batch_size", self.batch_size)
        checks.positive("learning_rate", self.learning_rate)


@dataclass(frozen=True)
class Committee:
    """Trained networks of one form, their weights stacked along a first dimension."""

    template: nn.Module
    params: Params

    def scores(self, features: Features) -> Tensor:
        """Log-odds of membership, averaged over the networks; above 0 means member."""

        def one(params: Params, *inputs: Tensor) -> Tensor:
            result: Tensor = functional_call(self.template, params, inputs)
            return result

        ask = vmap(one, in_dims=(0, *(None for _ in features)))
        with torch.no_grad():
            parts = zip(*(torch.split(feature, ROWS_AT_ONCE) for feature in features), strict=True)
            answers = torch.cat([ask(self.params, *part) for part in parts], dim=1).double()
        return (answers[..., 1] - answers[..., 0]).mean(0).cpu()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw what torch draws globally (weights, dropout) from a seed, and put it back."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def fit_committee(
    make: Callable[[], nn.Module], members: Features, others: Features, fitting: Fitting, seed: int
) -> Committee:
    """Train networks that `make` builds on records whose membership is known.

    Their inputs are tensors with one row a record, their outputs two scores: other and member. Both
    sides count alike, however many there are of each.
    """
    device = members[0].device
    sizes = len(members[0]), len(others[0])
    features = [torch.cat(pair) for pair in zip(members, others, strict=True)]
    labels = torch.cat([torch.ones(sizes[0]), torch.zeros(sizes[1])]).long().to(device)
    weight = torch.tensor([sum(sizes) / (2 * n) for n in reversed(sizes)], device=device)
    batch = min(fitting.batch_size, len(labels))
    steps = len(labels) // batch
    epochs = max(fitting.epochs, math.ceil(fitting.least_steps / steps))
    slot = torch.zeros(fitting.networks, batch, dtype=torch.long, device=device)
    with seeded(seed, device):
        networks = [make().to(device).train() for _ in range(fitting.networks)]
        take_step = _CommitteeStep(
            networks, features, labels, weight, slot, fitting, epochs * steps
        )
        may_capture = fitting.capture and device.type == "cuda"
        run = take_step.captured() if may_capture else take_step
        for epoch in range(epochs):
            advance(epoch, epochs)
            order = torch.rand(fitting.networks, len(labels), device=device).argsort(1)
            for start in range(0, steps * batch, batch):
                slot.copy_(order[:, start : start + batch])
                run()
    return Committee(networks[0].eval(), take_step.params)


class _CommitteeStep:
    """One step of Adam of all networks on the rows that `slot` names, in place."""

    def __init__(
        self,
        networks: Sequence[nn.Module],
        features: Features,
        labels: Tensor,
        weight: Tensor,
        slot: Tensor,
        fitting: Fitting,
        total: int,
    ) -> None:
        self.params = {
            k: v.detach().clone() for k, v in stack_module_state(list(networks))[0].items()
        }
        self._features, self._labels, self._slot = features, labels, slot
        self._fitting, self._total = fitting, total
        self._first = {name: torch.zeros_like(value) for name, value in self.params.items()}
        self._second = {name: torch.zeros_like(value) for name, value in self.params.items()}
        self._made = torch.zeros((), device=slot.device)  # a tensor, so that a replay counts on
        template = networks[0]

        def batch_loss(params: Params, targets: Tensor, *inputs: Tensor) -> Tensor:
            scores = functional_call(template, params, inputs)
            return F.cross_entropy(scores, targets, weight=weight)

        self._gradients = vmap(grad(batch_loss), randomness="different")

    @torch.no_grad()
    def __call__(self) -> None:
        found = self._gradients(
            self.params, self._labels[self._slot], *(part[self._slot] for part in self._features)
        )
        rate = self._fitting.learning_rate * (1 - self._made / self._total)
        self._made += 1
        unseen = [1 - memory**self._made for memory in _MEMORIES]
        for name, value in self.params.items():
            first, second, slope = self._first[name], self._second[name], found[name]
            first.lerp_(slope, 1 - _MEMORIES[0])
            second.lerp_(slope.square(), 1 - _MEMORIES[1])
            value.mul_(1 - rate * self._fitting.weight_decay)
            value.sub_(rate * (first / unseen[0]) / ((second / unseen[1]).sqrt() + _LEAST))

    def captured(self) -> Callable[[], None]:
        """The step as a CUDA graph. Weights and all that Adam keeps are as before afterwards."""
        kept = [*self.params.values(), *self._first.values(), *self._second.values(), self._made]
        return replayed(self, kept)


def last_layer(module: nn.Module) -> nn.Linear:
    """The linear layer that gives the outputs: the last one that is registered."""
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not layers:
        raise InvalidInputError(
            f"{type(module).__name__} has no linear layer whose gradient could be read"
        )
    return layers[-1]


@contextmanager
def _recorded(layer: nn.Linear) -> Iterator[list[Tensor]]:
    """What goes into a layer while the context is open."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    try:
        yield seen
    finally:
        handle.remove()


def last_layer_gradients(module: nn.Module, examples: Examples) -> tuple[Tensor, Tensor]:
    """Outputs, and each record's own gradient of cross-entropy by the last layer's weights.

    For outputs W h + b the gradient is (p - y) h^T, a matrix a record, with the gradient by b as a
    further column. Nothing is summed over records.
    """
    layer = last_layer(module)
    outputs, gradients = [], []
    device = layer.weight.device
    for start in range(0, len(examples), GRADIENTS_AT_ONCE):
        rows = torch.arange(start, min(start + GRADIENTS_AT_ONCE, len(examples)))
        part = examples.select(rows.to(examples.inputs.device)).to(device)
        with torch.no_grad(), _recorded(layer) as seen:
            answer = module(part.inputs)
        hidden = F.pad(seen[0], (0, 1), value=1.0)
        errors = answer.softmax(1) - F.one_hot(part.targets, answer.shape[1]).to(answer.dtype)
        outputs.append(answer)
        gradients.append(errors.unsqueeze(2) * hidden.unsqueeze(1))
    return torch.cat(outputs), torch.cat(gradients)


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
    answers = models.outputs(examples.inputs)[index].double().softmax(1)
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


# attack -> what it does, in the order of the paper's tables
ATTACKS = {
    "gap": suite.ATTACKS["gap"],
    "shadow": "black-box: learns on a shadow model what answers to members look like",
    "white-box": "holds part of the training set, and reads gradients of the last layer",
    **{name: text for name, text in suite.ATTACKS.items() if name in suite.BY_SHADOWS},
}


def attack_target(
    split: Split, trainer: Trainer, names: Sequence[str], seed: int, shadow_models: int = 16
) -> AttackScores:
    """As the library's, with the attacks that learn. A shadow model is trained with the target."""
    suite.check_attacks(names, ATTACKS)
    rows = [split.target_train]
    if "shadow" in names:
        rows.append(split.shadow_train)
    with status("training the target" + (" and a shadow model" if len(rows) > 1 else "")):
        models = trainer(split.pool, rows, seed)
    target = Models([models.modules[0]])
    found = suite.attack_trained(target, split, trainer, names, seed, shadow_models)
    scores = dict(found.scores)
    members = as_many(split.target_train, len(split.target_test), seed)
    sides = split.examples(members), split.examples(split.target_test)
    if "shadow" in names:
        shadow = Models([models.modules[1]])
        known = split.examples(split.shadow_train), split.examples(split.shadow_test)
        with status("fitting the attack shadow"):
            learned = learn_from_shadow(shadow, *known, seed)
        scores |= with_control("shadow", partial(shadow_attack, target, learned), *sides, seed)
    if "white-box" in names:
        scores |= with_white_box(target, split.examples(split.target_train), sides[1], seed)
    ordered = sorted(scores, key=lambda name: list(ATTACKS).index(name.split(",")[0]))
    return replace(found, scores={name: scores[name] for name in ordered})


def with_white_box(
    target: Models, members: Examples, others: Examples, seed: int
) -> dict[str, Scores]:
    """The white-box attack and its control. Of members there may be more than of others."""
    attack = partial(_white_box, target, seed=seed)
    with status("fitting the attack white-box and its control; on a wide last layer: minutes"):
        return with_control("white-box", attack, members, others, seed)


def _white_box(target: Models, members: Examples, others: Examples, seed: int) -> Scores:
    """Guess as many members as others, half of the smaller side; the adversary holds the rest."""
    count = min(len(members), len(others)) // 2
    guessed, known = zip(*(_parted(part, count, seed) for part in (members, others)), strict=True)
    return white_box_attack(
        target.modules[0],
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


def with_control(
    name: str,
    attack: Callable[[Examples, Examples], Scores],
    members: Examples,
    others: Examples,
    seed: int,
) -> dict[str, Scores]:
    """The attack, and the same attack on records whose membership was drawn by lot.

    It learns from the membership, so its control has to learn again.
    """
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
