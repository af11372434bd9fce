"""The learning tasks, by name. A task is registered by being listed here."""

from dpsur.errors import InvalidInputError
from dpsur.tasks.base import Task
from dpsur.tasks.mnist_5k import MNIST_5K

TASKS: dict[str, Task] = {task.name: task for task in (MNIST_5K,)}
DEFAULT_TASK = MNIST_5K.name


def task_named(name: str) -> Task:
    """Look a task up by name."""
    try:
        return TASKS[name]
    except KeyError:
        known = ", ".join(TASKS)
        raise InvalidInputError(f"unknown task {name!r}; choose one of {known}") from None


__all__ = ["DEFAULT_TASK", "TASKS", "Task", "task_named"]
