"""Checks of records, labels and tokens before a run, each with a remedy."""

import copy
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dpsur import checks
from dpsur.errors import InvalidInputError, UnsupportedModelError, from_custom_code
from dpsur.functional.problem import (
    EVALUATION_ROWS,
    LossFunction,
    call,
    losses_one_by_one,
    mode,
    weight_by_record,
)
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.records import Examples
from dpsur.functional.tree import (
    TensorTree,
    describe_rows,
    device_of,
    map_tensors,
    row_count,
    slice_rows,
    split_rows,
    tensors_of,
)


def check_observers(observers: Any) -> None:
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
        if hasattr(value, "device_mesh"):
            raise UnsupportedModelError(
                f"{name} is split over several processes (fully_shard, tensor parallelism), and "
                "fit trains a copy on each; pass the model unsharded, or train the sharded one "
                "with dpsur.PrivacyEngine"
            )
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
_TRIED = ((0.5, 0), (1.0, 1), (0.0, 0))
ROWS_AT_ONCE = 4096


def loss_on(loss: LossFunction, device: torch.device) -> LossFunction:
    """The loss as it is applied to single records, with what it holds on the device."""
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).to(device)
    return weight_by_record(loss)


def check_loss(loss: LossFunction, outputs: TensorTree, targets: TensorTree) -> None:
    """Refuse a loss that does not give one number with a gradient for one record.

    `outputs` are those for synthetic inputs. Of the targets only shape and type are used. A loss
    passes that works for one of several synthetic targets.
    """
    faults: list[str | Exception] = []
    device = device_of(outputs)
    for values in _TRIED:
        # bound now: a closure in a loop would see the last pair
        def filled(one: Tensor, values: tuple[float, int] = values) -> Tensor:
            value = values[0] if one.dtype.is_floating_point else values[1]
            return torch.full_like(one[:1], value, device=device)

        target = map_tensors(filled, targets)
        fault = _fault(loss, slice_rows(outputs, slice(1)), target)
        if fault is None:
            one = map_tensors(Tensor.detach, slice_rows(outputs, slice(1)))
            with without_memory(loss, one, target):  # of itself, with a gradient
                longer = map_tensors(lambda x: 3 * x + 1 if x.is_floating_point() else x, one)
                _fault(loss, longer, target)
            return
        faults.append(fault)
    if isinstance(faults[0], Exception):
        raise faults[0]
    raise InvalidInputError(faults[0])


def _computed(values: Tensor) -> Tensor:
    """A tensor that, like an output, is no leaf."""
    return values * 1 if values.is_floating_point() else values


@contextmanager
def without_memory(loss: LossFunction, output: TensorTree, target: TensorTree) -> Iterator[None]:
    """Refuse a loss that gives a record another value after it was applied to others."""

    def value() -> Tensor:
        with torch.no_grad(), seeded_globally(0, device_of(output)):
            return loss(map_tensors(_computed, output), target).detach().clone().nan_to_num()

    before = value()
    yield
    if not torch.equal(value(), before):
        raise InvalidInputError(
            "the loss keeps state: it gives a record another value after it was applied to others; "
            "compute it from the arguments of the call and keep nothing"
        )


def check_targets(loss: LossFunction, outputs: TensorTree, targets: TensorTree, name: str) -> None:
    """Refuse records with a target that the loss cannot take, before one of them is drawn.

    A run that such a record ended would reveal that the record is in the data.
    """
    if not tensors_of(targets):
        return
    device = device_of(outputs)

    def repeated(count: int) -> TensorTree:
        return map_tensors(lambda one: one[:1].detach().expand(count, *one.shape[1:]), outputs)

    for part in split_rows(targets, ROWS_AT_ONCE):
        part = map_tensors(lambda value: value.to(device), part)
        try:
            with torch.no_grad(), without_memory(loss, repeated(1), slice_rows(part, slice(1))):
                losses_one_by_one(loss, repeated(row_count(part)), part)
        except (torch.OutOfMemoryError, InvalidInputError):
            raise  # says nothing of the targets
        except Exception as error:  # a custom loss may raise anything
            raise InvalidInputError(
                f"the loss cannot be computed for some target of {name} ({type(error).__name__}); "
                "change the loss or those targets",
                private="".join(traceback.format_exception(error)),
            ) from None  # its words may quote a target


def _fault(loss: LossFunction, output: TensorTree, target: TensorTree) -> str | Exception | None:
    """What is wrong with the loss of one record, or the error that custom code raised."""
    given = describe_rows(output, 1)
    if isinstance(output, Tensor):
        given = f"shape {tuple(output.shape)}"
    about = f"for one record, with outputs of {given} and targets of {describe_rows(target, 1)}"
    leaf = map_tensors(
        lambda x: x.detach().requires_grad_() if x.is_floating_point() else x, output
    )
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # training gives the same warnings
            found: Any = loss(map_tensors(_computed, leaf), target)
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


_TABLES = (nn.Embedding, nn.EmbeddingBag)
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _BeyondTable(Exception):  # noqa: N818
    """The table that a number was looked up in without a row for it, and the number."""


def check_tokens(model: nn.Module, examples: Examples, name: str) -> None:
    """Refuse records with a number that an embedding of the model has no row for.

    First with synthetic records of the least and largest numbers at each place. Where those do not
    fit, a real record is looked for: a model may combine its inputs before it looks them up.
    """
    inputs, place = examples.inputs, next(model.parameters()).device
    # Tables that are no modules are looked up unwatched, and a bad index breaks the CUDA context.
    looks_up = place.type == "cpu" or any(isinstance(one, _TABLES) for one in model.modules())
    if all(value.dtype not in _WHOLE for value in tensors_of(inputs)) or not looks_up:
        return
    if _table_fault(model, map_tensors(partial(_extremes, place), inputs)) is None:
        return
    for part in split_rows(inputs, EVALUATION_ROWS):
        fault = _table_fault(model, map_tensors(lambda value: value.to(place), part))
        if fault is not None:
            where, number = fault
            raise InvalidInputError(
                f"the inputs of {name} hold a number that {where}; fix the tokens or enlarge the "
                "table",
                private=number,
            ) from None


def _extremes(place: torch.device, values: Tensor) -> Tensor:
    """Two records: of the least and of the largest whole numbers; of others a first and a last."""
    if values.dtype not in _WHOLE:
        return torch.stack([values[0], values[-1]]).to(place)
    return torch.stack([values.amin(0), values.amax(0)]).to(place)


def _table_fault(model: nn.Module, inputs: TensorTree) -> tuple[str, str] | None:
    """Which lookup fails, and by which number, which is private."""
    with torch.no_grad(), mode(model, training=False), _watched(model):
        try:
            call(model, inputs)
        except _BeyondTable as found:
            where, number = found.args
            return where, number
        except IndexError as found:
            return "the model cannot look up", str(found)
    return None


@contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    """Have every embedding look at its numbers before it looks them up."""

    def watch(
        name: str, table: nn.Embedding | nn.EmbeddingBag
    ) -> torch.utils.hooks.RemovableHandle:
        rows = table.num_embeddings

        def look(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            if not given or not given[0].numel():
                return
            low, high = int(given[0].min()), int(given[0].max())
            if low < 0 or high >= rows:
                odd = low if low < 0 else high
                raise _BeyondTable(
                    f"the embedding {name or '(root)'} has no row for: it has {rows} rows "
                    f"(0 to {rows - 1})",
                    f"the number {odd}",
                )

        return table.register_forward_pre_hook(look)

    handles = [watch(name, one) for name, one in model.named_modules() if isinstance(one, _TABLES)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
