"""What a run did, in the terms an accountant needs: written into a statement and read back."""

from collections.abc import Mapping
from typing import Any

from dpsur.privacy.accounting import FIGURES, figures
from dpsur.privacy.events import Event, Trial, event_from_json, event_to_json
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plans import AnyPlan, FilteredPlan, MenuPlan, Plan
from dpsur.privacy.plans.cap import early_end


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


def epsilons(plan: AnyPlan) -> dict[str, float | None]:
    """Epsilon of a completed run under each accounting; None where one does not apply."""
    if not isinstance(plan, Plan):
        return _own_figure(plan)
    return _figures(
        plan.setup,
        plan.trial,
        plan.budget.delta,
        mechanism_of(plan, Ledger()),
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
    capped = 0.0
    if trial.gate is not None and updates is not None:
        assert counts["trial_cap"] is not None
        capped = early_end(trial.gate, updates, counts["trial_cap"])
    return figures(
        setup,
        trial,
        delta,
        updates=updates,
        trials=trials,
        on_reject=on_reject,
        early_end=capped,
    )


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
