"""What depends on the data alone is computed once.

The input of the first layer is the same in every trial. Inner products between its patches, or the
norms of its rows, can be stored for a whole data set and looked up for a batch. Norms that were
stored for other values would let records pass the clip. So tables belong to one problem: another
one, over the same memory too, makes its own. They are made anew when the data is known to have been
written to; writing to it behind PyTorch's back, through an array of NumPy, while a run is under way
is not noticed.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpsur.functional.call import call_on
from dpsur.functional.parameters import Params
from dpsur.functional.problem import Objective, Problem, forbid_side_effects, mode, output_rows
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.records import Examples
from dpsur.functional.tree import TensorTree, map_tensors, tensors_of
from dpsur.per_example.memory_budget import GradientBudget

_log = logging.getLogger("dpsur.engine")

# Numbers of the data set that are worked on at once, beside a batch that fills the memory. Few, for
# what they take on the way is part of the peak of a small step.
_NUMBERS_AT_ONCE = 2**18

# By name and budget. A table that has no room is None.
Tables = dict[Hashable, Tensor | int | None]


@dataclass(frozen=True)
class KnownInputs:
    """Inputs of a batch that are rows of a data set, and the tables of the problem it is for."""

    data: Tensor
    rows: Tensor
    inputs: Tensor
    tables: Tables
    budget: GradientBudget = field(default_factory=GradientBudget)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_version", self.inputs._version)

    def holds(self, values: Tensor) -> bool:
        """Whether these are the inputs, perhaps flattened, and nothing has overwritten them."""
        version: int = vars(self)["_version"]
        if self.inputs._version != version:
            return False
        if values.data_ptr() != self.inputs.data_ptr():
            return False
        if values.shape == self.inputs.shape:
            return values.stride() == self.inputs.stride()
        return (
            values.shape == self.inputs.flatten(1).shape
            and values.is_contiguous()
            and self.inputs.is_contiguous()
        )

    @property
    def finite(self) -> bool:
        """Whether no record holds NaN or infinity."""
        tables = _current(self.tables, self.data)
        if "finite" not in tables:
            tables["finite"] = all(bool(part.isfinite().all()) for part in _parts(self.data))
        return bool(tables["finite"])

    def look_up(self, name: Hashable, compute: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Result of `compute` for the batch, from a table that is made on the first call.

        None where a table of the whole set has no room. Only the first call waits for the device,
        so that it must come before a capture.
        """
        table = table_of(self.data, self.tables, self.budget, name, compute)
        return None if table is None else table.index_select(0, self.rows)


def table_of(
    data: Tensor,
    tables: Tables,
    budget: GradientBudget,
    name: Hashable,
    compute: Callable[[Tensor], Tensor],
) -> Tensor | None:
    """Result of `compute` for a whole data set, kept in `tables`; None where it has no room."""
    tables, key = _current(tables, data), (name, budget)
    if key not in tables:
        one = compute(data[:1])
        size = one.element_size() * one.numel() * len(data)
        tables[key] = _fill(data, one, compute) if budget.has_room(size, data.device) else None
    table = tables[key]
    return table if isinstance(table, Tensor) else None


def _fill(data: Tensor, one: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """A table, some rows of the data after the other."""
    table = one.new_empty(len(data), *one.shape[1:])
    start = 0
    for part in _parts(data):
        table[start : start + len(part)] = compute(part)
        start += len(part)
    if data.is_cuda:  # another stream may be the next to read it
        torch.cuda.current_stream(data.device).synchronize()
    return table


def _current(tables: Tables, data: Tensor) -> Tables:
    """The tables, emptied first if the data was written to since they were made."""
    if tables.get("version") != data._version:
        tables.clear()
        tables["version"] = data._version
    return tables


def _parts(data: Tensor) -> tuple[Tensor, ...]:
    return torch.split(data, max(1, _NUMBERS_AT_ONCE // max(1, data[0].numel())))


# Channels-last pays for at least so many channels, and for layers whose outputs are smaller than
# their inputs: outputs have to be put back in order.
_LEAST_CHANNELS = 64
_TOLERANCE = 1e-3


def gather(
    objective: Objective,
    examples: Examples,
    rows: Tensor,
    budget: GradientBudget,
    *,
    channels_last: bool,
) -> Examples:
    """Copies of some rows; on a CPU in the memory of the batch before, which is still in its cache.

    Whoever uses the rows is done with them before the next batch is drawn.
    """
    data = examples.inputs
    if not (
        isinstance(objective, Problem)
        and type(examples) is Examples
        and data is objective.train.inputs
        and isinstance(data, Tensor)
        and data.device.type == "cpu"
    ):
        return examples.select(rows)
    tables, places = objective.tables, objective.places
    table = (
        table_of(data, tables, budget, "channels last", _channels_last) if channels_last else None
    )
    source = data if table is None else table
    place = places.get("inputs")
    if place is None or len(place) < len(rows) or place.shape[1:] != source.shape[1:]:
        # some room to spare, since the next sample may be larger; it takes no memory until used
        place = source.new_empty(len(rows) + len(rows) // 8, *source.shape[1:])
        places["inputs"] = place
    inputs = torch.index_select(source, 0, rows, out=place[: len(rows)])
    targets = map_tensors(lambda value: value.index_select(0, rows), examples.targets)
    return Examples(inputs if table is None else inputs.movedim(-1, 1), targets)


def _channels_last(data: Tensor) -> Tensor:
    """A view: numbers are moved when they are written to the table."""
    return data.movedim(1, -1)


def channels_last_pays(objective: Objective, params: Params, inputs: TensorTree) -> bool:
    """Whether a model's first layer gains by it, and the model can do with it: tried on `inputs`.

    A model that views its inputs in another shape fails on channels-last ones.
    """
    if not isinstance(inputs, Tensor) or inputs.device.type != "cpu":
        return False
    if inputs.dtype != torch.float32 or inputs.dim() != 4 or inputs.shape[1] < _LEAST_CHANNELS:
        return False
    gains = False

    def note(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        nonlocal gains
        gains = gains or (
            any(value is inputs for value in args) and output.numel() < inputs.numel()
        )

    layers = [one for one in objective.model.modules() if isinstance(one, nn.Conv2d)]
    handles = [layer.register_forward_hook(note) for layer in layers if layer.groups == 1]
    try:
        expected = _outputs(objective, params, inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not gains:
        return False
    try:
        other = inputs.contiguous(memory_format=torch.channels_last)
        found = _outputs(objective, params, other)
    except Exception as error:
        # such a model gets its inputs in the order that they came in
        _log.info(
            "dpsur: inputs are not gathered channels-last: the model fails on them: %s", error
        )
        return False
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(one, other, _TOLERANCE, _TOLERANCE) for one, other in pairs)


def _outputs(objective: Objective, params: Params, inputs: Tensor) -> list[Tensor]:
    model = objective.model
    same_draws, unchanged = seeded_globally(0, inputs.device), forbid_side_effects(model, params)
    with torch.no_grad(), mode(model, training=True), unchanged, same_draws:
        return tensors_of(output_rows(call_on(model, params, inputs)))
