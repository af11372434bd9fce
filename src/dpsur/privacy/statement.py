"""The privacy statement of a release: what is promised, to whom, and what is not.

It answers what NIST SP 800-226 and the reporting list of "How to DP-fy ML" (Ponomareva et al. 2023)
ask: definition and unit of privacy, adjacency, accounting, sampler, what is released, the settings,
random numbers, arithmetic, tuning and side channels.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpsur.privacy.accounting import FIGURES, accounting_named, figures
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, Trial, event_from_json, event_to_json
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans import AnyPlan, FilteredPlan, MenuPlan, Plan
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
    side_channels,
)

FORMAT = "dpsur-privacy/4"


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


def epsilons(plan: AnyPlan) -> dict[str, float | None]:
    """Epsilon of a completed run under each accounting; None where one does not apply."""
    if not isinstance(plan, Plan):
        return _own_figure(plan)
    return _figures(
        plan.setup,
        plan.trial,
        plan.budget.delta,
        {"updates": plan.updates, "trials": plan.trials if plan.updates is None else None},
        plan.on_reject,
    )


def _own_figure(plan: FilteredPlan | MenuPlan) -> dict[str, float | None]:
    """A run that steered itself has a guarantee under its own accounting, none under another."""
    found: dict[str, float | None] = dict.fromkeys(FIGURES)
    found[plan.accounting.replace("-", "_")] = plan.epsilon()
    return found


def _figures(
    setup: tuple[Event, ...],
    trial: Trial,
    delta: float,
    counts: Mapping[str, int | None],
    on_reject: str,
) -> dict[str, float | None]:
    updates, trials = counts["updates"], counts["trials"]
    if trial.test is None:  # every trial is an update, so both counts are fixed
        updates = trials = trials if updates is None else updates
    return figures(setup, trial, delta, updates=updates, trials=trials, on_reject=on_reject)


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


def mechanism_of(plan: AnyPlan, ledger: Ledger) -> dict[str, Any]:
    """What a run was planned to do and did, in the terms an accountant needs."""
    common = {
        "setup": [event_to_json(event) for event in plan.setup],
        "on_reject": plan.on_reject,
        "updates": plan.updates,
        "trials": plan.trials if plan.updates is None else None,
        "trial_cap": None if plan.updates is None else plan.trials,
        "to_the_cap": plan.to_the_cap,
    }
    if isinstance(plan, Plan):
        return {"trial": event_to_json(plan.trial), "filter": None, **common}
    # Rates and noise of the steps follow from released values, so they may be told; how many
    # trials were rejected only where they were charged.
    public = plan.verdicts_are_public
    steps = [
        {"step": event_to_json(e.step), "charged": e.trials if public else e.updates}
        for e in ledger.entries
    ]
    if isinstance(plan, MenuPlan):
        return {
            "trial": event_to_json(Trial(plan.menu.choices[0])),
            "filter": None,
            "menu": {
                "offer": event_to_json(plan.menu),
                "steering": event_to_json(plan.steering),
                "steps": steps,
            },
            **common,
        }
    return {
        "trial": event_to_json(plan.typical),
        "filter": {"order": plan.order, "allowance": plan.allowance, "steps": steps},
        **common,
    }


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


def recomputed_epsilons(statement: Mapping[str, Any]) -> dict[str, float | None]:
    """Epsilon under each accounting from a statement's own parameters."""
    mechanism = statement["mechanism"]
    trial = event_from_json(mechanism["trial"])
    if not isinstance(trial, Trial):
        raise TypeError(f"a mechanism repeats a Trial, got {mechanism['trial']!r}")
    if mechanism["filter"] is not None:
        return _own_figure(stated_filter(statement))
    if "menu" in mechanism:
        return _own_figure(stated_menu(statement))
    setup = tuple(event_from_json(event) for event in mechanism["setup"])
    delta = statement["guarantee"]["delta"]
    return _figures(setup, trial, delta, mechanism, mechanism["on_reject"])


def stated_filter(statement: Mapping[str, Any]) -> FilteredPlan:
    """The plan of an adaptive run, from its statement."""
    mechanism, budget = statement["mechanism"], statement["budget"]
    cap = mechanism["trials"] if mechanism["updates"] is None else mechanism["trial_cap"]
    return FilteredPlan.from_json(
        {
            **mechanism["filter"],
            **budget,
            "accounting": statement["guarantee"]["accounting"],
            "typical": mechanism["trial"],
            "updates": mechanism["updates"],
            "trials": cap,
            "setup": mechanism["setup"],
            "on_reject": mechanism["on_reject"],
            "stop_after": None,
        }
    )


def stated_menu(statement: Mapping[str, Any]) -> MenuPlan:
    """The plan of a run whose updates were chosen from a menu, from its statement."""
    mechanism = statement["mechanism"]
    return MenuPlan.from_json(
        {
            **statement["budget"],
            "accounting": statement["guarantee"]["accounting"],
            "menu": mechanism["menu"]["offer"],
            "steering": mechanism["menu"]["steering"],
            "updates": mechanism["updates"],
            "setup": mechanism["setup"],
        }
    )


def format_epsilon(value: float) -> str:
    """An epsilon to four decimals, rounded up: a shown figure must not be below the real one."""
    if not math.isfinite(value):
        return "infinite"
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}"
