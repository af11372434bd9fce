"""A model must treat a record alike whatever else is in the batch: tried on synthetic records.

This is a test and no proof. It finds what happens to records like the synthetic ones, under the
weights tried here, often enough to be seen, and changes an output by more than rounding.
"""

import itertools
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dpsur.errors import UnsupportedModelError
from dpsur.functional.call import call_on
from dpsur.functional.parameters import Params
from dpsur.functional.problem import forbid_side_effects, mode, output_rows
from dpsur.functional.process_settings import precision, seeded_globally
from dpsur.functional.tree import (
    TensorTree,
    device_of,
    flatten,
    map_tensors,
    row_count,
    slice_rows,
    tensors_of,
)

# What is compared differs by rounding, for kernels depend on the size of a batch; what is repeated
# does not.
_TOLERANCE, _REPEATED = 1e-3, 1e-5
# Enough records for what begins with a number of them, such as experts of limited capacity; fewer
# where layers return more than so many numbers for all of them, so that this takes no second.
_ROWS, _LEAST_ROWS, _NUMBERS = 64, 8, 2**21
# Records of different sizes side by side: for statistics of a batch that a large one dominates, and
# for switches that it throws ("divide by 255 if there are values above 1").
_SIZES = (1.0, 0.01, 100.0)
# For a model that draws random numbers: draws that are tried, and records for each.
_DRAWS, _ROWS_OF_DRAWS = 8, 16
_PERTURBATION = 0.3
_REMEDY = (
    "replace it, or what is computed right before it, with a layer that treats each example by "
    "itself, such as nn.GroupNorm or nn.LayerNorm"
)


# Outputs by the name of the module and their place among what it returns.
Seen = dict[tuple[str, int], Tensor]


@dataclass(frozen=True)
class Pass:
    """The outputs of a model and of its modules in the order they finish; whether it drew."""

    outputs: object
    seen: Seen
    drew: bool


def check_mixing(model: nn.Module, inputs: TensorTree) -> TensorTree:
    """Refuse a model that mixes or remembers records; return its outputs for synthetic ones.

    In both modes, since gradients are taken in training mode and losses in evaluation mode, and
    with weights that are moved a little, so that a head of zeros hides nothing.
    """
    with torch.no_grad(), precision(tf32=False):
        count = _affordable(model, inputs)
        weights = perturb(dict(model.named_parameters()))
        some, others = (rows_of_several_sizes(inputs, count, seed) for seed in (0, 1))
        for training in (True, False):
            with mode(model, training=training):
                first = call_watched(model, some)
                if first.drew and not training:
                    raise UnsupportedModelError(
                        "the model draws random numbers in evaluation mode, so that candidates "
                        "would be tested by chance; draw only where `self.training` is set (for "
                        "F.dropout: training=self.training)"
                    )
                outputs = _one_row_each(first.outputs, count)
                for rows in (some, nearly_equal_rows(inputs, count)):
                    if first.drew:
                        _with_the_same_draws(model, weights, rows, others)
                    else:
                        _in_parts(model, weights, rows)
                _again(model, some, first)
    return outputs


def _affordable(model: nn.Module, inputs: TensorTree) -> int:
    """How many records to try, from what the layers return for two of them."""
    seen = call_watched(model, random_rows(inputs, 2, seed=0)).seen
    numbers = numbers_per_record(inputs) + sum(value[0].numel() for value in seen.values())
    return min(_ROWS, max(_LEAST_ROWS, _NUMBERS // max(1, numbers)))


def numbers_per_record(inputs: TensorTree) -> int:
    """How many numbers a record consists of."""
    return sum(value[:1].numel() for value in tensors_of(inputs))


def rows_of_several_sizes(inputs: TensorTree, count: int, seed: int) -> TensorTree:
    """Synthetic records of several sizes."""

    def resize(rows: Tensor) -> Tensor:
        if not rows.is_floating_point():
            return rows
        sizes = torch.tensor(_SIZES, device=rows.device).repeat(count // len(_SIZES) + 1)[:count]
        return rows * sizes.view(-1, *[1] * (rows.dim() - 1)).to(rows.dtype)

    return map_tensors(resize, random_rows(inputs, count, seed))


def nearly_equal_rows(inputs: TensorTree, count: int) -> TensorTree:
    """Synthetic records that are nearly the same, and crowd whatever takes a limited number."""

    def repeat(one: Tensor, noise: Tensor) -> Tensor:
        rows = one.expand(count, *one.shape[1:]).clone()
        return rows + 1e-2 * noise if rows.is_floating_point() else rows

    return map_tensors(repeat, random_rows(inputs, 1, 3), random_rows(inputs, count, 4))


def synthetic(inputs: TensorTree, rows: int) -> TensorTree:
    """Records of the same structure, shape and type that say nothing about the real ones."""
    return random_rows(inputs, rows, seed=0)


def random_rows(inputs: TensorTree, count: int, seed: int) -> TensorTree:
    """Synthetic records: normal draws for fractions, zeros and ones for whole numbers."""
    seeds = itertools.count(seed, 1000)  # columns are independent of each other

    def draw(values: Tensor) -> Tensor:
        shape = (count, *values.shape[1:])
        generator = torch.Generator().manual_seed(next(seeds))
        if values.dtype.is_floating_point:
            drawn = torch.randn(shape, generator=generator)
        else:
            drawn = torch.randint(0, 2, shape, generator=generator)
        return drawn.to(device=values.device, dtype=values.dtype)

    return map_tensors(draw, inputs)


def call_watched(
    model: nn.Module, inputs: TensorTree, params: Params | None = None, seed: int = 0
) -> Pass:
    """Call a model, perhaps with other weights, and note what all of its modules return."""
    seen: Seen = {}
    count, device = row_count(inputs), device_of(inputs)

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def note(_: nn.Module, __: object, output: object) -> None:
            if name and isinstance(output, (tuple, list)):
                return  # of a layer inside: states of other shapes, which its parent uses
            for place, value in enumerate(tensors_of(output)):
                if len(value.shape) and len(value) == count:
                    seen[name, place] = value.clone()  # a later layer may overwrite it in place

        return model.get_submodule(name).register_forward_hook(note)

    given = [(value, value._version, value.clone()) for value in tensors_of(inputs)]
    handles = [watch(name) for name, _ in model.named_modules()]
    try:
        with seeded_globally(seed, device), forbid_side_effects(model, params or {}):
            before = generator_state(device)
            outputs = output_rows(call_on(model, params or {}, inputs))
            drew = not torch.equal(before, generator_state(device))
    finally:
        for handle in handles:
            handle.remove()
    for value, version, untouched in given:
        # writing through `.data` leaves the version as it is, and a clamp may leave the values
        if value._version != version or not same_bits(value, untouched):
            raise UnsupportedModelError(
                "the model overwrites its inputs, and would overwrite the data sets it is given; "
                "set inplace=False in its first layer, or write to a copy"
            )
    return Pass(outputs, seen, drew)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same, NaN included."""
    flat = one.reshape(-1), other.reshape(-1)
    return one.dtype == other.dtype and torch.equal(*(each.view(torch.uint8) for each in flat))


def generator_state(device: torch.device) -> Tensor:
    """The states of the generators that a model can draw from: the host's, and a GPU's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def perturb(weights: Params) -> Params:
    """Weights near the given ones; where all are zero, others."""
    generator = torch.Generator().manual_seed(5)

    def move(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=generator).to(value)
        size = value.square().mean().sqrt()
        return value + _PERTURBATION * torch.where(size > 0, size, 1.0) * noise

    return {name: move(value) for name, value in weights.items()}


def _one_row_each(outputs: TensorTree, count: int) -> TensorTree:
    found = flatten(outputs)
    odd = [name for name, value in found.items() if not value.dim() or len(value) != count]
    if not found or odd:
        where = f": output {odd[0]!r} has no row per example" if odd and odd[0] else ""
        raise UnsupportedModelError(
            "the model must return one tensor with one row per example, or a tuple, dict or "
            f"dataclass of such tensors{where}; wrap it in a module that does"
        )
    return outputs


def _choose(rows: TensorTree, chosen: Tensor) -> TensorTree:
    return map_tensors(lambda values: values[chosen.to(values.device)], rows)


def _in_parts(model: nn.Module, params: Params, rows: TensorTree) -> None:
    """Compare a batch with a permutation and with every second record of it, and some alone."""
    together, count = call_watched(model, rows, params), row_count(rows)
    alone = sorted({0, 1, 2, count // 2, count - 1})
    # without one: then what has as many rows for another reason is not taken for records
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(7)).tolist()[1:]
    some = (range(count)[::-2], range(count)[-2::-2])
    for part in (shuffled, *some, *([row] for row in alone)):
        chosen = torch.tensor(list(part), device=device_of(rows))
        apart = call_watched(model, _choose(rows, chosen), params)
        judge(model, apart.seen, together.seen, chosen)


def _with_the_same_draws(
    model: nn.Module, params: Params, rows: TensorTree, others: TensorTree
) -> None:
    """Replace every second record by another. Layers draw the same, for the shape is the same.

    Alone a record would get other draws. A module is judged if its outputs follow the batch in
    size, so that times or channels are not taken for records.
    """
    rows, others = (slice_rows(each, slice(_ROWS_OF_DRAWS)) for each in (rows, others))
    steady = call_watched(model, slice_rows(rows, slice(1, None)), params).seen
    every_second = torch.arange(row_count(rows), device=device_of(rows)) % 2 == 0

    def mix(values: Tensor, instead: Tensor, kept: Tensor) -> Tensor:
        mixed = values.clone()
        mixed[~kept] = instead[~kept]
        return mixed

    for seed in range(_DRAWS):
        together = call_watched(model, rows, params, seed).seen
        for kept in (every_second, ~every_second):
            mixed = map_tensors(partial(mix, kept=kept), rows, others)
            found = call_watched(model, mixed, params, seed).seen
            judged = {key: value[kept] for key, value in found.items() if key in steady}
            judge(model, judged, together, kept)


def judge(
    model: nn.Module,
    found: Seen,
    expected: Seen,
    chosen: Tensor,
    remedy: str = _REMEDY,
) -> None:
    """Compare outputs of modules with the chosen rows of what is expected."""
    for key, value in found.items():
        # a module that folds other dimensions into the batch is judged by its parent
        known = key in expected and expected[key].shape[1:] == value.shape[1:]
        if known and not _same(value, expected[key][chosen], _TOLERANCE):
            raise UnsupportedModelError(
                f"{_describe(model, key[0])} gives an example another output when other examples "
                f"are in the batch; {remedy}"
            )


def _again(model: nn.Module, rows: TensorTree, first: Pass) -> None:
    """After all the others, the first records must give what they gave at first."""
    again = call_watched(model, rows).seen
    for key, value in first.seen.items():
        if key not in again or not _same(again[key], value, _REPEATED):
            raise UnsupportedModelError(
                f"{_describe(model, key[0])} gives the same examples another output after it has "
                "seen others: it would carry private records from one step to the next; make the "
                "forward pass free of side effects"
            )


def _describe(model: nn.Module, name: str) -> str:
    return f"module {name or '(root)'} ({type(model.get_submodule(name)).__name__})"


def _same(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether outputs agree, for every record relative to its largest one."""
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    if not one.numel():
        return True
    size = 1 + other.flatten(1).abs().amax(1) if other.dim() > 1 else 1 + other.abs()
    size = size.nan_to_num(nan=1.0, posinf=1.0).view(-1, *[1] * (other.dim() - 1))
    return torch.allclose(one / size, other / size, tolerance, tolerance, equal_nan=True)
