"""Outputs and losses of private records in evaluation mode, each record alone.

For tests that add up what single records give: a model that lets records meet would let one of them
change the values of all.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpsur.functional.problem import (
    EVALUATION_ROWS,
    Objective,
    call,
    losses_one_by_one,
    mode,
    output_rows,
)
from dpsur.functional.records import Examples
from dpsur.functional.tree import (
    Params,
    TensorTree,
    concatenate_rows,
    map_tensors,
    row_count,
    split_rows,
)
from dpsur.per_example.record_function import RecordFunction, Way

# Which way works for a model: it is not kept alive by this.
_ways: WeakKeyDictionary[nn.Module, dict[object, Way]] = WeakKeyDictionary()


def record_outputs(objective: Objective, params: Params, inputs: TensorTree) -> TensorTree:
    model = objective.model
    own = dict(model.named_parameters())
    trained = {name: own[name] for name in params}
    records = RecordFunction((model,), trained, ways=_ways.setdefault(model, {}))

    def function(one: TensorTree) -> TensorTree:
        return output_rows(call(model, one))

    parts = []
    with torch.no_grad(), mode(model, training=False):
        for part in split_rows(inputs, EVALUATION_ROWS):
            alone = map_tensors(lambda value: value.unsqueeze(1), part)
            _, found = records.run(function, alone, row_count(part), params=params)
            parts.append(map_tensors(lambda value: value.flatten(0, 1), found))
    return concatenate_rows(parts)


def record_losses(objective: Objective, params: Params, examples: Examples) -> Tensor:
    outputs = record_outputs(objective, params, examples.inputs)
    return losses_one_by_one(objective.loss, outputs, examples.targets)
