"""What every method is: frozen hyper-parameters that can be settled and bound to data."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Self

from torch import nn

from dpsur import checks
from dpsur.functional.problem import Problem
from dpsur.mechanism.state import Procedure
from dpsur.mechanism.streams import Streams
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event
from dpsur.privacy.plans import AnyPlan


def option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A hyper-parameter with the text that the command line shows for it."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, repr=False)
class Method(checks.NamedArguments, ABC):
    """Hyper-parameters of a method. None means: choose something sensible for the data."""

    name: ClassVar[str]
    summary: ClassVar[str]

    # The kind of features that the method is known for; None leaves the inputs as they are.
    features: ClassVar[str | None] = None

    @abstractmethod
    def settle(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, AnyPlan]:
        """Fill in what was left open and fix the privacy of the run, before any data is touched.

        `setup` are events that happen before the first trial, such as private statistics.
        """

    @abstractmethod
    def bind(self, problem: Problem, plan: AnyPlan, streams: Streams) -> Procedure:
        """Tie a settled method to a model, records and random streams."""

    def adapt(self, model: nn.Module) -> nn.Module:
        """The network that the method trains in place of `model`."""
        return model

    def network_changes(self) -> Mapping[str, Any]:
        """The same change as arguments of a network's description."""
        return {}

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
