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
from dpsur.privacy.events import Event, Trial, event_from_json, event_to_json
from dpsur.privacy.filtered import AnyPlan, FilteredPlan
from dpsur.privacy.hiding import CONSTANT, DELAY, NOT_HIDDEN
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plan import Plan

FORMAT = "dpsur-privacy/3"

DEFINITION = "(epsilon, delta)-differential privacy in the central model"
UNIT = "one record of the training set"
ADJACENCY = "add or remove one record; the number of records N is public"
SAMPLER = (
    "Poisson: every record joins a batch independently, with fresh draws for every training batch "
    "and every test; accounting and implementation use the same rate"
)
ARITHMETIC = (
    "Gradients are clipped, summed and noised in floating point; the proofs are over the real "
    "numbers. Noise comes from PyTorch's generators, which are not cryptographically secure."
)
TF32_OFF = "Products were computed in full float32."
TF32_ON = (
    "Products in the layers were computed with inputs rounded to TF32, as asked for; norms, "
    "clipped sums and noise in full float32."
)
BF16_ON = (
    "Layers and their backward pass were computed in bfloat16, as asked for; every gradient was "
    "clipped by the norm of the very numbers that were summed, in float32, as was the noise."
)
TUNING = (
    "Hyper-parameters chosen by looking at results on the same private records are not covered by "
    "epsilon; only this one run is."
)
WATCHED = {
    NOT_HIDDEN: (
        "The time a run takes, its memory and its power, for whoever can watch the process.",
        "How many trials were rejected, unless every trial was charged.",
    ),
    DELAY: (
        "The time a run takes, its memory and its power, for whoever can watch the process. Random "
        "delays after accepted updates blurred that time, which is no guarantee.",
        "How many trials were rejected.",
    ),
    CONSTANT: (
        "The time single trials take, their memory and their power, for whoever can watch the "
        "process. How many were made was fixed before the run and tells nothing.",
    ),
}
PRIVATE_FOLDER = (
    "Checkpoints, metrics and random-stream positions in the private folder of the run."
)
NOT_COVERED = (
    "Preprocessing done before the records reached this library, and the public test set.",
    "Records that appear more than once, or people with several records.",
)


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
    if isinstance(plan, FilteredPlan):
        return _filtered_figures(plan)
    return _figures(
        plan.setup,
        plan.trial,
        plan.budget.delta,
        {"updates": plan.updates, "trials": plan.trials if plan.updates is None else None},
        plan.on_reject,
    )


def _filtered_figures(plan: FilteredPlan) -> dict[str, float | None]:
    """A filter promises its allowance under its own accounting, and nothing under another."""
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
        "mechanism": _mechanism(plan, ledger),
        "accepted_updates": ledger.updates if plan.verdicts_are_public else plan.kept,
        "method": facts.method,
        "settings": dict(facts.settings),
        "released": ["the average of the weights" if facts.average else "the last weights"],
        "random": {"seeded": facts.seeded},
        "arithmetic": _arithmetic(facts),
        "tuning": TUNING,
        "side_channels": [*WATCHED[facts.hide_rejections], PRIVATE_FOLDER],
        "not_covered": list(NOT_COVERED),
        "warnings": warnings_for(plan, facts.dataset_size, seeded=facts.seeded),
        "versions": dict(facts.versions),
    }


def _arithmetic(facts: RunFacts) -> str:
    products = TF32_ON if facts.tf32 else TF32_OFF
    if not facts.bf16:
        return f"{ARITHMETIC} {products}"
    return f"{ARITHMETIC} {BF16_ON} Outside of them: {products}"


def _mechanism(plan: AnyPlan, ledger: Ledger) -> dict[str, Any]:
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
    return {
        "trial": event_to_json(plan.typical),
        "filter": {"order": plan.order, "allowance": plan.allowance, "steps": steps},
        **common,
    }


def warnings_for(plan: AnyPlan, dataset_size: int, *, seeded: bool) -> list[str]:
    """What the user, and whoever reads the statement, must be told."""
    warnings = plan.budget.warnings(dataset_size)
    if not accounting_named(plan.accounting).proved:
        known = epsilons(plan)["proven"]
        beside = "not computed" if known is None else format_epsilon(known)
        warnings.append(
            f"the {plan.accounting} accounting is not proved for selective release: its epsilon "
            f"{format_epsilon(plan.epsilon())} is a claim of the paper, not a guarantee; "
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
        return _filtered_figures(stated_filter(statement))
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


def format_epsilon(value: float) -> str:
    """An epsilon to four decimals, rounded up: a shown figure must not be below the real one."""
    if not math.isfinite(value):
        return "infinite"
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}"
