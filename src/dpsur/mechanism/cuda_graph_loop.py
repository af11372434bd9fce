"""Algorithm 1 without waiting for the host: one trial captured as a CUDA graph and replayed.

Small networks are bound by the launching of kernels. A captured trial is launched at once:
sampling, clipping, noise, update, both losses and the choice between accepting and restoring stay
on the device, and the host reads the counts once per block of trials. A counter on the device masks
acceptance once the plan is done, so that the replays left in a block change nothing and exactly the
planned updates are kept. Replays that a plan makes to be dropped are masked alike, but counted.
Steps that differ in cost, and have to be asked for one by one, are blocks of a single trial.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpsur.errors import UnsupportedModelError
from dpsur.functional.parameters import elementwise
from dpsur.functional.tree import map_tensors
from dpsur.mechanism.cuda_graphs import graph_of
from dpsur.mechanism.loop import Progress, check_completed, goes_on, keep
from dpsur.mechanism.state import Procedure, State, Verdict
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.turns import Turns
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans import FilteredPlan, Plan

OnBlock = Callable[[Progress, list[Verdict]], None]


@dataclass(frozen=True)
class _Counts:
    """What the host reads after a block."""

    trials: Tensor
    updates: Tensor
    overflow: Tensor


class CapturedTrials:
    """A trial of a padded procedure, captured once; its state lives in fixed places.

    On other devices than CUDA a replay simply makes the trial.
    """

    def __init__(
        self,
        procedure: Procedure,
        plan: Plan | FilteredPlan,
        progress: Progress,
        streams: Streams,
        block: int,
    ) -> None:
        self._procedure, self._plan, self._streams = procedure, plan, streams
        device = progress.state.updates.device
        self._state = _copy(progress.state)
        self._places = self._places_now()
        ledger = progress.ledger
        self._counts = _Counts(
            torch.tensor(ledger.trials, device=device),
            torch.tensor(ledger.updates, device=device),
            torch.tensor(False, device=device),
        )
        self._names: tuple[str, ...] = ()
        self._rows = torch.zeros(block, 0, device=device, dtype=torch.float64)
        self._first = torch.tensor(ledger.trials, device=device)
        # Where schedules stand, if that does not follow from the counts.
        self._position: Tensor | None = None
        if isinstance(plan, FilteredPlan):
            self._position = torch.tensor(plan.position(ledger), device=device)
        self.replay: Callable[[], None] = self._trial  # one trial, within a block
        if device.type == "cuda":
            self.replay = self._captured()

    def run(self, count: int, ledger: Ledger) -> None:
        """Replay a block of trials, after those in the ledger."""
        self._first.copy_(self._counts.trials)
        if self._position is not None:
            self._position.fill_(self._plan.position(ledger))
        for _ in range(count):
            self.replay()

    def read(self) -> tuple[int, int, bool]:
        """Trials, updates and whether a batch had no room: the one wait per block."""
        counts = self._counts
        trials, updates, overflow = torch.stack(
            [counts.trials, counts.updates, counts.overflow.long()]
        ).tolist()
        return trials, updates, bool(overflow)

    def state(self) -> State:
        """A copy of the state as it is."""
        self._check_places()
        return _copy(self._state)

    def _check_places(self) -> None:
        """Refuse a model that moves the weights it is lent: updates would go nowhere."""
        if self._places_now() != self._places:
            raise UnsupportedModelError(
                "the model moves its weights in memory when it is called, which captured trials "
                "cannot follow; run with Speed(capture=False) or --no-capture"
            )

    def _places_now(self) -> list[int]:
        return [value.data_ptr() for value in self._state.params.values()]

    def verdicts(self, count: int) -> list[Verdict]:
        """The verdicts of the block's trials, on the host."""
        rows = self._rows[:count].cpu()
        return [Verdict(row[0] > 0, dict(zip(self._names, row[1:], strict=True))) for row in rows]

    def restore(self, progress: Progress, positions: dict[str, Tensor]) -> None:
        """Go back to an earlier point, draws included."""
        self._put(progress.state)
        self._counts.trials.fill_(progress.ledger.trials)
        self._counts.updates.fill_(progress.ledger.updates)
        self._counts.overflow.fill_(False)
        self._streams.restore(positions)

    def _put(self, state: State) -> None:
        map_tensors(Tensor.copy_, self._state, state, together=elementwise)

    def _put_if(self, condition: Tensor, state: State) -> None:
        def choose(place: Tensor, value: Tensor) -> Tensor:
            return torch.where(condition, value, place, out=place)

        map_tensors(choose, self._state, state, together=elementwise)

    def _trial(self) -> None:
        """One trial, written so that a replay after the end of the plan changes nothing."""
        counts, state = self._counts, self._state
        room = counts.trials < self._plan.trials
        active, position = room, counts.trials
        if self._plan.updates is not None:
            active = room & (counts.updates < self._plan.updates)
            position = counts.updates
        position = position if self._position is None else self._position
        counted = room if self._plan.to_the_cap else active
        candidate = self._procedure.propose(state, position)  # Alg. 1, L3-8
        verdict = self._procedure.judge(state, candidate)  # L9-14
        accept = verdict.accept & active
        rejected = self._procedure.after_rejection(state, candidate)
        self._note(accept, verdict)
        if rejected is state:
            self._put_if(accept, candidate.state)  # L15-18
        else:
            self._put_if(active, keep(accept, candidate.state, rejected))
        for overflow in (candidate.overflow, verdict.overflow):
            if overflow is not None:
                counts.overflow.logical_or_(overflow & counted)
        counts.trials.add_(counted)
        counts.updates.add_(accept)

    def _note(self, accept: Tensor, verdict: Verdict) -> None:
        row = torch.stack([accept.double(), *(v.double() for v in verdict.private.values())])
        if self._rows.shape[1] != len(row):  # the first trial, before it is captured
            self._names = tuple(verdict.private)
            self._rows = torch.zeros(
                len(self._rows), len(row), device=row.device, dtype=torch.float64
            )
        place = (self._counts.trials - self._first).clamp(max=len(self._rows) - 1)
        self._rows.index_copy_(0, place.reshape(1), row.reshape(1, -1))

    def _captured(self) -> Callable[[], None]:
        """Capture a trial, leaving state, counts and draws where they are."""
        start = self.state()
        counts = [value.clone() for value in vars(self._counts).values()]
        positions = {name: p.clone() for name, p in self._streams.positions().items()}

        def go_back() -> None:
            self._put(start)
            for place, value in zip(vars(self._counts).values(), counts, strict=True):
                place.copy_(value)
            self._streams.restore(positions)

        generators = [self._streams[purpose] for purpose in positions]
        return graph_of(self._trial, self._state.updates.device, generators, go_back)


def _copy(state: State) -> State:
    return map_tensors(torch.clone, state, together=elementwise)


def train(
    procedure: Procedure,
    plan: Plan | FilteredPlan,
    progress: Progress,
    streams: Streams,
    fall_back: Callable[[Progress, int], Progress],
    on_block: OnBlock,
    block: int,
) -> Turns[Progress]:
    """Make the planned trials in captured blocks; same guarantee as the loop's `train`.

    Yields while a block is under way on the device. `fall_back` makes a number of trials from a
    given progress with exact batches: it is used for a block in which a padded batch had no room,
    so that no record is ever left out.
    """
    if not isinstance(plan, Plan):
        block = 1  # what the next step costs depends on what this one released
    trials = CapturedTrials(procedure, plan, progress, streams, block)
    while goes_on(procedure, plan, progress):
        count = min(block, plan.trials - progress.ledger.trials)
        positions = {name: p.clone() for name, p in streams.positions().items()}
        trials.run(count, progress.ledger)
        yield
        made, kept, overflow = trials.read()
        if overflow:
            streams.restore(positions)
            progress = fall_back(progress, count)
            trials.restore(progress, streams.positions())
            continue
        ledger = progress.ledger.record(
            procedure.step(progress.state),
            trials=made - progress.ledger.trials,
            updates=kept - progress.ledger.updates,
        )
        verdicts = trials.verdicts(made - progress.ledger.trials)
        progress = Progress(trials.state(), ledger)
        on_block(progress, verdicts)
    check_completed(plan, progress)
    return progress
