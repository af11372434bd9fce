"""Grids of trained runs, which processes can share."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from dpsur.runs.build_session import choose_device
from reproduction.base import Cell, Experiment, Options, Row
from reproduction.training import TrainingCell, trained_rows


class TrainingGrid(Experiment):
    """An experiment whose cells are runs on tasks; a part of the rows is worth rendering."""

    identity = ("config", "seed")
    partial = True
    shared = True

    @abstractmethod
    def runs(self, seeds: tuple[int, ...] | None) -> Iterable[TrainingCell]:
        """The runs, the most important first."""

    def cells(self, options: Options) -> Iterator[Cell]:
        """A cell for every run on a task that is asked for."""
        for run in self.runs(options.seeds):
            if options.ask_for(run.task, run.arm, run.epsilon):
                yield {"config": run.config(), "seed": run.seed}

    def make(self, cells: Sequence[Cell], options: Options) -> Iterator[Row]:
        """Run this process's share, seeds of one configuration together.

        Configurations on the same records follow each other, so that those are loaded once. Every
        other process begins with the last records: large networks fill a GPU and small ones wait
        for it, so that both at once take less than one after the other.
        """
        limit_gpu_share(options)
        # Shares are told by the place in the whole grid: what is missing changes while others
        # fill it.
        groups: dict[str, list[Cell]] = {
            json.dumps(cell["config"]): [] for cell in self.cells(options)
        }
        for cell in cells:
            groups[json.dumps(cell["config"])].append(cell)
        mine = [group for group in options.share(list(groups.values())) if group]
        in_order = list(dict.fromkeys(_records_of(group) for group in mine))
        for records in in_order[::-1] if options.shard[0] % 2 else in_order:
            for group in mine:
                name = f"{self.name} {json.dumps(group[0]['config'])}"
                if _records_of(group) == records and options.takes(name):
                    yield from _filled(group, options.device)


def _records_of(group: Sequence[Cell]) -> tuple[Any, ...]:
    config = group[0]["config"]
    return config["task"], config["features"], config["hold_out"]


def _filled(group: Sequence[Cell], device: str | None) -> Iterator[Row]:
    config, seeds = group[0]["config"], [cell["seed"] for cell in group]
    for seed, row in trained_rows(config, seeds, device):
        yield {"config": config, "seed": seed, **row}


def limit_gpu_share(options: Options) -> None:
    """Limit a process that makes one of N parts of a grid to an Nth of the GPU's memory.

    Microbatches and tables are sized by what is free. Without a limit the first process would leave
    nothing to the others.
    """
    _, parts = options.shard
    if parts == 1:
        return
    device = choose_device(options.device or "auto")
    if device.type == "cuda":
        # by its number: "the current GPU" is not accepted here
        number = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_per_process_memory_fraction(1 / parts, number)
