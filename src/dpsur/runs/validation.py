"""What a run is given, checked before a record is drawn: arguments and loss."""

import copy
import os
import traceback
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpsur import checks
from dpsur.errors import InvalidInputError, UnsupportedModelError, from_custom_code
from dpsur.functional.problem import LossFunction, weighted_by_record
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.side_effects import refuse_memory
from dpsur.per_example.one_pass import losses_one_by_one


def check_single_process() -> None:
    """Refuse to be one of several processes: each would train, and spend, by itself."""
    given = os.environ.get("WORLD_SIZE", "1")
    if given.isdecimal() and int(given) > 1:
        raise InvalidInputError(
            f"WORLD_SIZE is {given}: a run takes one process, and several (torchrun) would each "
            "spend the budget on a separate model; start it without torchrun, or unset WORLD_SIZE"
        )


def check_observers(observers: Any) -> None:
    """Refuse observers of `fit` that are none."""
    if not isinstance(observers, (list, tuple)):
        given = checks.shown(observers)
        raise InvalidInputError(f"observers must be a list, got {given}; write [observer]")
    for observer in observers:
        missing = [
            name
            for name in ("started", "trials", "evaluated")
            if not callable(getattr(observer, name, None))
        ]
        if isinstance(observer, type) or missing:
            raise InvalidInputError(
                f"observers must have the methods started, trials and evaluated, got "
                f"{checks.shown(observer)}; pass an instance of a class like dpsur.Observer"
            )


def check_is_loss(loss: Any) -> None:
    """Refuse what is not a loss function."""
    example = "a function such as F.cross_entropy or a module such as nn.CrossEntropyLoss()"
    if isinstance(loss, type):
        raise InvalidInputError(
            f"loss is the class {loss.__name__}, not a loss; create an instance: {loss.__name__}()"
        )
    if not callable(loss):
        raise InvalidInputError(f"loss must be {example}, got {checks.shown(loss)}")


def check_module(model: Any) -> None:
    """Refuse what is not a network, or one with uninitialised weights or sparse gradients."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise UnsupportedModelError(
            f"the model must be a torch.nn.Module, got {given}; build the network and pass it in"
        )
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            raise UnsupportedModelError(
                f"{name} has no shape yet, as in lazy modules; call the model once on inputs of "
                "the right shape before it is passed in"
            )
        if value.is_meta:
            raise UnsupportedModelError(
                f"{name} is on the device meta and holds no numbers; build the model on the cpu, "
                "or use model.to_empty(device='cpu') and initialise it"
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UnsupportedModelError(
                f"module {name or '(root)'} ({type(module).__name__}) makes sparse gradients, to "
                "which noise cannot be added; build it with sparse=False"
            )


# Targets to try: a loss may be undefined for some of them, such as the logarithm of 0.
_FRACTIONS = (0.5, 1.0, 0.0)
_COUNTS = (0, 1)
ROWS_AT_ONCE = 4096
# Sizes of synthetic batches on which a loss is called to see whether it keeps state.
_ROWS = (2, 1, 3)


def loss_on(loss: LossFunction, device: torch.device) -> LossFunction:
    """The loss as it is applied to single records, with what it holds on the device."""
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).to(device)
    return weighted_by_record(loss)


def check_loss(loss: LossFunction, outputs: Tensor, targets: Tensor) -> None:
    """Refuse a loss that does not give one number with a gradient for one record.

    `outputs` are those for synthetic inputs. Of the targets only shape and type are used. A loss
    passes that works for one of several synthetic targets.
    """
    values = _FRACTIONS if targets.dtype.is_floating_point else _COUNTS
    faults: list[str | Exception] = []
    for value in values:
        target = torch.full_like(targets[:1], value, device=outputs.device)
        fault = _fault(loss, outputs[:1], target)
        if fault is None:
            _check_memory(loss, outputs.detach(), target)
            return
        faults.append(fault)
    if isinstance(faults[0], Exception):
        raise faults[0]
    raise InvalidInputError(faults[0])


def _check_memory(loss: LossFunction, outputs: Tensor, target: Tensor) -> None:
    """Refuse a loss that remembers records: by what it holds, and by the values that it gives."""

    def call(loss: LossFunction, number: int) -> None:
        """As training does, with and without gradients."""
        count = _ROWS[number]
        rows = outputs[(torch.arange(count, device=outputs.device) + number) % len(outputs)]
        leaf = (rows * (1 - 0.1 * number)).requires_grad_()
        targets = target.expand(count, *target.shape[1:])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.enable_grad():
                total = losses_one_by_one(loss, leaf * 1, targets).sum()
                torch.autograd.grad(total, leaf, allow_unused=True)
                loss(leaf[:1] * 1, target)
            with torch.no_grad():
                losses_one_by_one(loss, leaf.detach(), targets)

    def value() -> Tensor:
        with torch.no_grad(), seeded_globally(0, outputs.device):
            return loss(outputs[:1] * 1, target).detach().clone()

    before = value()
    with seeded_globally(0, outputs.device):
        refuse_memory("loss", loss, call, InvalidInputError)
    if not torch.equal(value().nan_to_num(), before.nan_to_num()):
        raise InvalidInputError(
            "the loss gives the same record another value after it was applied to others: it keeps "
            "state; compute it from the arguments of the call and keep nothing"
        )


def check_targets(loss: LossFunction, outputs: Tensor, targets: Tensor, name: str) -> None:
    """Refuse records with a target that the loss cannot take, before one of them is drawn.

    A run that such a record ended would reveal that the record is in the data.
    """
    for rows in torch.split(targets, ROWS_AT_ONCE):
        guesses = outputs[:1].detach().expand(len(rows), *outputs.shape[1:])
        try:
            with torch.no_grad():
                losses_one_by_one(loss, guesses, rows.to(outputs.device))
        except torch.OutOfMemoryError:
            raise  # says nothing of the targets
        except Exception as error:  # a custom loss may raise anything
            raise InvalidInputError(
                f"the loss cannot be computed for some target of {name} ({type(error).__name__}); "
                "change the loss or those targets",
                private="".join(traceback.format_exception(error)),
            ) from None  # its words may quote a target


def _fault(loss: LossFunction, output: Tensor, target: Tensor) -> str | Exception | None:
    """What is wrong with the loss of one record, or the error that custom code raised."""
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
        if from_custom_code(error):
            error.add_note(f"dpsur: raised when the loss was tried on synthetic values {about}")
            return error
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
