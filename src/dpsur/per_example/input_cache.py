"""What depends on the data alone is computed once.

The input of the first layer is the same in every trial. Inner products between its patches, or the
norms of its rows, can be stored for a whole data set and looked up for a batch. Norms that were
stored for other values would let records pass the clip. So tables belong to one problem: another
one, over the same memory too, makes its own. They are made anew when the data is known to have been
written to; writing to it behind PyTorch's back, through an array of NumPy, while a run is under way
is not noticed.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpsur.functional.call import call_on
from dpsur.functional.parameters import Params
from dpsur.functional.problem import Problem, left_alone, mode
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.records import Examples
from dpsur.per_example.memory_budget import GradientBudget

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
        return values is self.inputs or (
            values.data_ptr() == self.inputs.data_ptr()
            and values.shape == self.inputs.flatten(1).shape
            and values.is_contiguous()
            and self.inputs.is_contiguous()
        )

    @property
    def finite(self) -> bool:
        """Whether no record holds NaN or infinity."""
        tables = _current(self.tables, self.data)
        if "finite" not in tables:
            tables["finite"] = all(bool(piece.isfinite().all()) for piece in _pieces(self.data))
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
        tables[key] = _filled(data, one, compute) if budget.has_room(size, data.device) else None
    table = tables[key]
    return table if isinstance(table, Tensor) else None


def _filled(data: Tensor, one: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """A table, a piece of the data after the other."""
    table = one.new_empty(len(data), *one.shape[1:])
    start = 0
    for piece in _pieces(data):
        table[start : start + len(piece)] = compute(piece)
        start += len(piece)
    if data.is_cuda:  # another stream may be the next to read it
        torch.cuda.current_stream(data.device).synchronize()
    return table


def _current(tables: Tables, data: Tensor) -> Tables:
    """The tables, emptied first if the data was written to since they were made."""
    if tables.get("version") != data._version:
        tables.clear()
        tables["version"] = data._version
    return tables


def _pieces(data: Tensor) -> tuple[Tensor, ...]:
    return torch.split(data, max(1, _NUMBERS_AT_ONCE // max(1, data[0].numel())))


# Turning pays for at least so many channels, and for layers whose outputs are smaller than their
# inputs: outputs have to be turned back.
_LEAST_CHANNELS = 64
_TOLERANCE = 1e-3


def gathered(
    problem: Problem, examples: Examples, rows: Tensor, budget: GradientBudget, *, turned: bool
) -> Examples:
    """Copies of some rows; on a CPU in the memory of the batch before, which is still in its cache.

    Whoever uses the rows is done with them before the next batch is drawn.
    """
    data = examples.inputs
    own = type(examples) is Examples and data is problem.train.inputs
    if not own or data.device.type != "cpu":
        return examples.select(rows)
    table = table_of(data, problem.tables, budget, "turned", _turned) if turned else None
    source = data if table is None else table
    place = problem.places.get("inputs")
    if place is None or len(place) < len(rows) or place.shape[1:] != source.shape[1:]:
        # some room to spare, since the next sample may be larger; it takes no memory until used
        place = source.new_empty(len(rows) + len(rows) // 8, *source.shape[1:])
        problem.places["inputs"] = place
    inputs = torch.index_select(source, 0, rows, out=place[: len(rows)])
    targets = examples.targets.index_select(0, rows)
    return Examples(inputs if table is None else inputs.movedim(-1, 1), targets)


def _turned(data: Tensor) -> Tensor:
    """A view: numbers are moved when they are written to the table."""
    return data.movedim(1, -1)


def turning_pays(problem: Problem, params: Params, inputs: Tensor) -> bool:
    """Whether a model's first layer gains by it, and the model can do with it: tried on `inputs`.

    A model that views its inputs in another shape fails on turned ones.
    """
    if inputs.device.type != "cpu" or inputs.dtype != torch.float32:
        return False
    if inputs.dim() != 4 or inputs.shape[1] < _LEAST_CHANNELS:
        return False
    gains = False

    def note(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        nonlocal gains
        gains = gains or (
            any(value is inputs for value in args) and output.numel() < inputs.numel()
        )

    layers = [one for one in problem.model.modules() if isinstance(one, nn.Conv2d)]
    handles = [layer.register_forward_hook(note) for layer in layers if layer.groups == 1]
    try:
        expected = _outputs(problem, params, inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not gains:
        return False
    try:
        turned = inputs.contiguous(memory_format=torch.channels_last)
        found = _outputs(problem, params, turned)
    except Exception:  # such a model gets its inputs in the order that they came in
        return False
    return torch.allclose(found, expected, _TOLERANCE, _TOLERANCE)


def _outputs(problem: Problem, params: Params, inputs: Tensor) -> Tensor:
    model = problem.model
    same_draws = seeded_globally(0, inputs.device)
    with torch.no_grad(), mode(model, training=True), left_alone(model, params), same_draws:
        return call_on(model, params, inputs)
