"""How a gradient becomes an update: options that all gradient methods share."""

from dataclasses import dataclass

from dpsur import checks
from dpsur.mechanism.optim import SHAPES, Adam, Optimizer, Schedule, Sgd, WeightAverage
from dpsur.methods.base import Method, option

AVERAGE_HELP = "release an exponential average of the weights with this decay instead of the last"


def make_average(decay: float | None) -> WeightAverage | None:
    """The average that is released in place of the last weights, if any."""
    return None if decay is None else WeightAverage(decay)


@dataclass(frozen=True, repr=False)
class Optimization(Method):
    """Optimizer, learning rate and averaging."""

    learning_rate: float = option(4.0, "learning rate at the start")
    schedule: str = option("linear", "how the learning rate decays over the run", tuple(SHAPES))
    optimizer: str = option("sgd", "optimizer", ("sgd", "adam"))
    momentum: float = option(0.9, "momentum (sgd)")
    adam_beta1: float = option(0.9, "decay of the mean (adam)")
    adam_beta2: float = option(0.999, "decay of the mean square (adam)")
    adam_eps: float = option(1e-7, "added to the root of the mean square (adam)")
    average_decay: float | None = option(None, AVERAGE_HELP)

    def __post_init__(self) -> None:
        self.make_optimizer()
        self.make_schedule(length=1)
        self.make_average()

    def make_optimizer(self) -> Optimizer:
        """Build the optimizer that these hyper-parameters name."""
        if self.optimizer == "adam":
            return Adam(self.adam_beta1, self.adam_beta2, self.adam_eps)
        checks.one_of("optimizer", self.optimizer, ("sgd", "adam"))
        return Sgd(self.momentum)

    def make_schedule(self, length: int) -> Schedule:
        """Build the learning-rate schedule over a run of this length."""
        return Schedule(self.schedule, self.learning_rate, length)

    def make_average(self) -> WeightAverage | None:
        """The average that is released in place of the last weights, if any."""
        return make_average(self.average_decay)
