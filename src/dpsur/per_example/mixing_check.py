"""What a model does to a record must not depend on its company: tried out on made-up records.

This is a test and no proof. It finds what happens to records like the made-up ones, under the
weights tried here, often enough to be seen, and changes an output by more than rounding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpsur.errors import UnsupportedModelError
from dpsur.functional.call import call_on
from dpsur.functional.parameters import Params
from dpsur.functional.problem import left_alone, mode
from dpsur.functional.process_settings import precision, seeded_globally

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


@dataclass(frozen=True)
class Pass:
    """The outputs of a model and of its modules in the order they finish; whether it drew."""

    outputs: object
    seen: dict[str, Tensor]
    drew: bool


def probe(model: nn.Module, inputs: Tensor) -> Tensor:
    """Refuse a model that mixes or remembers records; return its outputs for made-up ones.

    In both modes, since gradients are taken in training mode and losses in evaluation mode, and
    with weights that are moved a little, so that a head of zeros hides nothing.
    """
    with torch.no_grad(), precision(tf32=False):
        count = _affordable(model, inputs)
        weights = moved(dict(model.named_parameters()))
        some, others = (varied(inputs, count, seed) for seed in (0, 1))
        for training in (True, False):
            with mode(model, training=training):
                first = watched(model, some)
                if first.drew and not training:
                    raise UnsupportedModelError(
                        "the model draws random numbers in evaluation mode, so that candidates "
                        "would be tested by chance; draw only where `self.training` is set (for "
                        "F.dropout: training=self.training)"
                    )
                outputs = _one_row_each(first.outputs, count)
                for rows in (some, alike(inputs, count)):
                    if first.drew:
                        _with_the_same_draws(model, weights, rows, others)
                    else:
                        _in_parts(model, weights, rows)
                _again(model, some, first)
    return outputs


def _affordable(model: nn.Module, inputs: Tensor) -> int:
    """How many records to try, from what the layers return for two of them."""
    seen = watched(model, random_rows(inputs, 2, seed=0)).seen
    numbers = inputs[:1].numel() + sum(value[0].numel() for value in seen.values())
    return min(_ROWS, max(_LEAST_ROWS, _NUMBERS // max(1, numbers)))


def varied(inputs: Tensor, count: int, seed: int) -> Tensor:
    """Made-up records of several sizes."""
    rows = random_rows(inputs, count, seed)
    if not rows.is_floating_point():
        return rows
    sizes = torch.tensor(_SIZES, device=rows.device).repeat(count // len(_SIZES) + 1)[:count]
    return rows * sizes.view(-1, *[1] * (rows.dim() - 1)).to(rows.dtype)


def alike(inputs: Tensor, count: int) -> Tensor:
    """Made-up records that are nearly the same, and crowd whatever takes a limited number."""
    rows = random_rows(inputs, 1, 3).expand(count, *inputs.shape[1:]).clone()
    if not rows.is_floating_point():
        return rows
    return rows + 1e-2 * random_rows(inputs, count, 4)


def random_rows(inputs: Tensor, count: int, seed: int) -> Tensor:
    """Records of the same shape and type that say nothing about the real ones."""
    shape = (count, *inputs.shape[1:])
    generator = torch.Generator().manual_seed(seed)
    if inputs.dtype.is_floating_point:
        values = torch.randn(shape, generator=generator)
    else:
        values = torch.randint(0, 2, shape, generator=generator)
    return values.to(device=inputs.device, dtype=inputs.dtype)


def watched(model: nn.Module, inputs: Tensor, params: Params | None = None, seed: int = 0) -> Pass:
    """Call a model, perhaps with other weights, and note what all of its modules return."""
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def note(_: nn.Module, __: object, output: object) -> None:
            if isinstance(output, Tensor) and len(output.shape) and len(output) == len(inputs):
                seen[name] = output.clone()  # a later layer may overwrite it in place

        return model.get_submodule(name).register_forward_hook(note)

    version, untouched = inputs._version, inputs.clone()
    handles = [watch(name) for name, _ in model.named_modules()]
    try:
        with seeded_globally(seed, inputs.device), left_alone(model, params or {}):
            before = generator_state(inputs)
            outputs = call_on(model, params or {}, inputs)
            drew = not torch.equal(before, generator_state(inputs))
    finally:
        for handle in handles:
            handle.remove()
    # writing through `.data` leaves the version as it is, and a clamp may leave the values
    if inputs._version != version or not same_bits(inputs, untouched):
        raise UnsupportedModelError(
            "the model overwrites its inputs, and would overwrite the data sets it is given; set "
            "inplace=False in its first layer, or write to a copy"
        )
    return Pass(outputs, seen, drew)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same, NaN included."""
    flat = one.reshape(-1), other.reshape(-1)
    return one.dtype == other.dtype and torch.equal(*(each.view(torch.uint8) for each in flat))


def generator_state(inputs: Tensor) -> Tensor:
    """The states of the generators that a model can draw from: the host's, and the inputs'."""
    states = [torch.get_rng_state()]
    if inputs.is_cuda:
        states.append(torch.cuda.get_rng_state(inputs.device))
    return torch.cat(states)


def moved(weights: Params) -> Params:
    """Weights near the given ones; where all are zero, others."""
    generator = torch.Generator().manual_seed(5)

    def move(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=generator).to(value)
        size = value.square().mean().sqrt()
        return value + _PERTURBATION * torch.where(size > 0, size, 1.0) * noise

    return {name: move(value) for name, value in weights.items()}


def _one_row_each(outputs: object, count: int) -> Tensor:
    if not isinstance(outputs, Tensor) or not outputs.dim() or len(outputs) != count:
        raise UnsupportedModelError(
            "the model must return one tensor with one row per example; wrap it in a module that "
            "does"
        )
    return outputs


def _in_parts(model: nn.Module, params: Params, rows: Tensor) -> None:
    """Compare a batch with a permutation and with every second record of it, and some alone."""
    together, count = watched(model, rows, params), len(rows)
    alone = sorted({0, 1, 2, count // 2, count - 1})
    # without one: then what has as many rows for another reason is not taken for records
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(7)).tolist()[1:]
    some = (range(count)[::-2], range(count)[-2::-2])
    for part in (shuffled, *some, *([row] for row in alone)):
        chosen = torch.tensor(list(part), device=rows.device)
        apart = watched(model, rows[chosen], params)
        judge(model, apart.seen, together.seen, chosen)


def _with_the_same_draws(model: nn.Module, params: Params, rows: Tensor, others: Tensor) -> None:
    """Replace every second record by another. Layers draw the same, for the shape is the same.

    Alone a record would get other draws. A module is judged if its outputs follow the batch in
    size, so that times or channels are not taken for records.
    """
    rows, others = rows[:_ROWS_OF_DRAWS], others[:_ROWS_OF_DRAWS]
    steady = watched(model, rows[1:], params).seen
    every_second = torch.arange(len(rows), device=rows.device) % 2 == 0
    for seed in range(_DRAWS):
        together = watched(model, rows, params, seed).seen
        for kept in (every_second, ~every_second):
            mixed = rows.clone()
            mixed[~kept] = others[~kept]
            found = watched(model, mixed, params, seed).seen
            judged = {name: value[kept] for name, value in found.items() if name in steady}
            judge(model, judged, together, kept)


def judge(
    model: nn.Module,
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    chosen: Tensor,
    remedy: str = _REMEDY,
) -> None:
    """Compare outputs of modules with the chosen rows of what is expected."""
    for name, value in found.items():
        # a module that folds other dimensions into the batch is judged by its parent
        known = name in expected and expected[name].shape[1:] == value.shape[1:]
        if known and not _same(value, expected[name][chosen], _TOLERANCE):
            raise UnsupportedModelError(
                f"{_described(model, name)} gives an example another output when it has other "
                f"company in the batch; {remedy}"
            )


def _again(model: nn.Module, rows: Tensor, first: Pass) -> None:
    """After all the others, the first records must give what they gave at first."""
    again = watched(model, rows).seen
    for name, value in first.seen.items():
        if name not in again or not _same(again[name], value, _REPEATED):
            raise UnsupportedModelError(
                f"{_described(model, name)} gives the same examples another output after it has "
                "seen others: it would carry private records from one step to the next; make the "
                "forward pass free of side effects"
            )


def _described(model: nn.Module, name: str) -> str:
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
