"""DPSUR (Fu et al., VLDB 2024): a DPSGD candidate, released only if it passes a noisy test."""

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from dpsur import checks
from dpsur.core.gate import LossGate, mean_losses
from dpsur.core.problem import Problem
from dpsur.core.sampling import poisson_sample
from dpsur.core.streams import VAL_BATCH, VAL_NOISE, Streams
from dpsur.core.types import Candidate, Procedure, State, Verdict
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.methods.base import option, power_of_two_near
from dpsur.methods.dpsgd import Dpsgd, NoisyGradientSteps, check_batch_size
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.calibrate import least_noise
from dpsur.privacy.events import Event, LossTest, Trial
from dpsur.privacy.plan import Budget, Plan, Request

USUAL_TEST_NOISE = 1.0
TEST_SHARE = 0.5


@dataclass(frozen=True)
class Dpsur(Dpsgd):
    """DPSGD with selective update and release (the paper's Algorithm 1).

    Formal guarantee of one trial: a sampled Gaussian for the candidate and one for the test. What a
    run of them costs is the accounting's business.
    """

    name = "dpsur"
    summary = "selective update and release (Fu et al. 2024): an update must pass a noisy loss test"

    learning_rate: float = option(4.0, "learning rate at the start")
    val_batch_size: int | None = option(
        None, "expected size of a Poisson batch for the test (default: near the root of N)"
    )
    val_noise_multiplier: float | None = option(
        None,
        "noise of the test relative to twice its clip bound (default: 1, or more where the tests "
        "would spend over half of the budget)",
    )
    loss_clip: float = option(0.001, "clip bound of the loss difference, C_v")
    accept_threshold: float = option(
        0.0, "accept below this many clip bounds, beta (the paper uses -1; 0 separates best)"
    )
    trials: int | None = option(
        None, "trials to make, accepted or not (accounting every-trial; otherwise use updates)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.finite("accept_threshold", self.accept_threshold)
        checks.positive("loss_clip", self.loss_clip)
        if self.val_noise_multiplier is not None:
            checks.positive("val_noise_multiplier", self.val_noise_multiplier)
        for name in ("val_batch_size", "trials"):
            value = getattr(self, name)
            if value is not None:
                checks.at_least_one(name, value)

    def bind(self, problem: Problem, plan: Plan, streams: Streams) -> Procedure:
        """Tie the method to its data."""
        steps = NoisyGradientSteps(self, problem, plan, streams)
        return Selective(steps, problem, plan, streams, self.loss_clip)

    def _with_defaults(self, dataset_size: int, budget: Budget, accounting: str) -> Self:
        settled = super()._with_defaults(dataset_size, budget, accounting)
        if self.val_batch_size is None:
            chosen = min(power_of_two_near(dataset_size**0.5), dataset_size)
            settled = replace(settled, val_batch_size=chosen)
        else:
            check_batch_size("val_batch_size", self.val_batch_size, dataset_size)
        if self.val_noise_multiplier is None:
            noise = settled._affordable_test_noise(dataset_size, budget, accounting)
            settled = replace(settled, val_noise_multiplier=noise)
        return settled

    def _affordable_test_noise(self, dataset_size: int, budget: Budget, accounting: str) -> float:
        """The usual noise, or as much more as keeps the tests to their share of the budget."""
        assert self.val_batch_size is not None
        rate = self.val_batch_size / dataset_size
        wanted = self.trials if accounting_named(accounting).charges == "trials" else self.updates
        count = self._default_count(dataset_size) if wanted is None else wanted
        share = TEST_SHARE * budget.epsilon

        def epsilon_of(noise: float) -> float:
            tests = [(LossTest(rate, noise, self.accept_threshold), count)]
            return accounting_named(accounting).epsilon(tests, budget.delta)

        if epsilon_of(USUAL_TEST_NOISE) <= share:
            return USUAL_TEST_NOISE
        noise = least_noise(epsilon_of, share)
        if noise is None:
            raise BudgetError(
                f"epsilon {budget.epsilon:g} is too small for {count} tests of candidates; raise "
                "epsilon, make fewer updates or use the method dpsgd, which makes no tests"
            )
        return noise

    def _request(self, dataset_size: int, accounting: str) -> Request:
        charged = accounting_named(accounting).charges
        fixed, random = ("trials", "updates") if charged == "trials" else ("updates", "trials")
        if getattr(self, random) is not None:
            raise InvalidInputError(
                f"{random} {getattr(self, random)} cannot be fixed under the {accounting} "
                f"accounting, where the number of accepted updates is random given the trials; "
                f"give {fixed} instead"
            )
        request = super()._request(dataset_size, accounting)
        return replace(request, count=getattr(self, fixed))

    def _trial(self, dataset_size: int, noise_multiplier: float) -> Trial:
        assert self.val_batch_size is not None
        assert self.val_noise_multiplier is not None
        trial = super()._trial(dataset_size, noise_multiplier)
        test = LossTest(
            self.val_batch_size / dataset_size, self.val_noise_multiplier, self.accept_threshold
        )
        return replace(trial, test=test)

    def _with_plan(self, plan: Plan) -> Self:
        settled = super()._with_plan(plan)
        if plan.updates is None:
            return replace(settled, updates=None, trials=plan.trials)
        return replace(settled, updates=plan.updates, trials=None)


class Selective:
    """Any procedure behind the paper's gate: its candidates must pass a noisy loss test."""

    def __init__(
        self,
        proposer: Procedure,
        problem: Problem,
        plan: Plan,
        streams: Streams,
        loss_clip: float,
    ) -> None:
        assert plan.trial.test is not None
        self.trial: Trial = plan.trial
        self.setup: tuple[Event, ...] = plan.setup
        self._proposer = proposer
        self._problem = problem
        self._streams = streams
        self._test = plan.trial.test
        self._gate = LossGate(loss_clip, self._test.noise_multiplier, self._test.accept_threshold)

    def initial_state(self) -> State:
        """The proposer's."""
        return self._proposer.initial_state()

    def propose(self, state: State, position: Tensor) -> Candidate:
        """Draw the proposer's candidate (Alg. 1, L3-8)."""
        return self._proposer.propose(state, position)

    def judge(self, state: State, candidate: Candidate) -> Verdict:
        """Compare both models on one fresh batch, with noise (Alg. 1, L9-14)."""
        train = self._problem.train
        batch = train.select(
            poisson_sample(len(train), self._test.sample_rate, self._streams[VAL_BATCH])
        )
        after, before = mean_losses(self._problem, candidate.state.params, state.params, batch)
        difference = after - before
        accept = self._gate.decide(difference, self._streams[VAL_NOISE])
        return Verdict(accept, private={"loss": after, "loss_difference": difference})
