"""The losses of two sets of weights on the same records, in one evaluation where that pays.

A test compares a candidate with the model it came from. On a CPU two evaluations cost no more than
one of both. On a card that waits for small kernels one evaluation costs half, but only of layers
whose weights can be stacked for nothing: a convolution with two sets of weights is grouped, and
grouped convolutions have slow kernels.
"""

import warnings
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpsur.core.gradients.support import made_up
from dpsur.core.lending import call_on
from dpsur.core.problem import EVALUATION_ROWS, Problem, example_losses, mode
from dpsur.core.streams import seeded_globally
from dpsur.core.types import Examples, Params

# Where one evaluation of both costs less than two, and for which layers with weights.
PAYS_ON = ("cuda",)
PAYS_FOR = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
_TOLERANCE = 1e-4
_agrees: WeakKeyDictionary[nn.Module, dict[object, bool]] = WeakKeyDictionary()


def pair_losses(problem: Problem, one: Params, other: Params, examples: Examples) -> Tensor:
    """Losses of every record by itself, in evaluation mode: a row for each set of weights."""
    inputs = examples.inputs
    if not evaluated_at_once(problem, one, inputs):
        return torch.stack([problem.losses(params, examples) for params in (one, other)])
    outputs = stacked_outputs(problem, one, other, inputs)
    losses = example_losses(
        problem.loss,
        outputs.flatten(0, 1),
        torch.cat([examples.targets, examples.targets]),
    )
    return losses.view(2, -1)


def evaluated_at_once(problem: Problem, params: Params, inputs: Tensor) -> bool:
    """Whether two sets of weights get one evaluation."""
    return stacking_pays(problem, inputs) and can_be_stacked(problem, params, inputs)


def stacking_pays(problem: Problem, inputs: Tensor) -> bool:
    """Whether one evaluation of both costs less than two, from the device and the layers."""
    weighty = [m for m in problem.model.modules() if any(True for _ in m.parameters(recurse=False))]
    return inputs.device.type in PAYS_ON and all(isinstance(m, PAYS_FOR) for m in weighty)


def stacked_outputs(problem: Problem, one: Params, other: Params, inputs: Tensor) -> Tensor:
    """Outputs for both sets of weights, stacked."""
    both = {name: torch.stack([value, other[name]]) for name, value in one.items()}
    model = problem.model

    def outputs(params: Params, piece: Tensor) -> Tensor:
        return call_on(model, params, piece)

    evaluate = vmap(outputs, in_dims=(0, None))
    with torch.no_grad(), mode(model, training=False), sdpa_kernel(SDPBackend.MATH):
        pieces = [evaluate(both, piece) for piece in torch.split(inputs, EVALUATION_ROWS)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def can_be_stacked(problem: Problem, params: Params, inputs: Tensor) -> bool:
    """Whether one evaluation gives what two give, tried once on made-up records and weights."""
    known = _agrees.setdefault(problem.model, {})
    key = (tuple(inputs.shape[1:]), inputs.dtype, inputs.device)
    if key not in known:
        with seeded_globally(0, inputs.device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a trial that may fail
            known[key] = _tried(problem, params, made_up(inputs, 3))
    return known[key]


def _tried(problem: Problem, params: Params, inputs: Tensor) -> bool:
    other = {name: value + 0.05 * torch.randn_like(value) for name, value in params.items()}
    try:
        stacked = stacked_outputs(problem, params, other, inputs)
        apart = torch.stack([problem.outputs(one, inputs) for one in (params, other)])
        return torch.allclose(stacked, apart, rtol=_TOLERANCE, atol=_TOLERANCE)
    except Exception:  # whatever goes wrong, two evaluations remain
        return False
