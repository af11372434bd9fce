"""How good a model is on public records."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.errors import InvalidInputError
from dpsur.functional.call import call
from dpsur.functional.parameters import Params
from dpsur.functional.problem import (
    EVALUATION_ROWS,
    LossFunction,
    Problem,
    example_losses,
    mode,
    output_rows,
)
from dpsur.functional.records import Examples
from dpsur.functional.tree import concatenate_rows, describe_rows, map_tensors, split_rows
from dpsur.runs.data import check_labels
from dpsur.runs.embedding_check import check_tokens
from dpsur.tasks.schema import RangeLoss

# Losses of targets that are right or wrong, several of them at once or one, and of numbers.
LABEL_LOSSES = (F.binary_cross_entropy_with_logits, F.multilabel_soft_margin_loss)
LABEL_LOSS_MODULES = (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
NUMBER_LOSSES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
NUMBER_LOSS_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, RangeLoss)
# What is shown of the scores first, and how.
SHOWN = {
    "accuracy": "{:.2%}",
    "auc": "{:.4f}",
    "micro_f1": "{:.4f}",
    "subset_accuracy": "{:.2%}",
    "r2": "{:.4f}",
    "mae": "{:.4g}",
    "loss": "{:.4f}",
}


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


def evaluate(problem: Problem, params: Params, examples: Examples) -> dict[str, float]:
    """Mean loss and what else suits the target.

    Class indices: accuracy, and the area under the ROC curve where there are two classes. Targets
    of a binary cross entropy: the same for one label, micro-averaged F1 and the share of records
    with every label right for several. Numbers: R2 and the mean absolute error.
    """
    outputs, targets, losses = [], [], []
    for part in examples.parts(EVALUATION_ROWS):
        outputs.append(problem.outputs(params, part.inputs))
        targets.append(part.targets)
        losses.append(example_losses(problem.loss, outputs[-1], part.targets).double())
    scores = {"loss": float(torch.cat(losses).mean())}
    return scores | score(concatenate_rows(outputs), concatenate_rows(targets), problem.loss)


def score(outputs: Any, targets: Any, loss: LossFunction) -> dict[str, float]:
    """What suits the target, besides the loss; nothing where that is not known."""
    if isinstance(outputs, Mapping):  # of a Hugging Face model
        outputs = outputs.get("logits")
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return {}
    if outputs.dim() == 2 and targets.dim() == 1 and not targets.dtype.is_floating_point:
        scores = {"accuracy": _share(outputs.argmax(dim=1) == targets)}
        if outputs.shape[1] == 2:
            scores |= _area(outputs[:, 1] - outputs[:, 0], targets == 1)
        return scores
    if outputs.shape != targets.shape:
        return {}
    if is_one_of(loss, LABEL_LOSSES, LABEL_LOSS_MODULES):
        return _label_scores(outputs.flatten(1) if outputs.dim() > 1 else outputs, targets)
    if is_one_of(loss, NUMBER_LOSSES, NUMBER_LOSS_MODULES):
        return _number_scores(outputs.double(), targets.double(), getattr(loss, "unit", 1.0))
    return {}


def _label_scores(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    found, wanted = outputs > 0, targets.reshape(outputs.shape) > 0.5
    if outputs.dim() == 1 or outputs.shape[1] == 1:
        area = _area(outputs.reshape(-1), wanted.reshape(-1))
        return {"accuracy": _share((found == wanted).reshape(-1)), **area}
    right, wrong = (found & wanted).sum(), (found != wanted).sum()
    # without any label, found or wanted, nothing is wrong
    f1 = float(2 * right / (2 * right + wrong)) if bool(right + wrong) else 1.0
    return {"micro_f1": f1, "subset_accuracy": _share((found == wanted).all(1))}


def _number_scores(outputs: Tensor, targets: Tensor, unit: float) -> dict[str, float]:
    outputs, targets = outputs.reshape(len(outputs), -1), targets.reshape(len(targets), -1)
    scores = {"mae": float((outputs - targets).abs().mean()) * unit}
    spread = (targets - targets.mean(0)).square().sum(0)
    if bool((spread > 0).all()):
        errors = (outputs - targets).square().sum(0)
        scores = {"r2": float((1 - errors / spread).mean()), **scores}
    return scores


def _area(margins: Tensor, positive: Tensor) -> dict[str, float]:
    """The area under the ROC curve; nothing where all records are of one class."""
    count, total = int(positive.sum()), len(positive)
    if not 0 < count < total or not bool(margins.isfinite().all()):
        return {}
    _, places, repeats = torch.unique(margins, return_inverse=True, return_counts=True)
    last = repeats.cumsum(0).double()
    ranks = (last - (repeats.double() - 1) / 2)[places]  # ties share their mean rank
    area = (ranks[positive].sum() - count * (count + 1) / 2) / (count * (total - count))
    return {"auc": float(area)}


def _share(right: Tensor) -> float:
    return float(right.to(torch.float64).mean())


def is_one_of(loss: Any, functions: tuple[Any, ...], modules: tuple[type, ...]) -> bool:
    """Whether a loss is one of these functions, or of these modules."""
    if isinstance(loss, functools.partial):
        loss = loss.func
    return loss in functions or isinstance(loss, modules)


def model_outputs(model: nn.Module, inputs: Any) -> Any:
    """Outputs of a model in evaluation mode, a bounded number of records at once."""
    device = next(model.parameters()).device
    if not isinstance(inputs, Tensor) and hasattr(inputs, "__array__"):
        values = torch.from_numpy(np.array(inputs))
        weight = next(model.parameters()).dtype
        inputs = values.to(weight) if values.is_floating_point() else values
    with torch.no_grad(), mode(model, training=False):
        parts = [
            output_rows(call(model, map_tensors(lambda value: value.to(device), part)))
            for part in split_rows(inputs, EVALUATION_ROWS)
        ]
    return concatenate_rows(parts)


def shown_scores(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Scores by name in words, the most telling first."""
    names = {"auc": "AUC", "r2": "R2", "mae": "mean absolute error", "micro_f1": "micro F1"}
    return [
        (names.get(name, name.replace("_", " ")), form.format(scores[name]))
        for name, form in SHOWN.items()
        if name in scores
    ]


def describe_scores(scores: Mapping[str, float]) -> str:
    """Scores on one line."""
    return "test " + ", ".join(f"{name} {text}" for name, text in shown_scores(scores))
