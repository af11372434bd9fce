"""What an experiment is: cells of a grid, rows that fill them, and pages rendered from rows."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from reproduction.artifacts import Artifact

Cell = Mapping[str, Any]
Row = dict[str, Any]
Group = TypeVar("Group")


@dataclass(frozen=True)
class Options:
    """What a person may choose for any experiment; None leaves it to the experiment."""

    seeds: tuple[int, ...] | None = None
    device: str | None = None
    shard: tuple[int, int] = (0, 1)  # this process makes every n-th group of cells, from the k-th
    tasks: tuple[str, ...] = ()  # that a grid is limited to
    arms: tuple[str, ...] = ()  # likewise
    epsilons: tuple[float, ...] = ()  # likewise
    results: Path = Path("results")  # where the rows of all experiments are
    claims: Path | None = None  # where processes note what they have begun, to share a grid evenly

    def ask_for(self, task: str, arm: str, epsilon: float | None) -> bool:
        """Whether a limited grid has these. What has no epsilon is none of those asked for."""
        return (
            (not self.tasks or task in self.tasks)
            and (not self.arms or arm in self.arms)
            and (not self.epsilons or epsilon in self.epsilons)
        )

    def share(self, groups: Sequence[Group]) -> Sequence[Group]:
        """What this process makes of all groups of cells, or may make where they are claimed."""
        part, parts = (0, 1) if self.claims else self.shard
        return groups[part::parts]

    def takes(self, group: str) -> bool:
        """Whether a group of this name is for this process: it has claimed it before the others."""
        if self.claims is None:
            return True
        try:
            (self.claims / hashlib.sha256(group.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Experiment(ABC):
    """A grid of cells. A cell is what is asked, a row is a cell with its answer.

    `identity` names the fields that a cell has and that its row repeats. They are the key of a row:
    a cell whose key is among the rows is not measured again. What a row's figures depend on belongs
    into these fields, or a changed setting would keep the old rows. `partial` says that a part of
    the rows is worth rendering, `shared` that several processes can each make a part.
    """

    name: ClassVar[str]
    identity: ClassVar[tuple[str, ...]] = ("config",)
    partial: ClassVar[bool] = False
    shared: ClassVar[bool] = False

    @abstractmethod
    def cells(self, options: Options) -> Iterable[Cell]:
        """Everything that is asked, in the order of the tables. Costs nothing."""

    @abstractmethod
    def make(self, cells: Sequence[Cell], options: Options) -> Iterator[Row]:
        """Fill cells, in any order, several at once where that is faster."""

    @abstractmethod
    def render(self, rows: Sequence[Row]) -> Iterable[Artifact]:
        """Tables and figures, from rows and nothing else."""

    def key(self, row: Cell) -> str:
        """The identity of a cell or a row as text."""
        return json.dumps({field: row.get(field) for field in self.identity}, sort_keys=True)


class OneByOne(Experiment):
    """An experiment that fills one cell after another."""

    @abstractmethod
    def measure(self, cell: Cell, options: Options) -> Row:
        """The answer of one cell, without the cell's own fields."""

    def make(self, cells: Sequence[Cell], options: Options) -> Iterator[Row]:
        """Fill cells in their order: all, or a share that follows from the place in the grid."""
        grid = options.share(list(self.cells(options))) if self.shared else cells
        mine = {self.key(cell) for cell in grid}
        for cell in cells:
            key = self.key(cell)
            if key in mine and options.takes(f"{self.name} {key}"):
                yield {**cell, **self.measure(cell, options)}
