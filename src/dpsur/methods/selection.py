"""Selective update: any procedure behind a gate."""

import copy
from dataclasses import replace

from torch import Tensor

from dpsur.core.gate import make_gate, mean_losses
from dpsur.core.problem import Problem
from dpsur.core.sampling import Draw, padded_batch, steady_batch
from dpsur.core.streams import VAL_BATCH, VAL_NOISE, Streams
from dpsur.core.types import Candidate, Procedure, State, Verdict
from dpsur.privacy.accounting import KEEP_MOMENTUM
from dpsur.privacy.events import Event, Step, Trial
from dpsur.privacy.plans import AnyPlan, FilteredPlan, Plan


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
        self._keeps_momentum = plan.on_reject == KEEP_MOMENTUM

    def step(self, state: State) -> Step:
        """The proposer's, with the test."""
        step = self._proposer.step(state)
        return replace(step, test=self._test) if isinstance(step, Trial) else step

    def initial_state(self) -> State:
        """The proposer's."""
        return self._proposer.initial_state()

    def propose(self, state: State, position: Tensor) -> Candidate:
        """Draw the proposer's candidate (Alg. 1, L3-8)."""
        return self._proposer.propose(state, position)

    def judge(self, state: State, candidate: Candidate) -> Verdict:
        """Compare both models on one fresh batch, with noise (Alg. 1, L9-14)."""
        if not isinstance(self.step(state), Trial):
            return self._proposer.judge(state, candidate)  # a figure to steer by, not an update
        train = self._problem.train
        batch = self._draw(train, self._test.sample_rate, self._streams[VAL_BATCH])
        after, before = mean_losses(self._problem, candidate.state.params, state.params, batch)
        difference = after - before
        accept = self._gate.decide(difference, self._streams[VAL_NOISE])
        private = {"loss": after, "loss_difference": difference}
        return Verdict(accept, private, batch.overflow)

    def padded(self) -> "Selective | None":
        """The same gate on padded batches, if what it judges can be padded too."""
        proposer = self._proposer.padded()
        if proposer is None:
            return None
        copied = copy.copy(self)
        copied._proposer, copied._draw = proposer, padded_batch
        return copied

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The state as it was; with momentum kept, the optimizer as the candidate left it.

        What the optimizer keeps comes from a noisy gradient that the `every-trial` accounting has
        charged. Under any other accounting a plan with that setting does not exist.
        """
        if self._keeps_momentum:
            return replace(state, optimizer=candidate.state.optimizer)
        return state
