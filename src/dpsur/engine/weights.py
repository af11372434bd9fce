"""A module's weights, what a batch adds up for them, and an optimizer whose step is private.

The optimizer stays the object that it is and gets another class (`make_private_optimizer`). It
updates the weights in place. `ModuleUpdates` is to a custom loop what `GradientProposer` is to
`fit`: it makes candidates, saves weights and goes back to them. The state that it returns holds
counts and saved copies; the weights at hand are those of the module. Where a gate may reject a
candidate, it can be undone. All of this works on shards as well, each rank with its own.
"""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

from dpsur.distributed import Reduction
from dpsur.engine.sharding import Sharding
from dpsur.errors import Fixed, InvalidInputError, StepError
from dpsur.functional.process_settings import precision, widen
from dpsur.functional.tree import Params, empty_like
from dpsur.mechanism import gaussian
from dpsur.mechanism.proposer import GradientSource
from dpsur.mechanism.state import START, Candidate, OptimizerState, State
from dpsur.mechanism.streams import NOISE, Draws
from dpsur.per_example.clipping import ClippedSum, clip_tape
from dpsur.per_example.tape import Tape
from dpsur.privacy.events import NonPrivate, SampledGaussian, Step, Trial

if TYPE_CHECKING:
    from dpsur.engine.steps import PrivateLoop


_REFUSED = {
    LBFGS: "evaluates the loss several times per step, so that one batch would be used repeatedly",
    SparseAdam: "takes sparse gradients, to which noise cannot be added",
}


SCHEDULED = (
    "{} sets the learning rate, which a BlockGate searches for and lets decay by itself; leave "
    "that out, or train without a BlockGate"
)


class PrivateOptimizer(Optimizer):
    """What is mixed into the class of an optimizer by `make_private_optimizer`."""

    engine: "PrivateLoop"

    @Fixed
    def noise_multiplier(self) -> float:
        return self.engine.noise_multiplier

    @Fixed
    def max_grad_norm(self) -> float:
        return self.engine.max_grad_norm

    @Fixed
    def expected_batch_size(self) -> float:
        return self.engine.expected_batch_size

    @property
    def original_optimizer(self) -> Optimizer:
        return self

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Charge, add noise, and step; nothing for a microbatch that is not the last."""
        if "engine" not in vars(self):
            raise StepError(
                "this optimizer is a copy of a private one; make steps with the one that "
                "make_private returned, and keep its state_dict() where you need its state"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.make_step()
        return loss

    def plain_step(self) -> None:
        super().step()


def check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise InvalidInputError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    for kind, why in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise InvalidInputError(f"{kind.__name__} {why}; use torch.optim.SGD, Adam or AdamW")
    if isinstance(optimizer, PrivateOptimizer):
        raise InvalidInputError(
            "this optimizer is private already; build a new one for another make_private"
        )


def make_private_optimizer(optimizer: Optimizer, engine: "PrivateLoop") -> Optimizer:
    """Make an optimizer private in place: the same object, groups, state and schedulers."""
    kind = type(optimizer)
    private = type(f"Private{kind.__name__}", (PrivateOptimizer, kind), {})
    wrapped = vars(optimizer).pop("step", None)  # by a scheduler that was built before
    optimizer.__class__ = private
    optimizer.engine = engine  # type: ignore[attr-defined]
    # `torch.optim` has its hooks and profiler around the step of the original class
    private.step.hooked = True  # type: ignore[attr-defined]
    _wrap_schedulers(LRScheduler)
    if getattr(wrapped, "_wrapped_by_lr_sched", False):
        private_step = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # before a scheduler's step
            return private_step(*args, **kwargs)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def _wrap_schedulers(kind: type[LRScheduler]) -> None:
    """Let schedulers of a private optimizer do nothing after a step that was skipped or undone."""
    plain = vars(kind).get("step")
    if plain is not None and not hasattr(plain, "asks_the_engine"):

        @functools.wraps(plain)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = getattr(self, "optimizer", None)
            if isinstance(optimizer, PrivateOptimizer):
                if optimizer.engine.sets_learning_rate:
                    raise InvalidInputError(SCHEDULED.format(type(self).__name__))
                if not (optimizer.engine.scheduler_due or getattr(self, "_is_initial", False)):
                    return None
            return plain(self, *args, **kwargs)

        step.asks_the_engine = True  # type: ignore[attr-defined]
        kind.step = step  # type: ignore[method-assign]
    for child in kind.__subclasses__():
        _wrap_schedulers(child)


@dataclass
class Sums:
    """What the passes over one batch have added up so far. Private."""

    rows: int = 0
    params: Params = field(default_factory=dict)
    captured: Params | None = None  # what CUDA graphs have added up
    replaying: bool = False  # whether they have added records that are not counted yet

    def add(self, rows: int, params: Params) -> None:
        self.rows += rows
        for name, value in params.items():
            self.params[name] = self.params[name] + value if name in self.params else value
        self.replaying = False


class Gradients:
    """What stands in `.grad`: zeros after a backward pass, the private gradient after a step."""

    KEPT_ON = ("cpu",)  # where memory for gradients is kept from step to step

    def __init__(self, trained: dict[str, nn.Parameter]) -> None:
        self._trained = trained
        self._grads: Params = {}
        self._versions: dict[str, int] = {}

    def mark(self, unwatched: str | None) -> None:
        """Put zeros into `.grad`, where other code that clips or adds gradients leaves a trace."""
        self.check(unwatched, cleared=True)
        torch._foreach_zero_(list(self._made().values()))
        self.put()

    def check(self, unwatched: str | None, *, cleared: bool = False) -> None:
        """Refuse gradients that do not come from the clipped sum, or that were changed."""
        for name, value in self._trained.items():
            grad = value.grad
            if grad is None:
                if cleared:
                    continue
                raise StepError(
                    "gradients were cleared between backward() and step(); call zero_grad() "
                    "before the forward pass"
                )
            if grad is not self._grads.get(name):
                raise StepError(
                    f"parameter {name} has a gradient that was not clipped per record: "
                    + (unwatched or "it was used outside of the model's own call")
                )
            if not cleared and grad._version != self._versions[name]:
                raise StepError(
                    f"the gradient of {name} was changed between backward() and step() (by "
                    "clip_grad_norm_, a GradScaler or another library); remove that: the private "
                    "gradient is made in step() and is clipped per record already"
                )

    def check_others(self, optimizer: Optimizer) -> None:
        """Refuse gradients of parameters that are not trained here: they have no noise."""
        trained = {id(value) for value in self._trained.values()}
        for group in optimizer.param_groups:
            for value in group["params"]:
                if id(value) in trained or value.grad is None or not value.grad.any():
                    continue
                raise StepError(
                    f"the optimizer has a parameter of shape {tuple(value.shape)} that was added "
                    "or frozen, with a gradient that is neither clipped nor noisy; give it another "
                    "optimizer, or build the model first, then call make_private"
                )

    def give_back(self, *, ours: bool = False) -> None:
        """Let go of memory that the loop has cleared, so that none lies beside activations.

        With `ours`, of a private gradient that still stands in `.grad` too. What lies on a CPU
        stays: the system would have to clear new memory.
        """
        if any(value.device.type in self.KEPT_ON for value in self._grads.values()):
            return
        for name, value in self._trained.items():
            if ours and value.grad is self._grads.get(name):
                value.grad = None
        if all(value.grad is None for value in self._trained.values()):
            self._grads = {}

    def places(self) -> Params:
        """Where the private gradient is to be written: of one in shards, this rank's."""
        return {
            name: grad.to_local() if isinstance(grad, DTensor) else grad
            for name, grad in self._made().items()
        }

    def _made(self) -> Params:
        """The memory of all gradients, side by side where that is how the weights lie."""
        if not self._grads:
            values = {name: value.detach() for name, value in self._trained.items()}
            shards = any(isinstance(each, DTensor) for each in values.values())
            if not shards and all(each.is_contiguous() for each in values.values()):
                # `data`: a change of one is no change of the others
                self._grads = {name: each.data for name, each in empty_like(values).items()}
            else:
                self._grads = {name: torch.empty_like(value) for name, value in values.items()}
        return self._grads

    def put(self) -> None:
        """Let parameters have their gradients, and note what these are now."""
        for name, value in self._trained.items():
            grad = self._grads[name]
            if value.grad is not grad:
                value.grad = grad
            self._versions[name] = grad._version


class TrainedModule:
    """A module whose parameters are trained, and what the batch at hand has added up.

    Attributes:
        randomness: what layers draw from.
        unwatched: why no gradient of a record was seen, in words, where that is known.
        rounded: whether a layer has rounded to bfloat16.
    """

    def __init__(
        self,
        module: nn.Module,
        trained: dict[str, nn.Parameter],
        max_grad_norm: float,
        randomness: Callable[[], AbstractContextManager[None]],
        sharding: Sharding | None = None,
    ) -> None:
        self.module, self.trained, self.sharding = module, trained, sharding
        self.randomness, self.max_grad_norm = randomness, max_grad_norm
        self.sums, self.gradients = Sums(), Gradients(trained)
        self.calls: list[Any] = []  # of the module, whose backward pass has not come yet
        self.unwatched: str | None = None
        self.rounded = False
        self._names = {id(value): name for name, value in module.named_parameters()}

    @property
    def device(self) -> torch.device:
        return next(iter(self.trained.values())).device

    def reshard(self) -> None:
        """Give gathered weights back, such as those of a call without a backward pass."""
        if self.sharding is not None:
            self.sharding.reshard()

    def check_parameters(self) -> None:
        self.reshard()
        now = dict(self.module.named_parameters())
        for name, value in self.trained.items():
            if now.get(name) is not value:
                raise StepError(
                    f"parameter {name} was replaced or removed after make_private, so the "
                    "optimizer trains another one; build the model first, then call make_private"
                )
            if not value.requires_grad:
                raise StepError(
                    f"parameter {name} was frozen after make_private; call make_private again"
                )
        for name, value in now.items():
            if id(value) not in self._names:
                raise StepError(
                    f"parameter {name} was added after make_private and would not be trained; "
                    "build the model first, then call make_private"
                )
            if value.requires_grad and name not in self.trained:
                raise StepError(
                    f"parameter {name} requires a gradient but is not in the optimizer, so it "
                    "takes no part in the clipped sum; freeze it with requires_grad_(False), or "
                    "add it to the optimizer before make_private"
                )

    def clip(
        self,
        *tapes: Tape,
        keep: Tensor | None = None,
        totals: Params | None = None,
        scale: float | Tensor | None = None,
    ) -> Params:
        """Sums of clipped gradients of records; on several tapes each gets a share of the norm.

        Only records count that `keep` names. With `totals` the sums are added to these. `scale` is
        what each gradient on a tape has to be multiplied by.
        """
        with torch.no_grad(), precision(tf32=False):
            for tape in tapes:
                tape.carry_back()
        # else a record of zeros may stand in
        if (keep is None or totals is not None) and not any(tape.incomplete for tape in tapes):
            used = {name for tape in tapes for name, kept in tape.contributions.items() if kept}
            missing = next((name for name in tapes[0].params if name not in used), None)
            if missing is not None:
                raise StepError(
                    f"parameter {missing} took no part in the loss, so noise alone would train it; "
                    "freeze it with requires_grad_(False) before make_private"
                )
        sums: Params = {}
        for tape in tapes:
            for name, total in clip_tape(
                tape,
                tape.params,
                self.max_grad_norm / len(tapes),
                keep=keep,
                scale=scale,
                places=totals or (None if sums else self._room()),
                add=totals is not None,
            ):  # of a sharded parameter only this rank's part is kept, of the sum of all ranks
                with torch.no_grad():
                    part = total if self.sharding is None else self.sharding.reduce(name, total)
                    sums[name] = sums[name] + part if name in sums else part
            tape.leaves.clear()
        return sums

    def _room(self) -> Params | None:
        """Memory for the first sums of a batch on a CPU, where noise is added to them in place."""
        if self.sums.params or self.sharding is not None or self.device.type != "cpu":
            return None
        return empty_like({name: widen(value.detach()) for name, value in self.trained.items()})

    def take(self) -> Params:
        """The clipped sums of the batch, which are forgotten here."""
        sums = self.sums
        self.forget()
        sums.add(0, sums.captured or {})
        for name, value in self.trained.items():
            if name not in sums.params:
                sums.params[name] = torch.zeros_like(value.detach())
        return {name: sums.params[name] for name in self.trained}

    def check_interrupted(self) -> None:
        if self.sums.replaying:
            raise StepError(
                "a step was interrupted while it added up gradients, so that its records could "
                "count twice; iterate over the loader again, which draws the batch anew"
            )

    def forget(self) -> None:
        self.sums, self.calls = Sums(), []


class ModuleWeights:
    """Parameters and buffers of a module and of modules that follow it, and the optimizer.

    Attributes:
        rates: sets the learning rate, where that is not up to the loop.
        at_rest: then, a copy of the optimizer before the first update, which restored weights start
            with.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, followers: Sequence[nn.Module] = ()
    ) -> None:
        self.module, self.optimizer, self._followers = module, optimizer, followers
        self.rates: Rates | None = None
        self.at_rest: dict[str, Any] | None = None

    def live(self) -> Params:
        found: Params = {}
        for place, module in enumerate((self.module, *self._followers)):
            prefix = f"{place - 1} " if place else ""
            found |= {f"{prefix}parameter {n}": value for n, value in module.named_parameters()}
            found |= {f"{prefix}buffer {n}": value for n, value in module.named_buffers()}
        return found

    def copy(self) -> Params:
        return {name: value.detach().clone() for name, value in self.live().items()}

    def write(self, saved: Params) -> None:
        with torch.no_grad():
            for name, value in self.live().items():
                value.copy_(saved[name])
        for value in self.module.parameters():
            value.grad = None

    def copy_optimizer(self) -> dict[str, Any]:
        """State and settings of the groups, as a checkpoint holds them: parameters by number."""
        numbers = {value: number for number, value in enumerate(self._optimized())}
        state = self.optimizer.state.items()
        return {
            "optimizer": {numbers.get(key, key): copy.deepcopy(held) for key, held in state},
            "groups": [
                {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
                for group in self.optimizer.param_groups
            ],
        }

    def write_optimizer(self, saved: Mapping[str, Any]) -> None:
        state, parameters = saved["optimizer"], self._optimized()
        values = copy.deepcopy(list(state.values()))
        keys = [parameters[key] if isinstance(key, int) else key for key in state]
        self.optimizer.state.clear()
        self.optimizer.state.update(zip(keys, values, strict=True))
        for group, settings in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            group.update(copy.deepcopy(settings))

    def _optimized(self) -> list[Any]:
        return [value for group in self.optimizer.param_groups for value in group["params"]]

    def undo(self) -> Callable[[], None]:
        """What puts everything back as it is now."""
        tensors, optimizer = self.copy(), self.copy_optimizer()

        def back() -> None:
            self.write(tensors)
            self.write_optimizer(optimizer)

        return back


class Rates:
    """The learning rates of an optimizer whose groups keep their ratios."""

    def __init__(self, optimizer: Optimizer) -> None:
        if any("initial_lr" in group for group in optimizer.param_groups):
            raise InvalidInputError(SCHEDULED.format("a learning-rate scheduler"))
        self._optimizer = optimizer
        self._set: list[float] | None = None  # what they were set to, since weights were restored
        rates = self._now()
        if not max(rates) > 0 or not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise InvalidInputError(
                f"the learning rates of the optimizer are {rates}; a BlockGate keeps their ratios, "
                "so give at least one group a rate above zero"
            )
        self._ratios = [rate / max(rates) for rate in rates]

    def _now(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def check(self) -> None:
        if self._set is not None and self._now() != self._set:
            raise StepError(SCHEDULED.format("the loop or a scheduler"))

    def set(self, rate: float) -> None:
        for group, ratio in zip(self._optimizer.param_groups, self._ratios, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio
        self._set = self._now()

    def forget(self) -> None:
        self._set = None


@dataclass(frozen=True)
class ModuleUpdates(GradientSource):
    """A candidate is one step of the optimizer, made in place.

    Its gradient is the noisy sum of what backward passes have clipped, over the expected batch
    size. Formal guarantee of one gradient: the sampled Gaussian mechanism `update`, if the loader
    has drawn the batch of this step.

    Attributes:
        expected: the size of a batch.
        undoes: whether a candidate may be rejected, so that what was there before is kept.
        schedule: the learning rate by position, where that is not up to the loop.
    """

    weights: ModuleWeights
    watcher: TrainedModule
    update: SampledGaussian | NonPrivate
    expected: float
    undoes: bool = False
    schedule: Callable[[Tensor], Tensor] | None = None

    @property
    def source(self) -> Self:
        return self

    def event(self, state: State) -> SampledGaussian | NonPrivate:  # noqa: ARG002
        return self.update

    def gradient(self, state: State, draws: Draws) -> Params:  # noqa: ARG002
        watcher, sums = self.watcher, self.watcher.take()
        offsets, whole = None, None
        if watcher.sharding is None:
            reduction = Reduction(draws.ranks)
            for name, value in sums.items():
                reduction.add(name, value)
            sums = reduction.result()
        else:  # its sums are those of all ranks already
            offsets = watcher.sharding.offsets()
            whole = sum(value.numel() for value in watcher.sharding.trained.values())
        total = ClippedSum(sums, watcher.max_grad_norm, offsets=offsets, whole=whole)
        noise = self.update.noise_multiplier if isinstance(self.update, SampledGaussian) else 0.0
        places = watcher.gradients.places()
        return gaussian.noisy_mean(total, noise, self.expected, draws[NOISE], places)

    def step(self, state: State) -> Step:  # noqa: ARG002
        return Trial(self.update)

    def initial_state(self) -> State:
        """Counts. They are on the host, where verdicts go."""
        zero = torch.zeros((), dtype=torch.int64, device="cpu")
        return State(params={}, optimizer=OptimizerState(zero, {}), updates=zero)

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        undo = self.weights.undo() if self.undoes else None
        try:
            self.gradient(state, draws)
            self.watcher.gradients.put()
            if self.weights.rates is not None and self.schedule is not None:
                self.weights.rates.set(float(self.schedule(position)))
            cast(PrivateOptimizer, self.weights.optimizer).plain_step()
        except BaseException:  # also Ctrl-C in a notebook, where the next cell continues
            if undo is not None:
                undo()
            raise
        return Candidate(replace(state, updates=state.updates + 1), undo=undo)

    def at_rate(self, schedule: Callable[[Tensor], Tensor], max_grad_norm: Tensor) -> Self:
        """The same with another learning rate; the norm is that of the backward pass."""
        assert float(max_grad_norm) == self.watcher.max_grad_norm
        return replace(self, schedule=schedule)

    def reserve(self, state: State, names: Sequence[str]) -> State:  # noqa: ARG002
        """Nothing: what is not there yet takes no memory."""
        return state

    def save(self, state: State, name: str) -> State:
        return replace(state, saved={**(state.saved or {}), name: self.weights.copy()})

    def restore(self, state: State, name: str, add: Sequence[tuple[str, float]] = ()) -> State:
        weights = self.weights
        assert state.saved is not None
        assert weights.rates is not None
        assert weights.at_rest is not None
        undo = weights.undo()
        try:
            weights.write(state.saved[name])
            weights.write_optimizer(weights.at_rest)
            weights.rates.forget()
            first = state.saved[START]
            with torch.no_grad():
                for end, factor in add:
                    for key, value in self._trained().items():
                        value.add_(state.saved[end][key] - first[key], alpha=factor)
        except BaseException:
            undo()
            raise
        return replace(state, updates=torch.zeros_like(state.updates))

    def squared_distance(self, state: State) -> tuple[float, int]:
        assert state.saved is not None
        first, trained = state.saved[START], self._trained()
        squares = [
            (value.detach() - first[key]).double().square().sum() for key, value in trained.items()
        ]
        whole = [  # ranks may hold parts of them
            value.full_tensor() if isinstance(value, DTensor) else value for value in squares
        ]
        return float(torch.stack(whole).sum()), sum(value.numel() for value in trained.values())

    def _trained(self) -> Params:
        return {f"parameter {n}": value for n, value in self.watcher.trained.items()}


def trace_of(optimizer: Optimizer) -> list[tuple[object, ...]]:
    """Settings of an optimizer's groups and versions of its tensors, to be compared later."""
    settings: list[tuple[object, ...]] = [
        (name, repr(float(value) if isinstance(value, Tensor) else value))
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params"
    ]
    return settings + [
        (name, id(value), value._version)
        for held in optimizer.state.values()
        for name, value in held.items()
        if isinstance(value, Tensor)
    ]
