"""What every method is: frozen hyper-parameters that can be settled and bound to data.

`resolve` fixes the privacy of a run before data is touched. `build` composes the procedure that the
loop drives.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import nn

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.mechanism.proposer import (
    SHAPES,
    Adam,
    GradientProposer,
    GradientSource,
    Optimizer,
    Schedule,
    Sgd,
    WeightAverage,
)
from dpsur.mechanism.state import Procedure
from dpsur.options import OPTIMIZER, UPDATES, option
from dpsur.privacy.accounting import DEFAULT_ACCOUNTING
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, Test
from dpsur.privacy.plan import Plan


@dataclass(frozen=True, repr=False)
class Method(checks.NamedArguments, ABC):
    """Hyper-parameters of a method. None means: choose something sensible for the data."""

    name: ClassVar[str]
    summary: ClassVar[str]

    # The kind of features that the method is known for; None leaves the inputs as they are.
    features: ClassVar[str | None] = None

    @abstractmethod
    def resolve(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, Plan]:
        """Fill in what was left open and fix the privacy of the run, before any data is touched.

        `setup` are events that happen before the first trial, such as private statistics.
        """

    @abstractmethod
    def build(self, problem: Problem, plan: Plan) -> Procedure:
        """Compose the procedure that trains this model on these records."""

    def adapt(self, model: nn.Module) -> nn.Module:
        """The network that the method trains in place of `model`."""
        return model

    def network_changes(self) -> Mapping[str, Any]:
        """The same change as arguments of a network's description."""
        return {}

    @property
    def label(self) -> str:
        """The method's name in statements, on the terminal and in reports: what runs."""
        return self.name

    def acceptance_in_words(self, test: Test) -> str:
        """How a test of this method treats a better and a worse candidate, for the terminal."""
        most, least = test.accept_max, test.accept_min
        return f"passes with probability {most:.2f}, a worse one with {least:.2f}"

    @property
    def usual_accounting(self) -> str:
        """The accounting that is taken where none is named: the tightest that covers it."""
        return DEFAULT_ACCOUNTING


USUAL_RATE = 4.0
# A learning rate that follows from the noise, for linear models (`linear_head_rate`).
LINEAR_HEAD = "linear-head"
AVERAGE_HELP = "release an exponential average of the weights with this decay instead of the last"


@dataclass(frozen=True, repr=False)
class OptimizerMethod(Method):
    """How a gradient becomes an update: options of every method that steps along one."""

    learning_rate: float | str | None = option(
        None,
        f"learning rate at the start (default: the task's, else {USUAL_RATE:g}; the gate block "
        "finds one)",
        group=UPDATES,
        common=True,
    )
    schedule: str = option(
        "linear",
        "how the learning rate decays over the run",
        tuple(SHAPES),
        group=UPDATES,
    )
    optimizer: str = option("sgd", "optimizer", ("sgd", "adam"), group=OPTIMIZER)
    momentum: float = option(0.9, "momentum (sgd)", group=OPTIMIZER)
    adam_beta1: float = option(0.9, "decay of the mean (adam)", group=OPTIMIZER)
    adam_beta2: float = option(0.999, "decay of the mean square (adam)", group=OPTIMIZER)
    adam_eps: float = option(1e-7, "added to the root of the mean square (adam)", group=OPTIMIZER)
    average_decay: float | None = option(None, AVERAGE_HELP, group=OPTIMIZER)

    def __post_init__(self) -> None:
        self.make_optimizer()
        if self.learning_rate != LINEAR_HEAD:
            self.make_schedule(length=1)
        self.make_average()

    def make_optimizer(self) -> Optimizer:
        if self.optimizer == "adam":
            return Adam(self.adam_beta1, self.adam_beta2, self.adam_eps)
        checks.one_of("optimizer", self.optimizer, ("sgd", "adam"))
        return Sgd(self.momentum)

    def make_schedule(self, length: int) -> Schedule:
        rate = USUAL_RATE if self.learning_rate is None else self.learning_rate
        if isinstance(rate, str):
            raise InvalidInputError(
                f"learning_rate must be a number above 0, got {rate!r}; give one"
            )
        return Schedule(self.schedule, rate, length)

    def make_average(self) -> WeightAverage | None:
        """The average that is released in place of the last weights, if any."""
        return None if self.average_decay is None else WeightAverage(self.average_decay)

    def proposer(self, problem: Problem, source: GradientSource, length: int) -> GradientProposer:
        """Steps along gradients from this source, over a run of this length."""
        return GradientProposer(
            problem,
            source,
            self.make_optimizer(),
            self.make_schedule(length),
            self.make_average(),
        )


def check_batch_size(name: str, value: int, dataset_size: int) -> None:
    if value > dataset_size:
        raise InvalidInputError(
            f"{name} {value} is larger than the data set of {dataset_size} records, a sample rate "
            f"of {value / dataset_size:.3g}; choose at most {dataset_size}",
            code="batch-too-large",
        )
