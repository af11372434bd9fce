"""The privacy statement of a release: what is promised, to whom, and what is not.

It answers what NIST SP 800-226 and the reporting list of "How to DP-fy ML" (Ponomareva et al. 2023)
ask: definition and unit of privacy, adjacency, accounting, sampler, what is released, the settings,
random numbers, arithmetic, tuning and side channels.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.mechanism import epsilons, mechanism_of
from dpsur.privacy.plans import AnyPlan, FilteredPlan
from dpsur.privacy.plans.hiding import NOT_HIDDEN
from dpsur.privacy.wording import (
    ADJACENCY,
    ARITHMETICS,
    AVERAGE,
    DEFINITION,
    LAST,
    NOT_COVERED,
    SAMPLER,
    TUNING,
    UNIT,
    format_epsilon,
    side_channels,
)

FORMAT = "dpsur-privacy/5"


@dataclass(frozen=True)
class RunFacts:
    """What the statement needs to know of a run besides its plan."""

    dataset_size: int
    method: str
    settings: Mapping[str, Any]
    seeded: bool
    average: bool
    tf32: bool
    bf16: bool
    versions: Mapping[str, str]
    hide_rejections: str = NOT_HIDDEN
    public: Mapping[str, Any] = field(default_factory=dict)


def privacy_statement(plan: AnyPlan, ledger: Ledger, facts: RunFacts) -> dict[str, Any]:
    """Everything a reviewer asks, as plain values, with nothing private among them."""
    accounting = accounting_named(plan.accounting)
    return {
        "format": FORMAT,
        "guarantee": {
            "definition": DEFINITION,
            "epsilon": plan.epsilon(),
            "delta": plan.budget.delta,
            "accounting": accounting.name,
            "proved": accounting.proved,
            "theorem": accounting.theorem,
            "assumes": accounting.assumes,
        },
        "budget": {"epsilon": plan.budget.epsilon, "delta": plan.budget.delta},
        "epsilon": epsilons(plan),
        "unit": UNIT,
        "adjacency": ADJACENCY,
        "dataset_size": facts.dataset_size,
        "public": dict(facts.public),
        "sampler": SAMPLER,
        "mechanism": mechanism_of(plan, ledger),
        "accepted_updates": ledger.updates if plan.verdicts_are_public else plan.kept,
        "method": facts.method,
        "settings": _settings(plan, facts.settings),
        "released": [AVERAGE if facts.average else LAST],
        "random": {"seeded": facts.seeded},
        "arithmetic": _arithmetic(facts),
        "tuning": TUNING,
        "side_channels": side_channels(facts.hide_rejections),
        "not_covered": list(NOT_COVERED),
        "warnings": warnings_for(plan, facts.dataset_size, seeded=facts.seeded),
        "versions": dict(facts.versions),
    }


def _arithmetic(facts: RunFacts) -> str:
    return ARITHMETICS[2 * facts.bf16 + facts.tf32]


def _settings(plan: AnyPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with the counts of the plan, which may have been cut short."""
    if isinstance(plan, FilteredPlan):
        return dict(settings)
    counts = {"updates": plan.length, "trials": plan.trials}
    kept = {name: n for name, n in counts.items() if settings.get(name) is not None}
    return {**settings, **kept}


def warnings_for(plan: AnyPlan, dataset_size: int, *, seeded: bool) -> list[str]:
    """What the user, and whoever reads the statement, must be told."""
    unproved = not accounting_named(plan.accounting).proved
    figures = (plan.epsilon(), epsilons(plan)["proven"]) if unproved else (math.nan, None)
    return _warnings(plan.budget, plan.accounting, figures, dataset_size, seeded=seeded)


def stated_warnings(statement: Mapping[str, Any]) -> list[str]:
    """The warnings that follow from the figures of a statement."""
    guarantee, budget = statement["guarantee"], statement["budget"]
    epsilon = math.inf if budget["epsilon"] is None else budget["epsilon"]
    return _warnings(
        Budget(epsilon, budget["delta"]),
        guarantee["accounting"],
        (guarantee["epsilon"], statement["epsilon"]["proven"]),
        statement["dataset_size"],
        seeded=statement["random"]["seeded"],
    )


def _warnings(
    budget: Budget,
    accounting: str,
    figures: tuple[float, float | None],
    dataset_size: int,
    *,
    seeded: bool,
) -> list[str]:
    warnings = budget.warnings(dataset_size)
    claimed, proven = figures
    if not accounting_named(accounting).proved:
        beside = "not computed" if proven is None else format_epsilon(proven)
        warnings.append(
            f"the {accounting} accounting is not proved for selective release: its epsilon "
            f"{format_epsilon(claimed)} is a claim of the paper, not a guarantee; "
            f"proven: {beside}"
        )
    if seeded:
        warnings.append(
            "this run was seeded: whoever knows or guesses the seed can subtract the noise, and "
            "the guarantee does not hold against them"
        )
    return warnings
