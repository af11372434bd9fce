"""How good a model is on public records.

Noisy test figures of private records that were held out, released beside the weights.

Whether a record is held out follows from its own values alone, by a keyed hash. So one record more
or less changes either the training records or those held out, on its own, and never both.

Formal guarantee: the weights are those of a run on the training records, and the figures one
Gaussian mechanism on the others, given the weights. For a record of the first kind the figures are
post-processing of the weights; for one of the second kind the weights have nothing to do with it.
Both together have the larger of the two epsilons (parallel composition), and the noise of the
figures is calibrated to that of the run. Like N, the number of records held out counts as public.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.errors import InvalidInputError
from dpsur.functional.persons import record_loss
from dpsur.functional.problem import (
    EVALUATION_ROWS,
    LossFunction,
    Problem,
    call,
    example_losses,
    mode,
    output_rows,
)
from dpsur.functional.records import Examples
from dpsur.functional.tree import Params, concatenate_rows, describe_rows, map_tensors, split_rows
from dpsur.mechanism import gaussian
from dpsur.mechanism.streams import Stream
from dpsur.per_example import ClippedSum
from dpsur.privacy.events import Gaussian, event_to_json
from dpsur.privacy.search import least_noise
from dpsur.privacy.statement import holdout_cost, stated_holdout
from dpsur.runs.data import check_labels, check_tokens, is_one_of, keyed_draws
from dpsur.tasks.schema import RangeLoss

# Losses of targets that are right or wrong, several of them at once or one, and of numbers.
LABEL_LOSSES = (
    *(F.binary_cross_entropy_with_logits, F.multilabel_soft_margin_loss),
    *(nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss),
)
NUMBER_LOSSES = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, RangeLoss),
)
CLASS_LOSSES = (F.cross_entropy, nn.CrossEntropyLoss)
# How scores are shown, the most telling first.
SHOWN = {
    "accuracy": ("accuracy", "{:.2%}"),
    "base_rate": ("share of the most frequent class", "{:.2%}"),
    "auc": ("AUC", "{:.4f}"),
    "micro_f1": ("micro F1", "{:.4f}"),
    "subset_accuracy": ("subset accuracy", "{:.2%}"),
    "r2": ("R2", "{:.4f}"),
    "mae": ("mean absolute error", "{:.4g}"),
    "loss": ("loss", "{:.4f}"),
    "log_loss": ("log loss", "{:.4f}"),
    "constant_log_loss": ("log loss of a constant", "{:.4f}"),
    "calibration_error": ("calibration error", "{:.2%}"),
}
# Classes of which the area under the curve is computed, and bins of confidence.
MOST_CLASSES, CONFIDENCE_BINS = 100, 10


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

    Class indices: accuracy beside the share of the most frequent class, and the area under the ROC
    curve (of each class against the rest, their mean). If the loss is a cross entropy also the log
    loss beside that of a constant, and the calibration error. Targets of a binary cross entropy:
    the same for one label, micro-averaged F1 and the share of records with every label right for
    several. Numbers: R2 and the mean absolute error.
    """
    loss = record_loss(problem.loss)
    outputs, targets, losses = [], [], []
    for part in examples.parts(EVALUATION_ROWS):
        outputs.append(problem.outputs(params, part.inputs))
        targets.append(part.targets)
        losses.append(example_losses(loss, outputs[-1], part.targets).double())
    scores = {"loss": float(torch.cat(losses).mean())}
    return scores | score(concatenate_rows(outputs), concatenate_rows(targets), loss)


def score(outputs: Any, targets: Any, loss: LossFunction) -> dict[str, float]:
    """What suits the target, besides the loss; nothing where that is not known."""
    if isinstance(outputs, Mapping):  # of a Hugging Face model
        outputs = outputs.get("logits")
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return {}
    if outputs.dim() == 2 and targets.dim() == 1 and not targets.dtype.is_floating_point:
        return _class_scores(outputs, targets, is_one_of(loss, CLASS_LOSSES))
    if outputs.shape != targets.shape:
        return {}
    if is_one_of(loss, LABEL_LOSSES):
        return _label_scores(outputs.flatten(1) if outputs.dim() > 1 else outputs, targets)
    if is_one_of(loss, NUMBER_LOSSES):
        return _number_scores(outputs.double(), targets.double(), getattr(loss, "unit", 1.0))
    return {}


def _class_scores(outputs: Tensor, targets: Tensor, has_probabilities: bool) -> dict[str, float]:
    """Scores of class indices; of probabilities only where the outputs stand for some."""
    classes = outputs.shape[1]
    known = (targets >= 0) & (targets < classes)
    counts = torch.bincount(targets[known], minlength=classes).double()
    scores = {
        "accuracy": float((outputs.argmax(dim=1) == targets).double().mean()),
        "base_rate": float(counts.max() / len(targets)),
    }
    if classes == 2:
        scores |= _area(outputs[:, 1] - outputs[:, 0], targets == 1)
    elif classes <= MOST_CLASSES:
        odds = torch.logit(outputs.double().softmax(1)) if has_probabilities else outputs
        found = [_area(odds[:, one], targets == one) for one in range(classes)]
        areas = [area["auc"] for area in found if area]
        scores |= {"auc": float(np.mean(areas))} if areas else {}
    if has_probabilities and bool(known.all()):
        scores |= _probability_scores(outputs.double().log_softmax(1), targets, counts)
    return scores


def _probability_scores(logs: Tensor, targets: Tensor, counts: Tensor) -> dict[str, float]:
    """Log loss, that of the shares of the classes for everyone, and the calibration error.

    The last is the mean gap between confidence and accuracy over bins of confidence of one width.
    """
    shares = counts / counts.sum()
    best, places = logs.exp().max(1)
    bins = (best * CONFIDENCE_BINS).long().clamp(0, CONFIDENCE_BINS - 1)
    gaps = (places == targets).double() - best
    sums = torch.zeros(CONFIDENCE_BINS, dtype=torch.float64, device=logs.device)
    sums.index_add_(0, bins, gaps.nan_to_num(0.0))
    return {
        "log_loss": float(F.nll_loss(logs, targets)),
        "constant_log_loss": float(torch.special.entr(shares).sum()),
        "calibration_error": float(sums.abs().sum() / len(targets)),
    }


def _label_scores(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    found, wanted = outputs > 0, targets.reshape(outputs.shape) > 0.5
    if outputs.dim() == 1 or outputs.shape[1] == 1:
        logits = outputs.reshape(-1)
        both = torch.stack([torch.zeros_like(logits), logits], dim=1)
        return _class_scores(both, wanted.reshape(-1).long(), has_probabilities=True)
    right, wrong = (found & wanted).sum(), (found != wanted).sum()
    # without any label, found or wanted, nothing is wrong
    f1 = float(2 * right / (2 * right + wrong)) if bool(right + wrong) else 1.0
    return {"micro_f1": f1, "subset_accuracy": float((found == wanted).all(1).double().mean())}


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


def area_of_counts(negative: Tensor, positive: Tensor) -> float:
    """The area under the ROC curve from counts in bins of rising odds; 1/2 without either class."""
    pairs = float(negative.sum() * positive.sum())
    if pairs <= 0:
        return 0.5
    below = negative.cumsum(0) - negative / 2  # ties count half
    return float((positive * below).sum()) / pairs


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
    # the mean loss is the log loss where that is the loss
    hidden = {"loss"} if "log_loss" in scores else set()
    return [
        (words, form.format(scores[name]))
        for name, (words, form) in SHOWN.items()
        if name in scores and name not in hidden
    ]


def describe_scores(scores: Mapping[str, float], records: int) -> str:
    shown = ", ".join(f"{name} {text}" for name, text in shown_scores(scores))
    return f"test {shown} ({records:,} records)"


def objection(scores: Mapping[str, float]) -> str | None:
    """What must be said of a model that is no better than a constant; None of others."""
    log_loss, constant = scores.get("log_loss"), scores.get("constant_log_loss")
    if log_loss is not None and constant is not None and not log_loss < constant:
        return (
            f"the log loss {log_loss:.4g} is not below that of a constant ({constant:.4g}): the "
            "shares of the classes are better probabilities than the model's"
        )
    accuracy, base = scores.get("accuracy"), scores.get("base_rate")
    if log_loss is None and accuracy is not None and base is not None and accuracy <= base:
        return (
            f"the accuracy {accuracy:.2%} is that of a constant: the most frequent class has a "
            f"share of {base:.2%}"
        )
    return None


# The key of the draws: they are the same on every machine.
KEY = b"dpsur-holdout/1"
# Bins of the log odds of the second class, and the largest that has a bin of its own.
BINS, MOST_ODDS = 16, 4.5
BASE_RATE = "share of the most frequent class"


def split_off(train: Examples, fraction: float) -> tuple[Examples, Examples]:
    """Records to train on, and about this fraction to hold out, each by its own values."""
    if not isinstance(train.inputs, Tensor) or not isinstance(train.targets, Tensor):
        raise InvalidInputError("holdout needs records of one tensor; leave it out")
    if not 0 < fraction < 1:
        raise InvalidInputError(f"holdout must be above 0 and below 1, got {fraction}")
    held = torch.tensor([draw < fraction for draw in keyed_draws(train, KEY)])
    if not 0 < int(held.sum()) < len(train):
        raise InvalidInputError(
            f"holdout {fraction:g} leaves nothing to train or nothing to test; choose another"
        )
    return train.select(~held), train.select(held)


def check_target(loss: LossFunction) -> None:
    """Refuse a kind of target that there are no noisy figures for, before anything is read."""
    if loss is not F.cross_entropy and not isinstance(loss, RangeLoss):
        raise InvalidInputError(
            "holdout has figures for classes (F.cross_entropy) and for numbers of a schema, not "
            "for this loss; leave it out"
        )


def noisy_figures(
    model: nn.Module,
    records: Examples,
    loss: LossFunction,
    *,
    fraction: float,
    target: tuple[float, float],
    stream: Stream,
) -> dict[str, Any]:
    """What a statement lists: the figures, their noise and what it costs.

    `target` are the epsilon that the figures may cost and its delta.
    """
    outputs = model_outputs(model, records.inputs).double().cpu()
    wanted = records.targets.cpu()
    epsilon, delta = target
    found = least_noise(lambda noise: holdout_cost(noise, delta), epsilon)
    assert found is not None  # a Gaussian alone fits any budget
    # each value in a row is in [0, 1], and of the counts in its end one is 1
    if isinstance(loss, RangeLoss):  # absolute errors in units of the declared range, at most 1
        errors = (outputs - wanted.double().reshape(outputs.shape)).abs().mean(1, keepdim=True) / 2
        rows, sensitivity = errors.nan_to_num(1.0, 1.0).clamp(0, 1), 1.0
    else:
        rows, sensitivity = _class_rows(outputs, wanted), math.sqrt(3)
    assert float(rows.norm(dim=1).max()) <= sensitivity * (1 + 1e-9)
    total = ClippedSum({"sum": rows.sum(0).to(stream.device)}, sensitivity)
    sums = gaussian.add_noise(total, found, stream)["sum"].cpu()
    scale, count = found * sensitivity, len(records)
    if isinstance(loss, RangeLoss):
        unit = 2 * loss.unit
        figures = [_figure("mean absolute error, clipped", sums[0] * unit, scale * unit, count)]
    else:
        figures = _class_figures(sums, scale, count, outputs.shape[1])
    event = event_to_json(Gaussian(found))
    held = {"fraction": fraction, "records": count, "event": event, "figures": figures}
    return stated_holdout(held, delta)


def _loss_bound(classes: int) -> float:
    return 2 * math.log(classes)  # twice the loss of a guess at random


def _class_rows(outputs: Tensor, targets: Tensor) -> Tensor:
    """Right or wrong, the clipped loss over its bound, and a count of one.

    Of two classes the count is in one of the bins of the log odds for each class, of more in one
    for each class. A record whose outputs are not finite is wrong, with the largest loss.
    """
    classes = outputs.shape[1]
    finite = outputs.isfinite().all(1)
    outputs = torch.where(finite[:, None], outputs, torch.zeros_like(outputs))
    right = ((outputs.argmax(1) == targets) & finite).double()
    losses = F.cross_entropy(outputs, targets, reduction="none") / _loss_bound(classes)
    losses = torch.where(finite, losses, torch.ones_like(losses)).clamp(0, 1)
    places = targets
    if classes == 2:
        odds = (outputs[:, 1] - outputs[:, 0]).clamp(-MOST_ODDS, MOST_ODDS)
        bins = ((odds + MOST_ODDS) * BINS / (2 * MOST_ODDS)).long().clamp(0, BINS - 1)
        places = targets * BINS + bins
    counts = F.one_hot(places, classes * BINS if classes == 2 else classes).double()
    return torch.cat([right[:, None], losses[:, None], counts], dim=1)


def _class_figures(sums: Tensor, scale: float, count: int, classes: int) -> list[dict[str, Any]]:
    bound = _loss_bound(classes)
    counts = sums[2:].reshape(classes, -1)
    found = [
        _figure("accuracy", sums[0], scale, count),
        _figure(BASE_RATE, counts.sum(1).max(), scale * math.sqrt(counts.shape[1]), count),
        _figure(f"log loss, clipped at {bound:.4g}", sums[1] * bound, scale * bound, count),
    ]
    if classes == 2:
        area = area_of_counts(*counts.clamp(min=0))
        # how far noise moves it, by drawing it again: post-processing of the noisy counts
        drawn = torch.Generator().manual_seed(0)
        again = [
            area_of_counts(
                *(counts + scale * torch.randn(counts.shape, generator=drawn)).clamp(min=0)
            )
            for _ in range(200)
        ]
        error = float(np.std(again))
        found.append({"quantity": "AUC, in bins", "value": area, "standard_error": error})
    return found


def doubts(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the noisy figures say of a model or a schema that may be wrong."""
    found = {row["quantity"]: row for row in figures}
    share, accuracy = found.get(BASE_RATE), found.get("accuracy")
    if share is None or accuracy is None:
        return []
    if share["value"] + 2 * share["standard_error"] >= 1:
        return [
            "one class has nearly all records held out; check the spelling of the other classes in "
            "the schema"
        ]
    if accuracy["value"] <= share["value"]:
        return ["the accuracy is not above the share of the most frequent class, as far as seen"]
    return []


def _figure(name: str, total: Tensor, scale: float, count: int) -> dict[str, Any]:
    """A mean with the standard error of its noise."""
    return {"quantity": name, "value": float(total) / count, "standard_error": scale / count}
