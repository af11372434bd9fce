"""Noisy test figures of private records that were held out, released beside the weights.

Whether a record is held out follows from its own values alone, by a keyed hash. So one record more
or less changes either the training records or those held out, by itself, and never both.

Formal guarantee: the weights are those of a run on the training records, and the figures one
Gaussian mechanism on the others, given the weights. For a record of the first kind the figures are
post-processing of the weights; for one of the second kind the weights have nothing to do with it.
Both together have the larger of the two epsilons (parallel composition), and the noise of the
figures is calibrated to that of the run. Like N, the number of records held out counts as public.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.errors import InvalidInputError
from dpsur.functional.problem import LossFunction
from dpsur.functional.records import Examples
from dpsur.mechanism import gaussian
from dpsur.mechanism.streams import Stream
from dpsur.per_example import ClippedSum
from dpsur.privacy.events import Gaussian, event_to_json
from dpsur.privacy.search import least_noise
from dpsur.privacy.statement import holdout_cost, stated_holdout
from dpsur.runs.evaluation import area_of_counts, model_outputs
from dpsur.tasks.schema import RangeLoss

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
    held = torch.tensor([draw < fraction for draw in _draws(train)])
    if not 0 < int(held.sum()) < len(train):
        raise InvalidInputError(
            f"holdout {fraction:g} leaves nothing to train or nothing to test; choose another"
        )
    return train.select(~held), train.select(held)


def _draws(records: Examples) -> list[float]:
    inputs, targets = (
        np.ascontiguousarray(part.detach().cpu().numpy()).reshape(len(records), -1)
        for part in (records.inputs, records.targets)
    )
    found = []
    for row, target in zip(inputs, targets, strict=True):
        digest = hashlib.blake2b(row.data, digest_size=8, key=KEY)
        digest.update(target.data)
        found.append((int.from_bytes(digest.digest(), "little") >> 11) / 2**53)
    return found


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
    rows, names = (
        (_number_rows(outputs, wanted), "number")
        if isinstance(loss, RangeLoss)
        else (_class_rows(outputs, wanted), "classes")
    )
    # each value in a row is in [0, 1], and of the counts in its end one is 1
    sensitivity = 1.0 if names == "number" else math.sqrt(3)
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


def _number_rows(outputs: Tensor, targets: Tensor) -> Tensor:
    """The absolute error of each record in units of the declared range, at most 1."""
    errors = (outputs - targets.double().reshape(outputs.shape)).abs().mean(1, keepdim=True) / 2
    return errors.nan_to_num(1.0, 1.0).clamp(0, 1)


def loss_bound(classes: int) -> float:
    """What losses are clipped at: twice that of a guess at random."""
    return 2 * math.log(classes)


def _class_rows(outputs: Tensor, targets: Tensor) -> Tensor:
    """Right or wrong, the clipped loss over its bound, and a count of one.

    Of two classes the count is in one of the bins of the log odds for each class, of more in one
    for each class. A record whose outputs are not finite is wrong, with the largest loss.
    """
    classes = outputs.shape[1]
    finite = outputs.isfinite().all(1)
    outputs = torch.where(finite[:, None], outputs, torch.zeros_like(outputs))
    right = ((outputs.argmax(1) == targets) & finite).double()
    losses = F.cross_entropy(outputs, targets, reduction="none") / loss_bound(classes)
    losses = torch.where(finite, losses, torch.ones_like(losses)).clamp(0, 1)
    places = targets
    if classes == 2:
        odds = (outputs[:, 1] - outputs[:, 0]).clamp(-MOST_ODDS, MOST_ODDS)
        bins = ((odds + MOST_ODDS) * BINS / (2 * MOST_ODDS)).long().clamp(0, BINS - 1)
        places = targets * BINS + bins
    counts = F.one_hot(places, classes * BINS if classes == 2 else classes).double()
    return torch.cat([right[:, None], losses[:, None], counts], dim=1)


def _class_figures(sums: Tensor, scale: float, count: int, classes: int) -> list[dict[str, Any]]:
    bound = loss_bound(classes)
    counts = sums[2:].reshape(classes, -1)
    found = [
        _figure("accuracy", sums[0], scale, count),
        _figure(
            BASE_RATE,
            counts.sum(1).max(),
            scale * math.sqrt(counts.shape[1]),
            count,
        ),
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
