"""Poisson batches of a map-style data set, read by the workers of a `DataLoader`."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
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
)

from dpsur.engine.private_step import CollateAlone, collate_apart, padding_of
from dpsur.errors import InvalidInputError, StepError
from dpsur.functional.persons import PersonRecords
from dpsur.functional.tree import map_tensors
from dpsur.mechanism.gaussian import poisson_sample
from dpsur.mechanism.streams import BATCH, VAL_BATCH, Stream, Streams

if TYPE_CHECKING:
    from dpsur.engine.steps import PrivateLoop

# Poisson sampling takes their place; it is over the whole data set, whatever the rank.
_PLAIN_SAMPLERS = (RandomSampler, SequentialSampler, DistributedSampler)


@dataclass(frozen=True)
class Microbatch:
    """Some records (or persons) of one Poisson batch, as the loader is about to yield them."""

    step: int
    rows: int  # records of this microbatch; for none a record of zeros stands in
    before: int  # records in the microbatches before this one
    last: bool
    records: tuple[Any, ...] = ()  # their numbers in the data set

    @property
    def first(self) -> bool:
        """Whether a new batch begins."""
        return not self.before

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it, so that a record of zeros stands in."""
        return not self.rows


def check_loader(loader: Any) -> None:
    """Refuse a loader that Poisson sampling cannot take the place of."""
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
    _check_repeats(loader.dataset)


def _check_repeats(dataset: Any) -> None:
    """Refuse a record that stands at several indices, where the classes of torch show it."""
    seen: dict[int, set[int]] = {}

    def visit(data: Any, indices: Sequence[int]) -> None:
        if isinstance(data, Subset):
            visit(data.dataset, [int(data.indices[index]) for index in indices])
        elif isinstance(data, ConcatDataset):
            first = 0
            for part in data.datasets:
                size = len(cast(Sized, part))
                visit(part, [index - first for index in indices if first <= index < first + size])
                first += size
        else:
            known = seen.setdefault(id(data), set())
            for index in indices:
                index %= max(1, len(cast(Sized, data)))
                if index in known:
                    raise InvalidInputError(
                        "a record stands at several indices of the data set (a Subset with "
                        "repeated indices, or a data set twice in a ConcatDataset), so it would "
                        "count more than once; use each record once, and weight it in the loss"
                    )
                known.add(index)

    if isinstance(dataset, (Subset, ConcatDataset)):
        visit(dataset, range(len(dataset)))


class PersonData(Dataset[list[Any]]):
    """A data set that is read by persons: for some numbers, a list of these records."""

    def __init__(self, records: Any) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, rows: Sequence[int]) -> list[Any]:
        return [self.records[row] for row in rows]


class PoissonSampler(Sampler[list[Any]]):
    """Poisson samples by number of the step, in microbatches of a bounded size.

    Every record joins every batch independently with probability `sample_rate`. The number of a
    batch is part of the address of its random numbers, so a batch that was drawn ahead and not used
    is drawn again, not replaced by another. Of several ranks each yields its share of the batch,
    perhaps nothing. With `persons` it is they who join, each with a tuple of records.
    """

    def __init__(
        self,
        size: int,
        sample_rate: float,
        streams: Callable[[], Streams],
        persons: PersonRecords | None = None,
    ) -> None:
        self.size, self._sample_rate, self._streams = size, sample_rate, streams
        self.persons = persons
        self.steps: Sequence[int] = ()
        self.most: int | None = None
        self.planned: deque[Microbatch] = deque()

    @property
    def sample_rate(self) -> float:
        """The probability with which each record joins each batch: the one that is charged."""
        return self._sample_rate

    def units(self, drawn: Tensor, stream: Stream) -> list[Any]:
        """What this rank reads of a sample: records, or tuples of the records of a person."""
        own = stream.ranks.own(drawn)
        return own.tolist() if self.persons is None else self.persons.draw(own, stream.uniform)

    def __iter__(self) -> Iterator[list[Any]]:
        planned: deque[Microbatch] = deque()
        self.planned = planned
        for step in self.steps:
            stream = self._streams().at(step)[BATCH]
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

    With `persons` it is given a list of records for each of them.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        dataset: Any,
        views: int,
        *,
        persons: bool = False,
    ) -> None:
        self.collate, self.dataset, self.views = collate, dataset, views
        self.persons = persons
        self.alone: CollateAlone | None = None  # for private steps

    def __call__(self, records: list[Any]) -> Any:
        """A batch of some records, or the placeholder; for a private step each record alone."""
        if self.alone is not None:
            return self.alone(records)
        if self.persons:
            records = [record for own in records for record in own]
        if records:
            batch = collate_apart(self.collate, records)
        else:  # only the shape of the record is used; what is no number becomes empty
            batch = map_tensors(torch.zeros_like, self.collate([self.dataset[0]]), otherwise=_blank)
        if self.views == 1:
            return batch
        return map_tensors(
            lambda value: value.repeat_interleave(self.views, 0) if value.dim() else value,
            batch,
            otherwise=lambda value: value,
        )


def _blank(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, bytes)):
        return type(value)()
    return None


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
        views: int = 1,
    ) -> None:
        self.length, self.plain = length, loader
        self.owner, self.views = owner, views
        self.poisson = sampler
        options: dict[str, Any] = {}
        if loader.num_workers:
            options = {
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": loader.persistent_workers,
            }
        by_person = sampler.persons is not None
        super().__init__(
            PersonData(loader.dataset) if by_person else loader.dataset,
            batch_sampler=sampler,
            num_workers=loader.num_workers,
            collate_fn=Collate(loader.collate_fn, loader.dataset, views, persons=by_person),
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            **options,
        )

    @property
    def sample_rate(self) -> float:
        """The probability with which each record joins each batch."""
        return self.poisson.sample_rate

    def collate_alone(self) -> None:
        """Yield opaque batches from now on, for private steps."""
        own = cast(Collate, self.collate_fn)
        own.alone = CollateAlone(
            own.collate, padding_of(own.collate), own.views, persons=own.persons
        )

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        if cast(Collate, self.collate_fn).alone is None:
            if self.poisson.persons is not None:
                raise StepError(
                    "with groups, only a private step can tell whose records a batch holds; write "
                    "the loss as engine.private_step, before the loop"
                )
            if not torch.is_grad_enabled():
                return self._all_records()
        self.poisson.steps = self.owner.begin_epoch(self.length)
        return self._batches(super().__iter__())

    def _all_records(self) -> Iterator[Any]:
        """Every record once, to evaluate a model: no step can be made without gradients."""
        own = cast(Collate, self.collate_fn)
        most = self.poisson.most or max(1, math.ceil(self.sample_rate * self.poisson.size))
        return iter(
            DataLoader(
                self.dataset,
                batch_size=most,
                num_workers=self.num_workers,
                collate_fn=own.collate,
                pin_memory=self.pin_memory,
                multiprocessing_context=self.multiprocessing_context,
            )
        )

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        planned = None
        for batch in batches:
            if self.owner.finished():
                return
            if planned is None:  # the sampler has begun by now
                planned = self.poisson.planned
            self.owner.yielded(planned.popleft(), batch)
            yield batch


def _of_equal_size(units: list[Any], most: int) -> list[list[Any]]:
    """The same tuples in lists of at most `most`, each list of tuples of one length."""
    found: dict[int, list[Any]] = {}
    for unit in units:
        found.setdefault(len(unit), []).append(unit)
    return [
        same[start : start + most] for same in found.values() for start in range(0, len(same), most)
    ]


def plain_loader(loader: Any) -> Any:
    """The loader that a private one was made from: each engine draws batches of its own."""
    return loader.plain if isinstance(loader, PrivateLoader) else loader


class TestReader:
    """Reads the records of a test in microbatches, with the workers of a private loader."""

    def __init__(self, loader: PrivateLoader, streams: Callable[[], Streams]) -> None:
        self._loader, self._streams = loader, streams

    def blank(self) -> Any:
        """A batch of one record of zeros."""
        return self._collate(views=False)([])

    def _collate(self, *, views: bool) -> Collate:
        own = cast(Collate, self._loader.collate_fn)
        return Collate(own.collate, own.dataset, own.views if views else 1, persons=own.persons)

    def read(
        self, step: int | Tensor, rate: float | None, *, views: bool, here: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """This rank's share of all records, or of a Poisson sample, as the loader joins them.

        Each microbatch comes with its number of records; for none a record of zeros stands in. With
        `views` it has as many rows per record as in training. A small sample is read `here` and at
        once, which takes less time than to start workers. Where persons are drawn, those of a
        microbatch have the same number of rows, and it comes with the number of persons.
        """
        loader, streams = self._loader, self._streams()
        sampler, stream = loader.poisson, streams.at(step)[VAL_BATCH]
        drawn = torch.arange(sampler.size, device="cpu")
        if rate is not None:
            drawn = poisson_sample(sampler.size, rate, stream)
        units = sampler.units(drawn, stream)
        # all ranks make as many passes as the one with most records: some need each other's
        longest = max(1, -(-len(drawn) // streams.ranks.size))
        usual = longest if here else max(1, math.ceil(loader.sample_rate * sampler.size))
        most = sampler.most or usual
        parts = [units[start : start + most] for start in range(0, longest, most)]
        if sampler.persons is not None:
            parts = _of_equal_size(units, most) or [[]]
        collate, data = self._collate(views=views), cast(Any, loader.dataset)
        batches: Iterable[Any] = (collate([data[row] for row in part]) for part in parts)
        if not here:
            batches = DataLoader(
                loader.dataset,
                batch_sampler=cast(Any, parts),
                num_workers=loader.num_workers,
                collate_fn=collate,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=loader.worker_init_fn,
                multiprocessing_context=loader.multiprocessing_context,
            )
        yield from zip(map(len, parts), batches, strict=True)
