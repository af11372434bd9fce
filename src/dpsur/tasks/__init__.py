"""The learning tasks, by name. A task is registered by being listed here."""

from dpsur.errors import InvalidInputError
from dpsur.tasks.base import Task
from dpsur.tasks.cifar10 import CIFAR10_TASK
from dpsur.tasks.fmnist import FMNIST_TASK
from dpsur.tasks.imdb import IMDB_TASK
from dpsur.tasks.imdb_words import IMDB_WORDS_TASK
from dpsur.tasks.mnist import MNIST_TASK
from dpsur.tasks.mnist_5k import MNIST_5K
from dpsur.tasks.npz import PREFIX as NPZ
from dpsur.tasks.npz import npz_task

TASKS: dict[str, Task] = {
    task.name: task
    for task in (MNIST_5K, MNIST_TASK, FMNIST_TASK, CIFAR10_TASK, IMDB_TASK, IMDB_WORDS_TASK)
}
DEFAULT_TASK = MNIST_5K.name


def task_named(name: str) -> Task:
    """Look a task up by name; `npz:FILE` is the task of a file of a user's own."""
    if name.startswith(NPZ):
        return npz_task(name)
    try:
        return TASKS[name]
    except KeyError:
        known = ", ".join(TASKS)
        raise InvalidInputError(
            f"unknown task {name!r}; choose one of {known}, or {NPZ}FILE for records of your own"
        ) from None


__all__ = ["DEFAULT_TASK", "TASKS", "Task", "task_named"]
