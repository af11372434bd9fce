"""The privacy statement of a release: what is promised, to whom, and what is not.

It answers what NIST SP 800-226 and the reporting list of "How to DP-fy ML" (Ponomareva et al. 2023)
ask: definition and unit of privacy, adjacency, accounting, sampler, what is released, the settings,
random numbers, arithmetic, tuning and side channels.

A statement follows from a plan, the steps that were charged and a few facts of the run, and holds
all of them. So `dpsur verify` can rebuild it from itself, and compare.

Its words, those of its pages and of model cards have versions, of which a statement names one. To
say something better, write the next file in `words/`, with the reworded entries only: it lies on
top of the one before, and what was released keeps its words. An entry is a template for
`str.format`. One of a table has its label and its value on both sides of a bar; a version that
lacks such an entry leaves the row out.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from dpsur.errors import InvalidInputError
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.conversion import NOT_HELD_OUT, for_group
from dpsur.privacy.events import (
    Gaussian,
    Ledger,
    NoisyChoice,
    SampledGaussian,
    event_from_json,
    event_to_json,
)
from dpsur.privacy.plan import ACCEPTED, NOT_HIDDEN, TRIALS, WAYS_TO_HIDE, Plan
from dpsur.status import html_table


class Words(dict[str, str]):
    """Templates of one version by name."""

    def __call__(self, name: str, /, **values: Any) -> str:
        return self[name].format(**values)

    def rows(self, name: str, /, **values: Any) -> list[tuple[str, str]]:
        """One row of a table; none where this version has no such row."""
        if name not in self:
            return []
        label, _, value = self[name].partition(" | ")
        return [(label.format(**values), value.format(**values))]


def _read(folder: Path) -> dict[int, Words]:
    found: dict[int, Words] = {}
    for number, _ in enumerate(folder.glob("*.toml"), start=1):
        text = (folder / f"{number}.toml").read_text(encoding="utf-8")
        found[number] = Words({**found.get(number - 1, {}), **tomllib.loads(text)})
    return found


TEXTS: Final = _read(Path(__file__).with_name("words"))


def latest() -> int:
    return max(TEXTS)


FORMAT: Final = "dpsur-privacy/7"
EARLIER: Final = "dpsur-privacy/6"  # without a version of texts, and with settings of no use
# The method of a release that a `PrivacyEngine` writes.
CUSTOM_LOOP: Final = "custom-loop"
# Why each record's clipped gradient depends on that record alone.
BY_CONSTRUCTION, WAS_CHECKED = "by construction", "checked"
# The declared number of records of a person that a run may use: with it the unit is a person.
RECORDS_PER_PERSON = "records_per_person"
# Whether the size is one that the user declared, so that the true one need not be public.
DECLARED_SIZE = "declared_size"
# The size of groups, such as the records of a person without a name, that a converted guarantee is
# stated for.
GROUP_SIZE = "group_size"
# With persons: whether records are drawn for a batch one by one, in the place of persons.
SAMPLED_BY = "sampled_by"
RECORD, PERSON = "record", "person"
# Noisy values that tests of blocks of updates release of a classifier.
ACCURACY, BRIER = "training accuracy", "training Brier score"
# Settings that only one gate, or one optimizer, reads.
_SETTINGS_OF = {
    "gate": {
        "loss": ("val_noise_multiplier", "loss_clip", "accept_threshold", "on_reject"),
        "coin": ("accept_ratio", "on_reject"),
        "block": ("val_noise_multiplier", "blocks", "block_updates", "clip_norm"),
        "none": (),
    },
    "optimizer": {"sgd": ("momentum",), "adam": ("adam_beta1", "adam_beta2", "adam_eps")},
}


def unit_of(statement: Mapping[str, Any]) -> str:
    return PERSON if RECORDS_PER_PERSON in statement["public"] else RECORD


def counted_by(statement: Mapping[str, Any]) -> str:
    """What its number N counts: persons, or the records that are drawn of them."""
    return RECORD if SAMPLED_BY in statement["public"] else unit_of(statement)


def words_of(statement: Mapping[str, Any]) -> Words:
    version = statement["texts"]
    if type(version) is int and version in TEXTS:
        return TEXTS[version]
    raise InvalidInputError(
        f"texts {version!r} are of no version that this installation has (1 to {latest()}); "
        "update dpsur",
        code="unknown-format",
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
    public: Mapping[str, Any] = field(default_factory=dict)
    independence: str = BY_CONSTRUCTION
    metrics: Sequence[Mapping[str, Any]] | None = None  # noisy values that were paid for
    test: Mapping[str, Any] | None = None  # figures on public records: "records" and "scores"
    holdout: Mapping[str, Any] | None = None  # noisy figures on private records held out
    replay: Mapping[str, str] | None = None  # commitments of a replayable run


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
    promised = statement["guarantee"]
    epsilon, units = promised["epsilon"], f"{counted_by(statement)}s"
    if epsilon is None or math.isinf(epsilon):
        return [
            ("privacy", words_of(statement)["no guarantee"]),
            (units, f"{statement['dataset_size']:,}"),
        ]
    return [
        ("epsilon", f"{format_epsilon(epsilon)} at delta {promised['delta']:g}"),
        ("accounting", f"{promised['accounting']}, {'' if promised['proved'] else 'not '}proved"),
        ("unit", statement["unit"]),
        (units, f"{statement['dataset_size']:,}"),
        *group_rows(statement),
        ("updates", str(statement["accepted_updates"])),
        *(("warning", text) for text in statement["warnings"]),
    ]


def group_rows(statement: Mapping[str, Any]) -> list[tuple[str, str]]:
    group = statement.get("group", {"epsilon": None})
    if group["epsilon"] is None or math.isinf(group["epsilon"]):
        return []
    epsilon = format_epsilon(group["epsilon"])
    return words_of(statement).rows("group", **{**group, "epsilon": epsilon})


def privacy_statement(
    plan: Plan, ledger: Ledger, facts: RunFacts, texts: int | None = None
) -> Statement:
    """Everything a reviewer asks, as plain values, with nothing private among them."""
    accounting, unit = accounting_named(plan.accounting), unit_of({"public": facts.public})
    texts = latest() if texts is None else texts
    words, epsilon, figures = TEXTS[texts], plan.epsilon(), plan.figures()
    private = math.isfinite(epsilon)
    more = {name: getattr(facts, name) for name in ("metrics", "test", "holdout", "replay")}
    if GROUP_SIZE in facts.public:
        if facts.holdout is not None:
            raise InvalidInputError(NOT_HELD_OUT)
        group = asdict(for_group(plan, facts.public[GROUP_SIZE], unit))
        group["how"] = words["group exact" if group.pop("exact") else "group whole"]
        more["group"] = group
    found = {
        "format": FORMAT,
        "texts": texts,
        "guarantee": {
            "definition": words["definition" if private else "no guarantee"],
            "epsilon": epsilon,
            "delta": plan.budget.delta,
            "accounting": accounting.name,
            # a reader must not find the word "proved" beside an epsilon that is not there
            "proved": accounting.proved and private,
            "theorem": words[f"theorem {accounting.name}"] if private else None,
            "assumes": words[f"assumes {accounting.name}"] if private else None,
        },
        "budget": {"epsilon": plan.budget.epsilon, "delta": plan.budget.delta},
        "epsilon": figures,
        "unit": words[f"{unit} unit"],
        "adjacency": words[f"{unit} adjacency{' declared' * (DECLARED_SIZE in facts.public)}"],
        "dataset_size": facts.dataset_size,
        "public": dict(facts.public),
        "sampler": words[f"{unit} sampler{' by record' * (SAMPLED_BY in facts.public)}"],
        "independence": {"how": facts.independence, "meaning": words[facts.independence]},
        "mechanism": stated_mechanism(plan, ledger),
        "accepted_updates": plan.kept if plan.charges_accepted else ledger.updates,
        "method": facts.method,
        "settings": used_settings(with_counts(plan, facts.settings)),
        "released": [words["average" if facts.average else "last weights"]],
        "random": {"seeded": facts.seeded},
        "computed": {"tf32": facts.tf32, "bf16": facts.bf16},
        "arithmetic": _arithmetic(words, seeded=facts.seeded, tf32=facts.tf32, bf16=facts.bf16),
        "tuning": words["tuning"],
        "hide_rejections": facts.hide_rejections,
        "side_channels": _side_channels(words, facts.hide_rejections),
        "not_covered": words[f"{unit} not covered"].splitlines(),
        "versions": dict(facts.versions),
    }
    for name, value in more.items():
        if value is not None:
            found[name] = [dict(row) for row in value] if name == "metrics" else dict(value)
    return Statement({**found, "warnings": warnings_of(found)})


def _arithmetic(words: Words, *, seeded: bool, tf32: bool, bf16: bool) -> str:
    numbers = words.get("seeded key" if seeded else "secret key", "")  # not in version 1
    layers = words["bf16"] if bf16 else ""
    return words["arithmetic"] + numbers + layers + words["tf32" if tf32 else "float32"]


def _side_channels(words: Words, way: str) -> list[str]:
    """What anyone who watches a run, or reads its folder, learns beyond the release."""
    return [*words[f"watched {way}"].splitlines(), words["private folder"]]


def with_counts(plan: Plan, settings: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: n for name, n in plan.fixed_counts.items() if settings.get(name) is not None}
    return {**settings, **kept}


def used_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run used and no others; None where the run found the value itself."""
    used = {name: value for name, value in settings.items() if value is not None}
    for choice, owned in _SETTINGS_OF.items():
        if settings.get(choice) in owned:
            own = owned[settings[choice]]
            others = {name for names in owned.values() for name in names} - set(own)
            used = {name: value for name, value in used.items() if name not in others}
    if settings.get("gate") == "block":
        found = ("learning_rate", "max_grad_norm")
        for name in found if settings.get("clip_norm") == "median" else found[:1]:
            used[name] = None
    return used


def shown_settings(statement: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for a reader, with words for what the run found itself."""
    words, shown = words_of(statement), dict(statement["settings"])
    if shown.get("max_grad_norm", 0.0) is None:
        shown["max_grad_norm"] = words["clip found"]
    if shown.get("learning_rate", 0.0) is None:
        rates = [row["learning_rate"] for row in statement.get("metrics", [])]
        found = [rate for rate in rates if rate is not None]
        name = "rates found" if found else "rate found"
        shown["learning_rate"] = words(name, last=found[-1] if found else None)
    return shown


def warnings_of(statement: Mapping[str, Any]) -> list[str]:
    """What the user, and anyone who reads the statement, must know, by its own figures."""
    words, guarantee = words_of(statement), statement["guarantee"]
    size, delta = statement["dataset_size"], statement["budget"]["delta"]
    warnings = []
    if delta > 1 / size:
        warnings.append(words("large delta", delta=delta, most=1 / size, size=size))
    if not accounting_named(guarantee["accounting"]).proved:
        claimed, proven = format_epsilon(guarantee["epsilon"]), statement["epsilon"]["proven"]
        shown = words["not computed"] if proven is None else format_epsilon(proven)
        named = guarantee["accounting"]
        warnings.append(words("unproved", accounting=named, claimed=claimed, proven=shown))
    if statement["random"]["seeded"]:
        warnings.append(words["seeded"])
    return warnings


def planned_warnings(plan: Plan, dataset_size: int, *, seeded: bool) -> list[str]:
    proved = accounting_named(plan.accounting).proved  # figures take a while
    guarantee = {"epsilon": math.nan if proved else plan.epsilon(), "accounting": plan.accounting}
    return warnings_of(
        {
            "texts": latest(),
            "guarantee": guarantee,
            "budget": {"delta": plan.budget.delta},
            "epsilon": {} if proved else plan.figures(),
            "dataset_size": dataset_size,
            "random": {"seeded": seeded},
        }
    )


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
        "to_the_cap": plan.run_all_trials,
    }
    steered: dict[str, Any] = {}
    if phase.steering is not None:
        steered = {"offer": event_to_json(phase.step), "steering": event_to_json(phase.steering)}
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
        charged = "updates" if plan.charges_accepted else "trials"
        steered["steps"] = [
            {"step": row["step"], "charged": row[charged]} for row in ledger.to_json()["entries"]
        ]
        found["filter" if plan.filter else "blocks" if plan.tests else "menu"] = steered
    return found


def plan_from_statement(statement: Mapping[str, Any]) -> Plan:
    """The plan that a privacy statement describes, made anew from its mechanism and budget."""
    mechanism, trial = statement["mechanism"], statement["mechanism"]["trial"]
    found = mechanism.get("menu", mechanism.get("blocks", {}))
    allowed, updates = mechanism["filter"], mechanism["updates"]
    cap = mechanism["trials" if updates is None else "trial_cap"]
    phase = {
        "step": found.get("offer", trial),
        "counts": TRIALS if updates is None else ACCEPTED,
        "test": found.get("test"),
        "steering": found.get("steering"),
    }
    # a choice rejects nothing
    gated = trial["test"] is not None and trial["test"]["kind"] != NoisyChoice.__name__
    if allowed is None and (updates is None or not gated):
        updates, cap = (cap if updates is None else updates), None
    else:
        allowed = allowed and {name: allowed[name] for name in ("order", "allowance")}
    return Plan.from_json(
        {
            **statement["budget"],
            "accounting": statement["guarantee"]["accounting"],
            "phases": [
                {**phase, "count": size, "cap": cap} for size in found.get("updates", [updates])
            ],
            "filter": allowed,
            "setup": mechanism["setup"],
            "on_reject": mechanism["on_reject"],
            "to_the_cap": mechanism["to_the_cap"],
            "searches": found.get("searches", False),
            "may_stop": found.get("may_stop", False),
        }
    )


def stated_ledger(statement: Mapping[str, Any]) -> Ledger:
    """The steps that a statement lists, as if all had been accepted; none if all were fixed."""
    mechanism = statement["mechanism"]
    steered = mechanism.get("menu", mechanism.get("blocks", mechanism["filter"]))
    steps = [] if steered is None else steered["steps"]
    rows = [{**row, "trials": row["charged"], "updates": row["charged"]} for row in steps]
    return Ledger.from_json({"setup": mechanism["setup"], "entries": rows})


def stated_holdout(
    held: Mapping[str, Any], delta: float, texts: int | None = None
) -> dict[str, Any]:
    """Noisy figures of held-out records, with what they cost and what that means."""
    event = event_from_json(held["event"])
    if not isinstance(event, Gaussian):
        raise InvalidInputError("holdout.event is not a Gaussian mechanism")
    return {
        **{name: held[name] for name in ("fraction", "records")},
        "event": event_to_json(event),
        "epsilon": holdout_cost(event.noise_multiplier, delta),
        "composition": TEXTS[latest() if texts is None else texts]["holdout composition"],
        "figures": held["figures"],
    }


def holdout_cost(noise_multiplier: float, delta: float) -> float:
    return accounting_named("every-trial").epsilon([(Gaussian(noise_multiplier), 1)], delta)


def current(statement: Any) -> dict[str, Any]:
    """A statement in the format of today; refuses what is none.

    The format before it had the first version of texts, and listed all settings of its method.
    """
    form = statement.get("format") if isinstance(statement, dict) else None
    if form == FORMAT:
        return dict(statement)
    if form != EARLIER:
        raise InvalidInputError(
            f"this is not a privacy statement of the format {FORMAT}, or {EARLIER} before it",
            code="unknown-format",
        )
    words, flags = TEXTS[1], ((False, False), (True, False), (False, True), (True, True))
    computed = [
        {"tf32": tf32, "bf16": bf16}
        for tf32, bf16 in flags
        if statement["arithmetic"] == _arithmetic(words, seeded=True, tf32=tf32, bf16=bf16)
    ]
    ways = [w for w in WAYS_TO_HIDE if statement["side_channels"] == _side_channels(words, w)]
    if not computed or not ways or {"texts", "computed", "hide_rejections"} & statement.keys():
        raise InvalidInputError("arithmetic or side_channels are not what releases state there")
    return {
        **statement,
        "format": FORMAT,
        "texts": 1,
        "settings": used_settings(statement["settings"]),
        "computed": computed[0],
        "hide_rejections": ways[0],
    }


def metric_text(row: Mapping[str, Any]) -> str:
    error = "" if row["standard_error"] is None else f" +- {row['standard_error']:.2g}"
    return f"{row['quantity']} {row['value']:.4g}{error}"


def format_epsilon(value: float) -> str:
    """An epsilon to four decimals, rounded up: a shown figure must not be below the real one."""
    if not math.isfinite(value):
        return "infinite"
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}"


# --- pages: `PRIVACY.md` and the model card -------------------------------------------------------

Rows = list[tuple[str, str]]
FIGURES = ("proven_pld", "proven", "proven_lower", "every_trial", "published")


def render_markdown(statement: Mapping[str, Any]) -> str:
    words = words_of(statement)
    return words(
        "page",
        promise=_promise(words, statement["guarantee"]),
        warnings="".join(words("warning", warning=text) for text in statement["warnings"]),
        guarantee=_table(_guarantee_rows(words, statement)),
        mechanism=_table(_mechanism_rows(words, statement)),
        metrics=_metrics(words, statement),
        holdout=_holdout(words, statement),
        assumptions=_assumptions(words, statement),
        versions=_items(f"{name} {version}" for name, version in statement["versions"].items()),
    )


def render_model_card(statement: Mapping[str, Any]) -> str:
    """A model card in the form that model hubs read, with the privacy of the weights on top."""
    words, guarantee, public = words_of(statement), statement["guarantee"], statement["public"]
    private = _is_private(guarantee)
    proved = "true" if guarantee["proved"] else "false"
    promised = {**guarantee, "proved": proved, "unit": statement["unit"]}
    tags = [*(("differential-privacy", "dp-sgd") if private else ()), statement["method"]]
    declared = [*_public_rows(words, public, statement["method"]), *_class_rows(words, public)]
    results = _result_rows(words, statement)
    settings = [(f"`{name}`", _plain(v)) for name, v in shown_settings(statement).items()]
    return words(
        "card",
        tags=_items(tags),
        privacy=words("card privacy", **promised) if private else words["card no privacy"],
        size=statement["dataset_size"],
        method=statement["method"],
        promise=_promise(words, guarantee),
        warnings="".join(words("warning", warning=text) for text in statement["warnings"]),
        declared=words("card declared", rows=_table(declared)) if declared else "",
        version=statement["versions"]["dpsur"],
        results=words("card results", rows=_table(results)) if results else "",
        holdout=_holdout(words, statement),
        mechanism=_table(_mechanism_rows(words, statement)),
        settings=_table(settings),
    )


def _items(lines: Any) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(rows: Rows) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _plain(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _is_private(guarantee: Mapping[str, Any]) -> bool:
    epsilon = guarantee["epsilon"]
    return epsilon is not None and not math.isinf(epsilon)


def _promise(words: Words, guarantee: Mapping[str, Any]) -> str:
    """The first sentence, which must not sound better than it is."""
    if not _is_private(guarantee):
        return words["promise nothing"]
    epsilon, kind = guarantee["epsilon"], "proved" if guarantee["proved"] else "claimed"
    return words(f"promise {kind}", epsilon=format_epsilon(epsilon), delta=guarantee["delta"])


def _result_rows(words: Words, statement: Mapping[str, Any]) -> Rows:
    rows: Rows = []
    for name, column in statement["public"].get("schema", {}).get("target", {}).items():
        if column["kind"] == "category":
            values = ", ".join(str(value) for value in column["values"][:20])
            rows += words.rows("classes in order", name=name, values=values)
    if "test" in statement:
        test = statement["test"]
        rows += words.rows("test records", records=test["records"])
        scores = {name: value for name, value in test["scores"].items() if value is not None}
        if "log_loss" in scores:  # which the mean loss is then
            scores.pop("loss", None)
        rows += [(name.replace("_", " "), _plain(value)) for name, value in scores.items()]
    return rows


def _assumptions(words: Words, statement: Mapping[str, Any]) -> str:
    """What a guarantee rests on, and what it leaves out; nothing where there is none."""
    guarantee = statement["guarantee"]
    if not _is_private(guarantee):
        return ""
    limits = [statement["tuning"], statement["arithmetic"]]
    limits += [*statement["side_channels"], *statement["not_covered"]]
    return words("assumptions", **{**guarantee, "not_covered": _items(limits)})


def _guarantee_rows(words: Words, statement: Mapping[str, Any]) -> Rows:
    guarantee, figures = statement["guarantee"], statement["epsilon"]
    public = statement["public"]
    kind = "size declared" if DECLARED_SIZE in public else "size"
    size = words.rows(f"{counted_by(statement)} {kind}", size=statement["dataset_size"])
    released = words.rows("released", released=", ".join(statement["released"]))
    if not _is_private(guarantee):
        return [*words.rows("no privacy", nothing=words["no guarantee"]), *size, *released]
    kind = "proved" if guarantee["proved"] else "claimed"
    rows = words.rows("row definition", **guarantee)
    rows += words.rows("row unit", unit=statement["unit"])
    rows += words.rows("row adjacency", adjacency=statement["adjacency"])
    rows += [*size, *_public_rows(words, public, statement["method"])]
    rows += words.rows(f"accounting {kind}", **guarantee)
    rows += words.rows("budget", **statement["budget"])
    for name in FIGURES:
        if name in figures:
            value = figures[name]
            shown = words["no figure"] if value is None else format_epsilon(value)
            rows += words.rows(f"figure {name}", figure=shown)
    return [*rows, *group_rows(statement), *released]


def _public_rows(words: Words, public: Mapping[str, Any], method: str) -> Rows:
    """What the user declared; it is not read off the records, and epsilon does not cover it."""
    rows: Rows = []
    if "classes" in public:
        rows += words.rows("classes", **public)
    if "labels" in public:
        rows += words.rows("classes", classes=", ".join(map(str, public["labels"])))
    if "inputs" in public:
        inputs = public["inputs"]
        sizes = " x ".join(map(str, inputs.get("shape", [inputs.get("dimension")])))
        rows += words.rows("inputs", kind=inputs["kind"], sizes=sizes)
    if RECORDS_PER_PERSON in public:
        own = f"{RECORDS_PER_PERSON} {method}"
        name = own if own in words else RECORDS_PER_PERSON
        rows += words.rows(name, most=public[RECORDS_PER_PERSON])
    if "keep_fraction" in public:
        rows += words.rows("keep_fraction", fraction=public["keep_fraction"])
    if "schema" in public:
        columns, target = (public["schema"][part] for part in ("columns", "target"))
        names = ", ".join(map(str, target))
        own = "schema learned" if "learned" in public["schema"] else "schema"
        rows += words.rows(own, columns=len(columns), target=names)
    return rows


def _class_rows(words: Words, public: Mapping[str, Any]) -> Rows:
    rows: Rows = []
    for name, column in public.get("schema", {}).get("target", {}).items():
        if "values" in column:
            values = ", ".join(map(str, column["values"]))
            rows += words.rows("predicts classes", name=name, values=values)
        else:
            rows += words.rows("predicts number", name=name, low=column["low"], high=column["high"])
    return rows


def _mechanism_rows(words: Words, statement: Mapping[str, Any]) -> Rows:
    mechanism, settings = statement["mechanism"], statement["settings"]
    update, test = mechanism["trial"]["update"], mechanism["trial"]["test"]
    rows = words.rows("method", method=statement["method"])
    rows += words.rows("sampler", sampler=statement["sampler"])
    bound = settings.get("max_grad_norm")
    clip = words["clip by test"] if bound is None else words("clip", clip=bound)
    if mechanism["filter"] is not None:
        chosen = mechanism["filter"]
        count = sum(row["charged"] for row in chosen["steps"])
        rows += words.rows("filter", order=chosen["order"], allowance=chosen["allowance"])
        rows += words.rows("filter steps", count=count, kinds=len(chosen["steps"]))
    elif "menu" in mechanism:
        rows += _menu_rows(words, mechanism["menu"], clip)
    elif "blocks" in mechanism:
        rows += _block_rows(words, mechanism, clip)
    elif update["kind"] == SampledGaussian.__name__:
        rows += words.rows("candidate", **_sampled(update), clip=clip)
    if test is not None:
        worse = 1 / test.get("accept_ratio", 1.0)
        about = {"loss_clip": settings.get("loss_clip"), "worse": worse, **test}
        rows += words.rows(f"test {test['kind']}", **about)
        if test["kind"] != NoisyChoice.__name__:
            rows += words.rows("rejection", on_reject=mechanism["on_reject"])
    for event in mechanism["setup"]:
        own = f"setup {event['kind']}"
        rows += words.rows(own if own in words else "setup", **event)
    rows += words.rows("accepted", accepted=statement["accepted_updates"])
    if mechanism["filter"] is not None and mechanism["updates"] is None:
        rows += words.rows("trials by filter")
    elif mechanism["trials"] is not None:
        rows += words.rows("trials fixed", trials=mechanism["trials"])
    elif test is None:
        rows += words.rows("trials as updates")
    else:
        kind = "trials constant" if mechanism["to_the_cap"] else "trials private"
        rows += words.rows(kind, cap=mechanism["trial_cap"])
    rows += words.rows("independence", **statement["independence"])
    return [*rows, *words.rows("random seeded" if statement["random"]["seeded"] else "random")]


def _sampled(event: Mapping[str, Any]) -> dict[str, float]:
    return {"rate": event.get("sample_rate", 1.0), "noise": event["noise_multiplier"]}


def _menu_rows(words: Words, chosen: Mapping[str, Any], clip: str) -> Rows:
    choices, repeats = chosen["offer"]["choices"], chosen["offer"]["repeats"]
    ends: dict[str, float] = {}
    for name, key in (("rate", "sample_rate"), ("noise", "noise_multiplier")):
        offered = [choice[key] for choice in choices]
        ends |= {f"least_{name}": min(offered), f"most_{name}": max(offered)}
    rows = words.rows("menu", count=len(choices), clip=clip, **ends)
    return [*rows, *words.rows("steering", repeats=repeats, **_sampled(chosen["steering"]))]


def _block_rows(words: Words, mechanism: Mapping[str, Any], clip: str) -> Rows:
    chosen, sizes = mechanism["blocks"], mechanism["blocks"]["updates"]
    rows = (
        _menu_rows(words, chosen, clip)
        if "offer" in chosen
        else words.rows("block update", **_sampled(mechanism["trial"]["update"]), clip=clip)
    )
    kind = "blocks search" if chosen["searches"] else "blocks measure"
    rows += words.rows(kind, count=len(sizes), sizes=", ".join(map(str, sizes)))
    of_all = "" if "sample_rate" in chosen["test"] else " of all"
    return [*rows, *words.rows(f"block test{of_all}", **_sampled(chosen["test"]))]


def _metrics(words: Words, statement: Mapping[str, Any]) -> str:
    rows = []
    for row in statement.get("metrics", []):
        rate = "" if row["learning_rate"] is None else f"{row['learning_rate']:.4g}"
        spread = row["standard_error"]
        error = "" if spread is None else words("error", error=spread)
        rows.append(words("metric", **{**row, "rate": rate, "error": error}))
    return words("metrics", rows="\n".join(rows)) if "metrics" in statement else ""


def _holdout(words: Words, statement: Mapping[str, Any]) -> str:
    if "holdout" not in statement:
        return ""
    held = statement["holdout"]
    rows = [
        (row["quantity"], f"{row['value']:.4g}" + words("error", error=row["standard_error"]))
        for row in held["figures"]
    ]
    about = {**held, "epsilon": format_epsilon(held["epsilon"]), "rows": _table(rows)}
    return words("holdout", noise=held["event"]["noise_multiplier"], **about)
