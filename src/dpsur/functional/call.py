"""A model called with other weights than its own.

What `torch.func.functional_call` does, with one walk through the modules instead of several: for a
small network these take longer than its arithmetic. And a model always gets its own weights back,
where `functional_call` leaves some of the temporary ones behind: in a module that stands in two
places and whose weight another module shares.

How inputs reach the model: a tuple as positional arguments, a dict as keyword arguments, anything
else (a tensor, a list, a named tuple, a dataclass) as the only argument. `Arguments` holds those of
a call that someone else makes, `PersonRows` several records in a row.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree

from dpsur.functional.parameters import Params
from dpsur.functional.tree import PersonRows, TensorTree, map_tensors, row_count

# Only functional_call knows what to say to these.
_OTHERS = (torch.jit.ScriptModule, nn.DataParallel)


def every_module(model: nn.Module) -> dict[nn.Module, str]:
    """The modules of a model in the order of `model.modules()`, each with its name."""
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


def _tensors_of(given: Arguments) -> tuple[list[Tensor], Arguments]:
    found: list[Tensor] = []
    map_tensors(found.append, (given.args, given.kwargs), otherwise=lambda _: None)
    return found, given


def _with_tensors(tensors: Iterable[Any], given: Arguments) -> Arguments:
    following = iter(tensors)
    args, kwargs = map_tensors(
        lambda _: next(following), (given.args, given.kwargs), otherwise=lambda value: value
    )
    return Arguments(args, kwargs)


_pytree.register_pytree_node(Arguments, _tensors_of, _with_tensors)


def arguments(inputs: TensorTree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments that a model gets for its inputs."""
    if type(inputs) is tuple:
        return inputs, {}
    if type(inputs) is dict:
        return (), inputs
    return (inputs,), {}


def call(model: Callable[..., Any], inputs: TensorTree) -> TensorTree:
    """Outputs of a model with its own weights.

    Of persons, the model is called on their records, and outputs have the shape (persons, k, ...).
    """
    if type(inputs) is PersonRows:
        shape = row_count(inputs), inputs.records_each
        outputs = call(model, map_tensors(lambda value: value.flatten(0, 1), inputs.rows))
        return map_tensors(
            lambda value: value.unflatten(0, shape), outputs, otherwise=lambda value: value
        )
    positional, named = arguments(inputs)
    return model(*positional, **named)


def call_on(model: nn.Module, params: Params, inputs: TensorTree) -> TensorTree:
    """Outputs of a model with other values for the parameters that are named."""
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
    else:
        with _swap(modules, weight):
            yield model


@contextmanager
def _swap(modules: dict[nn.Module, str], weight: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Put other tensors in the place of parameters, and the parameters back afterwards."""
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
        yield
    finally:
        for held, key, value, _ in own:
            held[key] = value
