"""Poisson batches of a map-style data set, read by the workers of a `DataLoader`.

For `engine.private_step` the loader collates each record alone and yields a `PrivateBatch`, which
nothing but a private step can open.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from dpsur import checks
from dpsur.errors import Fixed, InvalidInputError, OpaqueBatchError, StepError
from dpsur.functional.tree import contexts_of, keep, map_tensors, row_count, tensors_of
from dpsur.mechanism.gaussian import poisson_sample
from dpsur.mechanism.streams import BATCH, VAL_BATCH, Stream, Streams

if TYPE_CHECKING:
    from dpsur.engine.procedure import Units
    from dpsur.engine.steps import PrivateLoop


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


_OPENED = (
    "a private step alone opens it; pass it on, as in `step(batch)`, and use it inside the "
    "function (to evaluate on records, read the data set itself)"
)


class PrivateBatch:
    """The records of a step, for a private step alone. Their number is private.

    A loop can move it to a device and pass it on. What it holds is for `groups_of`, which a private
    step calls: a loop that read a batch could pass values of some records on to others. Each group
    has records of one shape, in front of what the collate function gives for one record, or for the
    records of one person.
    """

    def __init__(self, groups: tuple[Any, ...], number: object = None) -> None:
        self.__groups = groups
        self.__number = object() if number is None else number  # the same wherever it is moved

    def __repr__(self) -> str:
        return "PrivateBatch(opened by engine.private_step)"

    def __getattr__(self, name: str) -> Any:
        """Only asked for what there is not, such as a data set's own attributes."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise OpaqueBatchError(f"a batch of the private loader has no .{name}: {_OPENED}")

    def __getitem__(self, _: Any) -> Any:
        raise OpaqueBatchError(f"a batch of the private loader cannot be taken apart: {_OPENED}")

    def __iter__(self) -> Iterator[Any]:
        return self[0]  # type: ignore[no-any-return]

    def __len__(self) -> int:
        raise OpaqueBatchError(f"the size of a private batch is private: {_OPENED}")

    def __bool__(self) -> bool:
        return True

    def __contains__(self, _: object) -> bool:
        return False  # what it holds is nobody's business

    def to(self, *args: Any, **kwargs: Any) -> "PrivateBatch":
        return self._map(lambda value: value.to(*args, **kwargs))

    def pin_memory(self, *_: Any) -> "PrivateBatch":
        return self._map(lambda value: value.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> "PrivateBatch":
        moved = tuple(map_tensors(change, group, otherwise=keep) for group in self.__groups)
        return PrivateBatch(moved, self.__number)


def settings_of(batch: Any) -> object:
    """What a batch holds that is no part of it, to be compared: records must have it in common."""
    return _comparable(contexts_of(batch))


def _comparable(value: Any) -> object:
    """Equal to that of an equal value; what cannot be compared is equal to nothing."""
    if isinstance(value, (list, tuple)):
        return type(value), *map(_comparable, value)
    if isinstance(value, dict):
        return type(value), *((name, _comparable(one)) for name, one in value.items())
    plain = isinstance(value, Hashable) and not isinstance(value, Tensor)
    return (type(value), value) if plain else object()


def is_same_batch(batch: PrivateBatch, other: Any) -> bool:
    """Whether a batch is another one, or this one on another device."""
    name = "_PrivateBatch__number"
    return isinstance(other, PrivateBatch) and vars(batch)[name] is vars(other)[name]


def groups_of(batch: PrivateBatch) -> tuple[Any, ...]:
    """The records of a batch, by their shape. Private."""
    return vars(batch)["_PrivateBatch__groups"]  # type: ignore[no-any-return]


def records_in(batch: PrivateBatch) -> int:
    """How many records, or persons, a batch holds. Private."""
    return sum(map(row_count, groups_of(batch)))


def collate_apart(collate: Callable[[list[Any]], Any], records: list[Any]) -> Any:
    """A batch of several records, in which each is what it is when it is collated alone.

    A collate function may add padding to a record's tensors, before or after them, and nothing
    else. Padding to the longest record of a batch is the one way left in which records meet.
    """
    joined = collate(records)
    if collate is default_collate or len(records) == 1:
        return joined
    _check_tensors(joined, joined)
    together, parts = tensors_of(joined), [tensors_of(collate([record])) for record in records]
    same = all(len(part) == len(together) for part in parts)
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


def _padding_of(collate: Any) -> dict[str, float] | None:
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


def _check_tensors(found: Any, joined: Any) -> None:
    if not tensors_of(found):
        raise InvalidInputError(
            f"no tensor was found in what the collate function returns, a {type(joined).__name__}; "
            "return tensors, or a tuple, list, dict or dataclass of them"
        )


def opened(batch: Any) -> PrivateBatch:
    """A batch that the loop has opened, with a row per record in every tensor."""
    tensors = tensors_of(batch)
    rows = len(tensors[0]) if tensors and tensors[0].dim() else 0
    if not rows or any(not value.dim() or len(value) != rows for value in tensors):
        raise InvalidInputError(
            "a private step was given tensors with different numbers of rows; pass it the batch "
            "that the loader yields, or tensors with a row per record"
        )
    return PrivateBatch((map_tensors(lambda value: value.unsqueeze(1), batch, otherwise=keep),))


# Poisson sampling takes their place; it is over the whole data set, for any rank.
_PLAIN_SAMPLERS = (RandomSampler, SequentialSampler, DistributedSampler)


@dataclass(frozen=True)
class Microbatch:
    """Some records (or persons) of one Poisson batch, as the loader is about to yield them."""

    step: int
    rows: int  # records of this microbatch; for none a record of zeros stands in
    before: int  # records in the microbatches before this one
    last: bool
    records: tuple[Any, ...] = ()  # their numbers in the data set


def check_loader(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise InvalidInputError(
            f"data_loader must be a torch.utils.data.DataLoader, got {type(loader).__name__}"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise InvalidInputError(
            "data_loader reads an IterableDataset, from which no Poisson sample can be drawn; use "
            "a map-style data set with __getitem__ and __len__"
        )
    if not isinstance(loader.batch_sampler, BatchSampler) or loader.batch_size is None:
        raise InvalidInputError(
            "data_loader has a custom batch_sampler or no batch_size; Poisson sampling takes "
            "its place: build the loader with batch_size=..."
        )
    if not isinstance(loader.sampler, _PLAIN_SAMPLERS) or getattr(
        loader.sampler, "replacement", False
    ):
        kind = type(loader.sampler).__name__
        raise InvalidInputError(
            f"data_loader has the sampler {kind}, which Poisson sampling would ignore; build the "
            "loader without a sampler (for a part of the data, use torch.utils.data.Subset)"
        )
    if not len(cast(Sized, loader.dataset)):
        raise InvalidInputError("the data set of data_loader is empty")
    if not len(loader):
        raise InvalidInputError(
            f"data_loader yields no batch: batch_size {loader.batch_size} is above the number of "
            "records, and drop_last=True drops what is left; lower batch_size"
        )
    if isinstance(loader.dataset, (Subset, ConcatDataset)):
        places = list(_places(loader.dataset, range(len(loader.dataset))))
        if len(set(places)) < len(places):
            raise InvalidInputError(
                "a record stands at several indices of the data set (a Subset with repeated "
                "indices, or a data set twice in a ConcatDataset), so it would count more than "
                "once; use each record once, and weight it in the loss"
            )


def _places(data: Any, indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where records stand, as far as the classes of torch show it: data sets and indices."""
    if isinstance(data, Subset):
        yield from _places(data.dataset, [int(data.indices[index]) for index in indices])
    elif isinstance(data, ConcatDataset):
        first = 0
        for part in data.datasets:
            size = len(cast(Sized, part))
            own = [index - first for index in indices if first <= index < first + size]
            yield from _places(part, own)
            first += size
    else:
        yield from ((id(data), index % max(1, len(data))) for index in indices)


class PersonData(Dataset[list[Any]]):
    """A data set that is read by persons: for some numbers, a list of these records."""

    def __init__(self, records: Any) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, rows: Sequence[int]) -> list[Any]:
        return [self.records[row] for row in rows]


class JoinedRows(list[Tensor]):
    """Some records of a `TensorDataset`, as `default_collate` joins them."""


class TensorRows(TensorDataset):
    """A `TensorDataset` whose batches are read by index: one read, not one for each record."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        if not rows:
            return []
        # A list as index, or one on another device, would wait for all work of the GPU. Memory
        # that is not pinned has been read when the copy returns.
        index = torch.tensor(rows, device="cpu")
        devices = {tensor.device for tensor in self.tensors}
        places = {device: index.to(device, non_blocking=True) for device in devices}
        return JoinedRows(tensor[places[tensor.device]] for tensor in self.tensors)


class PoissonSampler(Sampler[list[Any]]):
    """Poisson samples by number of the step, in microbatches of a bounded size.

    Every record joins every batch independently with probability `sample_rate`. The number of a
    batch is part of the address of its random numbers, so a batch that was drawn ahead and not used
    is drawn again, not replaced by another. Of several ranks each yields its share of the batch,
    perhaps nothing. Where persons are drawn it is they who join, each with a tuple of records;
    where their records are drawn, at most k of each of them join one by one, and `size` counts
    these.
    """

    def __init__(self, units: "Units", streams: Streams) -> None:
        self.size, self._sample_rate, self.streams = units.held, units.rate, streams
        self.expected = max(1, math.ceil(units.rate * units.held))
        self.persons, self.by_person = units.persons, units.by_person
        self.steps: Sequence[int] = ()
        self.most: int | None = None
        self.planned: deque[Microbatch] = deque()

    @Fixed
    def sample_rate(self) -> float:
        """The rate that is charged, so that nothing can change it."""
        return self._sample_rate

    def units(self, drawn: Tensor, stream: Stream) -> list[Any]:
        """What this rank reads of a sample: records, or tuples of the records of a person."""
        own = stream.ranks.own(drawn)
        if self.persons is None:
            return own.tolist()
        if self.by_person:
            return self.persons.draw(own, stream.uniform)
        return self.persons.draw_joining(stream.uniform)[own].tolist()

    def __iter__(self) -> Iterator[list[Any]]:
        planned: deque[Microbatch] = deque()
        self.planned = planned
        for step in self.steps:
            stream = self.streams.at(step)[BATCH]
            drawn = poisson_sample(self.size, self.sample_rate, stream)
            rows = self.units(drawn, stream)
            # all ranks make as many passes as the one with most records: some need each other's
            most = max(1, -(-len(drawn) // stream.ranks.size))
            size = self.most or most
            for start in range(0, most, size):
                part = rows[start : start + size]
                planned.append(
                    Microbatch(step, len(part), start, start + size >= most, tuple(part))
                )
                yield part

    def __len__(self) -> int:
        return len(self.steps)


class Collate:
    """The user's way to join records; for none of them, zeros in the place of one.

    With `persons` it is given a list of records for each of them. For private steps records are
    collated `alone`, or those of one person, and texts padded to the next of a few public lengths,
    each by its own length: `pad` gives the value for each tensor that is padded in its last
    dimension, and `None` pads nothing.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], dataset: Any, *, persons: bool = False
    ) -> None:
        self.collate, self.dataset, self.persons = collate, dataset, persons
        self.alone, self.pad = False, _padding_of(collate)

    def __call__(self, records: list[Any]) -> Any:
        if isinstance(records, JoinedRows):
            return opened(list(records)) if self.alone else list(records)
        if self.alone:
            return self._alone(records)
        if self.persons:
            records = [record for own in records for record in own]
        if records:
            return collate_apart(self.collate, records)
        # only the shape of the record is used; what is no number becomes empty
        plain = (bool, int, float, str, bytes)
        return map_tensors(
            torch.zeros_like,
            self.collate([self.dataset[0]]),
            otherwise=lambda value: type(value)() if isinstance(value, plain) else None,
        )

    def _alone(self, records: list[Any]) -> PrivateBatch:
        if not records:
            return PrivateBatch(())
        if self.collate is default_collate and self.pad is None and not self.persons:
            # it joins each record's tensors as they are, or raises; all tensors or nothing
            with suppress(RuntimeError, TypeError):
                joined = default_collate(records)
                return PrivateBatch((map_tensors(lambda value: value.unsqueeze(1), joined),))
        groups: dict[object, list[Any]] = {}
        for record in records:
            joined = self.collate(record if self.persons else [record])
            alone = self._padded(map_tensors(lambda value: value, joined, otherwise=_readable))
            _check_tensors(alone, joined)
            shape = tuple((value.shape, value.dtype) for value in tensors_of(alone))
            groups.setdefault((shape, settings_of(alone)), []).append(alone)
        return PrivateBatch(
            tuple(
                map_tensors(lambda *values: torch.stack(values), *group, otherwise=keep)
                for group in groups.values()
            )
        )

    def _padded(self, alone: Any) -> Any:
        if self.pad is None or not isinstance(alone, Mapping):
            return alone
        found = dict(alone)
        for name, padding in self.pad.items():
            value = alone.get(name)
            if isinstance(value, Tensor) and value.dim() > 1:
                length = value.shape[-1]
                more = next((each for each in LENGTHS if each >= length), length) - length
                found[name] = F.pad(value, (0, more), value=padding)
        return found


def _readable(value: Any) -> Any:
    """A number as a tensor; anything else cannot be read."""
    if isinstance(value, (bool, int, float)):
        return torch.tensor([value])
    return Unreadable(type(value).__name__)


_WORKERS = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")


class PrivateLoader(DataLoader[Any]):
    """Yields Poisson batches, one for each step of the optimizer.

    Iterating once yields as many batches as the loader it was made from, or as many as the budget
    still pays for. A batch for which nothing was drawn is a placeholder of one record of zeros: its
    gradient does not count, and its step is noise alone. The batch size is private. Under
    `torch.no_grad()` every record comes once, in order, so that programs which compute their
    training accuracy do; that figure is private.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: PoissonSampler,
        owner: "PrivateLoop",
        length: int,
    ) -> None:
        self.length, self.plain = length, loader
        self.owner, self.poisson = owner, sampler
        self.workers: dict[str, Any] = {name: getattr(loader, name) for name in _WORKERS}
        options = dict(self.workers)
        if loader.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
            options["persistent_workers"] = loader.persistent_workers
        by_person, dataset = sampler.by_person, loader.dataset
        if by_person:
            dataset = PersonData(dataset)
        elif type(dataset) is TensorDataset and loader.collate_fn is default_collate:
            dataset = TensorRows(*dataset.tensors)
        own, self.joined = (
            Collate(loader.collate_fn, loader.dataset, persons=by_person) for _ in range(2)
        )
        super().__init__(
            dataset,
            batch_sampler=sampler,
            collate_fn=own,
            generator=loader.generator,
            **options,
        )

    @Fixed
    def sample_rate(self) -> float:
        return self.poisson.sample_rate

    def collate_alone(self) -> None:
        """Yield opaque batches from now on, for private steps."""
        cast(Collate, self.collate_fn).alone = True

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        own = cast(Collate, self.collate_fn)
        if not own.alone:
            if self.poisson.by_person:
                raise StepError(
                    "loss.backward() cannot tell whose records a batch holds; write the loss as "
                    "engine.private_step, before the loop, or draw records in place of persons: "
                    "make_private(sampling='record')",
                    code="persons-need-private-step",
                )
            if not torch.is_grad_enabled():  # to evaluate a model: no step can be made
                dataset, most = self.plain.dataset, self.poisson.most or self.poisson.expected
                return iter(DataLoader(dataset, most, collate_fn=own.collate, **self.workers))
        self.poisson.steps = self.owner.begin_epoch(self.length)
        return self._batches(super().__iter__())

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        planned = None
        for batch in batches:
            if self.owner.finished():
                return
            if planned is None:  # the sampler has begun by now
                planned = self.poisson.planned
            self.owner.yielded(planned.popleft(), batch)
            yield batch

    def for_test(
        self, step: int | Tensor, rate: float | None, *, here: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """This rank's share of all records, or of a Poisson sample, as the loader joins them.

        Each microbatch comes with its number of records; for none a record of zeros stands in. A
        small sample is read `here` and at once, which takes less time than to start workers. Where
        persons are drawn, those of a microbatch have the same number of rows, and it comes with the
        number of persons.
        """
        sampler = self.poisson
        stream = sampler.streams.at(step)[VAL_BATCH]
        drawn = torch.arange(sampler.size, device="cpu")
        if rate is not None:
            drawn = poisson_sample(sampler.size, rate, stream)
        units = sampler.units(drawn, stream)
        # all ranks make as many passes as the one with most records: some need each other's
        longest = max(1, -(-len(drawn) // stream.ranks.size))
        most = sampler.most or (longest if here else sampler.expected)
        parts = [units[start : start + most] for start in range(0, longest, most)]
        if sampler.by_person:
            sizes: dict[int, list[Any]] = {}
            for unit in units:
                sizes.setdefault(len(unit), []).append(unit)
            parts = [
                same[start : start + most]
                for same in sizes.values()
                for start in range(0, len(same), most)
            ] or [[]]
        data = cast(Any, self.dataset)
        batches: Iterable[Any] = (self.joined([data[row] for row in part]) for part in parts)
        if not here:
            batches = DataLoader(
                self.dataset,
                batch_sampler=cast(Any, parts),
                collate_fn=self.joined,
                **self.workers,
            )
        yield from zip(map(len, parts), batches, strict=True)


@contextmanager
def BatchMemoryManager(  # noqa: N802
    *, data_loader: Any, max_physical_batch_size: int, optimizer: Optimizer
) -> Iterator[PrivateLoader]:
    """Let a private loader yield each batch in microbatches of at most so many records.

    Inside, call `zero_grad`, `backward` and `step` for every microbatch, as for a batch. `step`
    and `scheduler.step` act on the last microbatch of a batch and do nothing on the others: each
    batch gets one draw of noise and is charged once.
    """
    checks.at_least_one("max_physical_batch_size", max_physical_batch_size)
    if not isinstance(data_loader, PrivateLoader):
        raise InvalidInputError(
            "data_loader must be the loader that make_private returned, got "
            f"{type(data_loader).__name__}"
        )
    if getattr(optimizer, "engine", None) is not data_loader.owner:
        raise InvalidInputError("optimizer and data_loader must come from one make_private")
    before = data_loader.poisson.most
    data_loader.poisson.most = max_physical_batch_size
    try:
        yield data_loader
    finally:
        data_loader.poisson.most = before
