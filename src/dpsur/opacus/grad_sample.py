"""`GradSampleModule`, which has no counterpart here."""

from typing import Any

from dpsur.errors import InvalidInputError


class GradSampleModule:
    """Refused: models are not wrapped, and parameters have no `grad_sample`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise InvalidInputError(
            "GradSampleModule has no counterpart: models are not wrapped; for the gradients of "
            "each record use dpsur.per_example_gradients, for their clipped sum dpsur.clipped_sum"
        )
