"""How good a model is on public records."""

import torch
from torch import Tensor, nn

from dpsur.distributed import ALONE, Ranks
from dpsur.errors import InvalidInputError
from dpsur.functional.call import call
from dpsur.functional.parameters import Params
from dpsur.functional.problem import LossFunction, Problem, example_losses, mode, output_rows
from dpsur.functional.records import Examples
from dpsur.functional.tree import describe_rows, map_tensors
from dpsur.runs.data import check_labels, check_tokens


def check_fits(model: nn.Module, examples: Examples, loss: LossFunction, name: str) -> None:
    """Refuse records that a model cannot be applied to, before all of them are tried."""
    device = next(model.parameters()).device
    record = map_tensors(lambda value: value[:1].to(device), examples.inputs)
    try:
        with torch.no_grad(), mode(model, training=False):
            outputs = output_rows(call(model, record))
    except InvalidInputError:
        raise
    except Exception as error:  # a model may raise anything about inputs that it was not made for
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise InvalidInputError(
            f"the model cannot be applied to records of {name}, of "
            f"{describe_rows(record)} ({reason}); name the task that it "
            "was trained on"
        ) from None
    check_labels(examples, outputs, loss, name)
    check_tokens(model, examples, name)


def evaluate(
    problem: Problem, params: Params, examples: Examples, ranks: Ranks = ALONE
) -> dict[str, float]:
    """Mean loss and, where targets are class indices, accuracy; each rank evaluates its share."""
    count = len(examples)
    if count < ranks.size:
        ranks = ALONE
    if ranks.size > 1:
        own = ranks.own_range(count)
        examples = examples.part(slice(own.start, own.stop))
    outputs = problem.outputs(params, examples.inputs)

    def mean(values: Tensor) -> float:
        if ranks.size == 1:
            return float(values.mean())
        return float(ranks.sum(values.double().sum()) / count)

    scores = {"loss": mean(example_losses(problem.loss, outputs, examples.targets))}
    one = isinstance(outputs, Tensor) and isinstance(examples.targets, Tensor)
    if one and outputs.dim() == 2 and not examples.targets.dtype.is_floating_point:
        right = outputs.argmax(dim=1) == examples.targets
        scores["accuracy"] = mean(right.to(torch.float64))
    return scores
