"""The budget of a run."""

from dataclasses import dataclass

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.options import PRIVACY, option


@dataclass(frozen=True, repr=False)
class Budget(checks.NamedArguments):
    """The (epsilon, delta) that a run may spend, for adding or removing one record."""

    epsilon: float = option(
        help="budget for adding or removing one record",
        metavar="EPSILON",
        group=PRIVACY,
        common=True,
    )
    delta: float = option(
        help="of (epsilon, delta); should be well below 1/N",
        metavar="DELTA",
        group=PRIVACY,
        common=True,
    )

    def __post_init__(self) -> None:
        checks.number("epsilon", self.epsilon)
        if not self.epsilon > 0:
            raise InvalidInputError(
                f"epsilon must be above 0, got {self.epsilon}", code="out-of-range"
            )
        checks.probability("delta", self.delta)
