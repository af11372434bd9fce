"""Selective update: any procedure behind a gate."""

import copy
from dataclasses import dataclass, field, replace

from torch import Tensor

from dpsur.functional.problem import Problem
from dpsur.mechanism.cuda_graphs import side_by_side
from dpsur.mechanism.gate import BegunTest, begin_test, make_gate
from dpsur.mechanism.sampling import Batch, Draw, padded_batch, steady_batch
from dpsur.mechanism.state import Candidate, Procedure, State, Verdict
from dpsur.mechanism.streams import VAL_BATCH, VAL_NOISE, Streams
from dpsur.privacy.accounting import KEEP_MOMENTUM
from dpsur.privacy.events import Event, Step, Trial
from dpsur.privacy.plans import AnyPlan, FilteredPlan, Plan


@dataclass(frozen=True)
class _AwaitedCandidate(Candidate):
    """A candidate whose test was begun while it was drawn."""

    test: BegunTest = field(kw_only=True)


class Selective:
    """A procedure whose candidates must pass a test on a fresh batch before they count."""

    def __init__(
        self,
        proposer: Procedure,
        problem: Problem,
        plan: AnyPlan,
        streams: Streams,
        loss_clip: float,
    ) -> None:
        assert isinstance(plan, Plan | FilteredPlan)  # a menu has no tests
        gate = (plan.trial if isinstance(plan, Plan) else plan.typical).gate
        assert gate is not None
        self.setup: tuple[Event, ...] = plan.setup
        self._proposer = proposer
        self._problem = problem
        self._streams = streams
        self._test = gate
        self._gate = make_gate(gate, loss_clip)
        self._draw: Draw = steady_batch
        self._begins_early = False
        self._keeps_momentum = plan.on_reject == KEEP_MOMENTUM

    def step(self, state: State) -> Step:
        """The proposer's, with the test."""
        step = self._proposer.step(state)
        return replace(step, test=self._test) if isinstance(step, Trial) else step

    def initial_state(self) -> State:
        """The proposer's."""
        return self._proposer.initial_state()

    def propose(self, state: State, position: Tensor) -> Candidate:
        """Draw the proposer's candidate (Alg. 1, L3-8), and begin its test where that can be."""
        if not self._begins_early:
            return self._proposer.propose(state, position)
        test, candidate = side_by_side(
            self._problem.device,
            lambda: begin_test(self._problem, state.params, self._fresh_batch()),
            lambda: self._proposer.propose(state, position),
        )
        return _AwaitedCandidate(candidate.state, candidate.overflow, test=test)

    def judge(self, state: State, candidate: Candidate) -> Verdict:
        """Compare both models on one fresh batch, with noise (Alg. 1, L9-14)."""
        if not isinstance(self.step(state), Trial):
            return self._proposer.judge(state, candidate)  # a figure to steer by, not an update
        if isinstance(candidate, _AwaitedCandidate):
            test = candidate.test
        else:
            test = BegunTest(self._fresh_batch())
        after, before = test.losses(self._problem, candidate.state.params, state.params)
        difference = after - before
        accept = self._gate.decide(difference, self._streams[VAL_NOISE])
        private = {"loss": after, "loss_difference": difference}
        return Verdict(accept, private, test.batch.overflow)

    def _fresh_batch(self) -> Batch:
        return self._draw(self._problem.train, self._test.sample_rate, self._streams[VAL_BATCH])

    def padded(self) -> "Selective | None":
        """The same gate on padded batches, if what it judges can be padded too.

        Nothing waits for the host then, and a test can begin while its candidate is drawn. Every
        step is an update: a proposer with steps of several kinds (DPIS) is not padded.
        """
        proposer = self._proposer.padded()
        if proposer is None:
            return None
        copied = copy.copy(self)
        copied._proposer, copied._draw = proposer, padded_batch
        copied._begins_early = True
        return copied

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The state as it was; with momentum kept, the optimizer as the candidate left it.

        What the optimizer keeps comes from a noisy gradient that the `every-trial` accounting has
        charged. Under any other accounting a plan with that setting does not exist.
        """
        if self._keeps_momentum:
            return replace(state, optimizer=candidate.state.optimizer)
        return state
