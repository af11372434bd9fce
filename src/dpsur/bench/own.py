"""Our own arms: what `dpsur.core.loop.train` does in one turn, on a batch of known size."""

import torch
import torch.nn.functional as F

from dpsur.bench.cell import LEARNING_RATE, MAX_GRAD_NORM, MOMENTUM, NOISE_MULTIPLIER, Cell
from dpsur.core.gradients import clipped_sum
from dpsur.core.loop import keep
from dpsur.core.problem import Problem
from dpsur.core.types import Params
from dpsur.methods.dpsgd import Dpsgd
from dpsur.methods.dpsur import Dpsur
from dpsur.privacy.events import LossTest, SampledGaussian, Test, Trial
from dpsur.privacy.plan import Budget, Plan

VAL_BATCH_SIZE = 256
# The paper's gate; what a test costs in time does not depend on these.
VAL_NOISE_MULTIPLIER, ACCEPT_THRESHOLD = 1.3, -1.0
ENDLESS = 10**9


class OwnStep:
    """One trial: draw a candidate, judge it, keep or drop it.

    The batch is all there is, and is drawn at rate 1. So the step works on the very batch that the
    other arms are given, and still pays for drawing a Poisson sample and gathering its rows.
    """

    def __init__(self, cell: Cell, method: Dpsgd, test: Test | None) -> None:
        self._problem = Problem(cell.model(), F.cross_entropy, cell.batch)
        trial = Trial(SampledGaussian(1.0, NOISE_MULTIPLIER), test)
        # Nothing is released and no record is private: the plan only carries the trial.
        plan = Plan(Budget(1.0, 1e-5), "every-trial", trial, trials=ENDLESS)
        self._procedure = method.bind(self._problem, plan, cell.streams())
        self._state = self._procedure.initial_state()

    def __call__(self) -> None:
        """Make the trial."""
        position = torch.tensor(0, device=self._problem.device)
        candidate = self._procedure.propose(self._state, position)
        verdict = self._procedure.judge(self._state, candidate)
        rejected = self._procedure.after_rejection(self._state, candidate)
        self._state = keep(verdict.accept, candidate.state, rejected)
        int(verdict.accept)  # the ledger asks for every verdict, which waits for the device

    def clipped_sum(self) -> Params:
        """The sum of clipped gradients."""
        params = self._state.params
        return clipped_sum(self._problem, params, self._problem.train, MAX_GRAD_NORM).params


def dpsgd_step(cell: Cell) -> OwnStep:
    """A step of DP-SGD."""
    method = Dpsgd(
        learning_rate=LEARNING_RATE,
        momentum=MOMENTUM,
        schedule="constant",
        batch_size=len(cell.batch),
        max_grad_norm=MAX_GRAD_NORM,
    )
    return OwnStep(cell, method, test=None)


def dpsur_trial(cell: Cell) -> OwnStep:
    """A whole trial of DPSUR: the candidate, the test on its own batch, and the choice."""
    method = Dpsur(
        learning_rate=LEARNING_RATE,
        momentum=MOMENTUM,
        schedule="constant",
        batch_size=len(cell.batch),
        max_grad_norm=MAX_GRAD_NORM,
    )
    size = len(cell.batch)
    rate = min(VAL_BATCH_SIZE, size) / size
    return OwnStep(cell, method, LossTest(rate, VAL_NOISE_MULTIPLIER, ACCEPT_THRESHOLD))
