"""Per-example gradients in a custom loop: what one forward and one backward pass say about them.

Hooks on the module watch its calls in training mode: layers are replaced by their rules for the
length of the call, and weights require no gradient, so that `loss.backward()` fills a tape and
touches no `.grad`. After the backward pass each record's gradient is clipped and added to the sum
of the batch. `torch.autograd.backward`, which `loss.backward()` calls, is wrapped once per process:
the loss has to be inspected before autograd frees what it has saved.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpsur.engine.backward import leave_backward, watch_backward
from dpsur.engine.batch_checks import (
    NumberCheck,
    Place,
    TargetCheck,
    Yielded,
    check_not_used,
    places_of,
    rows_with_nan,
)
from dpsur.engine.gradients import Gradients
from dpsur.engine.loss_graph import Cut, Values, check_loss_graph
from dpsur.engine.plans import Plans, row_count_of
from dpsur.engine.sharding import Sharding
from dpsur.errors import StepError
from dpsur.functional.call import Arguments, arguments, every_module, use_weights
from dpsur.functional.parameters import Params
from dpsur.functional.problem import forbid_side_effects, without_flattening
from dpsur.functional.process_settings import precision
from dpsur.functional.tree import map_tensors, split_rows
from dpsur.per_example.augmentation import Augment, check_augmentation
from dpsur.per_example.contributions import Factors, clip_factors
from dpsur.per_example.engine_choice import Engine, Plan
from dpsur.per_example.one_pass import copy_per_example, use_rules
from dpsur.per_example.rules import RULES
from dpsur.per_example.tape import Layout, Tape

# Tensors that a module without any rule may take and return.
_MOST_TENSORS = 1000


@dataclass(eq=False)
class Call:
    """One watched call of the module, up to its backward pass."""

    tape: Tape
    rows: int
    inputs: list[Place]
    given: Arguments
    outputs: Values = field(default_factory=dict)
    # the outputs themselves, and how many hooks they had when the model returned them
    returned: list[tuple[Tensor, int]] = field(default_factory=list)
    cut: Cut = field(default_factory=dict)
    differentiated: bool = False


@dataclass
class Sums:
    """What the backward passes of one batch have added up so far. Private."""

    rows: int = 0
    params: Params = field(default_factory=dict)
    inputs: list[list[Place]] = field(default_factory=list)

    def add(self, rows: int, params: Params, inputs: list[Place]) -> None:
        """Add the clipped gradients of some more records."""
        self.rows += rows
        self.inputs.append(inputs)
        for name, value in params.items():
            self.params[name] = self.params[name] + value if name in self.params else value


class Owner(Protocol):
    """What an engine does around the calls of a module."""

    def expect(self, rows: int) -> Tensor | None:
        """Refuse a call without a private batch; for an empty one, which rows count: none."""
        ...

    def layer_randomness(self) -> AbstractContextManager[None]:
        """Secret random numbers in the place of those of torch's global generators."""
        ...


class Watcher:
    """Watches one module. `owner` is asked before each call whether a private batch is due.

    Layers and augmentations draw from its random numbers. Which draws a record gets depends on its
    place in the batch, and so on other records: nobody may know them. A program may well begin with
    `torch.manual_seed(0)`.
    """

    def __init__(
        self,
        module: nn.Module,
        trained: dict[str, nn.Parameter],
        max_grad_norm: float,
        loss_reduction: str,
        owner: Owner,
        augment: Augment | None = None,
        views: int = 1,
        sharding: Sharding | None = None,
    ) -> None:
        self.module, self.trained, self.sharding = module, trained, sharding
        self.max_grad_norm, self.loss_reduction = max_grad_norm, loss_reduction
        self.sums = Sums()
        self.unwatched: str | None = None
        self._expects, self._randomness = owner.expect, owner.layer_randomness
        self.augment, self._views = augment, views
        self._names = {id(value): name for name, value in module.named_parameters()}
        self._plans = Plans(module, list(trained), sharding)
        # of one record and of several, whose losses are not written alike
        self._factors: dict[bool, tuple[float, ...]] = {}
        self._calls: list[Call] = []
        self._open: tuple[ExitStack, Tape, Plan] | None = None
        self._given = Arguments((), {})
        self._number_check = NumberCheck()
        self.yielded: Yielded | None = None
        self._target_check = TargetCheck()
        self._busy = False
        self._measured: list[Tensor] | None = None
        self.gradients = Gradients(trained)
        self._handles = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True),
            module.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
        ]
        watch_backward(self)

    @property
    def rounded(self) -> bool:
        """Whether a call was made in bfloat16."""
        return self._plans.rounded

    def __deepcopy__(self, memo: Any) -> "Watcher":
        return _inactive()

    def __reduce__(self) -> Any:
        return _inactive, ()

    def detach(self) -> None:
        """Leave the module alone from now on."""
        for handle in self._handles:
            handle.remove()
        leave_backward(self)

    # The forward pass

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not hasattr(self, "module") or module is not self.module or self._busy:
            return None  # a copy of the module, or our own checks
        if self._open is not None:  # Ctrl-C in the call before, after which hooks are not called
            (stack, *_), self._open = self._open, None
            stack.close()
        self.unwatched = None
        if not module.training:
            self.unwatched = "the model was in evaluation mode; call model.train() first"
            return None
        if not torch.is_grad_enabled():
            return None
        rows = row_count_of(Arguments(args, kwargs))
        if rows % self._views:
            raise StepError(
                f"the model was called with {rows} rows, which is no multiple of the {self._views} "
                "views of each record; keep the views of a record together"
            )
        if self._measured is None:
            self._expects(rows // self._views)
        self.check_parameters()
        self._given = Arguments(args, kwargs)
        self._number_check.look(self._given)
        args, kwargs = self._augmented(args, kwargs)
        inputs = Arguments(args, kwargs)
        self._busy = True
        try:
            plan = self._plans.find(inputs)
        finally:
            self._busy = False
        layouts = list(plan.layouts) or [Layout(0)] * _MOST_TENSORS
        stack = ExitStack()
        if self.sharding is not None:
            assert plan.assignment is not None
            tape = self.sharding.tape(rows, layouts)
            tape.recording = False
            self._open = stack, tape, plan
            stack.enter_context(self._randomness())
            stack.enter_context(self.sharding.watched())
            stack.enter_context(use_rules(plan.assignment, module, tape))
            return args, kwargs
        params = {name: value.detach() for name, value in self.trained.items()}
        tape = Tape(params, rows, layouts)
        tape.recording = False  # until a loss was inspected
        self._open = stack, tape, plan
        stack.enter_context(self._randomness())
        stack.enter_context(without_flattening(every_module(module)))
        stack.enter_context(forbid_side_effects(module, {}))
        if self._recomputes(plan):
            stack.enter_context(torch.no_grad())
            return args, kwargs
        assert plan.assignment is not None
        stack.enter_context(use_rules(plan.assignment, module, tape))
        weights = tape.params
        stack.enter_context(use_weights(module, lambda name, own: weights.get(name, own.detach())))
        return args, kwargs

    def _augmented(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call after the augmentation."""
        if self.augment is None:
            return args, kwargs
        if bool(args) == bool(kwargs):
            raise StepError(
                "with augment=..., call the model with positional or with keyword arguments only"
            )
        inputs = kwargs or (args[0] if len(args) == 1 else args)
        if not len(self._plans):
            check_augmentation(self.augment, self._views, inputs)
        with self._randomness():
            return arguments(self.augment(inputs))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        if not hasattr(self, "module") or self._open is None or module is not self.module:
            return None
        (stack, tape, plan), self._open = self._open, None
        stack.close()
        if outputs is None:  # the forward pass raised
            return None
        call = Call(tape, tape.examples // self._views, places_of(self._given), self._given)

        def note(value: Tensor) -> Tensor:
            if value.grad_fn is not None and value.dim() and len(value) == tape.examples:
                call.cut[value.grad_fn, value.output_nr] = len(value)
                call.outputs[value.grad_fn, value.output_nr] = value.detach()
                call.returned.append((value, _hooks(value)))
            return value

        def total(given: Tensor, found: Tensor) -> Tensor:
            """A loss that the model computes itself was computed for each record alone."""
            note(found)
            if given.dim():
                return found
            return found.mean() if self.loss_reduction == "mean" else found.sum()

        if self._recomputes(plan):
            found = self._recompute(tape, plan, args, kwargs)
            outputs = map_tensors(total, outputs, found, otherwise=lambda value: value)
        else:
            map_tensors(note, outputs, otherwise=lambda value: value)
        # a call whose outputs were dropped is forgotten with its graph
        self._calls = [*[one for one in self._calls if not one.differentiated][-3:], call]
        return outputs

    def _recomputes(self, plan: Plan) -> bool:
        """Whether the module itself has to be called in another way, which hooks cannot do."""
        return plan.assignment is None or any(place == 0 for place, _ in plan.assignment.forwards)

    def _recompute(self, tape: Tape, plan: Plan, args: Any, kwargs: Any) -> Any:
        """Outputs of a module that is one layer, or that no rule covers."""
        own = type(self.module).forward
        forward = functools.partial(own, self.module)
        weights = tape.params

        def weight(name: str, value: Tensor) -> Tensor:
            return weights.get(name, value.detach())

        modules = every_module(self.module)
        with torch.enable_grad(), without_flattening(modules), self._randomness():
            if plan.engine is not Engine.ONE_BY_ONE:
                kind = None if plan.assignment is None else plan.assignment.forwards[0][1]
                with use_weights(self.module, weight):
                    if kind is not None:
                        return RULES[kind](self.module, tape, *args, **kwargs)
                    return copy_per_example(self.module, tape, forward, *args, **kwargs)
            return self._row_by_row(tape, Arguments(args, kwargs))

    def _row_by_row(self, tape: Tape, inputs: Arguments) -> Any:
        """Every record alone, with weights of its own: slow, and right for every module."""
        copies = {name: tape.copies(name) for name in tape.params}
        outputs = []
        for row, one in enumerate(split_rows(inputs, 1)):
            weights = {name: value[row] for name, value in copies.items()}
            self._busy = True
            try:
                outputs.append(functional_call(self.module, weights, one.args, one.kwargs))
            finally:
                self._busy = False
        return map_tensors(
            lambda *each: torch.cat(each) if each[0].dim() else torch.stack(each),
            *outputs,
            otherwise=lambda value: value,
        )

    def check_parameters(self) -> None:
        """Refuse a module whose parameters are no longer those of the set-up."""
        if self.sharding is not None:
            self.sharding.reshard()
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

    # The backward pass

    def reached(self, loss: Tensor) -> Call | None:
        """The watched call that a loss depends on."""
        calls = {key: call for call in self._calls for key in call.cut}
        if not calls or loss.grad_fn is None:
            return None
        found: list[Call] = []
        seen, ahead = {loss.grad_fn}, [loss.grad_fn]
        if (loss.grad_fn, loss.output_nr) in calls:
            found.append(calls[loss.grad_fn, loss.output_nr])
        while ahead:
            for child, number in ahead.pop().next_functions:
                if (child, number) in calls:
                    if calls[child, number] not in found:
                        found.append(calls[child, number])
                elif child is not None and child not in seen:
                    seen.add(child)
                    ahead.append(child)
        if len(found) > 1:
            raise StepError(
                "one backward pass goes through several calls of the model, whose rows may belong "
                "to different records; call the model once per backward pass"
            )
        return found[0] if found else None

    def before_backward(self, call: Call, loss: Tensor) -> Any:
        """Inspect a loss; returns what undoes a mean over the batch, and the rest of each scale."""
        if call.differentiated:
            raise StepError(
                "a second backward pass through one forward pass would count its records twice; "
                "add the losses up and call backward() once"
            )
        check_not_used(call.inputs, self.sums.inputs)
        if any(_hooks(output) != before for output, before in call.returned):
            raise StepError(
                "an output of the model has a hook, by which a record's gradient may depend on "
                "others; remove register_hook, or change gradients inside of the model"
            )
        report = check_loss_graph(loss, call.cut, call.rows, self._names, call.outputs)
        views = 1 if self.loss_reduction == "mean" else self._views  # a sum is not divided by them
        if call.rows > 1 and report.mean != (self.loss_reduction == "mean"):
            has = "a mean" if report.mean else "a sum"
            raise StepError(
                f"the loss is {has} over the batch, but loss_reduction is "
                f"{self.loss_reduction!r}; make the two agree in make_private(loss_reduction=...)"
            )
        known = self._factors.setdefault(call.rows == 1, report.factors)
        if not _close(known, report.factors):
            raise StepError(
                "the loss is multiplied or divided by other numbers than in the first batch; a "
                "number that depends on the batch couples its records: make it constant, or "
                "compute it from each record alone in make_private(criterion=...)"
            )
        if self.yielded is not None and self._measured is None and self._views == 1:
            used = self.sums.rows - self.yielded.before
            self._target_check.look(
                replace(self.yielded, before=used), call.given, report.targets, call.rows
            )
        call.tape.recording = True
        start = report.scale if report.divisor is None else report.divisor
        return start, report.scale / start / views

    def after_backward(self, call: Call, scale: float | Tensor) -> None:
        """Clip each record's gradient and add them up."""
        call.differentiated, tape = True, call.tape
        tape.recording = False
        with torch.no_grad(), precision(tf32=False):
            tape.carry_back()
            tape.spoiled = rows_with_nan(call.outputs.values())
            if self._views > 1:
                tape.merge_views(self._views)
        keep = None if self._measured is not None else self._expects(call.rows)
        if keep is None:
            missing = next((n for n in tape.params if not tape.contributions.get(n)), None)
            if missing is not None:
                raise StepError(
                    f"parameter {missing} took no part in the loss, so noise alone would train it; "
                    "freeze it with requires_grad_(False) before make_private"
                )
        with torch.no_grad(), precision(tf32=False):
            norms = tape.norms()
            scale = torch.as_tensor(scale, device=norms.device).to(norms.dtype)
            if self._measured is not None:
                self._measured.append(norms * scale)
                tape.leaves.clear()
                return
            factors = clip_factors(norms * scale, self.max_grad_norm, keep)
            factors = Factors(factors.values * scale, factors.keep)
            if factors.keep is not None:
                factors.values.masked_fill_(~factors.keep, 0.0)
            sums: Params = {}
            for name in reversed(tape.params):
                total = tape.weighted_sum(name, factors, last=True)
                # of a sharded parameter only this rank's part is kept, of the sum of all ranks
                sums[name] = total if self.sharding is None else self.sharding.reduce(name, total)
        self.sums.add(call.rows, sums, call.inputs)
        tape.leaves.clear()
        self.gradients.mark(self.unwatched)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While a private step calls the module in the record level."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def clip(self, tape: Tape) -> Params:
        """Sums of the gradients of a tape's records, each clipped to the norm bound."""
        missing = next((name for name in tape.params if not tape.contributions.get(name)), None)
        if missing is not None:
            raise StepError(
                f"parameter {missing} took no part in the loss, so noise alone would train it; "
                "freeze it with requires_grad_(False) before make_private"
            )
        with torch.no_grad(), precision(tf32=False):
            factors = clip_factors(tape.norms(), self.max_grad_norm, None)
            return {
                name: tape.weighted_sum(name, factors, last=True) for name in reversed(tape.params)
            }

    @contextmanager
    def measuring(self, factors: dict[bool, tuple[float, ...]]) -> Iterator[list[Tensor]]:
        """Norms of records' gradients by backward passes that add to no sum and need no batch.

        `factors` are the numbers in the losses so far, which need not be those of the loop.
        """
        own, calls = self._factors, self._calls
        self._measured, self._factors = [], factors
        try:
            yield self._measured
        finally:
            self._measured, self._factors, self._calls = None, own, calls

    def take(self) -> Params:
        """The clipped sums of the batch, which are forgotten here."""
        sums, self.sums, self._calls = self.sums, Sums(), []
        return {
            name: found
            if (found := sums.params.get(name)) is not None
            else torch.zeros_like(value.detach())
            for name, value in self.trained.items()
        }

    def forget(self) -> None:
        """Drop what calls and backward passes have left."""
        self.sums, self._calls, self.yielded = Sums(), [], None


def _hooks(value: Tensor) -> int:
    return len(value._backward_hooks or ())


def _inactive() -> Watcher:
    return object.__new__(Watcher)


def _close(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(abs(a - b) <= 1e-9 * abs(a) for a, b in pairs)
