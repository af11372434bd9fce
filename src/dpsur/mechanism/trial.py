"""Algorithm 1 of the paper: one step of training with its charge, the gate, and the loop.

    charge    book the step, before any noise is drawn
    propose   sample, clip, sum over ranks, add noise, divide, update       lines 3 to 8
    judge     compare both models on a fresh batch, with noise             lines 9 to 14
    decide    book the verdict
    keep      one of the two states, whole                                 lines 15 to 18

DP-SGD is the same step with a gate that accepts everything. `take_step` is what `fit` and
`PrivacyEngine` both call. They differ in where weights are: `GradientProposer` makes a new state
from an old one, and `engine/weights.py` updates a module and its `torch.optim` optimizer in place.
On CUDA graphs (`cuda_graph_loop.py`) `trial` is captured, and a block of trials is booked as one.

What an interruption leaves behind, in memory:
  * before the charge: nothing happened;
  * after the charge, before the verdict is booked: the step stays charged (or, where only accepted
    updates are charged, counted against the cap), and a gate's candidate is undone;
  * while the verdict is booked: an acceptance may be charged whose update was undone, never the
    reverse.
A checkpoint holds state and account of one moment. A run that resumes from it makes the steps after
it again: `fit` with the draws that they had, a custom loop with a new key, so that what was lost
has to be thrown away.

The gate compares both models on one fresh batch and asks a rule. `LossRule` is the paper's clipped,
noisy loss difference against a threshold, `CoinRule` a coin for candidates that got worse.

A loop makes one block of trials at a time, until the plan affords no more. `EagerLoop` makes a
trial per block on the host's command; `CudaGraphLoop` replays many. Between `launch` and `collect`
the device is busy, so that a caller can interleave several runs.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, TypeGuard

import torch
from torch import Tensor

from dpsur import checks
from dpsur.errors import InvalidInputError, NothingReleasedError
from dpsur.functional.problem import Problem
from dpsur.functional.tree import Params, elementwise, map_tensors, tensors_of
from dpsur.mechanism.cuda_graphs import run_concurrently
from dpsur.mechanism.gaussian import Batch, Draw, padded_batch, steady_batch
from dpsur.mechanism.noise_table import DEVIATION
from dpsur.mechanism.proposer import Adam, GradientProposer, Sgd
from dpsur.mechanism.state import Candidate, Gate, Procedure, Proposer, State, Verdict
from dpsur.mechanism.streams import VAL_BATCH, VAL_NOISE, Draws, Stream, Streams
from dpsur.per_example.record_function import record_losses
from dpsur.privacy.account import Account
from dpsur.privacy.events import CoinTest, Event, Ledger, Step, Test, Trial
from dpsur.privacy.plan import Plan

_SPARE_STEPS = 64


@dataclass(frozen=True)
class LossRule:
    """Accept a candidate whose noisy loss difference is below the threshold (Alg. 1, L11-14).

    Formal guarantee: for any difference, NaN included, acceptance has a probability between
    the a_min and a_max of `dpsur.privacy.events.LossTest` with the same parameters, and the noisy
    difference is a Gaussian mechanism of noise multiplier `noise_multiplier`.
    """

    loss_clip: float
    noise_multiplier: float
    accept_threshold: float

    def __post_init__(self) -> None:
        checks.positive("loss_clip", self.loss_clip)
        checks.positive("val_noise_multiplier", self.noise_multiplier)
        if math.isnan(self.accept_threshold):
            raise InvalidInputError("accept_threshold must be a number, got nan")

    def decide(self, difference: Tensor, stream: Stream) -> Tensor:
        """Draw a verdict for a loss difference. The noise is drawn for any difference."""
        return self.noisy(difference, stream) < self.accept_threshold * self.loss_clip

    def noisy(self, difference: Tensor, stream: Stream) -> Tensor:
        """The clipped difference with noise: all that a verdict may depend on."""
        bound = self.loss_clip
        # A comparison with NaN would reject with certainty, and a certain rejection has no
        # acceptance probability above a_min: count it as the worst finite difference instead.
        difference = torch.where(difference.abs() < math.inf, difference, bound)
        # Integers instead of real numbers move a threshold by a few steps of their grid, and a
        # probability beyond its bound, unless differences end so much earlier (docs/privacy.md).
        deviation = 2 * bound * self.noise_multiplier
        most = max(0.0, bound - _SPARE_STEPS * deviation / DEVIATION)
        noisy = stream.add_normal(difference.double().clamp(-most, most).view(-1), deviation)
        return noisy.view(difference.shape)


@dataclass(frozen=True)
class CoinRule:
    """Accept every improvement, and a worsening with probability 1 / accept_ratio.

    Formal guarantee: for any difference, NaN included, acceptance has a probability between
    1 / accept_ratio and 1. For the `proven` accounting this is all that matters, and against the
    paper's gate with the same ratio it needs about half the trials.
    """

    accept_ratio: float

    def decide(self, difference: Tensor, stream: Stream) -> Tensor:
        """Draw a verdict for a loss difference. The coin is tossed for any difference."""
        toss = stream.uniform(difference.numel()).view(difference.shape)
        # a comparison with NaN is false, which makes NaN a worsening, as it should be
        return (difference < 0) | (toss < 1 / self.accept_ratio)


Rule = LossRule | CoinRule


def make_rule(test: Test, loss_clip: float) -> Rule:
    if isinstance(test, CoinTest):
        return CoinRule(test.accept_ratio)
    return LossRule(loss_clip, test.noise_multiplier, test.accept_threshold)


def mean_losses(
    problem: Problem, candidate: Params, current: Params, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Mean losses of the candidate and of the current model, on one batch (Alg. 1, L10).

    An empty batch says nothing for or against: both are zero.
    """
    return mean_loss(problem, candidate, batch), mean_loss(problem, current, batch)


def mean_loss(problem: Problem, params: Params, batch: Batch) -> Tensor:
    """The mean of the losses that each record of a batch has by itself, in evaluation mode."""
    losses = torch.zeros(0, device=problem.device)
    if len(batch):
        losses = record_losses(problem, params, batch.examples)
    return batch.mean(losses.double())


@dataclass(frozen=True)
class AlwaysAccept:
    """No gate: every candidate is kept."""

    test: Test | None = None
    rejects: ClassVar[bool] = False

    def begin(self, state: State, draws: Draws) -> None:
        """Nothing to prepare."""

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:  # noqa: ARG002
        return Verdict(torch.ones((), dtype=torch.bool, device=state.updates.device))

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        return state

    def padded(self) -> "AlwaysAccept":
        return self


@dataclass(frozen=True)
class LossTestGate:
    """Compare both models on one fresh Poisson batch and let a rule decide.

    `keep_momentum` leaves the optimizer as a rejected candidate left it. What it then holds comes
    from a noisy gradient that the `every-trial` accounting has charged; under any other accounting
    a plan with that setting does not exist.
    """

    problem: Problem
    test: Test
    rule: Rule
    rejects: ClassVar[bool] = True
    keep_momentum: bool = False
    draw: Draw = steady_batch

    def begin(self, state: State, draws: Draws) -> tuple[Batch, Tensor]:
        """What does not need the candidate: the batch, and the loss of the current model on it.

        The rows of the batch are gathered for this, and again for the candidate: otherwise they
        would take memory beside the gradients.
        """
        batch = self._fresh_batch(draws)
        return batch, mean_loss(self.problem, state.params, replace(batch))

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:
        new = candidate.state.params
        if candidate.test is None:
            batch = self._fresh_batch(draws)
            after, before = mean_losses(self.problem, new, state.params, batch)
        else:
            batch, before = candidate.test
            after = mean_loss(self.problem, new, batch)
        difference = after - before
        accept = self.decide(state, difference, draws)
        return Verdict(accept, {"loss": after, "loss_difference": difference})

    def decide(self, state: State, difference: Tensor, draws: Draws) -> Tensor:  # noqa: ARG002
        """What the rule says; a gate whose rule changes over a run reads the state as well."""
        return self.rule.decide(difference, draws[VAL_NOISE])

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The state as it was; with momentum kept, the optimizer as the candidate left it."""
        if self.keep_momentum:
            return replace(state, optimizer=candidate.state.optimizer)
        return state

    def padded(self) -> "LossTestGate":
        return replace(self, draw=padded_batch)

    def _fresh_batch(self, draws: Draws) -> Batch:
        return self.draw(self.problem.train, self.test.sample_rate, draws[VAL_BATCH])


@dataclass(frozen=True)
class Selective:
    """Selective update and release: a proposer's candidates behind a gate.

    With a gate that accepts everything it is the proposer's own method, such as DP-SGD. `overlap`
    starts the test while the candidate is drawn, which pays on a GPU. `in_place`: candidates take
    the place of the weights they came from, so that these are tested first.
    """

    proposer: Proposer
    gate: Gate
    setup: tuple[Event, ...] = ()
    overlap: bool = False
    in_place: bool = False

    def step(self, state: State) -> Step:
        """The proposer's event, with the gate's test where it is an update."""
        step = self.proposer.step(state)
        return replace(step, test=self.gate.test) if isinstance(step, Trial) else step

    def initial_state(self) -> State:
        return self.proposer.initial_state()

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """Draw a candidate (lines 3 to 8)."""
        if self.in_place:
            begun = self.gate.begin(state, draws)
            return replace(self.proposer.propose(state, draws, position), test=begun)
        if not self.overlap:
            return self.proposer.propose(state, draws, position)
        begun, candidate = run_concurrently(
            state.updates.device,
            lambda: self.gate.begin(state, draws),
            lambda: self.proposer.propose(state, draws, position),
        )
        return replace(candidate, test=begun)

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:
        """Test the candidate (lines 9 to 14). What is not an update is always kept."""
        if not isinstance(self.step(state), Trial):
            return Verdict(torch.ones((), dtype=torch.bool, device=state.updates.device))
        return self.gate.judge(state, candidate, draws)

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        return self.gate.after_rejection(state, candidate)

    def padded(self) -> "Selective | None":
        """The same on padded batches, if the proposer can be padded.

        Nothing waits for the host then, and a test can start while its candidate is drawn. Every
        step is an update: a proposer with steps of several kinds (DPIS) is not padded.
        """
        proposer = self.proposer.padded()
        if proposer is None:
            return None
        overlap = self.gate.test is not None
        return replace(self, proposer=proposer, gate=self.gate.padded(), overlap=overlap)


def trial(
    procedure: Procedure,
    state: State,
    draws: Draws,
    position: Tensor,
    *,
    active: Tensor | None = None,
    out: State | None = None,
    decide: Callable[[Tensor], None] = lambda _: None,
) -> tuple[State, Verdict]:
    """Draw a candidate, test it, and return the next state with the verdict.

    A pure function of its arguments: `draws` are the random numbers of this trial, and `position`
    is where schedules stand. Where `active` is False the trial is made and its outcome dropped: the
    state stays as it is. `out` receives the next state in place, for a captured trial. If it is
    `state` itself, a procedure that never rejects updates it as it goes, without a candidate: the
    same numbers, but a trial that fails may leave it half updated. `decide` books the verdict.
    """
    if out is state and updates_in_place(procedure):
        assert isinstance(procedure.proposer, GradientProposer)
        procedure.proposer.update_in_place(state, draws, position, active)
        everywhere = torch.ones((), dtype=torch.bool, device=state.updates.device)
        return state, Verdict(everywhere if active is None else everywhere & active)
    candidate = procedure.propose(state, draws, position)  # lines 3 to 8
    with undone_if_interrupted(candidate):
        verdict = procedure.judge(state, candidate, draws)  # lines 9 to 14
        accept = verdict.accept if active is None else verdict.accept & active
        decide(accept)
        if candidate.undo is not None and not bool(accept):
            candidate.undo()
    rejected = procedure.after_rejection(state, candidate)
    if active is not None and rejected is not state:
        rejected = keep(active, rejected, state)
    after = keep(accept, candidate.state, rejected, out)  # lines 15 to 18
    return after, replace(verdict, accept=accept)


def take_step(
    procedure: Procedure,
    account: Account,
    streams: Streams,
    state: State,
    *,
    out: State | None = None,
    charged: bool = False,
) -> tuple[State, Verdict]:
    """Charge the step that is due, make it, and book its verdict; raises if it does not fit.

    `charged`: it was charged before and then interrupted, so it is made with the draws of its own
    number. Nothing has been seen of it.
    """
    device = state.updates.device
    position = torch.tensor(account.position, device=device)
    # after the last update trials may continue, so that their number is the same for all data
    active = torch.tensor(False, device=device) if account.dummy_trials_left else None
    if not charged:
        account.book(procedure.step(state))
    draws = streams.at(account.steps)

    def decide(accept: Tensor) -> None:
        account.decide(accepted=bool(accept))

    return trial(procedure, state, draws, position, active=active, out=out, decide=decide)


@contextmanager
def undone_if_interrupted(candidate: Candidate) -> Iterator[None]:
    """Nothing untested stays in the weights, whatever interrupts a test: also Ctrl-C."""
    try:
        yield
    except BaseException:
        if candidate.undo is not None:
            candidate.undo()
        raise


def updates_in_place(procedure: Procedure) -> TypeGuard[Selective]:
    """Whether nothing is ever undone, so that a trial needs no second copy of the state."""
    # exact types: a subclass may do more than these do
    if type(procedure) is not Selective or type(procedure.gate) is not AlwaysAccept:
        return False
    # Some weights after the others: a custom optimizer may need them all at once.
    steps = procedure.proposer
    return type(steps) is GradientProposer and type(steps.optimizer) in (Sgd, Adam)


def keep(accept: Tensor, candidate: State, current: State, out: State | None = None) -> State:
    """Choose one of two states, whole. On a GPU nothing waits for the verdict.

    This is where a rejected trial is undone: every tensor of the state comes from `current`.
    """
    if out is None and accept.device.type == "cpu":
        return candidate if bool(accept) else current
    if out is None:
        return map_tensors(
            lambda new, old: torch.where(accept, new, old), candidate, current, together=elementwise
        )

    def choose(place: Tensor, new: Tensor, old: Tensor) -> Tensor:
        if new is old is place:  # what this trial did not touch
            return place
        return torch.where(accept, new, old, out=place)

    return map_tensors(choose, out, candidate, current, together=elementwise)


@dataclass(frozen=True, repr=False)
class Progress:
    """Where a run stands between two trials. Private as a whole."""

    state: State
    ledger: Ledger

    def __repr__(self) -> str:
        return "Progress(state and ledger; private)"


def start(procedure: Procedure) -> Progress:
    """The progress of a run that has not made a trial."""
    return Progress(procedure.initial_state(), Ledger(setup=procedure.setup))


def own(progress: Progress, *, owned: bool) -> Progress:
    """A progress whose tensors a loop may overwrite: this one if it is `owned`, else a copy.

    Parameters are side by side in memory afterwards.
    """
    state = progress.state
    if owned:
        state = map_tensors(lambda value: value, state, together=elementwise)
        places = [value.data_ptr() for value in tensors_of(state) if value.numel()]
        owned = len(set(places)) == len(places)  # two names for one tensor would change together
    if not owned:
        state = map_tensors(torch.clone, state, together=elementwise)
    return Progress(state, progress.ledger)


HALF_UPDATED = (
    "a trial has begun to update the weights in memory and has not ended, so they are those of no "
    "update and nothing may be released from them; resume the run from its last checkpoint"
)


class EagerLoop:
    """One trial per block.

    Where nothing is ever rejected, trials update the state in place: of `progress` itself if the
    loop has it to itself (`owned`), else of a copy.
    """

    def __init__(
        self,
        procedure: Procedure,
        plan: Plan,
        streams: Streams,
        progress: Progress,
        *,
        owned: bool = False,
    ) -> None:
        self._procedure, self._plan, self._streams = procedure, plan, streams
        self._account = Account(plan, plan.budget.delta, progress.ledger)
        self._in_place = updates_in_place(procedure)
        state = own(progress, owned=owned).state if self._in_place else progress.state
        self._state: State | None = state

    @property
    def progress(self) -> Progress:
        if self._state is None:
            raise NothingReleasedError(HALF_UPDATED)
        return Progress(self._state, self._account.charged)

    @property
    def finished(self) -> bool:
        return not has_next(self._procedure, self._plan, self.progress)

    def launch(self) -> None:
        """Nothing: the trial is made when it is collected."""

    def collect(self) -> list[Verdict]:
        before = self.progress.state
        if self._in_place:  # weights and ledger would not fit each other until the trial is done
            self._state = None
        self._state, verdict = take_step(
            self._procedure,
            self._account,
            self._streams,
            before,
            out=before if self._in_place else None,
        )
        return [verdict]

    def close(self) -> None:
        """Nothing: all is done in the foreground."""


def has_next(procedure: Procedure, plan: Plan, progress: Progress) -> bool:
    """Whether there is another trial to make. Asked before it, never after."""
    stopped = getattr(procedure, "stopped", None)  # by what it has released
    if stopped is not None and stopped(progress.state):
        return False
    step = procedure.step(progress.state)
    return plan.affords(progress.ledger, step) or plan.dummy_trials_left(progress.ledger)


def make_trial(
    procedure: Procedure,
    plan: Plan,
    streams: Streams,
    progress: Progress,
    in_place: bool = False,
) -> tuple[Progress, Verdict]:
    """One step from a progress to the next.

    `in_place` overwrites the tensors of `progress`; for procedures of which `updates_in_place`.
    """
    account = Account(plan, plan.budget.delta, progress.ledger)
    state, verdict = take_step(
        procedure, account, streams, progress.state, out=progress.state if in_place else None
    )
    return Progress(state, account.charged), verdict


def check_completed(plan: Plan, progress: Progress) -> None:
    """Refuse to release a run that hit its cap on trials."""
    if not plan.completed(progress.ledger):
        raise NothingReleasedError(
            f"the cap of {plan.trials} trials came before {plan.updates} accepted updates; nothing "
            "may be released from this run: start another one"
        )
