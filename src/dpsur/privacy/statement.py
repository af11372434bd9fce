"""The privacy statement of a release: what is promised, to whom, and what is not.

It answers what NIST SP 800-226 and the reporting list of "How to DP-fy ML" (Ponomareva et al. 2023)
ask: definition and unit of privacy, adjacency, accounting, sampler, what is released, the settings,
random numbers, arithmetic, tuning and side channels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dpsur.display import html_table
from dpsur.privacy.account import replays
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Gaussian, NoisyChoice, event_to_json
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plan import ACCEPTED, TRIALS, Plan
from dpsur.privacy.rejections import CONSTANT, DELAY, NOT_HIDDEN

FORMAT = "dpsur-privacy/6"

# Sentences that are the same for every release of a kind.
DEFINITION = "(epsilon, delta)-differential privacy in the central model"
# what a release without privacy has in its place
NO_GUARANTEE = "none: the training was not private, and there is no guarantee of any kind"
ARITHMETIC = (
    "Gradients are clipped and summed in floating point, and noise is drawn and added in float64; "
    "the proofs are over the real numbers. Random numbers come from Philox4x64-10 under a secret "
    "key of 128 bits, a generator that is not cryptographically secure."
)
TF32_OFF = "Products were computed in full float32."
TF32_ON = (
    "Products in the layers were computed with inputs rounded to TF32, as asked for; norms and "
    "clipped sums in full float32."
)
BF16_ON = (
    "Layers and their backward pass were computed in bfloat16, as asked for; every gradient was "
    "clipped by the norm of the very numbers that were summed, in float32."
)
ARITHMETICS = tuple(
    f"{ARITHMETIC} {layers}{products}"
    for layers in ("", f"{BF16_ON} Outside of them: ")
    for products in (TF32_OFF, TF32_ON)
)
# Why each record's clipped gradient depends on that record alone, and what that rests on.
BY_CONSTRUCTION, WAS_CHECKED = "by construction", "checked"
INDEPENDENCE = {
    BY_CONSTRUCTION: (
        "Model and loss ran in a batching level of PyTorch that keeps records apart, whatever they "
        "compute; this rests on PyTorch's batching rules, and on what the data set calls a record."
    ),
    WAS_CHECKED: (
        "Some of the code saw several records, or ran one record at a time and could keep state in "
        "Python; it was checked for records that depend on each other, which is no proof."
    ),
}
LAST, AVERAGE = "the last weights", "the average of the weights"
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
    "Checkpoints, metrics and the key of the random numbers in the private folder of the run."
)
HOLDOUT_COMPOSITION = (
    "The records held out took no part in training. A record is in one part or the other by its "
    "own values alone, so that the weights and these figures together have the larger of their "
    "two epsilons (parallel composition)."
)
_BEFORE = "Preprocessing done before the records reached this library, and the public test set."
_SAMPLER = (
    "Poisson: every {} joins a batch independently, with fresh draws for every training batch "
    "and every test; accounting and implementation use the same rate"
)


@dataclass(frozen=True)
class Unit:
    """What one neighbouring data set has and the other has not, in words, and what follows."""

    name: str
    plural: str
    unit: str
    adjacency: str
    sampler: str
    not_covered: tuple[str, ...]


RECORD = Unit(
    "record",
    "Records",
    "one record of the training set",
    "add or remove one record; the number of records N is public",
    _SAMPLER.format("record"),
    (_BEFORE, "Records that appear more than once, or people with several records."),
)
PERSON = Unit(
    "person",
    "Persons",
    "one person (all of their records)",
    "add or remove one person with all of their records; the number of persons N is public",
    _SAMPLER.format("person")
    + "; a person adds one gradient, the mean over at most a public number of their records, "
    "clipped once",
    (
        _BEFORE,
        "People who appear under several names in the column of persons, and what the records of "
        "others say about a person.",
    ),
)
# The declared number of records of a person that a run may use: with it the unit is a person.
RECORDS_PER_PERSON = "records_per_person"


def unit_of(statement: Mapping[str, Any]) -> Unit:
    """The unit that a statement speaks of."""
    return PERSON if RECORDS_PER_PERSON in statement["public"] else RECORD


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
    independence: str = BY_CONSTRUCTION
    metrics: Sequence[Mapping[str, Any]] | None = None  # noisy values that were paid for
    test: Mapping[str, Any] | None = None  # figures on public records: "records" and "scores"
    holdout: Mapping[str, Any] | None = None  # noisy figures on private records held out


class Statement(dict[str, Any]):
    """A privacy statement: plain values, as `privacy.json` holds them, printed in one line.

    `statement["guarantee"]` is what is promised: (epsilon, delta)-DP under adding or removing one
    record of the training set, or one person, the accounting behind it and whether that is proved.
    """

    def __repr__(self) -> str:
        promised = self["guarantee"]
        return (
            f"Statement(epsilon {format_epsilon(promised['epsilon'])}, delta "
            f"{promised['delta']:g}, accounting {promised['accounting']}; a dictionary of "
            f"{', '.join(self)})"
        )

    def _repr_html_(self) -> str:
        return html_table("Privacy statement", guarantee_rows(self))


def guarantee_rows(statement: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is promised, in a few lines."""
    promised = statement["guarantee"]
    epsilon, units = promised["epsilon"], unit_of(statement).plural.lower()
    if epsilon is None or math.isinf(epsilon):
        return [("privacy", NO_GUARANTEE), (units, f"{statement['dataset_size']:,}")]
    return [
        ("epsilon", f"{format_epsilon(epsilon)} at delta {promised['delta']:g}"),
        ("accounting", f"{promised['accounting']}, {'' if promised['proved'] else 'not '}proved"),
        ("unit", statement["unit"]),
        (units, f"{statement['dataset_size']:,}"),
        ("updates", str(statement["accepted_updates"])),
        *(("warning", text) for text in statement["warnings"]),
    ]


def privacy_statement(plan: Plan, ledger: Ledger, facts: RunFacts) -> Statement:
    """Everything a reviewer asks, as plain values, with nothing private among them."""
    accounting, unit = accounting_named(plan.accounting), unit_of({"public": facts.public})
    metrics = {} if facts.metrics is None else {"metrics": [dict(row) for row in facts.metrics]}
    test = {} if facts.test is None else {"test": dict(facts.test)}
    holdout = {} if facts.holdout is None else {"holdout": dict(facts.holdout)}
    return Statement(
        {
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
            "epsilon": plan.figures(),
            "unit": unit.unit,
            "adjacency": unit.adjacency,
            "dataset_size": facts.dataset_size,
            "public": dict(facts.public),
            "sampler": unit.sampler,
            "independence": {
                "how": facts.independence,
                "meaning": INDEPENDENCE[facts.independence],
            },
            "mechanism": stated_mechanism(plan, ledger),
            "accepted_updates": ledger.updates if plan.verdicts_are_public else plan.kept,
            "method": facts.method,
            "settings": _settings(plan, facts.settings),
            "released": [AVERAGE if facts.average else LAST],
            "random": {"seeded": facts.seeded},
            "arithmetic": _arithmetic(facts),
            "tuning": TUNING,
            "side_channels": side_channels(facts.hide_rejections),
            "not_covered": list(unit.not_covered),
            "warnings": warnings_for(plan, facts.dataset_size, seeded=facts.seeded),
            "versions": dict(facts.versions),
            **metrics,
            **test,
            **holdout,
        }
    )


def _arithmetic(facts: RunFacts) -> str:
    return ARITHMETICS[2 * facts.bf16 + facts.tf32]


def _settings(plan: Plan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with the counts of the plan, which may have been cut short."""
    kept = {name: n for name, n in plan.fixed_counts.items() if settings.get(name) is not None}
    return {**settings, **kept}


def stated_mechanism(plan: Plan, ledger: Ledger) -> dict[str, Any]:
    """The mechanism in a statement: what was planned and done, nothing private.

    Where steps follow from released values, they are listed, each with how often it was charged.
    How many trials were rejected may be published only where they were charged.
    """
    phase, counted = plan.phases[0], plan.updates is not None
    found: dict[str, Any] = {
        "trial": event_to_json(plan.typical),
        "filter": None,
        "setup": [event_to_json(event) for event in plan.setup],
        "on_reject": plan.on_reject,
        "updates": plan.updates,
        "trials": None if counted else plan.trials,
        "trial_cap": plan.trials if counted else None,
        "to_the_cap": plan.to_the_cap,
    }
    steered: dict[str, Any] = {}
    if phase.steering is not None:
        steered = {
            "offer": event_to_json(phase.step),
            "steering": event_to_json(phase.steering),
        }
    if plan.tests:
        steered |= {
            "updates": list(plan.blocks),
            "searches": plan.searches,
            "may_stop": plan.may_stop,
            "test": event_to_json(plan.test),
        }
    if plan.filter is not None:
        steered = {"order": plan.filter.order, "allowance": plan.filter.allowance}
    if plan.steered:
        steered["steps"] = [
            {
                "step": event_to_json(entry.step),
                "charged": entry.trials if plan.verdicts_are_public else entry.updates,
            }
            for entry in ledger.entries
        ]
        found["filter" if plan.filter else "blocks" if plan.tests else "menu"] = steered
    return found


def plan_from_statement(statement: Mapping[str, Any]) -> Plan:
    """The plan that a privacy statement describes, made anew from its mechanism and budget."""
    mechanism, budget = statement["mechanism"], statement["budget"]
    found = mechanism.get("menu", mechanism.get("blocks", {}))
    allowed = mechanism["filter"]
    updates = mechanism["updates"]
    step = found.get("offer", mechanism["trial"])
    counts = ACCEPTED
    cap = mechanism["trial_cap"]
    if updates is None:
        counts, cap = TRIALS, mechanism["trials"]
    if allowed is None and (updates is None or event_gate(mechanism["trial"]) is None):
        updates, cap = (cap if updates is None else updates), None
    sizes = found.get("updates", [updates])
    values = {
        **budget,
        "accounting": statement["guarantee"]["accounting"],
        "phases": [
            {
                "step": step,
                "count": size,
                "counts": counts,
                "cap": cap,
                "test": found.get("test"),
                "steering": found.get("steering"),
            }
            for size in sizes
        ],
        "filter": None
        if allowed is None
        else {"order": allowed["order"], "allowance": allowed["allowance"], "stop_after": None},
        "setup": mechanism["setup"],
        "on_reject": mechanism["on_reject"],
        "to_the_cap": mechanism["to_the_cap"],
        "searches": found.get("searches", False),
        "may_stop": found.get("may_stop", False),
    }
    return Plan.from_json(values)


def event_gate(trial: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The test that can reject a candidate; a choice among step lengths cannot."""
    test: Mapping[str, Any] | None = trial["test"]
    return None if test is None or test["kind"] == NoisyChoice.__name__ else test


def stated_ledger(statement: Mapping[str, Any]) -> Ledger:
    """The steps that a statement lists."""
    mechanism = statement["mechanism"]
    steered = mechanism.get("menu", mechanism.get("blocks", mechanism["filter"]))
    rows = [
        {"step": row["step"], "trials": row["charged"], "updates": row["charged"]}
        for row in ([] if steered is None else steered["steps"])
    ]
    return Ledger.from_json({"setup": mechanism["setup"], "entries": rows})


def step_faults(statement: Mapping[str, Any], tolerance: float) -> list[str]:
    """Why the steps that a statement lists are not those of a run under its plan."""
    plan, made = plan_from_statement(statement), stated_ledger(statement)
    if plan.steered and plan.filter is not None:
        larger = replace(plan.filter, allowance=plan.filter.allowance * (1 + tolerance))
        plan = replace(plan, filter=larger)
    faults = []
    if plan.steered and not replays(plan, made):
        faults.append("the steps are not those of a run by the stated plan")
    if plan.filter is None and statement["mechanism"] != stated_mechanism(plan, made):
        faults.append("the mechanism says more or something else than its plan")
    return faults


def holdout_cost(noise_multiplier: float, delta: float) -> float:
    """Epsilon of the noisy figures of held-out records alone: one Gaussian mechanism."""
    return accounting_named("every-trial").epsilon([(Gaussian(noise_multiplier), 1)], delta)


# Settings of one gate, or of one optimizer, which the others do not read.
_SETTINGS_OF = {
    "gate": {
        "loss": ("val_noise_multiplier", "loss_clip", "accept_threshold", "on_reject"),
        "coin": ("accept_ratio", "on_reject"),
        "block": ("val_noise_multiplier", "blocks", "block_updates", "clip_norm"),
        "none": (),
    },
    "optimizer": {"sgd": ("momentum",), "adam": ("adam_beta1", "adam_beta2", "adam_eps")},
}


def used_settings(statement: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that it has used; what it found itself is named as found."""
    settings = {name: v for name, v in statement["settings"].items() if v is not None}
    for choice, owned in _SETTINGS_OF.items():
        if settings.get(choice) in owned:
            own = owned[settings[choice]]
            others = {name for names in owned.values() for name in names} - set(own)
            settings = {name: v for name, v in settings.items() if name not in others}
    if settings.get("gate") == "block":
        rates = [row["learning_rate"] for row in statement.get("metrics", [])]
        found = [rate for rate in rates if rate is not None]
        settings["learning_rate"] = f"found by tests, {found[-1]:.4g} last" if found else "found"
        if settings.get("clip_norm") == "median":
            settings["max_grad_norm"] = "an eighth of the noisy median of gradient norms"
    return settings


def warnings_for(plan: Plan, dataset_size: int, *, seeded: bool) -> list[str]:
    """What the user, and whoever reads the statement, must know."""
    unproved = not accounting_named(plan.accounting).proved
    figures = (plan.epsilon(), plan.figures()["proven"]) if unproved else (math.nan, None)
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


def side_channels(hide_rejections: str) -> list[str]:
    """What whoever watches a run, or reads its folder, learns beyond the release."""
    return [*WATCHED[hide_rejections], PRIVATE_FOLDER]


def metric_text(row: Mapping[str, Any]) -> str:
    """A noisy value with its standard error, in a few words."""
    error = "" if row["standard_error"] is None else f" +- {row['standard_error']:.2g}"
    return f"{row['quantity']} {row['value']:.4g}{error}"


def format_epsilon(value: float) -> str:
    """An epsilon to four decimals, rounded up: a shown figure must not be below the real one."""
    if not math.isfinite(value):
        return "infinite"
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}"
