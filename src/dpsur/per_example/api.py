"""Per-example gradients and their clipped sum, for a module, a loss and a batch of your code.

The tier between `dpsur.fit` and the engine: thin functions over it, with the same checks.
"""

from weakref import WeakKeyDictionary

import torch
from torch import nn

from dpsur import checks
from dpsur.functional.problem import LossFunction, Objective, weight_by_record
from dpsur.functional.records import Examples
from dpsur.functional.tree import Params, TensorTree, signature
from dpsur.per_example import clipping
from dpsur.per_example.check_and_fix import check_model
from dpsur.per_example.clipping import ClippedSum, tapes_of

_checked: WeakKeyDictionary[nn.Module, set[object]] = WeakKeyDictionary()


def per_example_gradients(
    model: nn.Module, loss: LossFunction, inputs: TensorTree, targets: TensorTree
) -> Params:
    """The gradient of every record's own loss, for all parameters that require a gradient.

    `loss(outputs, targets)` returns one number; its own reduction over the batch does not matter,
    since it is applied to each record alone. `inputs` and `targets` are tensors or trees of tensors
    (tuple, list, dict, dataclass) with one row per record: a tuple is passed to the model as
    positional arguments, a dict as keyword arguments, anything else as the only argument. The model
    is run in training mode.

    Guarantee: row i of each returned tensor, shape (records, *parameter.shape), depends on record i
    alone. A model that mixes the records of a batch is refused (`UnsupportedModelError`): it is
    tested on synthetic inputs of the same shape, on the first call for a model and a shape.
    The gradients are not private.
    """
    objective, params, examples = _objective(model, loss, inputs, targets)
    if not len(examples):
        return {name: value.new_zeros(0, *value.shape) for name, value in params.items()}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in params}
    for tape in tapes_of(objective, params, examples):
        with torch.no_grad():
            for name in params:
                found[name].append(tape.per_example(name))
    return {name: torch.cat(parts) for name, parts in found.items()}


def clipped_sum(
    model: nn.Module,
    loss: LossFunction,
    inputs: TensorTree,
    targets: TensorTree,
    max_grad_norm: float,
) -> ClippedSum:
    """The sum of the records' gradients, each scaled down to at most `max_grad_norm` in L2 norm.

    Arguments are those of `per_example_gradients`; no gradient of a single record is formed where a
    layer's rule makes that unnecessary. The result has `params`, the sum for every parameter by
    name, and `sensitivity`, which is `max_grad_norm`.

    Guarantee: adding or removing one record moves the sum, over all parameters together, by at most
    `sensitivity` in L2 norm (over the reals), for any record: a gradient that is not finite
    counts as zero, and so does an empty batch. The sum is not private before Gaussian noise of
    standard deviation noise_multiplier * sensitivity is added to every coordinate.
    """
    checks.positive("max_grad_norm", max_grad_norm)
    objective, params, examples = _objective(model, loss, inputs, targets)
    return clipping.clipped_sum(objective, params, examples, max_grad_norm)


def _objective(
    model: nn.Module, loss: LossFunction, inputs: TensorTree, targets: TensorTree
) -> tuple[Objective, Params, Examples]:
    examples = Examples(inputs, targets)
    known, key = _checked.setdefault(model, set()), signature(inputs)
    if key not in known and len(examples):
        check_model(model, examples.part(slice(1)), tested=False)
        known.add(key)
    objective = Objective(model, weight_by_record(loss))
    return objective, objective.initial_params(), examples
