"""Real updates with and without one record, and otherwise the same random numbers.

Of each update two things are seen:

  * every sum moves by at most its sensitivity, before its noise;
  * given the sums of the update with the record, the one without it ends in the same bits.

So in these updates the record reaches the weights through noisy sums and nowhere else, and by no
more than is charged. It is a check of the updates that were made, on this model and these records;
it proves nothing of others. What a gate decides is not part of an update, and is charged apart.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.tree import flatten, map_tensors
from dpsur.mechanism import gaussian
from dpsur.mechanism.state import Candidate
from dpsur.mechanism.streams import BATCH, VAL_BATCH, Draws, Stream, Streams
from dpsur.mechanism.trial import EagerLoop, Progress, start
from dpsur.per_example import ClippedSum, draws_randomness
from dpsur.privacy.events import Trial
from dpsur.runs.checkpoint import digest_of
from dpsur.runs.session import Session

# Norms and sums are computed in float32.
ROUNDING = 1e-4
See = Callable[[ClippedSum], ClippedSum]


@dataclass(frozen=True)
class NeighbourPair:
    """One update, twice: how far its sums moved, over their sensitivity, and whether all else held.

    The farthest of several sums. It is private: it follows from a record.
    """

    moved: float
    same_otherwise: bool

    @property
    def sound(self) -> bool:
        return self.same_otherwise and self.moved <= 1 + ROUNDING


def neighbour_test(session: Session, updates: int) -> list[NeighbourPair]:
    """Train, and make this many of its updates twice, evenly over the run."""
    checks.at_least_one("neighbour", updates)
    problem, plan = session.problem, session.plan
    if problem.augment is not None or draws_randomness(session.original, problem.train):
        raise InvalidInputError(
            "the neighbour test needs a model without layers that draw random numbers, such as "
            "dropout: they draw for a batch as a whole, and others' draws would move with a record"
        )
    due = {plan.duration * number // updates for number in range(updates)}
    found = []
    with session.arithmetic():
        begun = start(session.procedure)
        loop = EagerLoop(session.procedure, plan, session.streams, begun, owned=True)
        while due and not loop.finished:
            progress = loop.progress
            reached = {position for position in due if position <= plan.elapsed(progress.ledger)}
            if reached and isinstance(session.procedure.step(progress.state), Trial):
                found.append(_pair(session, progress))
                due -= reached
            loop.launch()
            loop.collect()
    return found


def _pair(session: Session, progress: Progress) -> NeighbourPair:
    """The update that comes next, with and without the record that is likeliest to be in it."""
    step = progress.ledger.steps + 1
    draws = session.streams.at(step)[BATCH].uniform(len(session.problem.train))
    without = _Without(session.streams, int(draws.argmin()))
    sums: list[ClippedSum] = []
    moved: list[float] = []

    def keep(total: ClippedSum) -> ClippedSum:
        sums.append(replace(total, params=map_tensors(torch.clone, dict(total.params))))
        return total

    def compare(total: ClippedSum) -> ClippedSum:
        if len(moved) == len(sums):  # a sum more than with the record
            moved.append(0.0)
            return total
        with_record = sums[len(moved)]
        squares = [
            (value.double() - with_record.params[name].double()).square().sum()
            for name, value in total.params.items()
        ]
        moved.append(float(torch.stack(squares).sum().sqrt()) / float(with_record.sensitivity))
        same = float(total.sensitivity) == float(with_record.sensitivity)
        return with_record if same else total

    first = _proposed(session, progress, session.streams.at(step), keep)
    second = _proposed(session, progress, without.at(step), compare)
    ends = {digest_of(flatten(candidate.state)) for candidate in (first, second)}
    return NeighbourPair(max(moved, default=0.0), len(ends) == 1 and len(moved) == len(sums))


def _proposed(session: Session, progress: Progress, draws: Draws, see: See) -> Candidate:
    position = torch.tensor(
        session.plan.position(progress.ledger), device=progress.state.updates.device
    )
    token = gaussian.before_noise.set(see)
    try:
        return session.procedure.propose(progress.state, draws, position)
    finally:
        gaussian.before_noise.reset(token)


class _Without(Streams):
    """The random numbers of others, but one record joins no sample."""

    def __init__(self, others: Streams, record: int) -> None:
        super().__init__(None, others.device, others.ranks, key=others.key)
        self.record = record

    def at(self, step: int | Tensor) -> Draws:
        draws = Draws(self, step)
        for purpose in (BATCH, VAL_BATCH):
            draws._found[purpose] = _StreamWithout(self, purpose, step)
        return draws


class _StreamWithout(Stream):
    def uniform(self, count: int) -> Tensor:
        found = super().uniform(count)
        found[self._streams.record] = 1.0  # type: ignore[attr-defined]
        return found
