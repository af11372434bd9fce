"""Parameters that a model uses directly: every operation on one is followed while the model runs.

Rules of layers see calls of modules. A class token, a layer scale, `F.linear(x, table.weight)` or a
weight that is standardised before a convolution are seen here instead, as calls of torch functions:

- an operation on parameters alone gives a derived weight (`Tape.derive`), whose per-example
  gradients are carried back to the parameters after the backward pass;
- an operation on a parameter and on examples has a rule below, or else torch.func repeats it per
  example when its output's gradient is known.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from dpsur.functional.process_settings import widen
from dpsur.functional.tree import tensors_of, with_tensors
from dpsur.per_example.contributions import Contribution, Products, Rows, split_dimension
from dpsur.per_example.kernels.products import fast_linear
from dpsur.per_example.rules.convolution import convolution
from dpsur.per_example.rules.embedding import (
    Lookups,
    add_up_repeats,
    embedding_bag_map,
    first_places,
    look_up,
)
from dpsur.per_example.rules.linear import bilinear_map, linear_map
from dpsur.per_example.rules.normalization import (
    group_norm_map,
    instance_norm_map,
    layer_norm_map,
    prelu_map,
    rms_norm_map,
)
from dpsur.per_example.rules.transposed_convolution import transposed_convolution_map
from dpsur.per_example.tape import Layout, NotSupportedError, Slot, Tape

# Operations on single numbers, by the names that torch calls them.
_ELEMENTWISE = frozenset(
    f"{before}{name}{after}"
    for name in ("add", "sub", "mul", "div", "truediv", "pow", "maximum", "minimum")
    for before, after in (("", ""), ("__", "__"), ("__r", "__"))
) | {"true_divide", "rsub", "atan2", "hypot", "logaddexp", "where", "lerp", "addcmul", "addcdiv"}
_TRANSPOSES = frozenset({"t", "mT", "T"})


class Operations(TorchFunctionMode):
    """Follows parameters of a tape through the torch functions that a model calls."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While the rule of a layer looks after its parameters."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let a rule answer the call of a function that is given a parameter."""
        kwargs = kwargs or {}
        if self._paused or not torch.is_grad_enabled() or not self._follows((args, kwargs)):
            return func(*args, **kwargs)
        call = Call(func, args, kwargs, self.tape)
        in_place = call.name.endswith("_") and not call.name.endswith("__")
        if in_place or "out" in kwargs:
            raise NotSupportedError(f"{call.name} changes a tensor in place next to a parameter")
        layouts = [self.tape.layout(value) for value in call.others]
        if all(layout is None for layout in layouts):
            return derive(call)
        rule = OPERATION_RULES.get(func)
        if rule is not None:
            return rule(self.tape, *args, **kwargs)
        if call.name in _ELEMENTWISE:
            return _elementwise(call)
        return _generic(call, layouts)

    def _follows(self, values: Any) -> bool:
        """Whether a parameter, or what was derived of one, is among the arguments."""
        names = self.tape.names
        if isinstance(values, Tensor):
            return id(values) in names
        if isinstance(values, dict):
            values = values.values()
        elif not isinstance(values, (tuple, list)):
            return False
        return any(map(self._follows, values))


@dataclass(frozen=True)
class Call:
    """A call of a torch function that is given at least one followed weight."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tape: Tape

    @property
    def name(self) -> str:
        """What torch calls the function; an attribute of a tensor goes by its own name."""
        name: str = getattr(self.func, "__name__", "")
        if name != "__get__":
            return name
        return getattr(getattr(self.func, "__self__", None), "__name__", name)

    @property
    def given(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return tensors_of((self.args, self.kwargs))

    @property
    def followed(self) -> dict[int, Tensor]:
        """The followed weights among the arguments, by their places in `given`."""
        names = self.tape.names
        return {i: value for i, value in enumerate(self.given) if id(value) in names}

    @property
    def others(self) -> list[Tensor]:
        """The arguments that are not followed."""
        return [value for value in self.given if id(value) not in self.tape.names]

    def on(self, tensors: list[Tensor]) -> Any:
        """The function's value on other tensors in the same places."""
        args, kwargs = with_tensors((self.args, self.kwargs), tensors)
        return self.func(*args, **kwargs)


def derive(call: Call) -> Any:
    """An operation on weights and constants only: its results are weights as well."""
    tape, result = call.tape, call.func(*call.args, **call.kwargs)
    followed = call.followed
    slots = {place: tape.slot(value) for place, value in followed.items()}
    constants = [value.detach() for value in call.given]

    def again(which: int, leaves: dict[int, Tensor]) -> Tensor:
        given = [leaves.get(place, value) for place, value in enumerate(constants)]
        return tensors_of(call.on(given))[which]

    def carry(
        which: int,
        part: Callable[[Tensor], Tensor],
        contributions: list[Contribution],
        rows: Callable[[], Tensor],
    ) -> Iterable[tuple[Slot, Contribution]]:
        products = [one.products() for one in contributions] if call.name in _TRANSPOSES else []
        if products and all(one is not None for one in products):
            for one in products:
                yield slots[0], Products(one.outputs, one.inputs)  # type: ignore[misc,union-attr]
            return
        if call.func is F.embedding:  # as of positions: a gradient of the rows that are read
            tokens = constants[0].reshape(1, -1).expand(tape.examples, -1)
            read = rows().reshape(*tokens.shape, -1)
            yield from _read(slots, tokens, read, call)
            return
        leaves = {place: value.detach().requires_grad_() for place, value in followed.items()}
        with torch.enable_grad():
            value = part(again(which, leaves))
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
            slot = slots[place]
            if gradient is not None and slot is not None:
                yield slot, Rows(widen(gradient))

    def follow(which: int, value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        layout = None if tape.in_level else tape.layout(value, guess=None)
        if layout is None:
            return tape.derive(value, partial(carry, which, lambda whole: whole))
        # a copy for every example, such as of a class token: what was copied is followed
        part = partial(_first_example, layout)
        source = tape.derive(part(value).detach(), partial(carry, which, part))
        slot = tape.slot(source)
        assert slot is not None

        def record(gradient: Tensor) -> Iterable[tuple[Slot, Contribution]]:
            yield slot, Rows(_rows_of(layout, gradient))

        return tape.watch(value, record)

    if tape.slot(result) is not None:
        return result
    if isinstance(result, Tensor):
        return follow(0, result)
    if not isinstance(result, (tuple, list)) or not all(isinstance(v, Tensor) for v in result):
        return result  # a shape, a type, a number
    return type(result)(follow(which, value) for which, value in enumerate(result))


def _read(
    slots: dict[int, Slot | None], tokens: Tensor, outputs: Tensor, call: Call
) -> Iterable[tuple[Slot, Contribution]]:
    """The rows of a table that are the same for all examples."""
    (place, slot), *more = slots.items()
    if more or place != 1:
        raise NotSupportedError("an embedding whose numbers are parameters")
    size = len(call.given[1])
    padding = call.kwargs.get("padding_idx", call.args[2] if len(call.args) > 2 else None)
    if padding is not None:
        outputs = torch.where((tokens == padding % size).unsqueeze(-1), 0.0, outputs)
    if slot is not None:
        yield slot, Lookups(tokens, add_up_repeats(outputs, first_places(tokens)), size)


def _first_example(layout: Layout, values: Tensor) -> Tensor:
    return values.narrow(layout.axis, 0, layout.fold)


def _rows_of(layout: Layout, values: Tensor) -> Tensor:
    """Values with the examples in front, in their own shape otherwise."""
    return layout.by_example(values).movedim(1, layout.axis + 1)


def _elementwise(call: Call) -> Any:
    """Numbers are worked on one by one, and a weight is used for all that it is broadcast to."""
    tape, output = call.tape, call.func(*call.args, **call.kwargs)
    layout = tape.examples_in(output)
    given = [value.detach() for value in call.given]
    followed = {place: tape.slot(value) for place, value in call.followed.items()}

    def record(gradient: Tensor) -> Iterable[tuple[Slot, Contribution]]:
        for place, slot in followed.items():
            if slot is None:
                continue
            each = _local_gradient(call, given, place, gradient)
            yield slot, Rows(_sum_to(_rows_of(layout, each), given[place].shape))

    return tape.watch(output, record)


def _local_gradient(call: Call, given: list[Tensor], place: int, gradient: Tensor) -> Tensor:
    """Gradient of a weight that is broadcast to the shape of the output, before it is added up."""
    name = call.name.strip("_")
    if name in ("add", "radd") and "alpha" not in call.kwargs and len(given) == 2:
        return gradient
    if name in ("mul", "rmul") and len(given) == 2:
        return gradient * given[1 - place]
    wide = given[place].expand(gradient.shape).detach().requires_grad_()
    with torch.enable_grad():
        output = call.on([*given[:place], wide, *given[place + 1 :]])
    return torch.autograd.grad(output, wide, gradient)[0]


def _sum_to(rows: Tensor, shape: torch.Size) -> Tensor:
    """Add up what was broadcast, for every row."""
    extra = rows.dim() - 1 - len(shape)
    if extra:
        rows = rows.sum(tuple(range(1, 1 + extra)))
    stretched = [i + 1 for i, size in enumerate(shape) if size == 1 and rows.shape[i + 1] != 1]
    return rows.sum(stretched, keepdim=True) if stretched else rows


def _generic(call: Call, layouts: list[Layout | None]) -> Any:
    """Any operation: torch.func differentiates it again for every example."""
    tape, output = call.tape, call.func(*call.args, **call.kwargs)
    given = [value.detach() for value in call.given]
    followed = {place: tape.slot(value) for place, value in call.followed.items()}
    found = iter(layouts)
    where = [None if place in followed else next(found) for place in range(len(given))]
    axes = tuple(None if layout is None else layout.axis for layout in where)
    tape.repeated.update(slot.parameter for slot in followed.values() if slot is not None)

    def follow(which: int, value: Tensor) -> Tensor:
        layout = tape.examples_in(value)
        record = partial(_repeat, call, given, followed, (where, axes), (which, layout))
        return tape.watch(value, record)

    results = tensors_of(output)
    if not results or not all(value.is_floating_point() for value in results):
        raise NotSupportedError(f"{call.name} of a parameter and of examples")
    return with_tensors(output, [follow(which, value) for which, value in enumerate(results)])


def _repeat(
    call: Call,
    given: list[Tensor],
    followed: dict[int, Slot | None],
    places: tuple[list[Layout | None], tuple[int | None, ...]],
    result: tuple[int, Layout],
    gradient: Tensor,
) -> Iterable[tuple[Slot, Contribution]]:
    (layouts, axes), (which, layout) = places, result
    slots = {place: slot for place, slot in followed.items() if slot is not None}

    def split(values: Tensor, where: Layout | None) -> Tensor:
        if where is None:
            return values
        return split_dimension(values, where.axis, (-1, where.fold))

    def one(some: list[Tensor], direction: Tensor) -> tuple[Tensor, ...]:
        def value(*weights: Tensor) -> Tensor:
            chosen = dict(zip(slots, weights, strict=True))
            return tensors_of(call.on([chosen.get(i, v) for i, v in enumerate(some)]))[which]

        pull: Any = vjp(value, *(given[place] for place in slots))[1]
        gradients: tuple[Tensor, ...] = pull(direction)
        return gradients

    parts = [split(value, where) for value, where in zip(given, layouts, strict=True)]
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        rows = vmap(one, in_dims=(list(axes), layout.axis), randomness="error")(
            parts, split(gradient, layout)
        )
    for slot, each in zip(slots.values(), rows, strict=True):
        yield slot, Rows(widen(each.detach()))


def _linear(tape: Tape, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_map(tape, input, weight, bias)


def _matmul(tape: Tape, input: Tensor, other: Tensor) -> Any:
    """Examples times a matrix; any other product is repeated per example."""
    if other.dim() != 2 or tape.slot(other) is None or tape.slot(input) is not None:
        call = Call(torch.matmul, (input, other), {}, tape)
        return _generic(call, [tape.layout(value) for value in call.others])
    output = fast_linear(input, other.mT)
    return _times(tape, input @ other if output is None else output, input, other, None)


def _addmm(
    tape: Tape, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    if (beta, alpha) != (1, 1) or input.dim() != 1 or tape.slot(mat1) is not None:
        raise NotSupportedError("addmm with factors or with a weight on its left")
    output = fast_linear(mat1, mat2.mT, input)
    output = torch.addmm(input, mat1, mat2) if output is None else output
    return _times(tape, output, mat1, mat2, input)


def _times(tape: Tape, output: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear map by a weight of the shape (in, out), as `Conv1D` of Hugging Face has it."""
    layout, slot, shift = tape.examples_in(output), tape.slot(weight), tape.slot(bias)

    def record(gradient: Tensor) -> Iterable[tuple[Slot, Contribution]]:
        rows = tape.examples
        outputs = layout.by_example(gradient).reshape(rows, -1, gradient.shape[-1])
        if slot is not None:
            inputs = layout.by_example(x).reshape(rows, -1, x.shape[-1]).detach()
            yield slot, Products(outputs, inputs).cheapest()
        if shift is not None:
            yield shift, Rows(outputs.sum(1))

    return tape.watch(output, record)


def _embedding(
    tape: Tape,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001  of max_norm
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NotSupportedError("embedding with max_norm, scale_grad_by_freq or sparse gradients")
    return look_up(tape, input, weight, padding_idx)


def _convolution(
    dimensions: int,
    tape: Tape,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    def each(value: Any) -> Any:
        many = isinstance(value, (tuple, list)) and len(value) > 1
        one = value[0] if isinstance(value, (tuple, list)) else value
        return tuple(value) if many else (one,) * dimensions

    layer: Any = SimpleNamespace(
        weight=weight,
        bias=bias,
        kernel_size=tuple(weight.shape[2:]),
        stride=each(stride),
        padding=padding if isinstance(padding, str) else each(padding),
        dilation=each(dilation),
        groups=groups,
        padding_mode="zeros",
    )
    return convolution(layer, tape, input)


OPERATION_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    F.embedding_bag: embedding_bag_map,
    F.conv1d: partial(_convolution, 1),
    F.conv2d: partial(_convolution, 2),
    F.conv3d: partial(_convolution, 3),
    F.conv_transpose1d: transposed_convolution_map,
    F.conv_transpose2d: transposed_convolution_map,
    F.conv_transpose3d: transposed_convolution_map,
    F.layer_norm: layer_norm_map,
    F.group_norm: group_norm_map,
    F.instance_norm: instance_norm_map,
    F.rms_norm: rms_norm_map,
    F.prelu: prelu_map,
    F.bilinear: bilinear_map,
}
