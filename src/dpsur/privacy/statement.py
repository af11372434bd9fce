"""The privacy statement of a release: what is promised, to whom, and what is not."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpsur.privacy.accounting import PUBLISHED_WARNING, accounting_named
from dpsur.privacy.events import SampledGaussian, event_to_json
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plan import Plan

FORMAT = "dpsur-privacy/1"

UNIT = "one record of the training set"
ADJACENCY = "add or remove one record; the number of records N is public"
NOT_COVERED = (
    "Choosing hyper-parameters by looking at results on the same private records.",
    "What an observer of the running process sees: the time a run takes, its memory and its power.",
    "The public test set and any preprocessing done before the records reached this library.",
    "Sampling is in floating point; the proofs are over the real numbers.",
    "The random generators are not cryptographically secure.",
)


@dataclass(frozen=True)
class RunFacts:
    """What the statement needs to know of a run besides its plan."""

    dataset_size: int
    method: str
    settings: Mapping[str, Any]
    seeded: bool
    average: bool
    versions: Mapping[str, str]


def epsilons(plan: Plan, ledger: Ledger) -> dict[str, float | None]:
    """Epsilon of a finished run under each accounting; None where one does not apply.

    Charging every trial needs a number of trials that was fixed in advance, so it says nothing of a
    run that stopped after a number of accepted updates.
    """
    delta = plan.budget.delta
    fixed_trials = plan.updates is None or plan.trial.test is None
    return {
        "every_trial": accounting_named("every-trial").spent(ledger, delta)
        if fixed_trials
        else None,
        "published": accounting_named("published").spent(ledger, delta),
        "proven": None,
    }


def privacy_statement(plan: Plan, ledger: Ledger, facts: RunFacts) -> dict[str, Any]:
    """Everything a reviewer asks, as plain values, with nothing private among them."""
    accounting = accounting_named(plan.accounting)
    return {
        "format": FORMAT,
        "guarantee": {
            "epsilon": accounting.spent(ledger, plan.budget.delta),
            "delta": plan.budget.delta,
            "accounting": accounting.name,
            "proved": accounting.proved,
            "assumes": accounting.assumes,
        },
        "budget": {"epsilon": plan.budget.epsilon, "delta": plan.budget.delta},
        "epsilon": epsilons(plan, ledger),
        "unit": UNIT,
        "adjacency": ADJACENCY,
        "dataset_size": facts.dataset_size,
        "sampling": "Poisson: every record joins a batch independently",
        "noise": "Gaussian, on the sum of clipped gradients"
        + (" and on the clipped loss difference" if plan.trial.test else ""),
        "trial": event_to_json(plan.trial),
        "setup": [event_to_json(event) for event in plan.setup],
        "method": facts.method,
        "settings": dict(facts.settings),
        "updates": _public_updates(plan, ledger),
        "trials": ledger.trials if plan.verdicts_are_public else None,
        "random": {"seeded": facts.seeded},
        "released": ["the average of the weights" if facts.average else "the last weights"],
        "not_covered": list(NOT_COVERED),
        "warnings": _warnings(plan, facts),
        "versions": dict(facts.versions),
    }


def _public_updates(plan: Plan, ledger: Ledger) -> int:
    # Fixed in advance, or paid for by charging every trial: public either way.
    return ledger.updates if plan.verdicts_are_public else plan.length


def _warnings(plan: Plan, facts: RunFacts) -> list[str]:
    warnings = plan.budget.warnings(facts.dataset_size)
    if not accounting_named(plan.accounting).proved:
        warnings.append(PUBLISHED_WARNING)
    if facts.seeded:
        warnings.append(
            "this run was seeded: whoever knows or guesses the seed can subtract the noise, and "
            "the guarantee does not hold against them"
        )
    return warnings


def render_markdown(statement: Mapping[str, Any]) -> str:
    """The statement as a page for people."""
    guarantee, epsilon = statement["guarantee"], statement["epsilon"]
    spent = guarantee["epsilon"]
    verb = "satisfies" if guarantee["proved"] else "is claimed by the paper (not proved) to satisfy"
    lines = [
        "# Privacy statement",
        "",
        f"The released weights come from a training procedure that {verb} **({_figure(spent)}, "
        f"{guarantee['delta']:g})-differential privacy**.",
        "",
        *(f"> **Warning:** {warning}." for warning in statement["warnings"]),
        *([""] if statement["warnings"] else []),
        "| | |",
        "|---|---|",
        f"| Unit of privacy | {statement['unit']} |",
        f"| Neighbouring data sets | {statement['adjacency']} |",
        f"| Records N (public) | {statement['dataset_size']} |",
        f"| Accounting | `{guarantee['accounting']}`, {'' if guarantee['proved'] else 'not '}proved"
        f" |",
        f"| Budget | epsilon {statement['budget']['epsilon']:g}, "
        f"delta {statement['budget']['delta']:g} |",
        f"| Epsilon, every trial charged | {_figure(epsilon['every_trial'])} |",
        f"| Epsilon, as published (a claim) | {_figure(epsilon['published'])} |",
        f"| Epsilon, proven for selective release | {_figure(epsilon['proven'])} |",
        f"| Sampling | {statement['sampling']} |",
        f"| Noise | {statement['noise']} |",
        *_mechanism_rows(statement),
        f"| Updates | {statement['updates']} |",
        f"| Trials | {_public_trials(statement)} |",
        f"| Random numbers | {_randomness(statement)} |",
        f"| Released | {', '.join(statement['released'])} |",
        "",
        "## What the accounting assumes",
        "",
        guarantee["assumes"],
        "",
        "## What is not covered",
        "",
        *(f"- {item}" for item in statement["not_covered"]),
        "",
        "## Versions",
        "",
        *(f"- {name} {version}" for name, version in statement["versions"].items()),
        "",
    ]
    return "\n".join(lines)


def format_epsilon(value: float) -> str:
    """An epsilon to four decimals, rounded up: a shown figure must not be below the real one."""
    if not math.isfinite(value):
        return "infinite"
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}"


def _figure(value: float | None) -> str:
    return "not computed" if value is None else format_epsilon(value)


def _public_trials(statement: Mapping[str, Any]) -> str:
    trials = statement["trials"]
    return "private" if trials is None else f"{trials}, each one charged"


def _randomness(statement: Mapping[str, Any]) -> str:
    if statement["random"]["seeded"]:
        return "seeded, so that the run can be repeated; the seed is not part of the release"
    return "seeded by the operating system"


def _mechanism_rows(statement: Mapping[str, Any]) -> list[str]:
    update, test = statement["trial"]["update"], statement["trial"]["test"]
    settings = statement["settings"]
    rows = [f"| Method | `{statement['method']}` |"]
    if update["kind"] == SampledGaussian.__name__:
        rows.append(
            f"| Candidate update | sample rate {update['sample_rate']:.5g}, noise multiplier "
            f"{update['noise_multiplier']:.5g}, gradient clip norm {settings['max_grad_norm']:g} |"
        )
    if test is not None:
        rows.append(
            f"| Test of a candidate | sample rate {test['sample_rate']:.5g}, noise multiplier "
            f"{test['noise_multiplier']:.5g}, threshold {test['accept_threshold']:g}, "
            f"loss clip {settings['loss_clip']:g} |"
        )
    return rows
