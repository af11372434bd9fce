"""`get_noise_multiplier` with the arguments of Opacus."""

from typing import Any

from dpsur.errors import InvalidInputError
from dpsur.privacy.calibrate import calibrate
from dpsur.privacy.plans.open_ended import ACCOUNTING


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: int | None = None,
    steps: int | None = None,
    accountant: str = "prv",
    **_: Any,
) -> float:
    """The least noise multiplier for a budget, by privacy loss distributions."""
    if accountant == "gdp":
        raise InvalidInputError(
            "accountant 'gdp' can report too low an epsilon; leave it out or use 'prv'"
        )
    if (epochs is None) == (steps is None):
        raise InvalidInputError("give epochs or steps, and not both")
    updates = steps if steps is not None else int((epochs or 0) / sample_rate)
    return calibrate(
        epsilon=target_epsilon,
        delta=target_delta,
        sample_rate=sample_rate,
        updates=updates,
        accounting=ACCOUNTING,
    )
