"""Algorithm 1 on CUDA graphs: one trial is captured once and replayed.

Small networks are limited by kernel launches. A captured trial launches all of its kernels at once:
sampling, clipping, noise, update, both losses and the choice between accepting and restoring stay
on the GPU, and the host reads the counts once per block of trials. A counter on the GPU masks
acceptance once the plan is done, so that the replays left in a block change nothing and exactly the
planned updates are kept. Trials that a plan makes only to be dropped are masked too, but counted.
Steps whose cost depends on earlier steps are blocks of a single trial. Steps that are no trials,
such as the tests of blocks of updates, are made on the host's command between captured blocks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dpsur.errors import NothingReleasedError, UnsupportedModelError
from dpsur.functional.tree import elementwise, map_tensors
from dpsur.mechanism.captured_batches import CapturedBatches
from dpsur.mechanism.cuda_graphs import WARM_UP_CALLS, capture_graph
from dpsur.mechanism.gaussian import EXPECTED_LEVEL, LEVELS, captured_batch, padded_sizes
from dpsur.mechanism.proposer import DpGradient
from dpsur.mechanism.state import Procedure, Verdict
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import (
    HALF_UPDATED,
    EagerLoop,
    Progress,
    has_next,
    make_trial,
    own,
    trial,
    updates_in_place,
)
from dpsur.privacy.plan import Plan

# Parameters times records of a batch from which on it pays to have several sizes of batches: trials
# of half a millisecond on an H200. By size, not by a clock: a seeded run has to choose the same
# every time, since sums over other sizes are rounded otherwise.
LEAST_WORK = 1e8


class CudaGraphLoop:
    """Makes the planned trials in captured blocks, on a state that stays in fixed memory.

    A batch that is larger than its padding is never cut: sizes are counted before a block, which
    ends before such a batch, and that trial is made with its exact batch. So nothing is ever
    repeated, and there is no copy of the state. On other devices than CUDA a replay simply makes
    the trial. Where trials take long they are captured for a few sizes of the batch, each when it
    is first needed.
    """

    def __init__(
        self,
        procedure: Procedure,
        padded: Procedure,
        plan: Plan,
        streams: Streams,
        progress: Progress,
        block: int,
        *,
        owned: bool = False,
    ) -> None:
        self._procedure, self._padded, self._plan = procedure, padded, plan
        self._streams, self._block = streams, block
        self._progress = own(progress, owned=owned)
        self._addresses = self._current_addresses()
        ledger, device = progress.ledger, progress.state.updates.device
        # What the host reads after a block.
        self._trials = torch.tensor(ledger.trials, device=device)
        self._updates = torch.tensor(ledger.updates, device=device)
        self._cut = torch.tensor(False, device=device)
        self._names: tuple[str, ...] = ()
        self._rows = torch.zeros(block, 0, device=device, dtype=torch.float64)
        self._first = torch.tensor(ledger.trials, device=device)
        # Steps that are no trials have random numbers too, so draws are addressed by both.
        self._other_steps = torch.tensor(ledger.steps - ledger.trials, device=device)
        # Where schedules stand, if that does not follow from the counts.
        self._position: Tensor | None = None
        if plan.filter is not None and plan.updates is None:
            self._position = torch.tensor(plan.position(ledger), device=device)
        # Where this is False a trial changes neither state nor counts.
        self._live = torch.tensor(True, device=device)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._by_level: dict[int, Callable[[], None]] = {}
        sized = self._sizes_pay()
        self._levels = range(LEVELS if sized else 1)
        self._batches = CapturedBatches(streams, sized=sized)
        self._at(EXPECTED_LEVEL if sized else 0)  # which also finds out what is drawn
        self._launched, self._event = 0, padded.step(progress.state)
        # Whether trials were begun that the ledger does not have yet.
        self._in_flight = False

    @property
    def progress(self) -> Progress:
        """Where the run stands after the last block.

        The next block may overwrite its tensors: copy what is to be kept. Raises
        NothingReleasedError while they are being overwritten, or if that has failed.
        """
        if self._in_flight:
            raise NothingReleasedError(HALF_UPDATED)
        return self._progress

    @property
    def finished(self) -> bool:
        """Whether the plan affords no further trial."""
        return not self._in_flight and not has_next(self._procedure, self._plan, self._progress)

    @property
    def replay(self) -> Callable[[], None]:
        """One trial, within a block, at the level with the most room."""
        return self._at(self._levels[-1])

    def prepare(self) -> None:
        """Capture trials for all sizes of batches, so that none of them waits for it later."""
        for level in self._levels:
            self._at(level)

    def launch(self) -> None:
        """Replay a block on the GPU, without waiting for it.

        Replays after the last update change nothing, but records on the host would be read for
        them. So there are no more than the updates that are left, and fewer than the block has if
        the batch of the next one is known to have no room.
        """
        plan, ledger = self._plan, self.progress.ledger
        self._launched, self._in_flight = 0, True  # should it be interrupted
        self._event = self._padded.step(self._progress.state)  # by the state before
        count = min(self._block, plan.identical_trials_left(ledger))
        if self._batches.read_from_host and plan.updates is not None and not plan.run_all_trials:
            count = min(count, max(1, plan.updates - ledger.updates))
        self._first.copy_(self._trials)
        self._other_steps.fill_(ledger.steps - ledger.trials)
        if self._position is not None:
            self._position.fill_(plan.position(ledger))
        steps = range(ledger.steps + 1, ledger.steps + 1 + count)
        last = plan.trials + ledger.steps - ledger.trials
        replays = [self._at(level) for level in self._batches.levels(steps)]
        for step, replay in zip(steps, replays, strict=False):
            self._batches.load(step, last)
            replay()
        self._launched = len(replays)

    def collect(self) -> list[Verdict]:
        """Wait for the block, record it in the ledger, and return its verdicts."""
        verdicts = self._recorded() if self._launched else [self._exactly()]
        self._in_flight = False
        return verdicts

    def close(self) -> None:
        """Stop what is done in the background, at the end of a run or after an error."""
        self._batches.close()

    def _recorded(self) -> list[Verdict]:
        """The block that was launched, in the ledger."""
        counts = [self._trials, self._updates, self._cut.long()]
        trials, updates, cut = torch.stack(counts).tolist()  # the one synchronisation of a block
        if cut:
            raise NothingReleasedError(
                "a batch was larger than counted in advance, so that records were left out; resume "
                "from the last checkpoint with Performance(capture=False) or --no-capture"
            )
        if self._current_addresses() != self._addresses:
            raise UnsupportedModelError(
                "the model moves its weights in memory when it is called, which a CUDA graph "
                "cannot follow; run with Performance(capture=False) or --no-capture"
            )
        state, ledger = self._progress.state, self._progress.ledger
        made = trials - ledger.trials
        ledger = ledger.record(self._event, trials=made, updates=updates - ledger.updates)
        self._progress = Progress(state, ledger)
        rows = self._rows[:made].cpu()
        return [Verdict(row[0] > 0, dict(zip(self._names, row[1:], strict=True))) for row in rows]

    def _exactly(self) -> Verdict:
        """A step that is no trial, or a trial whose batch has no room: with its exact batch."""
        state = self._progress.state
        after, verdict = make_trial(
            self._procedure,
            self._plan,
            self._streams,
            self._progress,
            updates_in_place(self._procedure),
        )
        if after.state is not state:  # whose parts may be some that are written to
            copied = map_tensors(torch.clone, after.state, together=elementwise)
            map_tensors(Tensor.copy_, state, copied, together=elementwise)
        self._trials.fill_(after.ledger.trials)
        self._updates.fill_(after.ledger.updates)
        self._progress = Progress(state, after.ledger)
        return verdict

    def _current_addresses(self) -> list[int]:
        return [value.data_ptr() for value in self._progress.state.params.values()]

    def _sizes_pay(self) -> bool:
        """Whether batches have several padded sizes: where trials are large."""
        source = getattr(getattr(self._padded, "proposer", None), "source", None)
        if not isinstance(source, DpGradient):
            return False
        problem, rate = source.sampler.problem, source.update.sample_rate
        parameters = sum(value.numel() for value in problem.model.parameters())
        records = len(problem.train)
        several = len(set(padded_sizes(records, rate))) > 1
        return several and parameters * rate * records >= LEAST_WORK

    def _at(self, level: int) -> Callable[[], None]:
        """A trial at a level of padding, made when it is first needed.

        On CUDA it is captured. State and counts are left alone.
        """
        if level in self._by_level:
            return self._by_level[level]

        def trial_at_level() -> None:
            self._batches.level = level
            token = captured_batch.set(self._batches.batch)
            try:
                self._trial()
            finally:
                captured_batch.reset(token)

        made, device = trial_at_level, self._trials.device
        self._live.fill_(False)
        try:
            if device.type == "cuda":
                self._batches.resolve()
                calls = 1 if self._by_level else WARM_UP_CALLS  # kernels are known then
                made = capture_graph(trial_at_level, device, pool=self._pool, warm_up=calls)
            elif not self._by_level:
                trial_at_level()
        finally:
            self._live.fill_(True)
        self._by_level[level] = made
        return made

    def _trial(self) -> None:
        """One trial, written so that a replay after the end of the plan changes nothing."""
        room = (self._trials < self._plan.trials) & self._live
        active, position = room, self._trials
        if self._plan.updates is not None:
            active = room & (self._updates < self._plan.updates)
            position = self._updates
        position = position if self._position is None else self._position
        counted = room if self._plan.run_all_trials else active
        self._batches.cut.clear()
        _, verdict = trial(
            self._padded,
            self._progress.state,
            self._streams.at(self._trials + self._other_steps + 1),
            position,
            active=active,
            out=self._progress.state,
        )
        for cut in self._batches.cut:
            self._cut.logical_or_(cut & counted)
        self._note(verdict)
        self._trials.add_(counted)
        self._updates.add_(verdict.accept)

    def _note(self, verdict: Verdict) -> None:
        values = [verdict.accept, *verdict.private.values()]
        row = torch.stack([value.double() for value in values])
        if self._rows.shape[1] != len(row):  # the first trial, before it is captured
            self._names = tuple(verdict.private)
            self._rows = torch.zeros(
                len(self._rows), len(row), device=row.device, dtype=torch.float64
            )
        place = (self._trials - self._first).clamp(max=len(self._rows) - 1)
        self._rows.index_copy_(0, place.reshape(1), row.reshape(1, -1))


Loop = EagerLoop | CudaGraphLoop
