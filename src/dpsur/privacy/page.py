"""The privacy statement as readable pages: `PRIVACY.md` and the model card.

Here is which lines a page has. Their words are in `texts`, by the version of the statement.
"""

import math
from collections.abc import Mapping
from typing import Any

from dpsur.privacy.events import NoisyChoice, SampledGaussian
from dpsur.privacy.statement import (
    DECLARED_SIZE,
    RECORDS_PER_PERSON,
    Words,
    counted_by,
    format_epsilon,
    group_rows,
    shown_settings,
    words_of,
)

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
