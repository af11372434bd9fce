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
from dpsur.mechanism.cuda_graphs import WARM_UP_CALLS, capture_graph
from dpsur.mechanism.gaussian import host_batch, level_for, padding_level
from dpsur.mechanism.host_batches import HostBatches
from dpsur.mechanism.proposer import DpGradient
from dpsur.mechanism.state import Procedure, State, Verdict
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import (
    HALF_UPDATED,
    LossTestGate,
    Progress,
    has_next,
    make_trial,
    own,
    trial,
    updates_in_place,
)
from dpsur.privacy.events import Ledger
from dpsur.privacy.plan import Plan

# Parameters times records of a batch from which on it pays to look at the sizes of batches first:
# trials of half a millisecond on an H200. By size, not by a clock: a seeded run has to choose the
# same every time, since sums over other sizes are rounded otherwise.
LEAST_WORK = 1e8


class CapturedTrial:
    """A trial of a padded procedure, captured once; its state stays in fixed memory.

    On other devices than CUDA a replay simply makes the trial. Where trials take long they are
    captured for a few sizes of the batch, each when it is first needed.
    """

    def __init__(
        self,
        procedure: Procedure,
        plan: Plan,
        progress: Progress,
        streams: Streams,
        block: int,
        *,
        owned: bool = False,
    ) -> None:
        self._procedure, self._plan, self._streams = procedure, plan, streams
        device = progress.state.updates.device
        self._state = own(progress, owned=owned).state
        self._addresses = self._current_addresses()
        ledger = progress.ledger
        # What the host reads after a block.
        self._trials = torch.tensor(ledger.trials, device=device)
        self._updates = torch.tensor(ledger.updates, device=device)
        self._overflow = torch.tensor(False, device=device)
        self._names: tuple[str, ...] = ()
        self._rows = torch.zeros(block, 0, device=device, dtype=torch.float64)
        self._first = torch.tensor(ledger.trials, device=device)
        # Steps that are no trials have random numbers too, so draws are addressed by both.
        self._other_steps = torch.tensor(ledger.steps - ledger.trials, device=device)
        # Where schedules stand, if that does not follow from the counts.
        self._position: Tensor | None = None
        if plan.filter is not None and plan.updates is None:
            self._position = torch.tensor(plan.position(ledger), device=device)
        # Batches of records that stay on the host, copied to fixed memory before every replay.
        self._host_batches = HostBatches(streams)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # Where this is False a trial changes neither state nor counts.
        self._live = torch.tensor(True, device=device)
        # Trials by level of padding; None has room for any batch.
        self._by_level: dict[int | None, Callable[[], None]] = {}
        self._sized = self._sized_batches()
        # Whether sizes of batches are counted before a block, so that none of them overflows.
        self.knows_sizes = bool(self._sized)
        if not self._sized:
            self._at(None)

    @property
    def replay(self) -> Callable[[], None]:
        """One trial, within a block, with room for any batch."""
        return self._at(None)

    def run(self, ledger: Ledger, block: int) -> int:
        """Replay a block of trials, after those in the ledger; return how many.

        Replays after the last update change nothing, but records on the host would be read for
        them. So there are no more than the updates that are left, and fewer than the block has if
        the batch of the next one is known to have no room.
        """
        count = min(block, self._plan.identical_trials_left(ledger))
        private = self._plan.updates is not None and not self._plan.run_all_trials
        if private and self._host_batches.in_use:
            assert self._plan.updates is not None
            count = min(count, max(1, self._plan.updates - ledger.updates))
        if not count:  # a step that is no trial comes next
            return 0
        self._first.copy_(self._trials)
        self._other_steps.fill_(ledger.steps - ledger.trials)
        if self._position is not None:
            self._position.fill_(self._plan.position(ledger))
        steps = range(ledger.steps + 1, ledger.steps + 1 + count)
        last = self._plan.trials + ledger.steps - ledger.trials
        replays = self._replays(steps)
        for step, replay in zip(steps, replays, strict=False):
            self._host_batches.load(step, last)
            replay()
        return len(replays)

    def close(self) -> None:
        self._host_batches.close()

    def prepare(self) -> None:
        """Capture now what is captured when it is first needed otherwise."""
        for level in range(len(self._sized[0].padded_batch_sizes)) if self._sized else ():
            self._at(level)

    def _replays(self, steps: range) -> list[Callable[[], None]]:
        """A trial for every step, with the smallest sizes that hold its batches.

        Batches follow from the steps' random numbers alone, so their sizes can be had in advance.
        The list ends before a batch that is larger than every size. Without sizes the trial itself
        notices such a batch.
        """
        if not self._sized:
            return [self.replay] * len(steps)
        levels = [0] * len(steps)
        for one in self._sized:
            sizes, counts = one.padded_batch_sizes, one.batch_sizes(self._streams, steps)
            too_large = [place for place, size in enumerate(counts) if size > sizes[-1]]
            levels = levels[: min(too_large, default=len(levels))]
            counts = counts[: len(levels)]
            levels = [
                max(level, level_for(sizes, size))
                for level, size in zip(levels, counts, strict=True)
            ]
        for level in sorted(set(levels)):
            self._at(level)
        return [self._at(level) for level in levels]

    def _at(self, level: int | None) -> Callable[[], None]:
        """A trial at a level of padding, made when it is first needed.

        On CUDA it is captured, and state and counts are left alone.
        """
        if level in self._by_level:
            return self._by_level[level]

        def trial_in_room() -> None:
            tokens = padding_level.set(level), host_batch.set(self._host_batches.batch)
            try:
                self._trial()
            finally:
                padding_level.reset(tokens[0])
                host_batch.reset(tokens[1])

        made, device = trial_in_room, self._state.updates.device
        if device.type == "cuda":
            self._host_batches.resolve()
            self._live.fill_(False)
            try:
                calls = 1 if self._by_level else WARM_UP_CALLS  # kernels are known then
                made = capture_graph(trial_in_room, device, pool=self._pool, warm_up=calls)
            finally:
                self._live.fill_(True)
        self._by_level[level] = made
        return made

    def _sized_batches(self) -> list[DpGradient | LossTestGate]:
        """The sources of batches, if several padded sizes pay: where trials are large."""
        source = getattr(getattr(self._procedure, "proposer", None), "source", None)
        gate = getattr(self._procedure, "gate", None)
        if not isinstance(source, DpGradient) or len(set(source.padded_batch_sizes)) < 2:
            return []
        problem = source.sampler.problem
        parameters = sum(value.numel() for value in problem.model.parameters())
        if parameters * source.update.sample_rate * len(problem.train) < LEAST_WORK:
            return []
        return [source, gate] if isinstance(gate, LossTestGate) else [source]

    def read(self) -> tuple[int, int, bool]:
        """Trials, updates and whether a batch overflowed: the one synchronisation per block."""
        counts = [self._trials, self._updates, self._overflow.long()]
        trials, updates, overflow = torch.stack(counts).tolist()
        return trials, updates, bool(overflow)

    def state(self) -> State:
        """The state as it is; later replays write to the same tensors."""
        if self._current_addresses() != self._addresses:
            raise UnsupportedModelError(
                "the model moves its weights in memory when it is called, which a CUDA graph "
                "cannot follow; run with Performance(capture=False) or --no-capture"
            )
        return self._state

    def _current_addresses(self) -> list[int]:
        return [value.data_ptr() for value in self._state.params.values()]

    def verdicts(self, count: int) -> list[Verdict]:
        """The verdicts of the block's trials, on the host."""
        rows = self._rows[:count].cpu()
        return [Verdict(row[0] > 0, dict(zip(self._names, row[1:], strict=True))) for row in rows]

    def restore(self, progress: Progress) -> None:
        """Continue from a progress that was made elsewhere."""
        if progress.state is not self._state:
            map_tensors(Tensor.copy_, self._state, progress.state, together=elementwise)
        self._trials.fill_(progress.ledger.trials)
        self._updates.fill_(progress.ledger.updates)
        self._overflow.fill_(False)

    def _trial(self) -> None:
        """One trial, written so that a replay after the end of the plan changes nothing."""
        room = (self._trials < self._plan.trials) & self._live
        active, position = room, self._trials
        if self._plan.updates is not None:
            active = room & (self._updates < self._plan.updates)
            position = self._updates
        position = position if self._position is None else self._position
        counted = room if self._plan.run_all_trials else active
        _, verdict = trial(
            self._procedure,
            self._state,
            self._streams.at(self._trials + self._other_steps + 1),
            position,
            active=active,
            out=self._state,
        )
        self._note(verdict)
        if verdict.overflow is not None:
            self._overflow.logical_or_(verdict.overflow & counted)
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


def _copy(state: State) -> State:
    return map_tensors(torch.clone, state, together=elementwise)


class CudaGraphLoop:
    """Makes the planned trials in captured blocks.

    A batch that is larger than its padding is never cut. Where sizes are counted before a block,
    the block ends before such a batch, and that trial is made with its exact batch. Nothing is ever
    repeated then, so there is no copy of the state: `progress` shows the captured one. Elsewhere a
    block in which a batch overflowed is repeated with exact batches, from the copy in `progress`.
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
        self._streams, self._progress = streams, progress
        self._block = block
        self._captured = CapturedTrial(padded, plan, progress, streams, block, owned=owned)
        self._launched = 0
        self._shared = self._captured.knows_sizes
        # Whether trials were begun that the ledger does not have yet.
        self._in_flight = False
        if self._shared:
            self._progress = Progress(self._captured.state(), progress.ledger)
        elif owned:  # now the captured state's
            self._progress = Progress(_copy(progress.state), progress.ledger)

    @property
    def progress(self) -> Progress:
        if self._shared and self._in_flight:
            raise NothingReleasedError(HALF_UPDATED)
        return self._progress

    @property
    def finished(self) -> bool:
        return not self._in_flight and not has_next(self._procedure, self._plan, self._progress)

    def prepare(self) -> None:
        """Capture trials for all sizes of batches, so that none of them waits for it later."""
        self._captured.prepare()

    def launch(self) -> None:
        """Replay a block on the GPU, without waiting for it."""
        ledger = self.progress.ledger
        self._launched, self._in_flight = 0, True  # should it be interrupted
        self._launched = self._captured.run(ledger, self._block)

    def close(self) -> None:
        self._captured.close()

    def collect(self) -> list[Verdict]:
        verdicts = self._exactly(1) if not self._launched else self._recorded()
        self._in_flight = False
        return verdicts

    def _recorded(self) -> list[Verdict]:
        """The block that was launched, in the ledger."""
        made, kept, overflow = self._captured.read()
        if overflow and self._shared:
            raise NothingReleasedError(
                "a batch was larger than counted in advance, so that records were left out; resume "
                "from the last checkpoint with Performance(capture=False) or --no-capture"
            )
        if overflow:
            return self._exactly(self._launched)
        state, ledger = self._progress.state, self._progress.ledger
        count = made - ledger.trials
        ledger = ledger.record(
            self._padded.step(state), trials=count, updates=kept - ledger.updates
        )
        verdicts = self._captured.verdicts(count)
        state = self._captured.state()
        self._progress = Progress(state if self._shared else _copy(state), ledger)
        return verdicts

    def _exactly(self, count: int) -> list[Verdict]:
        """The same trials, with the same draws, on exact batches."""
        verdicts = []
        in_place = self._shared and updates_in_place(self._procedure)
        for _ in range(count):
            if has_next(self._procedure, self._plan, self._progress):
                self._progress, verdict = make_trial(
                    self._procedure, self._plan, self._streams, self._progress, in_place
                )
                verdicts.append(verdict)
        self._captured.restore(self._progress)
        if self._shared:
            self._progress = Progress(self._captured.state(), self._progress.ledger)
        return verdicts
