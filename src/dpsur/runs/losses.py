"""The loss of a run, tried on made-up records before a real one is looked at."""

import copy
import traceback
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from dpsur.core.gradients.one_pass import losses_one_by_one
from dpsur.core.problem import weighted_by_record
from dpsur.core.types import LossFunction
from dpsur.errors import InvalidInputError

# Targets to try: a loss may be undefined for some of them, such as the logarithm of 0.
_FRACTIONS = (0.5, 1.0, 0.0)
_COUNTS = (0, 1)
ROWS_AT_ONCE = 4096


def loss_on(loss: LossFunction, device: torch.device) -> LossFunction:
    """The loss as it is applied to single records, with what it holds on the device."""
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).to(device)
    return weighted_by_record(loss)


def check_loss(loss: LossFunction, outputs: Tensor, targets: Tensor) -> None:
    """Refuse a loss that does not give one number with a gradient for one record.

    `outputs` are those for made-up inputs. Of the targets only shape and type are looked at. A loss
    passes that works for one of several made-up targets.
    """
    values = _FRACTIONS if targets.dtype.is_floating_point else _COUNTS
    faults = []
    for value in values:
        target = torch.full_like(targets[:1], value, device=outputs.device)
        fault = _fault(loss, outputs[:1], target)
        if fault is None:
            return
        faults.append(fault)
    raise InvalidInputError(faults[0])


def check_targets(loss: LossFunction, outputs: Tensor, targets: Tensor, name: str) -> None:
    """Refuse records with a target that the loss cannot take, before one of them is drawn.

    A run that such a record ended would tell by its end that the record was there.
    """
    for piece in torch.split(targets, ROWS_AT_ONCE):
        guesses = outputs[:1].detach().expand(len(piece), *outputs.shape[1:])
        try:
            with torch.no_grad():
                losses_one_by_one(loss, guesses, piece.to(outputs.device))
        except torch.OutOfMemoryError:
            raise  # says nothing of the targets
        except Exception as error:  # whatever a loss of a user's own may raise
            raise InvalidInputError(
                f"the loss cannot be computed for some target of {name} ({type(error).__name__}); "
                "change the loss or those targets",
                private="".join(traceback.format_exception(error)),
            ) from None  # its words may quote a target


def _fault(loss: LossFunction, output: Tensor, target: Tensor) -> str | None:
    """What is wrong with the loss of one record, if anything."""
    about = (
        f"for one record, with outputs of shape {tuple(output.shape)} and targets of shape "
        f"{tuple(target.shape)} and type {target.dtype}"
    )
    leaf = output.detach().requires_grad_()
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training gives the same warnings
            found: Any = loss(leaf * 1, target)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"the loss cannot be computed {about}: {reason}; change the loss or the targets"
    if not isinstance(found, Tensor):
        kind = type(found).__name__
        return f"the loss must return a tensor of one number, got {kind} {about}; use torch for it"
    if found.numel() != 1:
        return (
            f"the loss must return one number, got the shape {tuple(found.shape)} {about}; reduce "
            "it with .mean() or .sum()"
        )
    if not found.requires_grad:
        return (
            f"the loss has no gradient {about}: it does not depend on the outputs, or was "
            "detached from them; compute it from the outputs by operations of torch"
        )
    if not bool(found.isfinite()):
        return f"the loss is {found.item()} {about}; use a loss that is finite"
    return None
