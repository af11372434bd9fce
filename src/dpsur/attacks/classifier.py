"""Steps of training that are replayed, so that a device does not wait for the host."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from dpsur import checks
from dpsur.functional.tree import Params
from dpsur.mechanism.cuda_graphs import capture_graph
from dpsur.status import advance


def replayed(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """A step as a CUDA graph. `state`, which the step changes, is as before afterwards."""
    before = [value.clone() for value in state]

    def restore() -> None:
        for value, old in zip(state, before, strict=True):
            value.copy_(old)

    return capture_graph(step, state[0].device, before_capture=restore)


Features = Sequence[Tensor]
ROWS_AT_ONCE = 4096
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
