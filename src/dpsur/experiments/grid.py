"""Grids of trained runs."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from dpsur.experiments.base import Cell, Experiment, Options, Row
from dpsur.experiments.training import TrainingCell, trained_row


class TrainingGrid(Experiment):
    """An experiment whose cells are runs on tasks; a part of the rows is worth rendering."""

    identity = ("config", "seed")
    partial = True

    @abstractmethod
    def runs(self, seeds: tuple[int, ...] | None) -> Iterable[TrainingCell]:
        """The runs, the most important first."""

    def cells(self, options: Options) -> Iterator[Cell]:
        """A cell for every run on a task that is asked for."""
        for run in self.runs(options.seeds):
            if _asked(run.task, options.tasks) and _asked(run.arm, options.arms):
                yield {"config": run.config(), "seed": run.seed}

    def make(self, cells: Sequence[Cell], options: Options) -> Iterator[Row]:
        """Run this process's share, task by task, so that records are loaded once."""
        part, parts = options.shard
        mine = [cell for index, cell in enumerate(cells) if index % parts == part]
        tasks = dict.fromkeys((c["config"]["task"], c["config"]["features"]) for c in mine)
        for task, features in tasks:
            for cell in mine:
                config = cell["config"]
                if (config["task"], config["features"]) == (task, features):
                    yield {**cell, **trained_row(config, cell["seed"], options.device)}


def _asked(name: str, among: tuple[str, ...]) -> bool:
    return not among or name in among
