"""What the options of `make_private` amount to: an account, and the procedure that it charges."""

import logging
import math
from dataclasses import dataclass, replace
from typing import Self

from torch.optim import ASGD, SGD, Optimizer

from dpsur import checks
from dpsur.engine.criterion import Criterion
from dpsur.engine.loader import PrivateLoader
from dpsur.engine.model_tests import CandidateTest, Evaluation, ModelTests
from dpsur.engine.setup import Units
from dpsur.engine.watch import Watcher
from dpsur.engine.weights import ModuleGradient, ModuleUpdates, ModuleWeights, Rates
from dpsur.errors import InvalidInputError
from dpsur.mechanism.blocks import MeasuredTraining, RateSearchTraining
from dpsur.mechanism.gates import (
    BlockGate,
    CoinGate,
    Gate,
    LossGate,
    Metrics,
    check_tested,
    measured_blocks,
)
from dpsur.mechanism.rate_search import RateRule, search_blocks, search_starts
from dpsur.mechanism.state import Procedure
from dpsur.mechanism.trial import AlwaysAccept, Selective, make_rule
from dpsur.privacy.account import ACCOUNTING as EVERY_TRIAL
from dpsur.privacy.account import PROVEN, Account
from dpsur.privacy.accounting import SELECTIVE_ACCOUNTING, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import CoinTest, LossTest, NonPrivate, SampledGaussian, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import (
    TESTS_COST,
    Request,
    make_plan,
    plan_blocks,
    repeated_plan,
)

_log = logging.getLogger("dpsur.engine")
FIRST_CLIP_NORM = 1.0  # stays in force where a histogram of gradient norms shows nothing

# The accountings of the updates that a test of candidates accepts.
ACCEPTED_ONLY = (PROVEN, SELECTIVE_ACCOUNTING)


@dataclass(frozen=True)
class Mechanism:
    """What decides about privacy, fixed before the first record is drawn.

    Attributes:
        accounting: "every-trial", "proven" or "proven-pld"; None: "proven" for a `CoinGate`, which
            "every-trial" does not cover, else that one.
        steps: the number of steps, or of accepted updates where only these are charged.
        epsilon: the budget; instead of `steps`, the allowance of a filter.
    """

    units: Units
    max_grad_norm: float | None
    steps: int | None
    epsilon: float | None
    delta: float
    gate: Gate | None = None
    metrics: Metrics | None = None
    accounting: str | None = None

    def __post_init__(self) -> None:
        if self.accounting is not None:
            checks.one_of("accounting", self.accounting, (EVERY_TRIAL, *ACCEPTED_ONLY))
        tested = isinstance(self.gate, LossGate | CoinGate)
        if self.accounting in ACCEPTED_ONLY and not tested:
            raise InvalidInputError(
                f"the accounting {self.accounting!r} charges the updates that a test of candidates "
                "accepts; give make_private gate=dpsur.LossGate(...), or leave the accounting out"
            )
        if self.metrics is not None and self.gate is not None:
            raise InvalidInputError(
                "metrics are measured where no gate makes tests; a BlockGate releases those of its "
                "own tests: leave metrics or the gate out"
            )
        if self.max_grad_norm is not None:
            checks.positive("max_grad_norm", self.max_grad_norm)
        elif not isinstance(self.gate, BlockGate):
            raise InvalidInputError("give max_grad_norm, the norm that gradients are clipped to")
        if isinstance(self.gate, LossGate) and self.gate.show_verdicts and self.charges_accepted:
            raise InvalidInputError(
                f"show_verdicts=True would show what {self._charges!r} does not pay for; use the "
                "accounting 'every-trial'"
            )

    @property
    def charges_accepted(self) -> bool:
        return self._charges in ACCEPTED_ONLY

    @property
    def _charges(self) -> str:
        return self.accounting or (PROVEN if isinstance(self.gate, CoinGate) else EVERY_TRIAL)

    def test(self) -> LossTest | CoinTest | None:
        if isinstance(self.gate, LossGate | CoinGate):
            return self.gate.test(self.units.size)
        return None

    def with_noise(self) -> tuple[float, Self]:
        """The least noise of the updates within the budget, and what was planned with it."""
        assert self.epsilon is not None
        plan = self._plan_of_blocks(None)
        if plan is not None:
            test, update = plan.test.noise_multiplier, plan.update.noise_multiplier
            if isinstance(self.gate, BlockGate):
                return update, replace(self, gate=replace(self.gate, val_noise_multiplier=test))
            assert self.metrics is not None
            return update, replace(self, metrics=replace(self.metrics, noise_multiplier=test))
        request = Request(self._trial, None, count=self._planned_steps())
        found = make_plan(request, Budget(self.epsilon, self.delta), self._charges)
        return found.update.noise_multiplier, self

    def update(self, noise_multiplier: float) -> SampledGaussian:
        return SampledGaussian(self.units.rate, noise_multiplier, self.units.joining)

    def account(self, noise_multiplier: float) -> Account:
        if not noise_multiplier:
            if not (self.gate is None and self.metrics is None and self.epsilon is None):
                raise InvalidInputError(
                    "noise_multiplier=0 has no privacy, and so neither a gate nor a "
                    "target_epsilon; leave them out, or give a noise multiplier"
                )
            if self.steps is None:
                raise InvalidInputError(
                    "noise_multiplier=0 trains without privacy, for debugging; say how long: "
                    "epochs=... or steps=..."
                )
            _log.warning(
                "dpsur: noise_multiplier=0: this training is not private, epsilon is infinite"
            )
            budget = Budget(math.inf, self.delta)
            return Account.from_plan(
                repeated_plan(budget, EVERY_TRIAL, Trial(NonPrivate()), self.steps)
            )
        plan = self._plan_of_blocks(noise_multiplier)
        if plan is not None:
            return Account.from_plan(plan)
        trial, epsilon, delta = self._trial(noise_multiplier), self.epsilon, self.delta
        if self.charges_accepted:
            return Account.for_updates(
                *(trial, self._planned_steps()),
                delta=delta,
                epsilon=epsilon,
                accounting=self._charges,
            )
        if self.steps is not None:
            if epsilon is None:  # what is planned is the budget
                epsilon = Account.for_steps(trial, self.steps, delta=delta).guarantee()
            return Account.for_steps(trial, self.steps, delta=delta, epsilon=epsilon)
        if epsilon is not None:
            return Account.for_budget(epsilon, delta, trial)
        return Account.without_limit(delta)

    def _trial(self, noise_multiplier: float) -> Trial:
        return Trial(self.update(noise_multiplier), self.test())

    def _planned_steps(self) -> int:
        if self.steps is None:
            raise InvalidInputError(
                f"the accounting {self._charges!r} needs steps=..., the number of accepted "
                "updates, fixed in advance"
            )
        return self.steps

    def _plan_of_blocks(self, noise_multiplier: float | None) -> Plan | None:
        """Updates and tests of blocks, where there are any.

        They fit the budget or, without one, have this noise in the updates.
        """
        gate, metrics, epsilon = self.gate, self.metrics, self.epsilon
        test_rate, test_noise, cost = None, None, TESTS_COST
        if isinstance(gate, BlockGate):
            check_tested(gate.val_batch_size, self.units.size)
            if gate.val_batch_size is not None:
                test_rate = gate.val_batch_size / self.units.size
            test_noise = gate.val_noise_multiplier
        elif metrics is not None:
            test_noise, cost = metrics.noise_multiplier, metrics.budget or TESTS_COST
        else:
            return None
        if self.steps is None:
            raise InvalidInputError(
                "a BlockGate, or metrics, needs steps=... or epochs=..., the length of the last "
                "block: the plan is fixed in advance"
            )
        sizes = measured_blocks(self.steps)
        if isinstance(gate, BlockGate):
            sizes = search_blocks(
                self.steps,
                1 if gate.learning_rate is None else 2,
                clip_by_median=self.max_grad_norm is None,
                blocks=gate.blocks,
                block_updates=gate.block_updates,
            )
        if epsilon is None and test_noise is None:
            assert noise_multiplier is not None
            alone = Trial(SampledGaussian(self.units.rate, noise_multiplier / (1 + cost)))
            epsilon = accounting_named(EVERY_TRIAL).epsilon([(alone, sum(sizes))], self.delta)
        plan = plan_blocks(
            Budget(math.inf if epsilon is None else epsilon, self.delta),
            EVERY_TRIAL,
            sizes,
            sample_rate=self.units.rate,
            test_rate=test_rate,
            noise_multiplier=noise_multiplier,
            test_noise=test_noise,
            searches=isinstance(gate, BlockGate),
            tests_cost=cost,
        )
        if epsilon is None:  # what is planned is the budget
            plan = replace(plan, budget=Budget(plan.epsilon(), self.delta))
        return replace(plan, may_stop=metrics is not None and metrics.patience is not None)


def make_procedure(
    mechanism: Mechanism,
    update: SampledGaussian | NonPrivate,
    plan: Plan | None,
    watcher: Watcher,
    weights: ModuleWeights,
    criterion: Criterion | None,
    loader: PrivateLoader,
) -> Procedure:
    """The procedure of `fit` with the same gate, on the weights of a module."""
    gate, metrics, size = mechanism.gate, mechanism.metrics, mechanism.units.size
    updates = ModuleUpdates(weights, ModuleGradient(watcher, update, mechanism.units.rate * size))
    if isinstance(gate, BlockGate):
        assert plan is not None
        evaluation = Evaluation(watcher, criterion, gate.outputs, gate.losses)
        tests = ModelTests(evaluation, loader, plan.test, size)
        rule = _rule_of(gate, weights.optimizer, mechanism.max_grad_norm)
        weights.rates, weights.at_rest = Rates(weights.optimizer), weights.copy_optimizer()
        return RateSearchTraining(plan, updates, tests, rule)
    if metrics is not None:
        assert plan is not None
        tests = ModelTests(Evaluation(watcher, criterion, metrics.outputs), loader, plan.test, size)
        return MeasuredTraining(plan, updates, tests, metrics.patience)
    if gate is None:
        return Selective(updates, AlwaysAccept(), in_place=True)
    test = mechanism.test()
    assert test is not None
    loss = gate.loss
    if loss is None:
        loss = Evaluation(watcher, criterion).mean_loss
    clip = gate.resolve(size).loss_clip if isinstance(gate, LossGate) else None
    test_gate = CandidateTest(watcher, loader, loss, test, make_rule(test, clip or 0.0))
    return Selective(replace(updates, undoes=True), test_gate, in_place=True)


def _rule_of(gate: BlockGate, optimizer: Optimizer, max_grad_norm: float | None) -> RateRule:
    # whether steps do not grow with the gradient, and the momentum of plain SGD: with momentum m
    # and dampening d a gradient moves the weights by (1 - d) / (1 - m) in all
    scale_free, momentum = True, 0.0
    if isinstance(optimizer, SGD | ASGD):
        group = optimizer.param_groups[0]
        left = 1 - group.get("dampening", 0.0)
        scale_free = False
        momentum = 1 - (1 - group.get("momentum", 0.0)) / left if left > 0 else 0.0
    if max_grad_norm is None and gate.learning_rate is not None and not scale_free:
        raise InvalidInputError(
            f"learning_rate {gate.learning_rate:g} of the gate means nothing without a clipping "
            "norm, by which gradients are scaled; give make_private max_grad_norm=..."
        )
    norm = FIRST_CLIP_NORM if max_grad_norm is None else max_grad_norm
    starts = search_starts(
        scale_free=scale_free,
        momentum=momentum,
        learning_rate=gate.learning_rate,
        max_grad_norm=norm,
    )
    return RateRule(
        norm,
        starts,
        schedule=gate.schedule or "linear",
        clip_by_median=max_grad_norm is None,
        scale_free=scale_free,
        momentum=momentum,
    )
