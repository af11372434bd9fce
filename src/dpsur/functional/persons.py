"""Several records of a person as one unit: their inputs, their targets and the mean of their loss.

A person takes the place of a record in everything that samples, clips, tests and charges: the rows
of `Examples` are persons, each with room for the same number k of records. What is bounded for a
row is then bounded for a person, whatever computes it.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import LossFunction, losses_one_by_one
from dpsur.functional.records import Examples, StreamedExamples
from dpsur.functional.tree import PersonRows, TensorTree, map_tensors, tensors_of

# The key of the draws of a person's records: they are the same on every machine.
KEY = b"dpsur-person/1"
# Records of a person that are used, unless another number is given.
DEFAULT_RECORDS = 16


@dataclass(frozen=True)
class PersonTargets:
    """Targets of shape (persons, k, ...), and which of the k places hold a record."""

    rows: TensorTree
    present: Tensor

    def mean(self, values: Tensor) -> Tensor:
        shape = (*self.present.shape, *[1] * (values.dim() - 2))
        total = values.masked_fill(~self.present.view(shape), 0.0).sum(1)
        return total / self.present.sum(1).clamp(min=1).view(-1, *[1] * (total.dim() - 1))


def record_rows(rows: TensorTree) -> TensorTree:
    if isinstance(rows, (PersonRows, PersonTargets)):
        return map_tensors(lambda value: value.flatten(0, 1), rows.rows)
    return rows


class PersonLoss(nn.Module):
    """The mean of a loss over the records of a person."""

    def __init__(self, of_record: LossFunction) -> None:
        super().__init__()
        self.of_record = of_record

    def forward(self, outputs: TensorTree, targets: PersonTargets) -> Tensor:
        flat = map_tensors(lambda value: value.flatten(0, 1), outputs)
        losses = losses_one_by_one(self.of_record, flat, record_rows(targets))
        return targets.mean(losses.view(targets.present.shape)).mean()


def record_loss(loss: LossFunction) -> LossFunction:
    return loss.of_record if isinstance(loss, PersonLoss) else loss


@dataclass(frozen=True, repr=False)
class Groups:
    """To whom each record belongs: a number for every record, and how many of a person are used."""

    person: Tensor
    records_each: int = DEFAULT_RECORDS

    def __repr__(self) -> str:
        return f"Groups({self.count} persons, at most {self.records_each} records each)"

    @property
    def count(self) -> int:
        return int(self.person.max()) + 1


def check_by_record(groups: Any, records: int | None, *, plain: bool) -> None:
    """Refuse to draw records of persons one by one where that is not covered."""
    if groups is None:
        raise InvalidInputError("sampling record needs groups=..., the person of each record")
    if records is None:
        raise InvalidInputError(
            "sampling record needs records=..., a public number: how many records there are "
            "depends on how many each person has, which is private"
        )
    if not plain:
        raise InvalidInputError(
            "sampling record is for updates alone: a gate or paid metrics would be bounded per "
            "record, not per person; leave them out (Dpsgd(gate='none')), or sample persons"
        )


def called(groups: Callable[..., Any], what: str, records: Iterable[tuple[Any, ...]]) -> list[Any]:
    found: list[Any] = []
    for record in records:
        if not found:
            try:
                inspect.signature(groups).bind(*record)
            except TypeError:
                raise InvalidInputError(f"groups as a function is called with {what}") from None
            except ValueError:  # of a function that does not say what it takes
                pass
        found.append(groups(*record))
    return found


def number_persons(names: Iterable[Any], records: int) -> Tensor:
    if isinstance(names, (str, bytes)) or not hasattr(names, "__iter__"):
        raise InvalidInputError(
            f"groups must name the person of every record, got {checks.shown(names)}; pass an "
            "array with one name or number per record"
        )
    listed = names.tolist() if hasattr(names, "tolist") else list(names)
    if len(listed) != records:
        raise InvalidInputError(
            f"groups name the persons of {len(listed)} records, but there are {records}; pass one "
            "name per record"
        )
    missing = sum(name is None or name != name or name == "" for name in listed)
    if missing:
        raise InvalidInputError(
            "some records belong to nobody; name a person for every record, or leave them out",
            private=f"{missing} records have no name of a person",
        )
    known: dict[Any, int] = {}
    try:
        return torch.tensor([known.setdefault(name, len(known)) for name in listed])
    except TypeError:
        raise InvalidInputError(
            "groups must hold one name or number per record, not lists of them"
        ) from None


def numbered(person: Tensor) -> Tensor:
    """The same persons with numbers from 0 on, after some records were left out."""
    return torch.from_numpy(np.unique(person.numpy(), return_inverse=True)[1].reshape(-1))


@dataclass(frozen=True, repr=False)
class Persons:
    """Which records each person adds: their rows (persons, k), and which of these places count.

    Places that do not count repeat a record of the same person.
    """

    rows: Tensor
    present: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def weights(self) -> Tensor:
        """Of every record that is used, one over how many its person has."""
        counts = self.present.sum(1)
        return (1.0 / counts.double()).repeat_interleave(counts)

    def means(self, values: Tensor) -> Tensor:
        device = values.device
        found = PersonTargets(None, self.present.to(device))
        return found.mean(values[self.rows.to(device)])

    def gather(self, examples: Examples) -> Examples:
        def each(values: Tensor) -> Tensor:
            rows = self.rows.to(values.device)
            return values.index_select(0, rows.flatten()).view(*rows.shape, *values.shape[1:])

        inputs = map_tensors(each, examples.inputs)
        present = self.present.to(tensors_of(examples.inputs)[0].device)
        return Examples(
            PersonRows(inputs), PersonTargets(map_tensors(each, examples.targets), present)
        )


class PersonRecords:
    """The records of each person in a data set, of whom every step draws at most k anew.

    Guarantee: whether and which records of a person are drawn is independent of other persons.
    """

    def __init__(self, groups: Groups) -> None:
        checks.at_least_one("records_per_person", groups.records_each)
        self.records_each, self.records = groups.records_each, len(groups.person)
        counts = torch.bincount(groups.person, minlength=groups.count)
        self._person, self._by_person = groups.person, torch.argsort(groups.person, stable=True)
        self.own = torch.split(self._by_person, counts.tolist())
        self._some_are_left_out = int(counts.max()) > self.records_each
        first = (counts.cumsum(0) - counts).repeat_interleave(counts)
        self._counts = torch.arange(self.records) - first < self.records_each

    def __len__(self) -> int:
        return len(self.own)

    @property
    def joining(self) -> int:
        return int(self._counts.sum())

    def draw_joining(self, uniform: Callable[[int], Tensor]) -> Tensor:
        """The numbers of at most k records of every person, by so many uniform numbers."""
        if not self._some_are_left_out:
            return self._by_person
        order = uniform(self.records).cpu().argsort()
        return order[self._person[order].argsort(stable=True)][self._counts]

    def draw(self, persons: Tensor, uniform: Callable[[int], Tensor]) -> list[tuple[int, ...]]:
        """The numbers of the records that some persons add, by so many uniform numbers."""
        own = [self.own[person] for person in persons.tolist()]
        if self._some_are_left_out:
            order = uniform(self.records).cpu()
            most = self.records_each
            own = [rows[order[rows].argsort()[:most]] if len(rows) > most else rows for rows in own]
        return [tuple(rows.tolist()) for rows in own]


def choose_records(examples: Examples, groups: Groups) -> tuple[Examples, Persons]:
    """At most k records of every person, and where they are among those that are left.

    Guarantee: which records of a person are used follows from that person's records alone, by a
    keyed hash of their values. Adding or removing a person changes nothing for another one.
    """
    if isinstance(examples, StreamedExamples):
        raise InvalidInputError(
            "groups need records in memory, but train_set is streamed; pass it as tensors"
        )
    if len(groups.person) != len(examples):
        raise InvalidInputError(
            f"groups name the persons of {len(groups.person)} records, but there are "
            f"{len(examples)}"
        )
    most, persons = groups.records_each, PersonRecords(groups)
    parts = [
        np.ascontiguousarray(part.detach().cpu().numpy()).reshape(len(part), -1)
        for part in tensors_of((examples.inputs, examples.targets))
    ]

    def draw(record: int) -> bytes:
        """A number for a record, from its values alone."""
        digest = hashlib.blake2b(digest_size=16, key=KEY)
        for part in parts:
            digest.update(part[record].data)
        return digest.digest()

    kept = [
        own if len(own) <= most else sorted(sorted(own, key=draw)[:most])
        for own in map(Tensor.tolist, persons.own)
    ]
    width = min(most, max(map(len, kept)))
    flat = torch.tensor([row for own in kept for row in own])
    sizes = torch.tensor([len(own) for own in kept])
    places = torch.arange(width)
    present = places < sizes[:, None]
    rows = (sizes.cumsum(0) - sizes)[:, None] + torch.where(present, places, 0)
    return examples.select(flat), Persons(rows, present)
