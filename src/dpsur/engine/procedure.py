"""What `make_private` is given, checked before anything is changed, and what it amounts to.

That is an account, and the procedure that it charges.
"""

import logging
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, cast
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import ASGD, SGD, Optimizer
from torch.utils.data import DataLoader

from dpsur import checks
from dpsur.engine.criterion import Criterion
from dpsur.engine.loader import PrivateLoader, check_loader
from dpsur.engine.model_tests import CandidateTest, Evaluation, ModelTests
from dpsur.engine.watch import Watcher
from dpsur.engine.weights import (
    ModuleUpdates,
    ModuleWeights,
    Rates,
    check_optimizer,
)
from dpsur.errors import InvalidInputError, UnsupportedModelError
from dpsur.functional.persons import (
    DEFAULT_RECORDS,
    Groups,
    PersonRecords,
    called,
    check_by_record,
    number_persons,
)
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
from dpsur.mechanism.rate_search import RateRule, search_blocks
from dpsur.mechanism.state import Procedure
from dpsur.mechanism.trial import AlwaysAccept, Selective, make_rule
from dpsur.per_example.check_and_fix import refuse_complex
from dpsur.per_example.rules import layer_fault
from dpsur.privacy.account import ACCOUNTING as EVERY_TRIAL
from dpsur.privacy.account import PROVEN, Account
from dpsur.privacy.accountants.noise_tail import MOST_WEIGHTS
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
from dpsur.privacy.statement import (
    DECLARED_SIZE,
    GROUP_SIZE,
    PERSON,
    RECORD,
    RECORDS_PER_PERSON,
    SAMPLED_BY,
)

_log = logging.getLogger("dpsur.engine")
FIRST_CLIP_NORM = 1.0  # stays in force where a histogram of gradient norms shows nothing

# The accountings of the updates that a test of candidates accepts.
ACCEPTED_ONLY = (PROVEN, SELECTIVE_ACCOUNTING)


def parameters_to_train(
    module: nn.Module, optimizer: Optimizer, data_loader: DataLoader[Any]
) -> dict[str, nn.Parameter]:
    """Refuse what cannot be made private; returns the parameters to be trained."""
    if not isinstance(module, nn.Module):
        raise InvalidInputError(f"module must be an nn.Module, got {type(module).__name__}")
    if hasattr(module, "_orig_mod"):
        raise InvalidInputError(
            "module was compiled by torch.compile, inside which layers cannot be watched; pass "
            "the module itself"
        )
    for name, value in module.named_parameters():
        if is_lazy(value) or value.is_meta:
            raise InvalidInputError(
                f"parameter {name} has no values yet: call the module once on a batch of zeros, if "
                "it has lazy layers, or load its weights after module.to_empty(device=...), if it "
                "is on the device meta; then build the optimizer"
            )
    check_optimizer(optimizer)
    check_loader(data_loader)
    for name, part in module.named_modules():
        early = isinstance(part, torch.jit.ScriptModule) or (
            part.training and isinstance(part, _BatchNorm)
        )
        fault = layer_fault(part) if early else None
        if fault is not None:
            raise UnsupportedModelError(fault.describe(name, part))
    held = {id(value) for group in optimizer.param_groups for value in group["params"]}
    if not held <= {id(value) for value in module.parameters()}:
        raise InvalidInputError(
            "Module parameters are different than optimizer Parameters, as they are after "
            "dpsur.fix, which repairs a copy; build the optimizer from module.parameters(), after "
            "the module is repaired and on its device"
        )
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    for name, value in trained.items():
        if id(value) not in held:
            raise InvalidInputError(
                f"parameter {name} requires a gradient but is not in the optimizer; freeze it "
                "with requires_grad_(False), or add it to the optimizer"
            )
        refuse_complex(name, value)
    if not trained:
        raise InvalidInputError("no parameter in the optimizer requires a gradient")
    count = sum(value.numel() for value in trained.values())
    if count > MOST_WEIGHTS:
        raise InvalidInputError(
            f"the model has {count} trainable weights, and guarantees are computed for at most "
            f"{MOST_WEIGHTS}; freeze some of them with requires_grad_(False)"
        )
    return trained


def refuse_options(
    batch_first: bool,
    poisson_sampling: bool,
    clipping: str,
    noise_generator: Any,
    grad_sample_mode: str,
) -> None:
    if not batch_first:
        raise InvalidInputError(
            "batch_first=False is not supported; put the records into the first dimension, or "
            "write the loss as engine.private_step, where each record is collated alone"
        )
    if not poisson_sampling:
        raise InvalidInputError(
            "poisson_sampling=False is not supported: no epsilon is known for shuffled batches; "
            "leave it out. Batches then have different sizes: read them from the batch, as len(x)"
        )
    if clipping != "flat":
        raise InvalidInputError(
            f"clipping={clipping!r} is not supported; use 'flat', one norm over all parameters"
        )
    if noise_generator is not None:
        raise InvalidInputError(
            "noise_generator is not supported: noise is drawn in double precision from a secret "
            "key; for a repeatable run pass seed=..."
        )
    checks.one_of("grad_sample_mode", grad_sample_mode, ("hooks", "functorch", "ew", "ghost"))


@dataclass(frozen=True)
class Units:
    """What is sampled: the records of a data set, or the persons whom they belong to.

    Attributes:
        held: how many there are. Private, where a public number was declared.
        size: how many there are by public knowledge; what is charged and divided by follows from
            this number alone.
        length: how many batches are as many.
        persons: the records of each person; None where records are sampled.
    """

    held: int
    size: int
    length: int
    persons: PersonRecords | None = None
    declared: bool = False  # whether `size` was given by the user
    by_record: bool = False  # whether records of persons are sampled one by one
    group_size: int | None = None  # of groups that a converted guarantee is stated for

    @cached_property
    def rate(self) -> float:
        return 1 / self.length

    @property
    def by_person(self) -> bool:
        return self.persons is not None and not self.by_record

    @property
    def joining(self) -> int:
        """How many that belong to one unit of privacy may join a batch, each by itself."""
        return self.persons.records_each if self.persons and self.by_record else 1

    @property
    def public(self) -> dict[str, Any]:
        """What was declared, as statements and checkpoints hold it."""
        found: dict[str, Any] = {}
        if self.persons is not None:
            found[RECORDS_PER_PERSON] = self.persons.records_each
        if self.by_record:
            found[SAMPLED_BY] = RECORD
        if self.declared:
            found[DECLARED_SIZE] = True
        if self.group_size is not None:
            found[GROUP_SIZE] = self.group_size
        return found


def units_of(
    loader: DataLoader[Any],
    groups: Any = None,
    records_per_person: int | None = None,
    records: int | None = None,
    sampling: str = PERSON,
    *,
    plain: bool = True,
) -> Units:
    """What batches of a loader are drawn from; its `batch_size` counts records, or persons."""
    dataset = cast(Any, loader.dataset)
    persons, by_record = None, sampling == RECORD
    checks.one_of("sampling", sampling, (PERSON, RECORD))
    if by_record:
        check_by_record(groups, records, plain=plain)
    if groups is not None:
        if callable(groups):
            groups = called(groups, "a record", ((dataset[row],) for row in range(len(dataset))))
        most = DEFAULT_RECORDS if records_per_person is None else records_per_person
        persons = PersonRecords(Groups(number_persons(groups, len(dataset)), most))
    elif records_per_person is not None:
        raise InvalidInputError(
            f"records_per_person {records_per_person} needs groups=..., which name the person of "
            "each record"
        )
    held = len(dataset if persons is None else persons)
    if persons is not None and by_record:
        held = persons.joining
    if records is None and persons is None:
        return Units(held, held, len(loader))
    size = held if records is None else checks.whole("records", records, 1)
    share = -(-size // getattr(loader.sampler, "num_replicas", 1))
    assert loader.batch_size is not None
    whole = share // loader.batch_size if loader.drop_last else -(-share // loader.batch_size)
    return Units(held, size, max(1, whole), persons, records is not None, by_record)


# Data sets that engines of this process train on, and whether that was warned of.
_trained_on: WeakValueDictionary[int, Any] = WeakValueDictionary()
_warned: list[bool] = []


def warn_of_second_engine(dataset: Any) -> None:
    if _trained_on.get(id(dataset)) is dataset and not _warned:
        _warned.append(True)
        _log.warning(
            "dpsur: another engine has trained on this data set, and what both release adds up; "
            "book trainings in a ledger of the data: `dpsur ledger create`, make_private(ledger=)"
        )
    with suppress(TypeError):  # of what takes no weak reference nothing is remembered
        _trained_on[id(dataset)] = dataset


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
    updates = ModuleUpdates(weights, watcher, update, mechanism.units.rate * size)
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
    return RateRule(
        norm,
        gate.learning_rate,
        schedule=gate.schedule or "linear",
        clip_by_median=max_grad_norm is None,
        scale_free=scale_free,
        momentum=momentum,
    )
