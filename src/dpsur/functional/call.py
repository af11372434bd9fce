"""A model called with other weights than its own.

What `torch.func.functional_call` does, with one walk through the modules instead of several: for a
small network these take longer than its arithmetic. And a model always gets its own weights back,
where `functional_call` leaves some of the lent ones behind: in a module that stands in two places
and whose weight another module shares.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpsur.functional.parameters import Params

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


def call_on(model: nn.Module, params: Params, inputs: Tensor) -> Tensor:
    """Outputs of a model with other values for the parameters that are named."""
    return call_with(model, lambda name, own: params.get(name, own), inputs)


def call_with(model: nn.Module, weight: Callable[[str, Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Outputs of a model whose parameters are replaced by what `weight` makes of name and value.

    A parameter that has several names goes by the first, wherever it is used.
    """
    modules = every_module(model)
    outputs: Tensor
    if any(isinstance(module, _OTHERS) for module in modules):
        weights = {name: weight(name, value) for name, value in model.named_parameters()}
        outputs = functional_call(model, weights, (inputs,))
    else:
        with _lent(modules, weight):
            outputs = model(inputs)
    return outputs


@contextmanager
def _lent(modules: dict[nn.Module, str], weight: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
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
