"""Per-example gradients of some rows, by the engine of a plan."""

import logging
from functools import cache

from dpsur.core.gradients.layout import NotSupportedError, Slot
from dpsur.core.gradients.one_pass import Piece, filled_tape
from dpsur.core.gradients.per_example import one_at_a_time, per_example_gradients
from dpsur.core.gradients.plan import Engine, Plan
from dpsur.core.gradients.tape import Tape
from dpsur.core.gradients.uses import Rows
from dpsur.core.problem import Problem
from dpsur.core.types import Params


def tape_of(problem: Problem, params: Params, piece: Piece, plan: Plan) -> Tape:
    """What is known about every row's gradient: enough for its norm and for weighted sums.

    Norms and sums are to be taken with `precision(tf32=False)`.
    """
    if plan.assignment is not None:
        try:
            return filled_tape(problem, params, piece, plan.assignment, list(plan.layouts))
        except NotSupportedError as error:
            # the model treats these records unlike the made-up ones of the plan
            _say_once(str(error))
    find = one_at_a_time if plan.engine is Engine.ONE_BY_ONE else per_example_gradients
    tape = Tape(params, len(piece.batch), [])
    for name, rows in find(problem, params, piece.batch).items():
        tape.add(Slot(name), Rows(rows))
    return tape


@cache
def _say_once(reason: str) -> None:
    """The reason is one of our own sentences and quotes no record."""
    logging.getLogger("dpsur.engine").warning(
        "dpsur: some batches need a slower engine than planned: %s", reason
    )
