"""How runs in blocks are settled: the gate block, and updates with paid metrics."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.mechanism.block_tests import RecordTests
from dpsur.mechanism.blocks import MeasuredTraining, RateSearchTraining
from dpsur.mechanism.gates import measured_blocks
from dpsur.mechanism.proposer import GradientProposer, Sampler
from dpsur.mechanism.rate_search import RateRule, search_blocks, search_starts
from dpsur.mechanism.state import Procedure
from dpsur.methods.base import LINEAR_HEAD, check_batch_size
from dpsur.privacy.accounting import RESTORE, check_covers_steering
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, Menu, SampledGaussian
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import TESTS_COST, cheapest_test, plan_blocks

if TYPE_CHECKING:
    from dpsur.methods.gradient_method import GradientMethod

M = TypeVar("M", bound="GradientMethod")
NO_GATE, BLOCK_GATE = "none", "block"
MEDIAN, GIVEN = "median", "given"


def check_metrics(method: "GradientMethod") -> None:
    """Refuse metrics that are not paid for, or that a gate does not make."""
    gate = method._implied_gate()
    if method.test_error is not None:
        checks.positive("test_error", method.test_error)
        if gate != BLOCK_GATE or method.val_noise_multiplier is not None:
            raise InvalidInputError(
                f"test_error {method.test_error:g} sets the noise of tests of the gate block; "
                "choose that gate, and leave val_noise_multiplier out"
            )
    if method.patience is not None and (method.metrics_budget is None or gate != NO_GATE):
        raise InvalidInputError(
            f"patience {method.patience} watches the Brier score that metrics_budget pays for, "
            "without a gate; give metrics_budget, or leave patience out"
        )
    if method.metrics_budget is None:
        if method.metrics_noise_multiplier is not None:
            raise InvalidInputError(
                f"metrics_noise_multiplier {method.metrics_noise_multiplier:g} has no meaning "
                "without metrics_budget; give one, such as 0.01, or leave it out"
            )
        return
    checks.positive("metrics_budget", method.metrics_budget)
    if gate not in (NO_GATE, BLOCK_GATE):
        raise InvalidInputError(
            f"metrics_budget {method.metrics_budget:g} needs the gate none or block; the gate "
            f"{gate or 'of ' + method.name} makes no tests that could pay for metrics"
        )
    if method.metrics_noise_multiplier is not None:
        checks.positive("metrics_noise_multiplier", method.metrics_noise_multiplier)
        if gate == BLOCK_GATE:
            raise InvalidInputError(
                f"metrics_noise_multiplier {method.metrics_noise_multiplier:g} is for the gate "
                "none; with the gate block give val_noise_multiplier"
            )


def check_block_gate(method: "GradientMethod") -> None:
    """Refuse what has no meaning where every update is charged and blocks are tested."""
    if method.trials is not None:
        raise InvalidInputError(
            f"trials {method.trials} has no meaning with the gate block, which charges every "
            "update; give updates instead"
        )
    if method.on_reject != RESTORE:
        raise InvalidInputError(
            f"on_reject {method.on_reject} has no meaning with the gate block, which restores "
            "whole blocks; leave it out"
        )


def starts_of(method: "GradientMethod") -> tuple[float, ...]:
    """Where the search starts: by rule, and at a learning rate that was given."""
    rate = method.learning_rate
    assert not isinstance(rate, str)
    return search_starts(
        scale_free=method.optimizer == "adam",
        momentum=method.momentum,
        learning_rate=rate,
        max_grad_norm=method.max_grad_norm,
    )


def resolve_blocks(
    method: M,
    dataset_size: int,
    budget: Budget,
    accounting: str,
    setup: tuple[Event, ...],
    menu: Menu | None = None,
    steering: SampledGaussian | None = None,
) -> tuple[M, Plan]:
    """Fix blocks, tests and noise: everything but what released values may decide."""
    check_covers_steering(accounting)
    if method.test_error is not None:
        tested = _with_tests(method, dataset_size, method.test_error)
        return resolve_blocks(tested, dataset_size, budget, accounting, setup, menu, steering)
    if method.learning_rate == LINEAR_HEAD:  # the search takes the place of the rule
        method = replace(method, learning_rate=None)
    settled = method._with_batches(dataset_size)
    assert settled.batch_size is not None
    updates = method.updates or settled._default_count(dataset_size)
    clip_by_median = method.clip_norm != GIVEN
    sizes = search_blocks(
        updates,
        len(starts_of(method)),
        clip_by_median=clip_by_median,
        blocks=method.blocks,
        block_updates=method.block_updates,
    )
    searched = sizes[2 if clip_by_median else 1 : -1]
    sample_rate = settled.batch_size / dataset_size
    settled = replace(settled, updates=updates, blocks=len(searched), block_updates=searched[0])
    plan = plan_blocks(
        budget,
        accounting,
        sizes,
        sample_rate=sample_rate,
        test_rate=None if method.val_batch_size is None else method.val_batch_size / dataset_size,
        noise_multiplier=method.noise_multiplier,
        test_noise=method.val_noise_multiplier,
        setup=setup,
        menu=menu,
        steering=steering,
        tests_cost=TESTS_COST + (method.metrics_budget or 0.0),
    )
    settled = replace(
        settled,
        noise_multiplier=plan.update.noise_multiplier,
        val_noise_multiplier=plan.test.noise_multiplier,
        clip_norm=method.clip_norm or MEDIAN,
    )
    return settled, plan


def _with_tests(method: M, dataset_size: int, error: float) -> M:
    """The noise of tests for a standard error, and their size unless it was given."""
    if method.val_batch_size is None:
        rate, noise = cheapest_test(dataset_size, error)
        if rate == 1:
            return replace(method, test_error=None, val_noise_multiplier=noise)
        size: int = math.ceil(rate * dataset_size)
    else:
        check_batch_size("val_batch_size", method.val_batch_size, dataset_size)
        size = method.val_batch_size
    left = error**2 - (1 - size / dataset_size) / size
    if left <= 0:
        raise InvalidInputError(
            f"{size} records cannot give a standard error of {error:g}, whatever the noise; "
            "raise test_error or val_batch_size"
        )
    noise = size * math.sqrt(left)
    return replace(method, test_error=None, val_batch_size=size, val_noise_multiplier=noise)


def settle_measured(
    method: M, dataset_size: int, budget: Budget, accounting: str, setup: tuple[Event, ...]
) -> tuple[M, Plan]:
    """Fix updates in equal blocks, after each of which loss and accuracy are measured."""
    check_covers_steering(accounting)
    settled = method._with_batches(dataset_size)
    assert settled.batch_size is not None
    assert method.metrics_budget is not None
    updates = method.updates or settled._default_count(dataset_size)
    plan = plan_blocks(
        budget,
        accounting,
        measured_blocks(updates),
        sample_rate=settled.batch_size / dataset_size,
        noise_multiplier=method.noise_multiplier,
        test_noise=method.metrics_noise_multiplier,
        setup=setup,
        searches=False,
        tests_cost=method.metrics_budget,
    )
    plan = replace(plan, may_stop=method.patience is not None)
    noise = plan.update.noise_multiplier
    settled = replace(
        settled,
        noise_multiplier=noise,
        metrics_noise_multiplier=plan.test.noise_multiplier,
        updates=updates,
    )
    return settled, plan


def block_procedure(method: "GradientMethod", plan: Plan, updates: GradientProposer) -> Procedure:
    """The search for a learning rate with these updates, or updates whose blocks are measured."""
    tests = RecordTests(Sampler(updates.problem), plan.test)
    if method.metrics_budget is not None and tests.classes < 2:
        raise InvalidInputError(
            f"metrics_budget {method.metrics_budget:g} pays for the accuracy and the loss of a "
            "classifier, and these targets are not class indices; leave it out"
        )
    if not plan.searches:
        return MeasuredTraining(plan, updates, tests, method.patience)
    rule = RateRule(
        method.max_grad_norm,
        starts_of(method),
        schedule=method.schedule,
        clip_by_median=method.clip_norm != GIVEN,
        scale_free=method.optimizer == "adam",
        momentum=method.momentum if method.optimizer == "sgd" else 0.0,
    )
    return RateSearchTraining(plan, updates, tests, rule)
