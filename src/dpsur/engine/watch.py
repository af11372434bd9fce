"""Per-record gradients in a loop of the form `loss.backward(); optimizer.step()`.

Hooks on the module watch its calls in training mode. The call runs in the record level, so that
each record's outputs follow from that record alone, and its layers note what they contribute to
each record's gradient. The loss between outputs and `backward()` is the user's and batched: it is
inspected (`loss_graph.py`), which is a check and no proof. After the backward pass each record's
gradient is clipped and added to the sum of the batch. `torch.autograd.backward`, which
`loss.backward()` calls, is wrapped once per process: the loss has to be inspected before autograd
frees what it has saved.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpsur.engine.backward import leave_backward, watch_backward
from dpsur.engine.captured import CallGraphs, CapturedCall, Sums, rows_with_nan
from dpsur.engine.gradients import Gradients
from dpsur.engine.loss_graph import REMEDY, Cut, check_loss_graph
from dpsur.engine.sharding import Sharding
from dpsur.errors import CouplingError, StepError, UnsupportedModelError
from dpsur.functional.call import Arguments, arguments
from dpsur.functional.parameters import Params
from dpsur.functional.process_settings import precision
from dpsur.functional.tree import describe_rows, map_tensors, tensors_of
from dpsur.per_example.augmentation import Augment, augmented
from dpsur.per_example.clipping import clip_tape
from dpsur.per_example.record_function import RecordFunction
from dpsur.per_example.tape import Tape

if TYPE_CHECKING:
    from dpsur.engine.steps import PrivateLoop


@dataclass(eq=False)
class WatchedCall:
    """One watched call of the module, up to its backward pass."""

    tape: Tape | None
    rows: int
    outputs: list[Tensor] = field(default_factory=list)
    # the outputs themselves, and how many hooks they had when the model returned them
    returned: list[tuple[Tensor, int]] = field(default_factory=list)
    cut: Cut = field(default_factory=dict)
    differentiated: bool = False
    replay: CapturedCall | None = None  # instead of a tape


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
        owner: "PrivateLoop",
        augment: Augment | None = None,
        views: int = 1,
        sharding: Sharding | None = None,
    ) -> None:
        self.module, self.trained, self.sharding = module, trained, sharding
        self.max_grad_norm, self.loss_reduction = max_grad_norm, loss_reduction
        self.sums = Sums()
        self.unwatched: str | None = None
        self._expects, self.randomness = owner.expect, owner.layer_randomness
        self._final_refusals, self._owner = owner.final_refusals, owner
        self.augment, self.views = augment, views
        self._names = {id(value): name for name, value in module.named_parameters()}
        self.records = RecordFunction(
            (module,), trained, None if sharding is None else sharding.tape
        )
        self.rounded = False  # whether a call was made in bfloat16
        # of one record and of several, whose losses are not written alike
        self._factors: dict[bool, tuple[float, ...]] = {}
        self._calls: list[WatchedCall] = []
        self._constants: str | None = None  # what is no tensor in the first call
        self._busy = False
        self._sharded = ExitStack()
        self.graphs: CallGraphs | None = None
        self.gradients = Gradients(trained)
        # before hooks of others, such as those by which FSDP gathers weights
        self._handle = module.register_forward_pre_hook(self._enter, prepend=True)
        held = vars(module).get("forward")
        if isinstance(held, WatchedForward) and held.watcher.module is module:
            held.watcher.detach()  # of an engine that has trained the model before
        self._own_forward = vars(module).get("forward")
        vars(module)["forward"] = WatchedForward(self, module.forward)
        watch_backward(self)

    def __deepcopy__(self, memo: Any) -> "Watcher":
        return _inactive()

    def __reduce__(self) -> Any:
        return _inactive, ()

    def detach(self) -> None:
        """Leave the module alone from now on."""
        self._handle.remove()
        if self._own_forward is None:
            vars(self.module).pop("forward", None)
        else:
            vars(self.module)["forward"] = self._own_forward
        leave_backward(self)

    # The forward pass

    def _enter(self, module: nn.Module, _: Any) -> None:
        if not hasattr(self, "module") or module is not self.module or not self._watches():
            return  # a copy of the module, or a call of our own
        with self._final_refusals():
            if self.sharding is None and len(module._forward_pre_hooks) > 1:
                raise CouplingError(
                    "the model has a forward pre-hook of someone else, which sees the whole batch; "
                    "change the inputs inside of the model, or use engine.private_step"
                )
            self.check_parameters()
        if self.sharding is not None:  # before FSDP gathers the weights of the module itself
            self._sharded.close()  # of a call that was interrupted
            self._sharded.enter_context(self.sharding.watched())

    def _watches(self) -> bool:
        if self._busy or self._owner.opaque:
            return False
        self.unwatched = None
        if not self.module.training:
            self.unwatched = "the model was in evaluation mode; call model.train() first"
        return self.module.training and torch.is_grad_enabled()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, in the record level where it is watched."""
        if not self._watches():
            with self._plain_forward() as forward:
                return forward(*args, **kwargs)
        with self._final_refusals():
            return self._call(args, kwargs)

    @contextmanager
    def _plain_forward(self) -> Iterator[Callable[..., Any]]:
        """The module as it was before it was watched."""
        held = vars(self.module)
        watched = held.pop("forward")
        if self._own_forward is not None:
            held["forward"] = self._own_forward
        try:
            yield self.module.forward
        finally:
            held["forward"] = watched

    def _call(self, args: Any, kwargs: Any) -> Any:
        """Run the module in the record level, in the place of its own forward pass."""
        given = Arguments(args, kwargs)
        rows, views = _row_count(given), self.views
        if rows % views:
            raise StepError(
                f"the model was called with {rows} rows, expected a multiple of views={views}; "
                "keep the views of a record together"
            )
        self._expects(rows // views)
        self.check_interrupted()
        self._check_constants(given)
        self._note_precision()

        def call(one: Any) -> Any:
            inner_args, inner_kwargs = self._augmented(*one)
            return forward(*inner_args, **inner_kwargs)

        alone = map_tensors(
            lambda value: value.unflatten(0, (-1, views)), (args, kwargs), otherwise=_keep
        )
        count = rows // views
        with self._sharded, self._plain_forward() as forward, self.paused():
            replay = None if self.graphs is None else self.graphs.run(call, self.sums, alone, count)
            if replay is not None:
                return self._outputs(WatchedCall(None, count, replay=replay), replay.outputs)
            tape, found = self.records.run(call, alone, count, randomness=self.randomness)
        tape.recording = False  # until a loss was inspected
        return self._outputs(WatchedCall(tape, count), found)

    def _check_constants(self, given: Arguments) -> None:
        """Refuse another number or text than in the first call: the batch may have decided it."""
        found: list[Any] = []
        map_tensors(lambda _: None, (given.args, given.kwargs), otherwise=found.append)
        plain = repr([one for one in found if isinstance(one, (Real, str, bytes))])
        self._constants = plain if self._constants is None else self._constants
        if plain != self._constants:
            raise CouplingError(
                "the model was called with another number or text than in its first call; one that "
                "depends on the batch couples its records: make it constant, or write the loss "
                "as engine.private_step, whose further arguments may change"
            )

    def _note_precision(self) -> None:
        kind = next(iter(self.trained.values())).device.type
        if not torch.is_autocast_enabled(kind):
            return
        if torch.get_autocast_dtype(kind) is torch.float16:
            raise StepError(
                "autocast in float16 needs a GradScaler, which a private step cannot have; use "
                "torch.autocast(..., dtype=torch.bfloat16)"
            )
        self.rounded = True

    def _augmented(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call after the augmentation."""
        if self.augment is None:
            return args, kwargs
        if bool(args) == bool(kwargs):
            raise StepError(
                "with augment=..., call the model with positional or with keyword arguments only"
            )
        return arguments(augmented(self.augment, kwargs or (args[0] if len(args) == 1 else args)))

    def _outputs(self, call: WatchedCall, found: Any) -> Any:
        """What the module returns for the whole batch; notes where its graph ends."""

        def note(value: Tensor) -> Tensor:
            if value.grad_fn is not None:
                call.cut[value.grad_fn, value.output_nr] = len(value)
                call.outputs.append(value.detach())
                call.returned.append((value, _hooks(value)))
            return value

        def batched(value: Tensor) -> Tensor:
            """An output of all records, where the model expects to have returned it."""
            if value.dim() == 1:  # a number that the model computed for each record, as a loss
                note(value)
                return value.mean() if self.loss_reduction == "mean" else value.sum()
            if value.shape[1] == self.views:
                return note(value.flatten(0, 1))
            if value.dim() > 2 and value.shape[2] == self.views:  # sequences come first
                return value.movedim(0, 1).flatten(1, 2)
            raise UnsupportedModelError(
                f"an output of the model has the shape {tuple(value.shape[1:])} for a batch of one "
                "record; it must have a row per record in its first dimension (a squeeze() without "
                "a dimension drops it: write squeeze(-1)), or compute the loss in "
                "engine.private_step, where an output may have any shape"
            )

        # a call whose outputs were dropped is forgotten with its graph
        self._calls = [*[one for one in self._calls if not one.differentiated][-3:], call]
        return map_tensors(batched, found, otherwise=_keep)

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

    def reached(self, loss: Tensor) -> WatchedCall | None:
        """The watched call that a loss depends on."""
        calls = {key: call for call in self._calls for key in call.cut}
        if not calls or loss.grad_fn is None:
            return None
        found: list[WatchedCall] = []
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
                "one backward pass goes through several calls of the model (a GAN, a siamese "
                "network), whose rows may belong to different records; " + REMEDY
            )
        return found[0] if found else None

    def before_backward(self, call: WatchedCall, loss: Tensor) -> Any:
        """Inspect a loss; returns what undoes a mean over the batch, and the rest of each scale."""
        with self._final_refusals():
            return self._inspect(call, loss)

    def _inspect(self, call: WatchedCall, loss: Tensor) -> Any:
        if call.differentiated:
            raise StepError(
                "a second backward pass through one forward pass would count its records twice; "
                "add the losses up and call backward() once"
            )
        hooked = any(_hooks(output) != before for output, before in call.returned)
        if hooked and self.sharding is None:  # FSDP has one on what the module returns
            raise CouplingError(
                "an output of the model has a hook, by which a record's gradient may depend on "
                "others; remove register_hook, or change gradients inside of the model"
            )
        report = check_loss_graph(loss, call.cut, call.rows, self._names)
        views = 1 if self.loss_reduction == "mean" else self.views  # a sum is not divided by them
        if call.rows > 1 and report.mean != (self.loss_reduction == "mean"):
            has = "a mean" if report.mean else "a sum"
            raise StepError(
                f"the loss is {has} over the batch, but loss_reduction is "
                f"{self.loss_reduction!r}; make the two agree in make_private(loss_reduction=...)"
            )
        known = self._factors.setdefault(call.rows == 1, report.factors)
        if not _close(known, report.factors):
            raise CouplingError(
                "the loss scale differs from the first batch; a "
                "number that depends on the batch couples its records: make it constant, or "
                "compute it from each record alone in make_private(criterion=...)"
            )
        if call.tape is not None:
            call.tape.recording = True
        start = report.scale if report.divisor is None else report.divisor
        return start, report.scale / start / views

    def after_backward(self, call: WatchedCall, scale: float | Tensor) -> None:
        """Clip each record's gradient and add them up."""
        self.check_interrupted()
        call.differentiated, tape = True, call.tape
        keep = self._expects(call.rows)
        if call.replay is not None:
            call.replay.clip(scale, keep)
            self.sums.add(call.rows, {})
            self.gradients.mark(self.unwatched)
            return
        assert tape is not None
        tape.recording = False
        with torch.no_grad(), precision(tf32=False):
            tape.carry_back()
            tape.spoiled = rows_with_nan(call.outputs, call.rows)
        if keep is None:
            _check_all_used(tape)
        sums: Params = {}
        for name, total in clip_tape(
            tape, tape.params, self.max_grad_norm, keep=keep, scale=scale
        ):  # of a sharded parameter only this rank's part is kept, of the sum of all ranks
            with torch.no_grad():
                sums[name] = total if self.sharding is None else self.sharding.reduce(name, total)
        self.sums.add(call.rows, sums)
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

    def clip(
        self,
        tape: Tape,
        keep: Tensor | None = None,
        totals: Params | None = None,
        scale: float | Tensor | None = None,
    ) -> Params:
        """Sums of the gradients of a tape's records, each clipped to the norm bound.

        Only records count that `keep` names. With `totals` the sums are added to these. `scale` is
        what each gradient on the tape has to be multiplied by.
        """
        with torch.no_grad(), precision(tf32=False):
            tape.carry_back()
        if not getattr(tape, "unusable", False):
            _check_all_used(tape)
        return dict(
            clip_tape(
                tape,
                tape.params,
                self.max_grad_norm,
                keep=keep,
                scale=scale,
                places=totals,
                add=totals is not None,
            )
        )

    def take(self) -> Params:
        """The clipped sums of the batch, which are forgotten here."""
        sums, self.sums, self._calls = self.sums, Sums(), []
        for name, value in (sums.captured or {}).items():
            sums.params[name] = sums.params[name] + value if name in sums.params else value
        return {
            name: found
            if (found := sums.params.get(name)) is not None
            else torch.zeros_like(value.detach())
            for name, value in self.trained.items()
        }

    def check_interrupted(self) -> None:
        """Refuse to continue where a graph may have added records that were not counted."""
        if self.sums.replaying:
            raise StepError(
                "a step was interrupted while it added up gradients, so that its records could "
                "count twice; iterate over the loader again, which draws the batch anew"
            )

    def forget(self) -> None:
        """Drop what calls and backward passes have left."""
        self.sums, self._calls = Sums(), []


class WatchedForward:
    """Stands in for the forward method of a watched module. A copy of the module is not watched."""

    def __init__(self, watcher: Watcher, forward: Callable[..., Any]) -> None:
        self.watcher = watcher
        self.__signature__ = signature(forward)  # trainers choose columns of a data set by it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the watcher."""
        return self.watcher.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.watcher.module))
        assert copied is not None  # it is copied as an attribute of the module
        return partial(type(copied).forward, copied)

    def __reduce__(self) -> Any:
        module = self.watcher.module
        return partial, (type(module).forward, module)


def _check_all_used(tape: Tape) -> None:
    missing = next((name for name in tape.params if not tape.contributions.get(name)), None)
    if missing is not None:
        raise StepError(
            f"parameter {missing} took no part in the loss, so noise alone would train it; "
            "freeze it with requires_grad_(False) before make_private"
        )


def _hooks(value: Tensor) -> int:
    return len(value._backward_hooks or ())


def _keep(value: Any) -> Any:
    return value


def _inactive() -> Watcher:
    return object.__new__(Watcher)


def _close(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(abs(a - b) <= 1e-9 * abs(a) for a, b in pairs)


def _row_count(inputs: Arguments) -> int:
    """How many rows a call is for; refuses arguments that do not agree."""
    found = tensors_of(inputs)
    if not found:
        raise UnsupportedModelError("the model was called without a tensor; pass it the records")
    if any(value.layout is not torch.strided or value.is_nested for value in found):
        raise UnsupportedModelError(
            "the model was called with a sparse or nested tensor, whose records cannot be told "
            "apart; pass dense tensors, with records padded to one length"
        )
    rows = len(found[0]) if found[0].dim() else 0
    for value in found:
        if not value.dim() or len(value) != rows:
            raise UnsupportedModelError(
                f"the model was called with tensors of {describe_rows(inputs)}, of which one has "
                f"the shape {tuple(value.shape)} and another {rows} rows; every tensor must have a "
                "row per record in its first dimension (batch_first=True)"
            )
    return rows
