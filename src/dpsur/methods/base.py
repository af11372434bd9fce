"""What every method is: frozen hyper-parameters that can be settled and bound to data."""

from abc import ABC, abstractmethod
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Self

from dpsur.core.problem import Problem
from dpsur.core.streams import Streams
from dpsur.core.types import Procedure
from dpsur.privacy.plan import Budget, Plan


def option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A hyper-parameter with the text that the command line shows for it."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class Method(ABC):
    """Hyper-parameters of a method. None means: choose something sensible for the data."""

    name: ClassVar[str]
    summary: ClassVar[str]

    @abstractmethod
    def settle(self, dataset_size: int, budget: Budget, accounting: str) -> tuple[Self, Plan]:
        """Fill in what was left open and fix the privacy of the run, before any data is touched."""

    @abstractmethod
    def bind(self, problem: Problem, plan: Plan, streams: Streams) -> Procedure:
        """Tie a settled method to a model, records and random streams."""

    @classmethod
    def options(cls) -> tuple[Field[Any], ...]:
        """The hyper-parameters."""
        return fields(cls)


def power_of_two_near(value: float) -> int:
    """The power of two nearest to a value on the logarithmic scale, at least 1."""
    power = 1
    while power * 2**0.5 < value:
        power *= 2
    return power
