"""Targets without privacy as the paper trains them: many models at once, by plain SGD."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from dpsur import checks
from dpsur.attacks.suite import Models, plain_features
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import LossFunction
from dpsur.functional.process_settings import precision
from dpsur.functional.records import Examples
from dpsur.functional.tree import Params
from dpsur.mechanism.cuda_graphs import capture_graph
from dpsur.networks import build_network, takes
from dpsur.status import advance
from dpsur.tasks import Task

# Of a number that hardly ever differs from record to record, such as a corner of an image.
SMALLEST_DEVIATION = 1e-3
# Models that take a step together: as many as still gain speed on one device. Several networks of
# large convolutions are slower together than one after another.
AT_ONCE = {"cifar10": 1}
USUALLY_AT_ONCE = 16
# As the paper's pixel networks have it where DPSGD trains them: a target without privacy is then
# what DPSGD would have made without clipping and noise.
TARGET_NETWORK = {"activation": "relu"}
Make = Callable[[], nn.Module]
_CPU = torch.device("cpu")


class StandardisedRecords(nn.Module):
    """A network behind a fixed shift and scale of its inputs."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.network((inputs - self.mean) / self.deviation)
        return result


def standardised(make: Callable[[], nn.Module], inputs: Tensor) -> Callable[[], nn.Module]:
    """Make networks that see each number of such inputs with mean 0 and deviation 1.

    Whole numbers are words, not quantities, and stay as they are.
    """
    if not inputs.is_floating_point():
        return make
    deviation, mean = (part.cpu() for part in torch.std_mean(inputs, dim=0, correction=0))
    deviation = deviation.clamp(min=SMALLEST_DEVIATION)
    return lambda: StandardisedRecords(make(), mean, deviation)


@dataclass(frozen=True)
class Recipe:
    """Plain SGD with momentum, as the paper's targets are trained."""

    epochs: int = 100
    batch_size: int = 128
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    # Every input to mean 0 and deviation 1, the usual preparation. The targets then overfit about
    # as much as the paper's do, which is what the attacks need to have something to find.
    standardise: bool = True
    # Nothing is promised of these targets, so products may be rounded where a GPU has TF32.
    tf32: bool = True

    def __post_init__(self) -> None:
        checks.at_least_one("epochs", self.epochs)
        checks.at_least_one("batch_size", self.batch_size)
        checks.positive("learning_rate", self.learning_rate)
        checks.fraction_below_one("momentum", self.momentum)


@dataclass(frozen=True)
class ManyModels:
    """A trainer of models that `make` builds, `at_once` of them in a group."""

    make: Make
    loss: LossFunction
    recipe: Recipe = Recipe()
    device: torch.device = _CPU
    at_once: int = 8
    capture: bool = True

    def __call__(self, pool: Examples, rows: Sequence[Tensor], seed: int) -> Models:
        """Train one model per set of rows. Each epoch leaves out what does not fill a batch."""
        if not rows or len({len(part) for part in rows}) != 1:
            raise InvalidInputError(
                f"models that are trained together need equally many records, got "
                f"{[len(part) for part in rows]}"
            )
        pool = pool.to(self.device)
        make = standardised(self.make, pool.inputs) if self.recipe.standardise else self.make
        together = [
            rows[start : start + self.at_once] for start in range(0, len(rows), self.at_once)
        ]
        with precision(self.recipe.tf32, whole_run=True):
            groups = [
                self._group(make, pool, torch.stack(list(part)), seed, index * self.at_once)
                for index, part in enumerate(together)
            ]
        return Models([module for group in groups for module in group])

    def _group(
        self, make: Make, pool: Examples, rows: Tensor, seed: int, first: int
    ) -> list[nn.Module]:
        modules = [_initial(make, seed, first + index) for index in range(len(rows))]
        params, buffers = stack_module_state(modules)
        params = {name: value.detach().to(self.device) for name, value in params.items()}
        buffers = {name: value.to(self.device) for name, value in buffers.items()}
        template = modules[0].to(self.device)
        rows = rows.to(self.device)
        size = min(self.recipe.batch_size, rows.shape[1])
        slot = rows[:, :size].clone()
        take_step = _Step(template, self.loss, self.recipe, pool, params, buffers, slot)
        run: Callable[[], None] = take_step
        if self.capture and self.device.type == "cuda":
            run = take_step.captured()
        generator = torch.Generator(self.device).manual_seed(hash((seed, first)) % 2**63)
        for epoch in range(self.recipe.epochs):
            advance(epoch, self.recipe.epochs)
            draws = torch.rand(rows.shape, generator=generator, device=self.device)
            order = rows.gather(1, draws.argsort(1))
            for start in range(0, rows.shape[1] - size + 1, size):
                slot.copy_(order[:, start : start + size])
                run()
        weights = {**params, **buffers}
        trained = [copy.deepcopy(template) for _ in modules]
        for index, module in enumerate(trained):
            module.load_state_dict({name: value[index] for name, value in weights.items()})
        return trained


def _initial(make: Make, seed: int, index: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash((seed, index)) % 2**63)
        return make()


def replayed(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """A step as a CUDA graph. `state`, which the step changes, is as before afterwards."""
    before = [value.clone() for value in state]

    def restore() -> None:
        for value, old in zip(state, before, strict=True):
            value.copy_(old)

    return capture_graph(step, state[0].device, before_capture=restore)


class _Step:
    """One step of all models of a group on the rows that `slot` names, in place."""

    def __init__(
        self,
        template: nn.Module,
        loss: LossFunction,
        recipe: Recipe,
        pool: Examples,
        params: Params,
        buffers: Params,
        slot: Tensor,
    ) -> None:
        self._recipe, self._pool, self._slot = recipe, pool, slot
        self._params, self._buffers = params, buffers
        self._velocity = {name: torch.zeros_like(value) for name, value in params.items()}

        def batch_loss(params: Params, buffers: Params, inputs: Tensor, targets: Tensor) -> Tensor:
            return loss(functional_call(template, (params, buffers), (inputs,)), targets)

        self._gradients = vmap(grad(batch_loss), randomness="different")

    @torch.no_grad()
    def __call__(self) -> None:
        inputs, targets = self._pool.inputs[self._slot], self._pool.targets[self._slot]
        found = self._gradients(self._params, self._buffers, inputs, targets)
        recipe = self._recipe
        weights = list(self._params.values())
        velocity = list(self._velocity.values())
        slopes = [found[name] for name in self._params]
        torch._foreach_mul_(velocity, recipe.momentum)
        torch._foreach_add_(velocity, slopes)
        torch._foreach_add_(velocity, weights, alpha=recipe.weight_decay)
        torch._foreach_add_(weights, velocity, alpha=-recipe.learning_rate)

    def captured(self) -> Callable[[], None]:
        """The step as a CUDA graph. Weights and velocities are as before afterwards."""
        state = [*self._params.values(), *self._velocity.values()]
        return replayed(self, state)


def target_network(task: Task) -> dict[str, Any]:
    """What the network of targets without privacy has other than the task's, where it can."""
    return TARGET_NETWORK if takes(task.networks[plain_features(task)], TARGET_NETWORK) else {}


def plain_trainer(task: Task, recipe: Recipe, device: torch.device) -> ManyModels:
    """Trains the task's network for inputs as they are, without privacy."""
    description = {**task.networks[plain_features(task)], **target_network(task)}
    at_once = AT_ONCE.get(task.name, USUALLY_AT_ONCE)
    return ManyModels(lambda: build_network(description), task.loss, recipe, device, at_once)
