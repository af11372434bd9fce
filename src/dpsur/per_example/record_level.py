"""The record level: code written for a batch runs once for all records, each as a batch of one.

A functorch batching level hides the dimension that tells records apart. Inside it every tensor that
depends on a record is a batch of one record to the code that sees it, so `y.mean()`, batch
normalisation or mixup can combine nothing but what one record holds. Python cannot read a number
out of it (`.item()`, `if tensor:` raise in PyTorch), and a tensor that outlives its step is
refused. Records are therefore independent by construction, for any model and any loss.

At the boundary of a layer or operation on trained weights the level is left: records are folded
into the first dimension, the usual batched kernel runs with a tape that watches it, and the level
is entered again. Everything else runs under PyTorch's batching rules. A weight that reaches an
operation without a rule enters the level as one expanded view per record, whose gradients autograd
keeps apart. So there is no way to a trained weight that the tape does not see.

This file holds all uses of functorch's private names.
"""

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._functorch.autograd_function
import torch._functorch.eager_transforms
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._functorch import (  # type: ignore[attr-defined]
    _add_batch_dim,
    _set_vmap_fallback_warning_enabled,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_bdim,
    maybe_get_level,
    peek_interpreter_stack,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
)
from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from dpsur.errors import CouplingError, UnsupportedModelError
from dpsur.functional import problem
from dpsur.functional.problem import every_module, use_weights, without_flattening
from dpsur.functional.tree import map_tensors, tensors_of, with_tensors
from dpsur.per_example.operations import (
    EMPTY,
    FACTORIES,
    OPERATION_RULES,
    PRODUCTS,
    WRONG,
    derive,
    name_of,
)
from dpsur.per_example.rules import RULES, kind_of, layer_fault
from dpsur.per_example.tape import Layout, NotSupportedError, Segment, Tape


def in_transform() -> bool:
    return peek_interpreter_stack() is not None


class RecordLevel(TorchFunctionMode):
    """A functorch level of `tape.examples` records, and the rules at its boundary.

    With `own_tensors` set, tensors that the code makes itself (`torch.zeros(...)`) belong to
    single records from the start, so that it may write a record's values into them.
    """

    def __init__(
        self, tape: Tape, models: tuple[nn.Module, ...] = (), *, own_tensors: bool = False
    ) -> None:
        super().__init__()
        self.tape, self._models = tape, models
        self._own_tensors = own_tensors
        self._paused = False
        self._members: list[dict[nn.Module, str]] = []  # of each model
        self.number = 0
        self._seen: list[weakref.ref[Tensor]] = []
        # attributes as they have to be for checkpoints that run again
        self.as_left: Callable[[], AbstractContextManager[None]] = nullcontext

    # --- entering and leaving --------------------------------------------------------------------

    @contextmanager
    def entered(self) -> Iterator["RecordLevel"]:
        with ExitStack() as stack:
            masks = sys.modules.get("transformers.masking_utils")
            if hasattr(masks, "is_tracing"):  # explicit masks, as for export: no values are read
                stack.enter_context(_replaced(masks, "is_tracing", lambda *_, **__: True))
            if "torch._dynamo" in sys.modules:  # layers are watched one by one, compiled or not
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(only_trusted_rules())
            stack.enter_context(_without_onlookers())
            for holder in (torch._C._functorch, torch._functorch.eager_transforms):
                stack.enter_context(_replaced(holder, "get_unwrapped", _refuse_unwrapping))
            for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
                stack.enter_context(_seen(kind, "__call__", self._scripted))
            stack.enter_context(self._running())
            yield self

    @contextmanager
    def _running(self) -> Iterator[None]:
        """What code needs that runs in the level, now or when a checkpoint runs it again."""
        self._members = [every_module(model) for model in self._models]
        params = self.tape.params

        def weight(_: str, value: Tensor) -> Tensor:
            """Detached, so that gradients reach the tape and nothing else."""
            name = self.tape.names.get(id(value))
            return value.detach() if name is None else params[name]

        with ExitStack() as stack:
            for holder, name, value in self._checkpoints():
                stack.enter_context(_replaced(holder, name, value))
            for model, members in zip(self._models, self._members, strict=True):
                if self.tape.swaps_weights:
                    stack.enter_context(use_weights(model, weight))
                stack.enter_context(without_flattening(members))
            stack.enter_context(self.rules())
            lazy_load_decompositions()
            number, paused = self.number, self._paused
            # its number is the depth at which it is entered
            self.number = _vmap_increment_nesting(self.tape.examples, "different")
            self._paused = False
            try:
                with self:
                    yield
            finally:
                _vmap_decrement_nesting()
                self.number, self._paused = number, paused

    @contextmanager
    def rules(self) -> Iterator[None]:
        changed: list[dict[str, Any]] = []
        try:
            for members in self._members:
                for module, name in members.items():
                    kind = kind_of(module)
                    fault = layer_fault(module) if module.training else None
                    if fault is not None:
                        forward = partial(_refuse, fault.describe(name, module))
                    elif kind is not None and (kind in _ALWAYS or self.tape.trains(module)):
                        forward = partial(self._layer, kind, module, module.forward)
                    else:
                        continue
                    vars(module)["forward"] = forward
                    changed.append(vars(module))
            yield
        finally:
            for own in changed:
                del own["forward"]

    @contextmanager
    def _outside(self, fold: Layout) -> Iterator[None]:
        """Outside of the level, where batched kernels run and the tape watches them."""
        paused, place = self._paused, self.tape.place
        self._paused, self.tape.place = True, fold
        try:
            # not even asked: a rule may make hundreds of calls, one for each time of a sequence
            with self._popped(), torch._C.DisableTorchFunction():
                yield
        finally:
            self._paused, self.tape.place = paused, place

    @contextmanager
    def _popped(self) -> Iterator[None]:
        """Without this level and those inside of it, such as that of `torch.func.grad`."""
        popped = []
        try:
            while (top := peek_interpreter_stack()) is not None and top.level() >= self.number:
                popped.append(pop_dynamic_layer_stack())
            yield
        finally:
            for layer in reversed(popped):
                push_dynamic_layer_stack(layer)

    # --- tensors of the level --------------------------------------------------------------------

    def hide(self, values: Tensor, axis: int = 0) -> Tensor:
        """A tensor with records in dimension `axis`, as the code in the level sees it."""
        hidden: Tensor = _add_batch_dim(values, axis, self.number)
        self._note(hidden)
        return hidden

    def holds(self, values: Any) -> bool:
        return (
            isinstance(values, Tensor)
            and is_batchedtensor(values)
            and maybe_get_level(values) == self.number
        )

    def show(self, values: Tensor) -> Tensor:
        """The tensor with records in front, for use outside of the level."""
        if self.holds(values):
            return get_unwrapped(values).movedim(maybe_get_bdim(values), 0)
        return values.expand(self.tape.examples, *values.shape)

    def _note(self, found: Any) -> None:
        if isinstance(found, Tensor):
            if is_functorch_wrapped_tensor(found):
                self._seen.append(weakref.ref(found))
        elif isinstance(found, (tuple, list)):
            for value in found:
                self._note(value)

    def check_survivors(self) -> None:
        """Refuse code that keeps a tensor of this step: a later step could read other records."""
        for generation in range(3):  # what only a cycle of objects keeps is not kept
            if not self._alive():
                break
            gc.collect(generation)
        else:
            alive = self._alive()
            if alive:
                raise CouplingError(
                    "a tensor that depends on private records outlives its step"
                    f"{_keeper(self._models, alive[0])}; a later step could read it: compute it "
                    "anew in each step, and keep nothing in closures or globals; a private step "
                    "puts attributes of modules back",
                    private=f"its shape for one record is {tuple(alive[0].shape)}",
                )
        self._seen.clear()

    def _alive(self) -> list[Tensor]:
        return [value for ref in self._seen if (value := ref()) is not None]

    # --- layers ----------------------------------------------------------------------------------

    def _layer(
        self, kind: type[nn.Module], module: nn.Module, own: Any, *args: Any, **kwargs: Any
    ) -> Any:
        rule, given = RULES[kind], tensors_of((args, kwargs))
        on_top = self._on_top()
        if on_top and not self.tape.swaps_weights and self.tape.trains(module):
            # a sharded weight has no other way than its rule: constants, such as positions, enter
            given = [self._for_each_record(value) for value in given]
            args, kwargs = with_tensors((args, kwargs), given)
        unlike = any(value.is_complex() for value in given)
        if self._paused or not on_top or unlike or not any(map(self.holds, given)):
            return own(*args, **kwargs)  # followed through its operations
        try:
            if any(map(self.tape.follows, given)):  # a weight is the layer's input
                given = [self._copy(value) for value in given]
                args, kwargs = with_tensors((args, kwargs), given)
            if kind in _LAYERS:
                found = _LAYERS[kind](self, rule, module, args, kwargs)
            else:
                found = self._batched(
                    partial(rule, module, self.tape), _LEAST_RANKS.get(kind, 1), given, args, kwargs
                )
            self._note(found)
            return found
        except NotSupportedError:
            return own(*args, **kwargs)

    def _batched(
        self,
        rule: Callable[..., Any],
        least_rank: int,
        records: list[Tensor],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """One call for all records, which are in front of those tensors that belong to them.

        The first of them has the rows that a record has, or no such dimension: then it has the
        least rank that the rule takes.
        """
        with torch._C.DisableTorchFunction():  # nothing here is for the level to answer
            first = records[0]
            fold = Layout(0, first.shape[0] if first.dim() > least_rank else None)
            places = {id(value): fold.into(self.show(value)) for value in records}
        given = [places.get(id(value), value) for value in tensors_of((args, kwargs))]
        with self._outside(fold):
            args, kwargs = with_tensors((args, kwargs), given)
            back = map_tensors(fold.back, rule(*args, **kwargs))
        return map_tensors(self.hide, back)

    def _on_top(self) -> bool:
        top = peek_interpreter_stack()
        return top is not None and top.level() == self.number

    # --- operations ------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func in WRONG or _is_custom(func):
            raise NotSupportedError(
                f"PyTorch has no batching rule for {func} that can be relied on"
            )
        special = _SPECIAL.get(func)
        found: Any = NotImplemented
        if special is not None:
            found = special(self, func, args, kwargs)
        elif func in OPERATION_RULES:
            found = self._by_rule(func, args, kwargs)
        if found is not NotImplemented:
            pass
        elif self._own_tensors and func in FACTORIES and self._on_top():
            if func is Tensor.clone and torch.is_grad_enabled():
                args = (self._copy(args[0]), *args[1:])
            found = self._for_each_record(func(*args, **kwargs))
        elif torch.is_grad_enabled() and self._follows((args, kwargs)):
            found = self._operation(func, args, kwargs)
        elif torch.is_grad_enabled() and not self._on_top() and self._hides_weights((args, kwargs)):
            raise NotSupportedError("a transform of torch.func over trained weights")
        else:
            found = func(*args, **kwargs)
        if func in EMPTY:
            with torch.no_grad():
                found.zero_()  # it could hold what other records have left
        self._note(found)
        return found

    def _follows(self, values: Any) -> bool:
        for value in values.values() if isinstance(values, dict) else values:
            if isinstance(value, Tensor):
                if self.tape.follows(value):
                    return True
            elif isinstance(value, (tuple, list, dict)) and self._follows(value):
                return True
        return False

    def _hides_weights(self, values: Any) -> bool:
        for value in tensors_of(values):
            while is_functorch_wrapped_tensor(value):
                value = get_unwrapped(value)
                if self.tape.follows(value):
                    return True
        return False

    def _scripted(self, own: Callable[..., Any], script: Any, *args: Any, **kwargs: Any) -> Any:
        """A function of TorchScript, inside which no operation is seen."""
        if not self._paused and torch.is_grad_enabled() and self._follows((args, kwargs)):
            raise NotSupportedError("a function of TorchScript on a trained weight")
        return own(script, *args, **kwargs)

    def _by_rule(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that has a rule, of the records' input and of weights."""
        tape = self.tape
        args, kwargs, given = tape.with_params(args, kwargs)
        trained = any(tape.slot(value) is not None for value in given)
        if not self._on_top() or not (trained or func in _ALWAYS) or "out" in kwargs:
            return NotImplemented
        if func in PRODUCTS and not torch.is_grad_enabled():
            return NotImplemented
        place, name = (1, "mat1") if func is torch.addmm else (0, "input")
        input = args[place] if len(args) > place else kwargs[name]
        constant = not self.holds(input) and tape.slot(input) is None
        if trained and constant and not tape.swaps_weights:
            # a sharded weight has no other way than its rule: constants, such as positions, enter
            entered = self._for_each_record(input)
            given = [entered if value is input else value for value in given]
            (args, kwargs), input = with_tensors((args, kwargs), given), entered
        records = [value for value in given if self.holds(value)]
        if not self.holds(input) or any(value.is_complex() for value in given):  # none conjugates
            return NotImplemented
        if len(records) > 1 and func is not F.embedding_bag:  # no other rule is for several
            return NotImplemented
        rank = _LEAST_RANKS.get(func, 1)
        if func in (F.layer_norm, F.rms_norm):
            rank = len(kwargs["normalized_shape"] if len(args) < 2 else args[1])
        try:
            return self._batched(partial(OPERATION_RULES[func], tape), rank, records, args, kwargs)
        except NotSupportedError:
            return NotImplemented

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = self.tape
        args, kwargs, given = tape.with_params(args, kwargs)

        def on_copies() -> Any:
            copied, named = with_tensors((args, kwargs), [self._copy(value) for value in given])
            return func(*copied, **named)

        name = name_of(func)
        in_place = name.endswith("_") and not name.endswith("__")
        if name == "requires_grad_":
            return args[0]
        if in_place and self.holds(args[0]) and not tape.follows(args[0]):
            return on_copies()  # into records' values
        if in_place or kwargs.get("out") is not None:
            changed = kwargs.get("out", args[0] if args else None)
            if any(changed is value for value in tape.params.values()):
                raise UnsupportedModelError(
                    f"{name} changes a trained weight in place; use the operation without the "
                    "underscore, or change weights between steps"
                )
            raise NotSupportedError("changes a tensor in place next to a trained weight")
        if not any(id(v) not in tape.names and is_functorch_wrapped_tensor(v) for v in given):
            with torch.enable_grad():
                found = derive(tape, func, args, kwargs)
            # else drawn at random for each
            if not any(map(is_functorch_wrapped_tensor, tensors_of(found))):
                return found
        if func in (F.embedding, F.embedding_bag):  # the padding row of one table alone is left out
            raise NotSupportedError("a table of vectors with a copy for each record")
        return on_copies()

    def _for_each_record(self, made: Tensor) -> Tensor:
        """A tensor that the code has made, as one for each record that it may write to."""
        if is_batchedtensor(made):
            return made
        with self._popped():
            copies = made.expand(self.tape.examples, *made.shape).contiguous()
        return self.hide(copies)

    def _copy(self, value: Tensor) -> Tensor:
        if id(value) not in self.tape.names:
            return value
        with self._popped(), torch._C.DisableTorchFunction():  # no derived weights
            copies = self.tape.copies(value)
        return self.hide(copies)

    # --- gradient checkpointing ------------------------------------------------------------------

    def _checkpoints(self) -> Iterator[tuple[Any, str, Any]]:
        """Where code finds `torch.utils.checkpoint.checkpoint`, and what stands there meanwhile.

        Code that imported it by name before the step finds the parts that it is made of: with
        `use_reentrant=False` nothing is then recomputed.
        """
        found = torch.utils.checkpoint
        yield found, "checkpoint", self._checkpoint
        reentrant = SimpleNamespace(
            apply=lambda function, _, *args: self._checkpoint(function, *args)
        )
        yield found, "CheckpointFunction", reentrant
        yield found, "_checkpoint_without_reentrant_generator", lambda *_, **__: iter([None])
        for members in self._members:
            for module in members:
                if "_gradient_checkpointing_func" in vars(module):  # of transformers
                    yield module, "_gradient_checkpointing_func", self._checkpoint

    def _checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`torch.utils.checkpoint.checkpoint`, whose recomputation enters the level again."""
        kwargs = {name: value for name, value in kwargs.items() if name not in _CHECKPOINT_OPTIONS}
        if not self._on_top() or not torch.is_grad_enabled() or self.tape.segment is not None:
            return function(*args, **kwargs)
        while isinstance(function, partial):  # its tensors enter the level again as well
            args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
            function = function.func
        given = tensors_of((args, kwargs))
        hidden = [self.holds(value) for value in given]
        plain = [self.show(v) if h else v for v, h in zip(given, hidden, strict=True)]
        arguments = _without_tensors((args, kwargs))  # which would outlive the level
        structure: Any = None
        segment = Segment()

        def inner(*values: Tensor) -> tuple[Tensor, ...]:
            nonlocal structure
            with self.as_left(), self._running(), self.tape.within(segment):
                entered = [self.hide(v) if h else v for v, h in zip(values, hidden, strict=True)]
                again_args, again_kwargs = with_tensors(arguments, entered)
                found = function(*again_args, **again_kwargs)
                structure = _without_tensors(found)
                return tuple(self.show(value) for value in tensors_of(found))

        own = _replaced(
            torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _generator
        )
        with self._popped(), own:
            found = _checkpoint(inner, *plain, use_reentrant=False)
        return with_tensors(structure, [self.hide(value) for value in found])


# torch says so, once, where it has no batched form of an operation and loops instead
_set_vmap_fallback_warning_enabled(False)

# What a checkpoint is told about itself, and not the function in it.
_CHECKPOINT_OPTIONS = {*signature(torch.utils.checkpoint.checkpoint).parameters}
_CHECKPOINT_OPTIONS |= {"preserve_rng_state"}
_CHECKPOINT_OPTIONS -= {"args", "kwargs"}
_checkpoint = torch.utils.checkpoint.checkpoint
_generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator


def _without_tensors(tree: Any) -> Any:
    return with_tensors(tree, [torch.empty(0) for _ in tensors_of(tree)])


# What has a rule though it is not trained: PyTorch cannot batch it, or not so fast. Attention holds
# its weights in others. (Rules that a user adds are for trained layers.)
_ALWAYS = frozenset({*RULES, F.linear, F.embedding_bag})


_OVERRIDDEN = "has_overridden_vmap_rule"
if not hasattr(torch._functorch.autograd_function, _OVERRIDDEN):
    _OVERRIDDEN = "has_overriden_vmap_rule"  # as torch spelled it before 2.8


# Whose lines are not the user's.
LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


def is_of_a_library(function: Callable[..., Any]) -> bool:
    """Whether a function's lines are PyTorch's or ours, and those of all that it wraps."""
    code, inner = getattr(function, "__code__", None), getattr(function, "__wrapped__", None)
    own = code is not None and code.co_filename.startswith(LIBRARIES)
    return own and (inner is None or is_of_a_library(inner))


@contextmanager
def _without_onlookers() -> Iterator[None]:
    """Let no code of the user's stand between PyTorch and its kernels, where all records pass.

    A `TorchDispatchMode` or `saved_tensors_hooks` of a function are for one record at a time.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(False)
    around = [type(mode).__torch_dispatch__ for mode in _get_current_dispatch_mode_stack()]
    if not all(map(is_of_a_library, [*around, *(top or ())])):
        raise CouplingError(
            "a TorchDispatchMode or saved_tensors_hooks around a step would see all records at "
            "once; enter it inside of the function of a private step, or after the training"
        )

    def enter(own: Callable[..., Any], held: Any) -> Any:
        is_mode = isinstance(held, TorchDispatchMode)
        code = [type(held).__torch_dispatch__] if is_mode else [held.pack_hook, held.unpack_hook]
        if not all(map(is_of_a_library, code)):
            raise NotSupportedError(f"{type(held).__name__} would see all records at once")
        return own(held)

    with (
        _seen(TorchDispatchMode, "__enter__", enter),
        _seen(saved_tensors_hooks, "__enter__", enter),
    ):
        yield


@contextmanager
def only_trusted_rules() -> Iterator[None]:
    """Use no batching rules but PyTorch's and ours: one of the user's may let records meet.

    An `autograd.Function` with a custom `vmap` method counts as one without, so that it runs one
    record at a time. This has to hold for the backward pass too.
    """

    def trusted(function: type[torch.autograd.Function]) -> bool:
        own = function.vmap is not torch.autograd.Function.vmap
        return own and is_of_a_library(function.vmap)

    with _replaced(torch._functorch.autograd_function, _OVERRIDDEN, trusted):
        yield


def _is_custom(func: Any) -> bool:
    """Whether an operator comes with a batching rule that is not PyTorch's."""
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
    if packet._qualified_op_name.partition("::")[0] in ("aten", "prims"):
        return False
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(
            getattr(packet, name)._name, "FuncTorchBatched"
        )
        for name in packet.overloads()
    )


def _refuse(fault: str, *_args: Any, **_kwargs: Any) -> Any:
    raise UnsupportedModelError(fault)


def _refuse_unwrapping(*_args: Any, **_kwargs: Any) -> Any:
    """A check, no proof: a function may have got hold of PyTorch's own before the step."""
    raise CouplingError(
        "the function calls functorch's get_unwrapped, which gives it the values of all records; "
        "use the batch as it is"
    )


def _keeper(models: tuple[nn.Module, ...], value: Tensor) -> str:
    """Which module keeps a tensor, in words, where that can be found."""
    for model in models:
        for name, module in model.named_modules():
            for key, held in vars(module).items():
                if held is value:
                    return f" in {name + '.' if name else ''}{key}"
    return ""


@contextmanager
def _seen(kind: Any, name: str, watch: Callable[..., Any]) -> Iterator[None]:
    """Have a method of a class called by `watch`, which is given it."""
    own = getattr(kind, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return watch(own, self, *args, **kwargs)

    with _replaced(kind, name, call):
        yield


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    own = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, own)


# --- the boundary of layers ----------------------------------------------------------------------


# The rank of the input of a layer or an operation without a batch dimension, where it is not 1.
_LEAST_RANKS: dict[Any, int] = {
    nn.MaxPool2d: 3,
    F.embedding: 0,
    F.conv1d: 2,
    F.conv2d: 3,
    F.conv3d: 4,
}


def _recurrent(
    level: RecordLevel, rule: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Layers over time, with records in the first or second dimension and states in the second."""
    given = dict(zip(("input", "hx"), args, strict=False)) | kwargs
    sequence, states = given["input"], given.get("hx")
    if not isinstance(sequence, Tensor):
        raise NotSupportedError("packed sequences")
    axis = 0 if module.batch_first else 1
    alone = sequence.dim() == 2
    fold = Layout(
        0 if alone and module.batch_first else axis, None if alone else sequence.shape[axis]
    )
    fold_states = Layout(1, None if alone else sequence.shape[axis])
    inner = None
    shown = fold.into(level.show(sequence))
    if states is not None:
        inner = map_tensors(lambda value: fold_states.into(level.show(value)), states)
    with level._outside(fold):
        output, last = rule(module, level.tape, shown, inner)
        output, last = fold.back(output), map_tensors(fold_states.back, last)
    return level.hide(output, fold.axis), map_tensors(lambda value: level.hide(value, 1), last)


def _attention(
    level: RecordLevel, rule: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """`nn.MultiheadAttention`: masks have their records elsewhere than the sequences."""
    given = dict(_ATTENTION.bind(module, *args, **kwargs).arguments)
    del given["self"]
    axis = 0 if module.batch_first else 1
    query = given["query"]
    if query.dim() != 3:
        raise NotSupportedError("attention without a batch dimension")
    fold = Layout(axis, query.shape[axis])
    shown: dict[int, Tensor] = {}  # one that is given twice stays one
    for name in ("query", "key", "value"):
        value = given[name]
        given[name] = shown.setdefault(id(value), fold.into(level.show(value)))
    in_front = Layout(0, query.shape[axis])
    if given.get("key_padding_mask") is not None:
        given["key_padding_mask"] = in_front.into(level.show(given["key_padding_mask"]))
    mask = given.get("attn_mask")
    if mask is not None and mask.dim() == 3:
        given["attn_mask"] = Layout(0, mask.shape[0]).into(level.show(mask))
    elif mask is not None and level.holds(mask):
        given["attn_mask"] = level.show(mask).repeat_interleave(module.num_heads, 0)
    with level._outside(fold):
        output, weights = rule(module, level.tape, **given)
        output = fold.back(output)
        weights = None if weights is None else in_front.back(weights)
    return level.hide(output, axis), None if weights is None else level.hide(weights)


_ATTENTION = signature(nn.MultiheadAttention.forward)
_CROSS_ENTROPY = {name: one.default for name, one in signature(F.cross_entropy).parameters.items()}
_LAYERS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.LSTM: _recurrent,
    nn.GRU: _recurrent,
    nn.RNN: _recurrent,
    nn.MultiheadAttention: _attention,
}


# --- operations that need no weight --------------------------------------------------------------


def _scaled_dot_product_attention(
    level: RecordLevel, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Fused attention, which torch cannot batch: all records are one batch of it."""
    names = ("query", "key", "value", "attn_mask")
    given = dict(zip(names, args, strict=False)) | kwargs
    tensors = {name: given.pop(name) for name in names if isinstance(given.get(name), Tensor)}
    if not level._on_top() or not any(map(level.holds, tensors.values())):
        return NotImplemented
    tensors = {name: level._copy(value) for name, value in tensors.items()}
    query, mask = tensors["query"], tensors.pop("attn_mask", None)
    rank = query.dim()

    def join(records: Tensor) -> Tensor:
        return records.flatten(0, rank - 3) if rank > 3 else records

    if mask is not None and (level.holds(mask) or mask.dim() > 3):
        shown = level.show(mask)
        shown = shown.reshape(len(shown), *[1] * (rank - mask.dim()), *mask.shape)
        mask = join(shown.expand(-1, *query.shape[: rank - 3], *[-1] * min(3, rank)))
    joined = [join(level.show(tensors[name])) for name in names[:3]]
    # the other kernels have no gradient of a mask
    math = sdpa_kernel(SDPBackend.MATH) if mask is not None and mask.requires_grad else None
    given.pop("attn_mask", None)
    with level._outside(Layout()), math or nullcontext():
        found = func(*joined, mask, *args[4:], **given)
        if rank > 3:
            found = found.unflatten(0, (-1, *query.shape[: rank - 3]))
    return level.hide(found)


def _require_grad(level: RecordLevel, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Whether a tensor of the level requires a gradient is decided outside of it."""
    if level.holds(args[0]):
        return args[0]
    if is_functorch_wrapped_tensor(args[0]):  # of `torch.func.grad` inside of the level
        return func(*args, **kwargs)
    with level._popped():  # a weight that FSDP gathers
        return func(*args, **kwargs)


def _requires_grad(level: RecordLevel, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The answer that code expects which runs for one record; inside the level it is always no."""
    value = args[0]
    if not level.holds(value):
        return func(*args, **kwargs)
    # FSDP would register hooks in the level; its weights stay gathered until the backward pass
    return level.tape.swaps_weights and get_unwrapped(value).requires_grad


def _data(level: RecordLevel, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    own = is_functorch_wrapped_tensor(args[0]) or level.tape.follows(args[0])
    return NotImplemented if own else problem.call_counted(func, args, kwargs)


def _cross_entropy(
    level: RecordLevel, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Cross entropy of class indices by one kernel for all records, then each record's own mean.

    Batched by PyTorch it is made of a dozen small operations.
    """
    given = _CROSS_ENTROPY | dict(zip(_CROSS_ENTROPY, args, strict=False)) | kwargs
    scores, target = given["input"], given["target"]
    usual = (
        level._on_top()
        and level.holds(scores)
        and level.holds(target)
        and scores.dim() == 2
        and target.dim() == 1
        and not target.is_floating_point()
        and given["reduction"] in ("mean", "sum")
        and all(given[name] is None for name in ("weight", "size_average", "reduce"))
    )
    if not usual:
        return NotImplemented
    fold, ignored = Layout(0, scores.shape[0]), given["ignore_index"]
    rows, labels = fold.into(level.show(scores)), fold.into(level.show(target))
    with level._outside(fold):
        each = F.cross_entropy(
            rows,
            labels,
            reduction="none",
            ignore_index=ignored,
            label_smoothing=given["label_smoothing"],
        )
        found = fold.back(each).sum(1)
        if given["reduction"] == "mean":
            found = found / fold.back(labels != ignored).sum(1)
    return level.hide(found)


def _repr(_: RecordLevel, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """No values: a text is something that Python can keep, and that errors quote."""
    if is_functorch_wrapped_tensor(args[0]):
        return f"tensor(<private records>, shape={tuple(args[0].shape)})"
    return func(*args, **kwargs)


def _roll(*call: Any) -> Any:
    """A number stays where it is: PyTorch would roll the numbers of all records."""
    *_, args, kwargs = call
    given = args[0] if args else kwargs["input"]
    alone = is_functorch_wrapped_tensor(given) and not given.dim()
    return given.clone() if alone else NotImplemented


def _number(level: RecordLevel, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """One random number without a dimension is one for the batch, which code may decide by.

    Models that leave out layers at random do. It comes before all records, and depends on none.
    """
    sizes = args if args else (kwargs.get("size"),)
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) and not sizes[0]:
        level.tape.incomplete = True
        with level._popped():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _squeeze(level: RecordLevel, _: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """As for several records, whose dimension stays: the first one of length 1."""
    if len(args) > 1 or kwargs or not level.holds(args[0]):
        return NotImplemented
    ones = [dim for dim, length in enumerate(args[0].shape) if length == 1]
    return args[0].squeeze(ones[1:])


CUDNN_DEVICE = "cuda"


def _recurrence(level: RecordLevel, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """One time after the other, by PyTorch's own operations: cuDNN's backward pass has no rule."""
    if args[0].device.type != CUDNN_DEVICE:
        return NotImplemented
    packed = not isinstance(args[3], bool)
    operation = getattr(getattr(torch.ops.aten, name_of(func)), "data" if packed else "input")
    with level:  # which follows these operations in turn
        return torch._decomp.decomposition_table[operation](*args, **kwargs)


# What they leave to the level, a trained weight among it, they answer by NotImplemented.
_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.squeeze: _squeeze,
    Tensor.squeeze: _squeeze,
    torch.rand: _number,
    torch.randn: _number,
    torch.roll: _roll,
    Tensor.roll: _roll,
    Tensor.__repr__: _repr,
    Tensor.__str__: _repr,
    Tensor.__format__: _repr,
    torch.gru: _recurrence,
    torch.lstm: _recurrence,
    torch.rnn_tanh: _recurrence,
    torch.rnn_relu: _recurrence,
    F.cross_entropy: _cross_entropy,
    F.scaled_dot_product_attention: _scaled_dot_product_attention,
    Tensor.requires_grad_: _require_grad,
    Tensor.data.__get__: _data,  # type: ignore[attr-defined]
    Tensor.data.__set__: _data,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
}
