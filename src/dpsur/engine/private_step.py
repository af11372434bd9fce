"""`engine.private_step`: a loss of a model and a batch, as one private step.

    @engine.private_step
    def step(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    for batch in loader:
        step(batch)

The function is written for a batch and runs in the record level, where it sees a batch of one
record. The loader collates each record alone and yields a `PrivateBatch`, which nothing but a
private step can open.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from dpsur.errors import InvalidInputError, StepError
from dpsur.functional.tree import map_tensors, tensors_of
from dpsur.per_example.augmentation import Augment, augmented

if TYPE_CHECKING:
    from dpsur.engine.steps import PrivateLoop

Function = Callable[..., Any]
# Lengths that records are padded to: about a quarter of the work is padding, at most a half.
LENGTHS = tuple(sorted({base << power for power in range(24) for base in (8, 12)}))


class Unreadable:
    """In the place of what is no tensor: Python code could carry it over to other records."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"<{self._kind} of a private record>"

    def __getattr__(self, name: str) -> Any:
        raise InvalidInputError(
            f"the batch holds a {self.__dict__.get('_kind')}, which a private step cannot use "
            f"(.{name}); turn it into a tensor in the data set or the collate function"
        )


@dataclass(frozen=True)
class Group:
    """Records of one shape: every tensor has them in front of what the collate function gives.

    With persons each is what it gives for the records of one of them.
    """

    records: int
    batch: Any


@dataclass(frozen=True, eq=False)
class PrivateBatch:
    """The records of a step, for a private step alone. Their number is private."""

    groups: tuple[Group, ...]

    def __repr__(self) -> str:
        return "PrivateBatch(opened by engine.private_step)"

    def __iter__(self) -> Iterator[Any]:
        raise StepError(
            "a batch of the private loader is opened by a private step alone: pass it on, as in "
            "`step(batch)`, and take it apart inside the function"
        )

    def __contains__(self, _: object) -> bool:
        return False  # what it holds is nobody's business

    def to(self, *args: Any, **kwargs: Any) -> "PrivateBatch":
        """The same records on a device; a private step moves them by itself."""
        return self._map(lambda value: value.to(*args, **kwargs))

    def pin_memory(self, *_: Any) -> "PrivateBatch":
        """The same records in pinned memory."""
        return self._map(lambda value: value.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> "PrivateBatch":
        return PrivateBatch(
            tuple(
                Group(group.records, map_tensors(change, group.batch, otherwise=_keep))
                for group in self.groups
            )
        )

    @property
    def records(self) -> int:
        """Private."""
        return sum(group.records for group in self.groups)


@dataclass(frozen=True)
class CollateAlone:
    """Collates each record alone and groups records of one shape.

    Texts are padded to the next of a few public lengths, each by its own length: `pad` gives the
    value for each tensor that is padded in its last dimension, and `None` pads nothing. With
    `persons` a list of records is collated for each of them, as one batch.
    """

    collate: Callable[[list[Any]], Any]
    pad: Mapping[str, float] | None = None
    views: int = 1
    persons: bool = False

    def __call__(self, records: Sequence[Any]) -> PrivateBatch:
        """What the loader yields."""
        if not records:
            return PrivateBatch(())
        if self.collate is default_collate and self.pad is None and not self.persons:
            try:  # which joins each record's tensors as they are, or raises; all tensors or nothing
                tensors = map_tensors(
                    lambda value: value.unsqueeze(1), default_collate(list(records))
                )
                return PrivateBatch((Group(len(records), self._viewed(tensors)),))
            except (RuntimeError, TypeError):
                pass
        groups: dict[object, list[Any]] = {}
        for record in records:
            own = record if self.persons else [record]
            alone = self._padded(_readable(self.collate(own)))
            groups.setdefault(_shape(alone), []).append(alone)
        return PrivateBatch(
            tuple(
                Group(
                    len(group),
                    self._viewed(
                        map_tensors(lambda *values: torch.stack(values), *group, otherwise=_keep)
                    ),
                )
                for group in groups.values()
            )
        )

    def _viewed(self, batch: Any) -> Any:
        if self.views == 1:
            return batch
        return map_tensors(
            lambda value: value.repeat_interleave(self.views, 1) if value.dim() > 1 else value,
            batch,
            otherwise=_keep,
        )

    def _padded(self, alone: Any) -> Any:
        if self.pad is None or not isinstance(alone, Mapping):
            return alone
        found = {}
        for name, value in alone.items():
            if name in self.pad and isinstance(value, Tensor) and value.dim() > 1:
                length = value.shape[-1]
                more = next((each for each in LENGTHS if each >= length), length) - length
                value = F.pad(value, (0, more), value=self.pad[name])
            found[name] = value
        return found


def collate_apart(collate: Callable[[list[Any]], Any], records: list[Any]) -> Any:
    """A batch of several records, in which each is what it is when it is collated alone.

    A collate function may add padding to a record's tensors, before or after them, and nothing
    else. Padding to the longest record of a batch is the one way left in which records meet.
    """
    joined = collate(records)
    if collate is default_collate or len(records) == 1:
        return joined
    together, parts = tensors_of(joined), [tensors_of(collate([record])) for record in records]
    same = bool(together) and all(len(part) == len(together) for part in parts)
    if not same or not all(
        _is_row(values, row, len(records), part[place])
        for row, part in enumerate(parts)
        for place, values in enumerate(together)
    ):
        raise InvalidInputError(
            "the collate function gives a record other tensors when other records are in the "
            "batch, so that one record could change the gradients of others; treat each record by "
            "itself (padding may be added), or use engine.private_step, which collates each alone"
        )
    return joined


def _is_row(values: Tensor, row: int, rows: int, alone: Tensor) -> bool:
    """Whether a record's tensor is a row of a batch, up to padding."""
    if not values.dim() or not alone.dim() or len(values) != rows or len(alone) != 1:
        return values.shape == alone.shape and torch.equal(values, alone)
    found, own = values[row], alone[0]
    if found.dim() != own.dim() or any(a < b for a, b in zip(found.shape, own.shape, strict=True)):
        return False
    first = tuple(slice(0, size) for size in own.shape)
    last = tuple(slice(a - b, a) for a, b in zip(found.shape, own.shape, strict=True))
    return any(torch.equal(found[part].nan_to_num(), own.nan_to_num()) for part in (first, last))


def padding_of(collate: Any) -> dict[str, float] | None:
    """The values that a collator of Hugging Face pads with; None for any other function."""
    tokenizer = getattr(collate, "tokenizer", None)
    padding = getattr(tokenizer, "pad_token_id", None)
    if padding is None:
        return None
    ignored = getattr(collate, "label_pad_token_id", -100)
    return {
        "input_ids": padding,
        "attention_mask": 0,
        "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
        "special_tokens_mask": 1,
        "labels": ignored,
    }


def _readable(batch: Any) -> Any:
    def other(value: Any) -> Any:
        if isinstance(value, (bool, int, float)):
            return torch.tensor([value])
        return Unreadable(type(value).__name__)

    return map_tensors(lambda value: value, batch, otherwise=other)


def opened(batch: Any) -> PrivateBatch:
    """A batch that the loop has opened, with a row per record in every tensor."""
    tensors = tensors_of(batch)
    rows = len(tensors[0]) if tensors and tensors[0].dim() else 0
    if not rows or any(not value.dim() or len(value) != rows for value in tensors):
        raise InvalidInputError(
            "a private step was given tensors with different numbers of rows; pass it the batch "
            "that the loader yields, or tensors with a row per record"
        )
    one = map_tensors(lambda value: value.unsqueeze(1), batch, otherwise=_keep)
    return PrivateBatch((Group(rows, one),))


@dataclass(eq=False)
class PrivateStep:
    """A function of (model, batch, ...) that makes one private step each time it is called.

    Calling it with a batch of the private loader clips each record's gradient, adds noise, charges
    the step and updates the weights. Further arguments are passed on to the function: numbers that
    change during training, such as the weight of a KL term, belong there. It returns the loss and
    other numbers of the function as means over the records of the batch. They are private: do not
    publish them, and decide nothing by them.
    """

    function: Function
    engine: "PrivateLoop" = field(repr=False)
    # the most records that are worked on at once, where memory is short
    max_physical_batch_size: int | None = None
    capture: bool = True  # as CUDA graphs, on a GPU

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidInputError("private_step takes a function of (model, batch)")
        update_wrapper(self, self.function)

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Make a step with a batch of the private loader."""
        figures = self.engine.clip_batch(self, batch, args, kwargs)
        self.engine.update()
        return figures

    @property
    def module(self) -> nn.Module | None:
        """The model that the function is called with; None before `make_private`."""
        return getattr(self.engine, "_module", None)

    def accumulate(self, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """All of a step but the update, for a trainer that calls `optimizer.step()` itself."""
        return self.engine.clip_batch(self, batch, args, kwargs)


def modules_of(function: Function) -> list[nn.Module]:
    """Other modules that a function uses by name: a teacher, a generator."""
    try:
        seen = inspect.getclosurevars(inspect.unwrap(function))
    except TypeError:  # no Python function
        return []
    found = {**seen.globals, **seen.nonlocals}
    return [value for value in found.values() if isinstance(value, nn.Module)]


def means(parts: list[tuple[Tensor, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Means over records of what a function returned for some of them at a time."""
    if not parts:
        return {"loss": torch.tensor(torch.nan)}
    names = [name for name in parts[0][1] if all(name in figures for _, figures in parts)]
    found = {"loss": torch.cat([losses for losses, _ in parts]).mean()}
    for name in names:
        values = [figures[name] for _, figures in parts]
        if all(value.is_floating_point() and value[0].numel() == 1 for value in values):
            found[name] = torch.cat([value.reshape(len(value)) for value in values]).mean()
    return found


@contextmanager
def augmenting(module: Any, augment: Augment | None) -> Iterator[None]:
    """Change the inputs of a module while a step runs, each record by itself."""
    if augment is None:
        yield
        return

    def change(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs:
            return args, augmented(augment, kwargs)
        found = augmented(augment, args[0] if len(args) == 1 else args)
        return (found if type(found) is tuple else (found,)), kwargs

    handle = module.register_forward_pre_hook(change, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def _shape(alone: Any) -> object:
    return tuple((value.shape, value.dtype) for value in tensors_of(alone))


def _keep(value: Any) -> Any:
    return value
