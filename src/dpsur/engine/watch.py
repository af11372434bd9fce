"""Per-record gradients in a loop of the form `loss.backward(); optimizer.step()`.

Hooks on the module watch its calls in training mode. The call runs in the record level, so that
each record's outputs follow from that record alone, and its layers note what they contribute to
each record's gradient. The loss between outputs and `backward()` is the user's and batched: it is
inspected (`loss_graph.py`), which is a check and no proof. After the backward pass each record's
gradient is clipped and added to the sum of the batch. `torch.autograd.backward`, which
`loss.backward()` calls, is wrapped once per process: the loss has to be inspected before autograd
frees what it has saved.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import isfunction, signature
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpsur.engine.captured import CallGraphs, Clip, leaves_of, rows_with_nan
from dpsur.engine.loss_graph import REMEDY, Cut, below, calls_meet, check_loss_graph
from dpsur.engine.sharding import Sharding
from dpsur.engine.weights import TrainedModule
from dpsur.errors import CouplingError, StepError, UnsupportedModelError
from dpsur.functional.problem import Arguments, use_weights
from dpsur.functional.process_settings import precision
from dpsur.functional.tree import describe_rows, keep, map_tensors, tensors_of
from dpsur.per_example.record_function import RecordFunction
from dpsur.per_example.record_level import in_transform, only_trusted_rules
from dpsur.per_example.tape import Tape

if TYPE_CHECKING:
    from dpsur.engine.steps import PrivateLoop


NO_BATCH = (
    "the model was called in training mode without a batch of the private loader; iterate over the "
    "loader that make_private returned, and evaluate with model.eval() or torch.no_grad()"
)
# What these call methods for needs no watching.
_LIBRARIES = ("torch", "transformers", "peft", "lightning", "pytorch_lightning", "timm")


@dataclass(eq=False)
class WatchedCall:
    """One watched call of the module, up to its backward pass."""

    tape: Tape | None
    rows: int
    given: list[Tensor]
    # the outputs themselves, and how many hooks they had when the model returned them
    returned: list[tuple[Tensor, int]] = field(default_factory=list)
    cut: set[tuple[Any, int]] = field(default_factory=set)  # where their graphs begin
    differentiated: bool = False
    clip: Clip | None = None  # of a captured call, instead of a tape


class Watcher(TrainedModule):
    """Watches one module. `owner` is asked before each call whether a private batch is due.

    Layers draw from its random numbers. Which draws a record gets depends on its place in the
    batch, and so on other records: nobody may know them. A program may well begin with
    `torch.manual_seed(0)`.
    """

    def __init__(
        self,
        module: nn.Module,
        trained: dict[str, nn.Parameter],
        max_grad_norm: float,
        loss_reduction: str,
        owner: "PrivateLoop",
        sharding: Sharding | None = None,
    ) -> None:
        super().__init__(module, trained, max_grad_norm, owner.layer_randomness, sharding)
        self.loss_reduction, self._owner = loss_reduction, owner
        self.records = RecordFunction(
            (module,), trained, None if sharding is None else sharding.tape
        )
        # of one record and of several, whose losses are not written alike
        self._factors: dict[bool, tuple[float, ...]] = {}
        self._first: dict[object, Any] = {}  # what must not change from batch to batch
        self._made: tuple[object, int] = (None, 0)  # calls since the last microbatch was yielded
        self._needed: dict[str, bool] = {}  # whether a method has to run in the record level
        self._busy = False
        self._sharded = ExitStack()
        self.graphs: CallGraphs | None = None
        # before hooks of others, such as those by which FSDP gathers weights
        self._handle = module.register_forward_pre_hook(self._enter, prepend=True)
        held = vars(module)
        earlier = held.get("forward")
        if isinstance(earlier, WatchedForward) and earlier.watcher.module is module:
            earlier.watcher.detach()  # of an engine that has trained the model before
        names = ["forward", *(() if sharding is not None else _methods(module))]
        self._own = {name: held[name] for name in names if name in held}
        self._watched = {name: WatchedForward(self, name, getattr(module, name)) for name in names}
        held.update(self._watched)
        if module._compiled_call_impl is not None:  # by `module.compile()`
            held["_compiled_call_impl"] = None
        _watchers.add(self)
        _wrap_backward()

    def __reduce__(self) -> Any:
        return object.__new__, (Watcher,)

    def detach(self) -> None:
        self._handle.remove()
        self._take_away()
        self._watched = {}
        _watchers.discard(self)

    def _take_away(self) -> None:
        held = vars(self.module)
        for name in self._watched:
            held.pop(name, None)
        held.update(self._own)

    # The forward pass

    def _enter(self, module: nn.Module, _: Any) -> None:
        if not hasattr(self, "module") or module is not self.module or not self._watches():
            return  # a copy of the module, or a call of our own
        if in_transform():
            raise StepError(
                "the model is called inside of torch.func (grad, jvp, vmap, functional_call, ...), "
                "where a call of the loop cannot be watched; " + REMEDY
            )
        with self._owner.final_refusals():
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

    def run(self, name: str, args: Any, kwargs: Any) -> Any:
        """The module's forward pass or another method, in the record level where it is watched.

        Another method is, if what it returns needs weights by another way. Its first call tells:
        one that calls the module itself, or takes steps, is left alone.
        """
        if name == "forward":
            if not self._watches():
                with self.paused():
                    return self.module.forward(*args, **kwargs)
        else:
            plain = self._watched[name].__wrapped__
            if not self._watches() or self._owner.due is None or not tensors_of((args, kwargs)):
                return plain(*args, **kwargs)
            if not self._needed.get(name):
                made = self._made
                found = plain(*args, **kwargs)
                used = (getattr(node, "variable", None) for node, _ in below(tensors_of(found)))
                if name in self._needed or not any(id(value) in self._names for value in used):
                    self._needed.setdefault(name, False)
                    return found
                self._needed[name], self._made = True, made
        with self._owner.final_refusals():
            if name != "forward":
                self.check_parameters()
            return self._call(name, args, kwargs)

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        """Run the module in the record level, in the place of its own forward pass."""
        given = Arguments(args, kwargs)
        below = [value for value in tensors_of(given) if value.grad_fn is not None]
        if below and self._owner.due is None:
            return self._judge(name, given)
        count = _row_count(given)
        self._owner.expect(count)
        self.gradients.give_back()
        self.check_interrupted()
        self._check_constants(name, given)
        if torch.is_autocast_enabled(self.device.type):
            if torch.get_autocast_dtype(self.device.type) is torch.float16:
                raise StepError(
                    "autocast in float16 needs a GradScaler, which a private step cannot have; use "
                    "torch.autocast(..., dtype=torch.bfloat16)"
                )
            self.rounded = True

        def call(one: Any) -> Any:
            inner_args, inner_kwargs = one
            return getattr(self.module, name)(*inner_args, **inner_kwargs)

        alone = map_tensors(lambda value: value.unsqueeze(1), (args, kwargs), otherwise=keep)
        made = WatchedCall(None, count, tensors_of(given))
        with self._sharded, self.paused():
            if self.graphs is not None and name == "forward" and not below:
                replay = self.graphs.run(call, alone, count, self._owner._loader.poisson.most)
                if replay is not None:
                    found, made.clip = replay
                    return self._outputs(made, found)
            made.tape, found = self.records.run(call, alone, count, randomness=self.randomness)
        made.tape.recording = False  # until a loss was inspected
        return self._outputs(made, found)

    def _judge(self, name: str, given: Arguments) -> Any:
        """A call between steps that trains what made its inputs, as a critic a generator.

        No gradient reaches the module's own weights. The number of rows must not change: it would
        be that of a private batch, which the other model would learn of.
        """
        self._refuse_change(
            *("rows that are judged", _row_count(given)),
            "the model judges another number of rows than in the step before, as made for the size "
            "of a private batch, which would reach the other model without noise; make a fixed "
            "number of rows for it, such as generator(torch.randn(64, ...))",
        )
        self.unwatched = NO_BATCH
        with use_weights(self.module, lambda _, value: value.detach()), self.paused():
            return getattr(self.module, name)(*given.args, **given.kwargs)

    def _refuse_change(self, what: object, now: object, words: str) -> None:
        if self._first.setdefault(what, now) != now:
            raise CouplingError(words)

    def _check_constants(self, name: str, given: Arguments) -> None:
        """Refuse another number or text than in the first call: the batch may have decided it."""
        found = leaves_of((given.args, given.kwargs))
        batch, count = self._made
        due = self._owner.due
        self._made = due, count + 1 if batch is due else 0
        self._refuse_change(
            (name, self._made[1]),
            repr([one for one in found if isinstance(one, (Real, str, bytes))]),
            "the model was called with another number or text than in its first call; one that "
            "depends on the batch couples its records: make it constant, or write the loss as "
            "engine.private_step, whose further arguments may change",
        )

    def _outputs(self, call: WatchedCall, found: Any) -> Any:
        """What the module returns for the whole batch; notes where its graph ends."""

        def note(value: Tensor) -> Tensor:
            if value.grad_fn is not None:
                call.cut.add((value.grad_fn, value.output_nr))
                call.returned.append((value, _hooks(value)))
            return value

        def batched(value: Tensor) -> Tensor:
            """An output of all records, where the model expects to have returned it."""
            if value.dim() == 1:  # a number that the model computed for each record, as a loss
                note(value)
                return value.mean() if self.loss_reduction == "mean" else value.sum()
            if value.shape[1] == 1:
                return note(value.flatten(0, 1))
            if value.dim() > 2 and value.shape[2] == 1:  # sequences come first
                return value.movedim(0, 1).flatten(1, 2)
            raise UnsupportedModelError(
                f"an output of the model has the shape {tuple(value.shape[1:])} for a batch of one "
                "record; it must have a row per record in its first dimension (a squeeze() without "
                "a dimension drops it: write squeeze(-1)), or compute the loss in "
                "engine.private_step, where an output may have any shape"
            )

        # a call whose outputs were dropped is forgotten with its graph
        self.calls = [*[one for one in self.calls if not one.differentiated][-3:], call]
        return map_tensors(batched, found, otherwise=keep)

    # The backward pass

    def reached(self, loss: Tensor) -> list[WatchedCall]:
        """The watched calls that a loss depends on; those that feed others come after them."""
        cut, found = _cut(self.calls), list[WatchedCall]()
        ahead = [[loss]] if cut else []
        while ahead:
            new = [call for call in _under(ahead.pop(), cut) if call not in found]
            found += new
            ahead += [call.given for call in new]
        return found

    def before_backward(self, calls: list[WatchedCall], loss: Tensor) -> Any:
        """Inspect a loss; returns what undoes a mean over the batch, and the rest of each scale."""
        call = calls[0]
        if any(one.differentiated for one in calls):
            raise StepError(
                "a second backward pass through one forward pass would count its records twice; "
                "add the losses up and call backward() once"
            )
        if any(one.rows != call.rows for one in calls):
            raise StepError(
                "one backward pass goes through calls of the model with different numbers of rows, "
                "of which a record could have several; " + REMEDY
            )
        hooked = any(_hooks(out) != before for one in calls for out, before in one.returned)
        if hooked and self.sharding is None:  # FSDP has one on what the module returns
            raise CouplingError(
                "an output of the model has a hook, by which a record's gradient may depend on "
                "others; remove register_hook, or change gradients inside of the model"
            )
        cut = _cut(calls)
        fed = [value for one in calls for value in one.given if _under([value], cut)]
        total, factors = check_loss_graph(loss, cut, call.rows, self._names, fed)
        self._check_calls(calls, cut, loss)
        if call.rows > 1 and total.mean != (self.loss_reduction == "mean"):
            has = "a mean" if total.mean else "a sum"
            raise StepError(
                f"the loss is {has} over the batch, but loss_reduction is "
                f"{self.loss_reduction!r}; make the two agree in make_private(loss_reduction=...)"
            )
        known = self._factors.setdefault(call.rows == 1, factors)
        pairs = zip(known, factors, strict=False)
        if len(known) != len(factors) or not all(abs(a - b) <= 1e-9 * abs(a) for a, b in pairs):
            raise CouplingError(
                "the loss scale differs from the first batch; a "
                "number that depends on the batch couples its records: make it constant, or "
                "compute it from each record alone in make_private(criterion=...)"
            )
        for one in calls:
            if one.tape is not None:
                one.tape.recording = True
        start = total.scale if total.divisor is None else total.divisor
        return start, total.scale / start

    def _check_calls(self, calls: list[WatchedCall], cut: Cut, loss: Tensor) -> None:
        """Know how a loss goes through several calls; it has to be the same in every batch."""
        firsts = [one for one in calls if not _under(one.given, cut)]
        met = len(firsts) == 1 or calls_meet(loss, cut) or len(firsts) < len(calls)
        self._refuse_change(
            *("way of the loss", (len(calls), len(firsts), met)),
            "the loss goes through other calls of the model than in the first batch; what is "
            "called must not depend on the batch: " + REMEDY,
        )
        if len(calls) > 1:
            self.graphs = None  # a captured call clips by itself
            if any(one.clip is not None for one in calls):
                raise StepError(
                    "the loss goes through several calls of the model, of which one was captured "
                    "before; call the model in the same way in every batch"
                )
        if met and len(firsts) > 1 and not all(map(self._in_order, firsts)):
            raise CouplingError(
                "the loss joins outputs of several calls of the model (a siamese network, a "
                "triplet loss), whose rows may belong to different records, since the inputs are "
                "not those that the loader has yielded; " + REMEDY
            )

    def _in_order(self, call: WatchedCall) -> bool:
        return all(map(self._owner.has_yielded, call.given))

    def after_backward(self, calls: list[WatchedCall], scale: float | Tensor) -> None:
        """Clip each record's gradient and add them up.

        Where a loss goes through several calls that do not meet in it, as those of a critic on real
        and on made rows do, nobody says which rows are of one record. Those of each call are then
        clipped by themselves, to a share of the norm.
        """
        self.check_interrupted()
        counted = self._owner.expect(calls[0].rows)
        for call in calls:
            call.differentiated = True
        if calls[0].clip is not None:
            calls[0].clip(scale, counted)
            self.sums.add(calls[0].rows, {})
            self.gradients.mark(self.unwatched)
            return
        *_, met = self._first["way of the loss"]
        tapes: list[Tape] = []
        for call in calls:
            assert call.tape is not None
            call.tape.recording = False
            with torch.no_grad(), precision(tf32=False):
                call.tape.carry_back()
                outputs = [value.detach() for value, _ in call.returned]
                call.tape.spoiled = rows_with_nan(outputs, call.rows)
            if tapes and met:
                tapes[0].join(call.tape)
            else:
                tapes.append(call.tape)
            call.tape, call.returned = None, []  # activations, which the next pass needs room for
        sums = self.clip(*tapes, keep=counted, scale=scale)
        self.sums.add(calls[0].rows, sums)
        self.gradients.mark(self.unwatched)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While the module is called as it is, or by a private step in the record level."""
        if self._busy:
            yield
            return
        self._busy = True
        self._take_away()
        try:
            yield
        finally:
            vars(self.module).update(self._watched)
            self._busy = False


class WatchedForward:
    """Stands in for a method of a watched module. A copy of the module is not watched."""

    def __init__(self, watcher: Watcher, name: str, method: Callable[..., Any]) -> None:
        self.watcher, self.name, self.__wrapped__ = watcher, name, method
        self.__signature__ = signature(method)  # trainers choose columns of a data set by it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.watcher.run(self.name, args, kwargs)

    def __reduce__(self) -> Any:
        module = self.watcher.module
        return partial, (getattr(type(module), self.name), module)


def _methods(module: nn.Module) -> list[str]:
    kinds = type(module).__mro__
    known = [kind for kind in kinds if kind.__module__.partition(".")[0] in _LIBRARIES]
    own = [vars(kind).items() for kind in kinds if kind not in known]
    return [
        name
        for name, held in dict(pair for pairs in own for pair in pairs).items()
        if isfunction(held)
        and not name.startswith("_")
        and not any(hasattr(kind, name) for kind in known)
    ]


def _cut(calls: list[WatchedCall]) -> dict[tuple[Any, int], WatchedCall]:
    return {end: call for call in calls for end in call.cut}


def _under(tensors: list[Tensor], cut: Cut) -> list[WatchedCall]:
    """What graphs of tensors come to first, of outputs of calls."""
    return list(dict.fromkeys(cut[one] for one in below(tensors, cut) if one in cut))


def _hooks(value: Tensor) -> int:
    return len(value._backward_hooks or ())


def _row_count(inputs: Arguments) -> int:
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


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
_plain_backward: Callable[..., None] | None = None


def _wrap_backward() -> None:
    global _plain_backward
    if _plain_backward is not None:
        return
    _plain_backward = torch.autograd.backward
    plain = _plain_backward

    @functools.wraps(plain)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        *args: Any,
        **options: Any,
    ) -> None:
        found = [
            (watcher, loss, calls)
            for loss in ([tensors] if isinstance(tensors, Tensor) else list(tensors))
            if isinstance(loss, Tensor)
            for watcher in list(_watchers)
            if (calls := watcher.reached(loss))
        ]
        if not found:
            plain(tensors, grad_tensors, retain_graph, create_graph, *args, **options)
            return
        if len(found) > 1:
            raise StepError("several losses in one backward pass; add them up first")
        watcher, loss, calls = found[0]
        given = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors or []
        if any(one is not None for one in given):
            raise StepError("backward(gradient=...) is not supported; reduce the loss to a number")
        if create_graph:
            raise StepError("create_graph=True is not supported in a private backward pass")
        if loss.dtype in (torch.float16, torch.bfloat16):
            raise StepError(
                f"the loss is in {loss.dtype}, in which a record's gradient is rounded by the size "
                "of the batch; compute it from outputs.float()"
            )
        # Each record's gradient from the start: a mean over the batch would divide it by the number
        # of records, and what is rounded after that would depend on the others. The rest is what a
        # record's gradient still has to be multiplied by, which depends on that record alone.
        with watcher._owner.final_refusals():
            first, rest = watcher.before_backward(calls, loss)
        start = torch.ones_like(loss) * first
        with only_trusted_rules():
            plain([loss], [start.to(loss.dtype)], retain_graph, False, *args, **options)
        watcher.after_backward(calls, rest)

    torch.autograd.backward = backward
