"""Operations on parameters: those of most layers, and those of parameters that belong to none.

`F.linear` of a layer or of `table.weight`, a layer scale, or a weight that is standardised before a
convolution are seen by the record level as calls of torch functions:

- an operation on parameters alone gives a derived weight (`Tape.derive`), whose per-example
  gradients are carried back to the parameters after the backward pass;
- an operation on a parameter and on records has a rule below, or else works on a copy of the
  parameter for each record.

At the end are those that the record level treats apart, whatever they are given.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsur.functional.process_settings import as_autocast_sees, widen
from dpsur.functional.tree import tensors_of, with_tensors
from dpsur.per_example.contributions import Contribution, Products, Rows
from dpsur.per_example.kernels.products import fast_linear
from dpsur.per_example.rules.convolution import convolution_map
from dpsur.per_example.rules.embedding import (
    Lookups,
    add_up_repeats,
    embedding_bag_map,
    embedding_map,
    first_places,
)
from dpsur.per_example.rules.linear import linear_map, watch_linear
from dpsur.per_example.rules.normalization import (
    group_norm_map,
    layer_norm_map,
    rms_norm_map,
)
from dpsur.per_example.tape import NotSupportedError, Tape, Uses

_TRANSPOSES = frozenset({"t", "mT", "T"})


def name_of(func: Callable[..., Any]) -> str:
    """What torch calls a function; an attribute of a tensor goes by its own name."""
    name: str = getattr(func, "__name__", "")
    if name != "__get__":
        return name
    return getattr(getattr(func, "__self__", None), "__name__", name)


def derive(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """An operation on weights and constants only: its results are weights as well."""
    result, all_given = func(*args, **kwargs), tensors_of((args, kwargs))
    followed = {i: value for i, value in enumerate(all_given) if id(value) in tape.names}
    slots = {place: tape.names[id(value)] for place, value in followed.items()}
    constants = [value.detach() for value in all_given]
    kind = constants[0].device.type
    rounds, rounded = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def again(which: int, leaves: dict[int, Tensor]) -> Tensor:
        given = [leaves.get(place, value) for place, value in enumerate(constants)]
        again_args, again_kwargs = with_tensors((args, kwargs), given)
        with torch.autocast(kind, rounded, enabled=rounds, cache_enabled=False):
            return tensors_of(func(*again_args, **again_kwargs))[which]

    def carry(which: int, uses: list[Contribution], rows: Callable[[], Tensor]) -> Uses:
        products = [one.products() for one in uses] if name_of(func) in _TRANSPOSES else []
        if products and all(one is not None for one in products):
            for one in products:
                yield slots[0], Products(one.outputs, one.inputs)  # type: ignore[union-attr]
            return
        if func is F.embedding:  # as of positions: a gradient of the rows that are read
            if list(slots) != [1]:
                raise NotSupportedError("an embedding whose numbers are parameters")
            tokens = constants[0].reshape(1, -1).expand(tape.examples, -1)
            outputs, size = rows().reshape(*tokens.shape, -1), len(constants[1])
            padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else None)
            if padding is not None:
                outputs = torch.where((tokens == padding % size).unsqueeze(-1), 0.0, outputs)
            sums = add_up_repeats(outputs, first_places(tokens))
            yield slots[1], Lookups(tokens, sums, size)
            return
        leaves = {place: value.detach().requires_grad_() for place, value in followed.items()}
        with torch.enable_grad():
            value = again(which, leaves)
        if not value.requires_grad:
            return
        gradients = torch.autograd.grad(
            value,
            list(leaves.values()),
            rows().to(value.dtype),
            is_grads_batched=True,
            allow_unused=True,
        )
        for place, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                yield slots[place], Rows(widen(gradient))

    def follow(which: int, value: Tensor) -> Tensor:
        if not (value.is_floating_point() or value.is_complex()):
            return value
        return tape.derive(value.detach(), partial(carry, which))

    if tape.slot(result) is not None:
        return result
    if isinstance(result, Tensor):
        return follow(0, result)
    if not isinstance(result, (tuple, list)) or not all(isinstance(v, Tensor) for v in result):
        return result  # a shape, a type, a number
    return type(result)(follow(which, value) for which, value in enumerate(result))


def _matmul(tape: Tape, input: Tensor, other: Tensor) -> Any:
    """Examples times a matrix; any other product is repeated per example."""
    if other.dim() != 2 or tape.slot(other) is None or tape.slot(input) is not None:
        raise NotSupportedError("a product of a weight by something else than a matrix of it")
    input = as_autocast_sees(input)
    output = fast_linear(input, other.mT)
    output = input @ other if output is None else output
    return watch_linear(tape, output, input, other, None, transposed=True)


def _addmm(
    tape: Tape, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    if (beta, alpha) != (1, 1) or input.dim() != 1 or tape.slot(mat1) is not None:
        raise NotSupportedError("addmm with factors or with a weight on its left")
    mat1 = as_autocast_sees(mat1)
    output = fast_linear(mat1, mat2.mT, input)
    output = torch.addmm(input, mat1, mat2) if output is None else output
    return watch_linear(tape, output, mat1, mat2, input, transposed=True)


# What layers do not call: without gradients PyTorch batches it.
PRODUCTS: dict[Any, Callable[..., Any]] = {
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
}
OPERATION_RULES: dict[Any, Callable[..., Any]] = PRODUCTS | {
    F.linear: linear_map,
    F.embedding: embedding_map,
    F.embedding_bag: embedding_bag_map,
    F.conv1d: convolution_map,
    F.conv2d: convolution_map,
    F.conv3d: convolution_map,
    F.layer_norm: layer_norm_map,
    F.group_norm: group_norm_map,
    F.rms_norm: rms_norm_map,
}


# Operations that PyTorch batches wrongly (`tests/per_example/test_batching_rules.py`).
WRONG = frozenset(
    {
        torch.select_scatter,
        Tensor.select_scatter,
        torch.index_fill,
        Tensor.index_fill,
        Tensor.index_fill_,
        Tensor.resize_,
        Tensor.resize_as_,
        getattr(F, "linear_cross_entropy", None),
    }
) - {None}

# What makes a tensor without writing to it.
EMPTY = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}
)

# What makes a tensor that code may write into.
FACTORIES = EMPTY | frozenset(
    {
        torch.zeros,
        torch.ones,
        torch.full,
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.new_full,
        Tensor.clone,
    }
)
