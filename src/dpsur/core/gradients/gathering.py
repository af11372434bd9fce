"""The rows of a batch, copied from the data set in the order that suits the first layer.

On a CPU convolutions are computed with the channels innermost. Maps that lie otherwise are turned
round for it: in every forward pass, and again for the gradient of the weights. What the first layer
reads never changes, so it is turned round once, for the whole data set, where there is room.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dpsur.core.gradients.budget import GradientBudget
from dpsur.core.gradients.stored import table_of
from dpsur.core.lending import call_on
from dpsur.core.problem import Problem, left_alone, mode
from dpsur.core.streams import seeded_globally
from dpsur.core.types import Examples, Params

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
