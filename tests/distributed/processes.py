"""Processes that tests give jobs to: started once, joined in groups of any size for each job."""

import multiprocessing
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = 120.0


class Processes:
    """As many processes as the largest group needs. A job is a function of the rank."""

    def __init__(self, count: int) -> None:
        # Forked from a process that has imported everything; CUDA may not survive a fork.
        way = "spawn" if torch.cuda.is_available() else "forkserver"
        context = multiprocessing.get_context(way)
        context.set_forkserver_preload(["tests.distributed.jobs"])
        self._pipes, self._processes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, size: int, job, *args, timeout: float = TIMEOUT):
        """What a job returns on each of `size` ranks; an exception is returned, not raised."""
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self._pipes[:size]:
                pipe.send((size, str(Path(folder) / "store"), timeout, job, args))
            return [pipe.recv() for pipe in self._pipes[:size]]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()


def _serve(rank: int, pipe) -> None:
    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        size, store, timeout, job, args = task
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        try:
            result = job(*args)
        except Exception as error:  # for the test to look at
            error.add_note(traceback.format_exc())
            result = error
        dist.destroy_process_group()
        pipe.send(result)
