"""Gradients of a function of a batch, for each record alone.

The function is written for a batch and called as if for a batch of one record. In the record level
one call serves all records. What PyTorch cannot batch (an operation without a batching rule, an `if`
on a record's values) runs one record at a time. Both give each record's gradient from that record
alone; what one record at a time cannot exclude is Python state that a function keeps between
calls, which is looked for (`check_again`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from dpsur.errors import DpsurError, InvalidInputError, UnsupportedModelError
from dpsur.functional.call import use_weights
from dpsur.functional.parameters import Params
from dpsur.functional.problem import forbid_side_effects, without_flattening
from dpsur.functional.process_settings import widen
from dpsur.functional.tree import map_tensors, signature, slice_rows, tensors_of
from dpsur.per_example.contributions import Rows
from dpsur.per_example.record_level import LevelTape, RecordLevel
from dpsur.per_example.tape import Slot, Tape

# Losses of one record that was worked on twice may differ by rounding.
_ROUNDING = 1e-4


class Way(Enum):
    """How a function is run over records, fastest first."""

    LEVEL = "all records at once"
    # the same, where tensors that the code makes itself belong to single records
    OWN_TENSORS = "all records at once, with new tensors for each record"
    ALONE = "one record at a time"


@dataclass
class RecordFunction:
    """A function of a batch, with the modules whose trained weights it uses.

    `function(batch)` returns a loss, one number, or a mapping that holds one under `loss`. `batch`
    is what a collate function makes of one record. `trained` are the parameters to differentiate by,
    by name. The way that works is found with the first batch of a shape, and remembered.
    """

    models: tuple[nn.Module, ...]
    trained: Mapping[str, Tensor]
    ways: dict[object, Way] = field(default_factory=dict)
    why_alone: str | None = None

    @property
    def by_construction(self) -> bool:
        """Whether every call so far was made in the record level."""
        return Way.ALONE not in self.ways.values()

    def tape(
        self,
        function: Callable[[Any], Any],
        batch: Any,
        records: int,
        *,
        params: Params | None = None,
        randomness: Callable[[], AbstractContextManager[Any]] = nullcontext,
        gradients: bool = True,
    ) -> tuple[LevelTape, Tensor, dict[str, Tensor]]:
        """What is known about every record's gradient, their losses, and other outputs.

        Every tensor of `batch` has the records in front. `params` are weights to use in the place of
        the modules' own. Without `gradients` only losses and outputs are found.
        """
        key = (signature(batch), gradients)
        tried = [self.ways[key]] if key in self.ways else list(Way)
        for way in tried:
            run = self._alone if way is Way.ALONE else self._together
            if way is Way.ALONE and key not in self.ways:
                self._say_alone()
            try:
                with randomness():
                    found = run(function, batch, records, params, way, gradients)
            except (DpsurError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever torch cannot batch; the last way shows the rest
                if way is tried[-1]:
                    raise
                self.why_alone = _first_line(error)
                continue
            self.ways[key] = way
            return found
        raise AssertionError("no way was tried")

    def _say_alone(self) -> None:
        logging.getLogger("dpsur.engine").warning(
            "dpsur: the function runs one record at a time, which is slow: %s", self.why_alone
        )

    def _weights(self, params: Params | None) -> tuple[Params, Mapping[str, Tensor]]:
        if params is None:
            return {name: value.detach() for name, value in self.trained.items()}, self.trained
        return params, {**self.trained}

    def _together(
        self,
        function: Callable[[Any], Any],
        batch: Any,
        records: int,
        params: Params | None,
        way: Way,
        gradients: bool,
    ) -> tuple[LevelTape, Tensor, dict[str, Tensor]]:
        tape = LevelTape(*self._weights(params)[:1], records, self.trained)
        level = RecordLevel(tape, self.models, own_tensors=way is Way.OWN_TENSORS)
        with torch.set_grad_enabled(gradients):
            with level.entered():
                hidden = map_tensors(level.hide, batch, otherwise=_keep)
                loss, others = _outputs(function(hidden))
                del hidden
                losses = widen(level.show(loss).reshape(records))
                figures = {name: level.show(value).detach() for name, value in others.items()}
                del loss, others
            if gradients and losses.requires_grad:
                torch.autograd.grad(losses.sum(), tape.leaves, allow_unused=True)
        losses = losses.detach()
        tape.spoiled = losses.isnan()
        tape.leaves.clear()
        tape.forget_copies()
        level.check_survivors()
        return tape, losses, figures

    def _alone(
        self,
        function: Callable[[Any], Any],
        batch: Any,
        records: int,
        params: Params | None,
        way: Way,  # noqa: ARG002
        gradients: bool,
    ) -> tuple[LevelTape, Tensor, dict[str, Tensor]]:
        """One backward pass per record: slow, and right for every function without state."""
        values, _ = self._weights(params)
        leaves = dict(self.trained)
        if params is not None:
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        names = {id(value): name for name, value in self.trained.items()}
        rows: list[Sequence[Tensor]] = []
        losses: list[Tensor] = []
        figures: list[dict[str, Tensor]] = []

        def one(record: int) -> Tensor:
            loss, others = _outputs(function(slice_records(batch, record)))
            figures.append({name: value.detach() for name, value in others.items()})
            return widen(loss.reshape(()))

        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(gradients))
            for model in self.models:
                stack.enter_context(forbid_side_effects(model, {}))
                stack.enter_context(without_flattening(model.modules()))
                if params is not None:
                    stack.enter_context(
                        use_weights(
                            model, lambda _, own: leaves.get(names.get(id(own), ""), own.detach())
                        )
                    )
            state = torch.get_rng_state()
            for record in range(records):
                loss = one(record)
                losses.append(loss.detach())
                if gradients:
                    rows.append(
                        torch.autograd.grad(
                            loss, list(leaves.values()), allow_unused=True, materialize_grads=True
                        )
                        if loss.requires_grad
                        else [torch.zeros_like(value) for value in leaves.values()]
                    )
            torch.set_rng_state(state)
            with torch.no_grad():
                check_again(losses[0], one(0))
        figures.pop()
        tape = LevelTape(values, records)
        if gradients:
            stacked = (torch.stack(column) for column in zip(*rows, strict=True))
            for name, each in zip(leaves, stacked, strict=True):
                tape.add(Slot(name), Rows(widen(each)))
        found = torch.stack(losses)
        tape.spoiled = found.isnan()
        together = {name: torch.stack([f[name] for f in figures]) for name in figures[0]}
        return tape, found, together


def check_again(first: Tensor, again: Tensor) -> None:
    """Refuse a function that gives a record another loss after it has seen others."""
    same = torch.isclose(
        first.double(), again.double().to(first.device), rtol=_ROUNDING, atol=1e-6, equal_nan=True
    )
    if not bool(same):
        raise UnsupportedModelError(
            "the function keeps state between calls: it gives a record another loss after it has "
            "seen other records, so clipping would not bound what one of them can change; compute "
            "everything from the batch and the model, and keep nothing"
        )


def _outputs(found: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and other tensors of a mapping that holds it."""
    others: dict[str, Tensor] = {}
    if isinstance(found, Mapping):
        if "loss" not in found:
            raise InvalidInputError(
                f"the function returned a mapping without 'loss' ({', '.join(map(str, found))})"
            )
        others = {
            str(name): value
            for name, value in found.items()
            if name != "loss" and isinstance(value, Tensor)
        }
        found = found["loss"]
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise InvalidInputError(
            "the function must return the loss, a tensor of one number, or a mapping with 'loss'; "
            f"it returned {type(found).__name__}{shape}: reduce it with .mean() or .sum()"
        )
    return found, others


def slice_records(batch: Any, record: int) -> Any:
    """One record of a batch whose tensors have the records in front."""
    return map_tensors(lambda value: value[record], batch, otherwise=_keep)


def _keep(value: Any) -> Any:
    return value


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:200].rstrip(".")
