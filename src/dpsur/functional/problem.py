"""A model, a loss and the private records, as pure functions of the weights.

First, a model called with other weights than its own: what `torch.func.functional_call` does, with
one walk through the modules instead of several, since for a small network these take longer than
its arithmetic. And a model always gets its own weights back, where `functional_call` leaves some of
the temporary ones behind: in a module that stands in two places and whose weight another module
shares.

How inputs reach the model: a tuple as positional arguments, a dict as keyword arguments, anything
else (a tensor, a list, a named tuple, a dataclass) as the only argument. `Arguments` holds those of
a call that someone else makes, `PersonRows` several records in a row.

Then `Objective` and `Problem`, and what a call of a model leaves behind: nothing. What a record
changes in a module would reach later steps and the release without noise. Attributes are put back,
with what lists, dictionaries and sets in them hold: a value there is for the call that has set it,
as an auxiliary loss or a cache by length. What is meant to last is refused: a tensor that is
written to, a buffer of the saved state that is replaced. Closures, globals and objects of other
classes are not looked at.
"""

import copy
import functools
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from dpsur.errors import UnsupportedModelError
from dpsur.functional.records import Examples
from dpsur.functional.tree import (
    Params,
    PersonRows,
    TensorTree,
    concatenate_rows,
    empty_like,
    keep,
    map_tensors,
    row_count,
    split_rows,
    tensors_of,
    with_tensors,
)

# What every module has: children, buffers, hooks, mostly none of them. `use_weights` and FSDP put
# weights in their places and back.
_USUAL = tuple(
    name
    for name, held in vars(nn.Module()).items()
    if isinstance(held, (dict, set)) and name != "_parameters"
)
_KNOWN = frozenset({*_USUAL, "_parameters", "training"})
_LEAVES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
)

# Only functional_call knows what to say to these.
_OTHERS = (torch.jit.ScriptModule, nn.DataParallel)


def every_module(model: nn.Module) -> dict[nn.Module, str]:
    found = {model: ""}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module._modules.items():
            if child is not None and child not in found:
                found[child] = prefix + name
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return found


class Arguments:
    """The arguments of a call: a tree of its tensors, which keeps all else as it is."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs


_pytree.register_pytree_node(
    Arguments,
    lambda given: (tensors_of((given.args, given.kwargs)), given),
    lambda tensors, given: Arguments(*with_tensors((given.args, given.kwargs), tensors)),
)


def call(model: Callable[..., Any], inputs: TensorTree) -> TensorTree:
    """Outputs of a model with its own weights.

    Of persons, the model is called on their records, and outputs have the shape (persons, k, ...).
    """
    if type(inputs) is PersonRows:
        shape = row_count(inputs), inputs.records_each
        outputs = call(model, map_tensors(lambda value: value.flatten(0, 1), inputs.rows))
        return map_tensors(lambda value: value.unflatten(0, shape), outputs, otherwise=keep)
    if type(inputs) is tuple:
        return model(*inputs)
    return model(**inputs) if type(inputs) is dict else model(inputs)


def call_on(model: nn.Module, params: Params, inputs: TensorTree) -> TensorTree:
    with use_weights(model, lambda name, own: params.get(name, own)) as called:
        return call(called, inputs)


@contextmanager
def use_weights(
    model: nn.Module, weight: Callable[[str, Tensor], Tensor]
) -> Iterator[Callable[..., Any]]:
    """Replace every parameter by what `weight` makes of name and value; yields what to call.

    A parameter that has several names goes by the first, wherever it is used.
    """
    modules = every_module(model)
    if any(isinstance(module, _OTHERS) for module in modules):
        weights = {name: weight(name, value) for name, value in model.named_parameters()}
        yield lambda *args, **kwargs: functional_call(model, weights, args, kwargs)
        return
    replacements: dict[int, Tensor] = {}
    own = [
        (module._parameters, key, value, f"{prefix}.{key}" if prefix else key)
        for module, prefix in modules.items()
        for key, value in module._parameters.items()
        if value is not None
    ]
    for _, _, value, name in own:
        if id(value) not in replacements:
            replacements[id(value)] = weight(name, value)
    try:
        for held, key, value, _ in own:
            # a plain tensor, which only a module's own way of setting attributes would refuse
            held[key] = replacements[id(value)]  # type: ignore[assignment]
        yield model
    finally:
        for held, key, value, _ in own:
            held[key] = value


# Of outputs and targets, trees of tensors, to a number.
LossFunction = Callable[[Any, Any], Tensor]

# Records per call where no gradient is taken.
EVALUATION_ROWS = 2048


@dataclass(frozen=True, repr=False)
class Objective:
    """A model and a loss as functions of the weights. The module's own weights are never changed.

    `bf16` lets layers round to bfloat16 where gradients are taken. Losses that decide about a
    candidate are never rounded so: their differences are smaller than that.
    """

    model: nn.Module
    loss: LossFunction
    bf16: bool = field(default=False, kw_only=True)
    # Views of each record whose gradients are averaged, and what makes them different.
    augment: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    views: int = field(default=1, kw_only=True)
    # Has the weights before training, where the model has given up its own (`drop_weights`).
    original: nn.Module | None = field(default=None, kw_only=True)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def training_precision(self) -> AbstractContextManager[object]:
        if not self.bf16:
            return nullcontext()
        # without its cache, which would outlive the weights of a captured trial
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def initial_params(self) -> Params:
        """Copies of the weights that are to be trained, side by side in memory."""
        held = self.model if self.original is None else self.original
        trained = {
            name: value.detach() for name, value in held.named_parameters() if value.requires_grad
        }
        if not trained:
            return {}
        copies = empty_like(trained, self.device)
        for name, value in trained.items():
            copies[name].copy_(value)
        return copies

    def outputs(self, params: Params, inputs: TensorTree) -> TensorTree:
        """Model outputs in evaluation mode, computed for a bounded number of records at once."""
        with (
            torch.no_grad(),
            mode(self.model, training=False),
            without_side_effects((self.model,), params),
        ):
            parts = [
                output_rows(call_on(self.model, params, part))
                for part in split_rows(inputs, EVALUATION_ROWS)
            ]
        return concatenate_rows(parts)

    def losses(self, params: Params, examples: Examples) -> Tensor:
        return example_losses(self.loss, self.outputs(params, examples.inputs), examples.targets)


@dataclass(frozen=True, repr=False)
class Problem(Objective):
    """What is to be learned: an objective and the private records."""

    train: Examples
    # a public size, where the number of records is not
    declared_size: int | None = None
    # What is computed once about the records, for this problem alone: `per_example/tape.py`.
    tables: dict[Hashable, Tensor | int | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __repr__(self) -> str:
        return f"Problem({type(self.model).__name__}, {self.train!r})"

    @property
    def size(self) -> int:
        """The number of records by public knowledge, which means are divided by."""
        return len(self.train) if self.declared_size is None else self.declared_size


def drop_weights(model: nn.Module) -> None:
    """Give up the memory of the weights that are trained: a run keeps them in its state.

    A model is only ever called with the weights of a state. Should it be called without, every
    number that it computes from them is NaN.
    """
    for value in model.parameters():
        if value.requires_grad:
            value.data = value.new_full((), torch.nan).expand(value.shape)


def output_rows(outputs: Any) -> TensorTree:
    """The tensors among a model's outputs; any other object, such as a cache, becomes None."""
    if isinstance(outputs, Tensor):
        return outputs
    return map_tensors(lambda value: value, outputs, otherwise=lambda _: None)


def example_losses(loss: LossFunction, outputs: TensorTree, targets: TensorTree) -> Tensor:
    """Apply a loss to every record alone, so that its own reduction does not matter."""
    if (
        loss is F.cross_entropy
        and isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and outputs.dim() == 2
        and targets.dtype == torch.int64
    ):
        return F.cross_entropy(outputs, targets, reduction="none")

    def one(output: list[Tensor], target: list[Tensor]) -> Tensor:
        return loss(
            with_tensors(outputs, (value.unsqueeze(0) for value in output)),
            with_tensors(targets, (value.unsqueeze(0) for value in target)),
        ).reshape(())

    return torch.func.vmap(one)(tensors_of(outputs), tensors_of(targets))


def losses_one_by_one(loss: LossFunction, outputs: TensorTree, targets: TensorTree) -> Tensor:
    """The loss of every row alone, batched where the loss function allows it."""
    try:
        return example_losses(loss, outputs, targets)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # what torch cannot batch
        pass
    # outside of `except`, so that an error of the loss itself comes through by itself
    pairs = split_rows((outputs, targets), 1)
    return torch.stack([loss(output, target).reshape(()) for output, target in pairs])


class WeightedLoss(nn.Module):
    """A classification loss whose class weights count for every record by itself.

    The mean of such a loss is divided by the weights of its batch. In a batch of one record that is
    the record's own weight, which would cancel.
    """

    def __init__(self, unreduced: LossFunction) -> None:
        super().__init__()
        self.unreduced = unreduced

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over what one record is asked, each times the weight of its class."""
        return self.unreduced(outputs, targets).mean()


def weight_by_record(loss: LossFunction) -> LossFunction:
    """The same loss, or one that keeps its class weights where they would cancel."""
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        if loss.weight is None or loss.reduction != "mean":
            return loss
        unreduced = copy.deepcopy(loss)
        unreduced.reduction = "none"
        return WeightedLoss(unreduced)
    if isinstance(loss, functools.partial) and loss.func in (F.cross_entropy, F.nll_loss):
        given = loss.keywords
        if given.get("weight") is not None and given.get("reduction", "mean") == "mean":
            return WeightedLoss(functools.partial(loss, reduction="none"))
    return loss


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put every submodule into one mode and back into its own afterwards.

    Meanwhile recurrent layers do not move their weights. On CUDA they would copy them into one
    buffer and point the tensors of a captured state there, which then no longer receives updates.
    """
    modules = every_module(model)
    others = [module for module in modules if module.training is not training]
    for module in others:
        module.training = training
    try:
        with without_flattening(modules):
            yield
    finally:
        for module in others:
            module.training = not training


class Attributes:
    """The attributes of all modules of some models, to be put back, and the tensors among them.

    Versions of tensors are counted on the host, so nothing waits for the device. Those of what is
    written through `.data` are by `call_counted`.
    """

    def __init__(self, models: Iterable[nn.Module], given: Mapping[str, Tensor] | None = None):
        self._models, self._given = tuple(models), given or {}
        # a container, what it held, and of which attribute of which module it is a part
        self._held: list[tuple[Any, Any, nn.Module, str]] = []
        self._own: list[tuple[dict[str, Any], dict[str, Any], nn.Module, type[nn.Module]]] = []
        self._tensors = [(value, value._version) for value in self._given.values()]
        self._saved: list[tuple[dict[str, Any], str, Any]] = []  # buffers of the saved state
        self._seen: set[int] = set()
        for model in self._models:
            self._visit(model)

    def _visit(self, model: nn.Module) -> None:
        for module in every_module(model):
            own = vars(module)
            if id(own) in self._seen:
                continue
            self._seen.add(id(own))
            self._note(module._parameters.values())
            if isinstance(module, torch.jit.ScriptModule):  # whose attributes are not in Python
                self._note(module._buffers.values())
                continue
            held = own.copy()
            self._own.append((own, held, module, type(module)))
            for name in held.keys() - _KNOWN:
                if type(held[name]) not in _LEAVES:
                    self._add(held[name], module, name)
            if any(map(held.get, _USUAL)):
                self._seen |= _spectral_buffers(module)
                for name in _USUAL:
                    if held[name]:
                        self._add(held[name], module, name)
                buffers = module._buffers
                self._saved += [
                    (buffers, name, buffers[name])
                    for name in buffers.keys() - module._non_persistent_buffers_set
                    if buffers[name] is not None
                ]

    def _add(self, value: Any, module: nn.Module, name: str) -> None:
        if isinstance(value, Tensor):
            self._note([value])
        elif isinstance(value, nn.Module):
            self._visit(value)
        elif isinstance(value, (dict, list, set, deque, tuple)) and id(value) not in self._seen:
            self._seen.add(id(value))
            held = _copy(value)
            if held is not value:
                self._held.append((value, held, module, name))
            items = tuple(held.values() if isinstance(held, dict) else held)
            if not _LEAVES.issuperset(map(type, items)):
                for item in items:
                    self._add(item, module, name)

    def _note(self, tensors: Iterable[Tensor | None]) -> None:
        self._tensors += [
            (value, value._version)
            for value in tensors
            if value is not None
            and id(value) not in self._seen
            and not is_lazy(value)
            and not value.is_inference()
        ]

    def put_back(self) -> list[tuple[nn.Module, str]]:
        """Put back what was changed; returns where that was.

        Raises where a tensor was written to, or a buffer of the saved state replaced.
        """
        changed: list[tuple[nn.Module, str]] = []
        written = [value for value, version in self._tensors if value._version != version]
        written += [value for own, name, value in self._saved if own.get(name) is not value]
        for own, held, module, kind in self._own:
            if type(module) is not kind:
                module.__class__ = kind
            if not _same(own, held):
                both = own.keys() | held.keys()
                changed += [(module, key) for key in both if own.get(key) is not held.get(key)]
                own.clear()
                own.update(held)
            if any(map(held.get, _USUAL)):
                for name in _USUAL:
                    if held[name] and id(held[name]) not in self._seen:  # it was empty
                        held[name].clear()
                        changed.append((module, name))
        for container, held, module, name in self._held:
            if not _same(container, held):
                changed.append((module, name))
                container.clear()
                (container.extend if isinstance(held, list) else container.update)(held)
        if written:
            raise UnsupportedModelError(
                f"{self._name_of(written[0])} changes during a forward pass and would carry "
                "private records into the release; make the forward pass free of side effects "
                "(metrics: return the figures beside the loss)"
            )
        return changed

    def _name_of(self, value: Tensor) -> str:
        for name, given in self._given.items():
            if given is value:
                return f"parameter {name}"
        for model in self._models:
            for kind, named in (
                ("own parameter", model.named_parameters()),
                ("buffer", model.named_buffers()),
            ):
                for name, own in named:
                    if own is value:
                        return f"{kind} {name}"
        return "a tensor in an attribute"

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The attributes as they were then, for what expects them later."""
        now = Attributes(self._models)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


def _spectral_buffers(module: nn.Module) -> set[int]:
    """Buffers of spectral norms, which PyTorch changes by the weights alone."""
    names = {"_u", "_v"} if type(module) is _SpectralNorm else set()
    for hook in module._forward_pre_hooks.values():
        if type(hook) is SpectralNorm:
            names |= {f"{hook.name}_u", f"{hook.name}_v"}
    return {id(module._buffers.get(name)) for name in names}


def call_counted(func: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call a function of PyTorch; what is written through `.data` counts as a change."""
    if func == Tensor.data.__get__:  # type: ignore[attr-defined]
        return args[0].detach()
    if func == Tensor.data.__set__:  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version(args[0])
    return func(*args, **(kwargs or {}))


class CountedData(TorchFunctionMode):
    """`call_counted` for all functions, where no record level does it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_counted(func, args, kwargs)


@contextmanager
def without_side_effects(
    models: Iterable[nn.Module], given: Mapping[str, Tensor] | None = None
) -> Iterator[list[tuple[nn.Module, str]]]:
    """Put attributes of models back after a call, and fail if it has changed one of their tensors.

    `given` are weights that the models are called with, by name. What is yielded says afterwards
    which attributes the call had changed.
    """
    before, changed = Attributes(models, given or {}), list[tuple[nn.Module, str]]()
    try:
        yield changed
    finally:  # also where the call has failed: this may be why
        changed += before.put_back()


def _copy(value: Any) -> Any:
    """A container of the usual kind with the same things in it; a tuple is its own."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, dict):
        return dict(value)
    return set(value) if isinstance(value, set) else list(value)


def _same(container: Any, held: Any) -> bool:
    """Whether a container holds the very things that it held."""
    if len(container) != len(held):
        return False
    if isinstance(held, set):
        return bool(container == held)
    if isinstance(held, dict) and not all(map(is_, container.values(), held.values())):
        return False
    return all(map(is_, container, held))


@contextmanager
def without_flattening(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep recurrent layers from moving their weights, which are not their own for the moment."""
    recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
    # not those of a pass around this one, which finds its own again
    recurrent = [module for module in recurrent if "flatten_parameters" not in vars(module)]
    if not recurrent:
        yield
        return
    for module in recurrent:
        vars(module)["flatten_parameters"] = lambda: None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "RNN module weights are not part of single")
            yield
    finally:
        for module in recurrent:
            vars(module).pop("flatten_parameters", None)


def fixed_parts(model: nn.Module) -> dict[str, Tensor]:
    parts = dict(model.named_buffers(remove_duplicate=False))
    for name, value in model.named_parameters(remove_duplicate=False):
        if not value.requires_grad:
            parts[name] = value.detach()
    return parts


def check_fixed_parts(model: nn.Module, original: nn.Module) -> None:
    """Refuse a model whose fixed parts are no longer, bit by bit, those it had at the start."""
    before, after = fixed_parts(original), fixed_parts(model)
    for name in sorted(before.keys() | after.keys()):
        if name in before and name in after and same_bits(before[name], after[name]):
            continue
        raise UnsupportedModelError(
            f"{name}, a buffer or frozen parameter, changed in a forward pass and would "
            "carry private records into the release, so nothing is released; make the forward "
            "pass free of side effects"
        )


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = (
        value.detach().to_dense().contiguous().reshape(-1).view(torch.uint8)
        for value in (one.to(other.device), other)
    )
    return torch.equal(first, second)
