"""The test of candidates, as options of any method: which gate, how strong, at what cost."""

from dataclasses import dataclass, replace
from typing import Self

from dpsur import checks
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.mechanism.state import Procedure
from dpsur.mechanism.streams import Streams
from dpsur.methods.base import option, power_of_two_near
from dpsur.methods.noisy_gradient import NoisyGradientSteps
from dpsur.methods.noisy_steps import NoisySteps, check_batch_size
from dpsur.methods.selection import Selective
from dpsur.privacy.accounting import KEEP_MOMENTUM, RESTORE, Accounting, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.calibrate import largest_ratio, least_noise
from dpsur.privacy.events import CoinTest, LossTest, NonPrivate, Test, Trial
from dpsur.privacy.plans import AnyPlan, Plan
from dpsur.privacy.plans.request import Request

NO_GATE = "none"
GATES = ("loss", "coin", NO_GATE)
GATE_HELP = (
    "the test of a candidate: loss is the paper's noisy loss difference, coin accepts every "
    "improvement and a worsening now and then, none keeps every candidate (dpsur, where it is left "
    "open: coin under the proven accounting, which alone covers it, else loss)"
)
USUAL_TEST_NOISE = 1.0
USUAL_RATIO = 2.0
USUAL_LOSS_CLIP = 0.001
# Shares of epsilon that tests by default may spend alone. Both were chosen on a held-out part of
# the training digits of mnist-5k: under `proven` the ratio costs more than its tests alone.
LOSS_TEST_SHARE = 0.5
COIN_TEST_SHARE = 0.3


def _example_test(gate: str) -> Test:
    return CoinTest(1.0, 1.0) if gate == "coin" else LossTest(1.0, 1.0, 0.0)


@dataclass(frozen=True, repr=False)
class Gated(NoisySteps):
    """Noisy steps that may have to pass a test before they count (the paper's Algorithm 1).

    Formal guarantee of one trial: a sampled Gaussian for the candidate, and a test that accepts
    with a probability in a known interval. What a run of them costs is the accounting's business.
    """

    val_batch_size: int | None = option(
        None, "expected size of a Poisson batch for the test (default: near the root of N)"
    )
    gate: str | None = option(NO_GATE, GATE_HELP, GATES)
    val_noise_multiplier: float | None = option(
        None,
        "noise of the gate loss relative to twice its clip bound (default: 1, or more where the "
        "tests alone would spend over half of the budget)",
    )
    loss_clip: float = option(USUAL_LOSS_CLIP, "clip bound of the loss difference, C_v (gate loss)")
    accept_threshold: float | None = option(
        None,
        "the gate loss accepts below this many clip bounds, beta (default: 0, which separates "
        "best; the paper uses -1)",
    )
    accept_ratio: float | None = option(
        None,
        "the gate coin accepts a worsening with probability 1 over this (default: 2, or less "
        "where the tests alone would spend over 30% of the budget)",
    )
    on_reject: str = option(
        RESTORE,
        "what a rejected trial leaves behind; keep-momentum lets the optimizer learn from it "
        "(accounting every-trial only)",
        (RESTORE, KEEP_MOMENTUM),
    )
    trials: int | None = option(
        None, "trials to make, accepted or not (accounting every-trial; otherwise use updates)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("loss_clip", self.loss_clip)
        checks.one_of("on_reject", self.on_reject, (RESTORE, KEEP_MOMENTUM))
        if self.gate is not None:
            checks.one_of("gate", self.gate, GATES)
        if self.accept_threshold is not None:
            checks.finite("accept_threshold", self.accept_threshold)
        if self.val_noise_multiplier is not None:
            checks.positive("val_noise_multiplier", self.val_noise_multiplier)
        if self.accept_ratio is not None:
            CoinTest(1.0, self.accept_ratio)
        checks.at_least_one_each(self, "val_batch_size", "trials")
        self._implied_gate()
        for name in ("val_batch_size", "trials"):
            if self.gate == NO_GATE and getattr(self, name) is not None:
                raise InvalidInputError(
                    f"{name} {getattr(self, name)} has no meaning without a test of candidates; "
                    "leave it out, or choose a gate"
                )
        if self.gate == NO_GATE and self.on_reject != RESTORE:
            raise InvalidInputError(
                f"on_reject {self.on_reject} has no meaning where nothing is rejected; leave it "
                "out, or choose a gate"
            )

    def bind(self, problem: Problem, plan: AnyPlan, streams: Streams) -> Procedure:
        """Tie the method to its data."""
        steps = self._proposer(problem, plan, streams)
        if self.gate == NO_GATE:
            return steps
        return Selective(steps, problem, plan, streams, self.loss_clip)

    def _proposer(self, problem: Problem, plan: AnyPlan, streams: Streams) -> Procedure:
        return NoisyGradientSteps(self, problem, plan, streams)

    def _with_defaults(self, dataset_size: int, budget: Budget, accounting: str) -> Self:
        settled = super()._with_defaults(dataset_size, budget, accounting)
        if self.gate == NO_GATE:
            return settled
        if self.val_batch_size is None:
            chosen = min(power_of_two_near(dataset_size**0.5), dataset_size)
            settled = replace(settled, val_batch_size=chosen)
        else:
            check_batch_size("val_batch_size", self.val_batch_size, dataset_size)
        return settled._with_gate(dataset_size, budget, accounting_named(accounting))

    def _implied_gate(self) -> str | None:
        """The gate that was named, or that the given parameters belong to; None if neither."""
        belong = {
            "loss": ("val_noise_multiplier", "accept_threshold", "loss_clip"),
            "coin": ("accept_ratio",),
        }
        usual = {"loss_clip": USUAL_LOSS_CLIP}  # the others are left open
        implied = self.gate
        for gate, names in belong.items():
            given = [name for name in names if getattr(self, name) != usual.get(name)]
            if given and implied not in (None, gate):
                raise InvalidInputError(
                    f"{given[0]} {getattr(self, given[0])} belongs to the gate {gate} and cannot "
                    f"be used with the gate {implied}; leave one of them out"
                )
            if given:
                implied = gate
        return implied

    def _with_gate(self, dataset_size: int, budget: Budget, accounting: Accounting) -> Self:
        gate = self._implied_gate() or ("coin" if accounting.name == "proven" else "loss")
        settled = replace(self, gate=gate)
        accounting.check(Trial(NonPrivate(), _example_test(gate)), self.on_reject)
        if gate == "loss" and self.accept_threshold is None:
            settled = replace(settled, accept_threshold=0.0)
        if gate == "loss" and self.val_noise_multiplier is None:
            noise = settled._affordable_test_noise(dataset_size, budget, accounting)
            settled = replace(settled, val_noise_multiplier=noise)
        if gate == "coin" and self.accept_ratio is None:
            ratio = settled._affordable_ratio(dataset_size, budget, accounting)
            settled = replace(settled, accept_ratio=ratio)
        return settled

    def _affordable_test_noise(
        self, dataset_size: int, budget: Budget, accounting: Accounting
    ) -> float:
        """The usual noise, or as much more as keeps the tests to their share of the budget."""
        rate, count = self._tests(dataset_size, accounting)
        share = LOSS_TEST_SHARE * budget.epsilon

        def epsilon_of(noise: float) -> float:
            test = LossTest(rate, noise, self.accept_threshold or 0.0)
            return accounting.test_epsilon(test, count, budget.delta)

        if epsilon_of(USUAL_TEST_NOISE) <= share:
            return USUAL_TEST_NOISE
        noise = least_noise(epsilon_of, share)
        if noise is None:
            raise self._no_room_for_tests(budget, count)
        return noise

    def _affordable_ratio(self, dataset_size: int, budget: Budget, accounting: Accounting) -> float:
        """The usual ratio, or as much less as keeps the tests to their share of the budget."""
        rate, count = self._tests(dataset_size, accounting)

        def epsilon_of(ratio: float) -> float:
            return accounting.test_epsilon(CoinTest(rate, ratio), count, budget.delta)

        ratio = largest_ratio(epsilon_of, COIN_TEST_SHARE * budget.epsilon, USUAL_RATIO)
        if ratio is None:
            raise self._no_room_for_tests(budget, count)
        return ratio

    def _tests(self, dataset_size: int, accounting: Accounting) -> tuple[float, int]:
        """The rate of the tests, and how many to expect to pay for."""
        assert self.val_batch_size is not None
        wanted = self.trials if accounting.charges == "trials" else self.updates
        count = self._default_count(dataset_size) if wanted is None else wanted
        return self.val_batch_size / dataset_size, count

    def _no_room_for_tests(self, budget: Budget, count: int) -> BudgetError:
        return BudgetError(
            f"epsilon {budget.epsilon:g} is too small for {count} tests of candidates; raise "
            "epsilon, make fewer updates or use the method dpsgd, which makes no tests"
        )

    def _request(self, dataset_size: int, accounting: str) -> Request:
        if self.gate == NO_GATE:
            return super()._request(dataset_size, accounting)
        charged = accounting_named(accounting).charges
        fixed, random = ("trials", "updates") if charged == "trials" else ("updates", "trials")
        if getattr(self, random) is not None:
            raise InvalidInputError(
                f"{random} {getattr(self, random)} cannot be fixed under the {accounting} "
                f"accounting, where the number of accepted updates is random given the trials; "
                f"give {fixed} instead"
            )
        request = super()._request(dataset_size, accounting)
        return replace(request, count=getattr(self, fixed), on_reject=self.on_reject)

    def _trial(self, dataset_size: int, noise_multiplier: float) -> Trial:
        trial = super()._trial(dataset_size, noise_multiplier)
        if self.gate == NO_GATE:
            return trial
        return replace(trial, test=self._test(dataset_size))

    def _test(self, dataset_size: int) -> Test:
        assert self.val_batch_size is not None
        rate = self.val_batch_size / dataset_size
        if self.gate == "coin":
            assert self.accept_ratio is not None
            return CoinTest(rate, self.accept_ratio)
        assert self.val_noise_multiplier is not None
        assert self.accept_threshold is not None
        return LossTest(rate, self.val_noise_multiplier, self.accept_threshold)

    def _with_plan(self, plan: Plan) -> Self:
        settled = super()._with_plan(plan)
        if self.gate == NO_GATE:
            return settled
        if plan.updates is None:
            return replace(settled, updates=None, trials=plan.trials)
        return replace(settled, updates=plan.updates, trials=None)
