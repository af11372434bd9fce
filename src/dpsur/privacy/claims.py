"""What a statement says in words and in settings, held against its own mechanism.

Epsilon is recomputed elsewhere. Here is the rest of what people read: texts that are the same for
every release, counts and settings that repeat the mechanism, and warnings that follow from both.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.privacy.accounting import KEEP_MOMENTUM, RESTORE, accounting_named
from dpsur.privacy.events import CoinTest, LossTest, NoisyChoice, SampledGaussian
from dpsur.privacy.rejections import CONSTANT, DELAY, NOT_HIDDEN
from dpsur.privacy.statement import (
    ARITHMETICS,
    AVERAGE,
    DEFINITION,
    LAST,
    NO_GUARANTEE,
    RECORDS_PER_PERSON,
    TUNING,
    side_channels,
    stated_warnings,
    unit_of,
)

# Settings that repeat a value of the event they belong to.
SETTINGS_OF: Final = {
    SampledGaussian.__name__: {"noise_multiplier": "noise_multiplier"},
    LossTest.__name__: {
        "val_noise_multiplier": "noise_multiplier",
        "accept_threshold": "accept_threshold",
    },
    CoinTest.__name__: {"accept_ratio": "accept_ratio"},
    NoisyChoice.__name__: {"choice_epsilon": "choice_epsilon"},
}
METRIC_KEYS: Final = {
    "test", "after", "quantity", "learning_rate", "value", "scale", "standard_error",
}  # fmt: skip
GATE_OF: Final = {LossTest.__name__: "loss", CoinTest.__name__: "coin"}


def claim_faults(statement: Mapping[str, Any]) -> list[str]:
    """What a statement claims without ground in its mechanism, each in a sentence."""
    checks.at_least_one("dataset_size", statement["dataset_size"])
    _check_form(statement["mechanism"])
    return [
        *_text_faults(statement),
        *_public_faults(statement["public"]),
        *_count_faults(statement),
        *_rate_faults(statement),
        *_step_faults(statement),
        *_setting_faults(statement),
        *_warning_faults(statement),
        *_metric_faults(statement),
    ]


def _check_form(mechanism: Mapping[str, Any]) -> None:
    """Refuse a mechanism whose values are of another kind than those that were written."""
    checks.one_of("mechanism.on_reject", mechanism["on_reject"], (RESTORE, KEEP_MOMENTUM))
    if not isinstance(mechanism["to_the_cap"], bool):
        raise InvalidInputError("mechanism.to_the_cap must be true or false")
    if not isinstance(mechanism["setup"], list):
        raise InvalidInputError("mechanism.setup must be a list of events")
    counts = {name: mechanism[name] for name in ("updates", "trials", "trial_cap")}
    fixed = ("trials",) if mechanism["updates"] is None else ("updates", "trial_cap")
    for row in _stated_steps(mechanism) or ():
        charged = row["charged"]
        if not isinstance(charged, int) or isinstance(charged, bool) or charged < 0:
            raise InvalidInputError(f"a step of the run cannot be charged {charged!r} times")
    for name, count in counts.items():
        whole = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        if not (whole if name in fixed else count is None):
            raise InvalidInputError(f"mechanism.{name} cannot be {count!r} beside {counts}")


def _stated_steps(mechanism: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """What a run did that steered itself; None where all was fixed in advance."""
    steered = mechanism.get("menu", mechanism.get("blocks", mechanism["filter"]))
    return None if steered is None else steered["steps"]


def _text_faults(statement: Mapping[str, Any]) -> Iterator[str]:
    guarantee = statement["guarantee"]
    accounting = accounting_named(guarantee["accounting"])
    promise: tuple[str | None, ...] = (DEFINITION, accounting.theorem, accounting.assumes)
    if guarantee["epsilon"] is None:
        promise = (NO_GUARANTEE, None, None)
    unit = unit_of(statement)
    averaged = statement["settings"].get("average_decay") is not None
    texts = {
        **{
            f"guarantee.{name}": (guarantee[name], (text,))
            for name, text in zip(("definition", "theorem", "assumes"), promise, strict=True)
        },
        "unit": (statement["unit"], (unit.unit,)),
        "adjacency": (statement["adjacency"], (unit.adjacency,)),
        "sampler": (statement["sampler"], (unit.sampler,)),
        "tuning": (statement["tuning"], (TUNING,)),
        "arithmetic": (statement["arithmetic"], ARITHMETICS),
        "released": (statement["released"], ([AVERAGE if averaged else LAST],)),
        "side_channels": (statement["side_channels"], _watched(statement)),
        "not_covered": (statement["not_covered"], (list(unit.not_covered),)),
    }
    for name, (stated, allowed) in texts.items():
        if stated not in allowed:
            yield f"{name} says {stated!r}, which is not what this library states there"


_SCHEMA = ("columns", "target")


def _public_faults(public: Mapping[str, Any]) -> Iterator[str]:
    """Only what can be declared, in the form in which a run takes it."""
    known = {"classes", "keep_fraction", "schema", "labels", "inputs", RECORDS_PER_PERSON}
    for name in sorted(public.keys() - known):
        yield f"public.{name} is nothing that a user declares"
    each = public.get(RECORDS_PER_PERSON, 1)
    if not isinstance(each, int) or isinstance(each, bool) or each < 1:
        yield f"public.{RECORDS_PER_PERSON} is {each!r}, which is no number of records"
    classes, fraction = public.get("classes", 2), public.get("keep_fraction", 1.0)
    if not isinstance(classes, int) or isinstance(classes, bool) or classes < 2:
        yield f"public.classes is {classes!r}, which is no number of classes"
    if not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        yield f"public.keep_fraction is {fraction!r}, which is no fraction of the records"
    labels = public.get("labels", ["no", "yes"])
    if not isinstance(labels, list) or not 2 <= len(labels) == len(set(map(str, labels))):
        yield "public.labels does not name different classes"
    inputs = public.get("inputs", {"kind": "images"})
    if not isinstance(inputs, Mapping) or inputs.get("kind") not in ("images", "texts"):
        yield "public.inputs does not say what records are"
    schema = public.get("schema", {"columns": {}, "target": {}})
    parts = [schema.get(part) if isinstance(schema, Mapping) else None for part in _SCHEMA]
    if not all(isinstance(part, Mapping) for part in parts):
        yield "public.schema does not declare columns and a target"


def _watched(statement: Mapping[str, Any]) -> tuple[list[str], ...]:
    mechanism = statement["mechanism"]
    if mechanism["to_the_cap"]:
        return (side_channels(CONSTANT),)
    if mechanism["updates"] is None or _gate(mechanism) is None:
        return (side_channels(NOT_HIDDEN),)
    return (side_channels(NOT_HIDDEN), side_channels(DELAY))


def _gate(mechanism: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The test that can reject a candidate; a choice among step lengths cannot."""
    test: Mapping[str, Any] | None = mechanism["trial"]["test"]
    return None if test is None or test["kind"] == NoisyChoice.__name__ else test


def _count_faults(statement: Mapping[str, Any]) -> Iterator[str]:
    least, most = _accepted(statement)
    stated = statement["accepted_updates"]
    if not (isinstance(stated, int) and least <= stated <= most):
        meant = f"{least}" if least == most else f"{least} to {most}"
        yield f"accepted_updates is {stated}, the mechanism makes {meant}"


def _accepted(statement: Mapping[str, Any]) -> tuple[int, int]:
    """The least and the most updates that the mechanism can have accepted."""
    mechanism = statement["mechanism"]
    updates, trials = mechanism["updates"], mechanism["trials"]
    steps = _stated_steps(mechanism)
    if steps is None:
        if updates is not None:
            return updates, updates
        return 0, trials  # all are charged; a gate that does not look at the data may reject some
    charged = sum(row["charged"] for row in steps if row["step"]["kind"] == "Trial")
    if mechanism["trial"]["test"] is None:
        return charged, charged
    if updates is not None and _gate(mechanism) is not None:
        return charged, updates  # the planned number is stated, whatever the filter let pass
    return 0, charged


def stated_menu(mechanism: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The menu that updates were chosen from and what they were chosen by; None without one."""
    found: Mapping[str, Any] = mechanism.get("menu", mechanism.get("blocks", {}))
    return found if "offer" in found else None


def _rate_faults(statement: Mapping[str, Any]) -> Iterator[str]:
    """The sizes that people read must be those that the accountant was given."""
    mechanism, settings = statement["mechanism"], statement["settings"]
    size, trial = statement["dataset_size"], mechanism["trial"]
    # Behind a filter the rate follows from released values; every step states its own.
    update = None if mechanism["filter"] is not None else trial["update"]
    pairs = [("batch_size", update), ("val_batch_size", trial["test"])]
    menu = stated_menu(mechanism)
    if menu is not None and "norm_batch_size" in settings:
        pairs.append(("norm_batch_size", menu["steering"]))
    if "blocks" in mechanism:
        pairs.append(("val_batch_size", mechanism["blocks"]["test"]))
    for name, event in pairs:
        if event is None or "sample_rate" not in event:
            continue
        if not math.isclose(settings[name] / size, event["sample_rate"], rel_tol=1e-9):
            yield (
                f"{name} {settings[name]} of {size} records is not the sample rate "
                f"{event['sample_rate']} that was accounted for"
            )


def _step_faults(statement: Mapping[str, Any]) -> Iterator[str]:
    """Behind a filter, updates have the stated rate, and noisy norms their own rate and noise."""
    mechanism, settings = statement["mechanism"], statement["settings"]
    if mechanism["filter"] is None:
        return
    size, steps = statement["dataset_size"], mechanism["filter"]["steps"]
    norms = None
    if "norm_batch_size" in settings:
        rate = min(1.0, settings["norm_batch_size"] / size)
        norms = asdict(SampledGaussian(rate, settings["norm_noise_multiplier"]))
    for row in steps:
        step = dict(row["step"])
        kind = step.pop("kind")
        if kind != "Trial" and step != norms:
            yield f"a step of the run is {row['step']}, which its settings do not have"
        if kind == "Trial" and norms is None:
            rate = step["update"]["sample_rate"]
            if rate != mechanism["trial"]["update"]["sample_rate"]:
                yield f"a step of the run has the sample rate {rate}, the mechanism another one"
    if norms is not None:
        yield from _release_faults(statement, steps)
    if norms is None and (not steps or steps[0]["step"] != mechanism["trial"]):
        yield "the first step of the run is not the one that was planned"


def _release_faults(statement: Mapping[str, Any], steps: list[Mapping[str, Any]]) -> Iterator[str]:
    """Norms are released at the start and after every so many accepted updates."""
    accepted = statement["accepted_updates"]
    if statement["mechanism"]["updates"] is not None:  # which is stated as planned
        accepted = sum(row["charged"] for row in steps if row["step"]["kind"] == "Trial")
    releases = sum(row["charged"] for row in steps if row["step"]["kind"] != "Trial")
    every = statement["settings"]["refresh_every"]
    due = (max(1, -(-accepted // every)), accepted // every + 1)
    if not steps or steps[0]["step"]["kind"] == "Trial" or releases not in due:
        yield f"norms were released {releases} times, {due[0]} are due at refresh_every {every}"


def _setting_faults(statement: Mapping[str, Any]) -> Iterator[str]:
    mechanism, settings = statement["mechanism"], statement["settings"]
    for name, value in _implied_settings(mechanism).items():
        if name in settings and settings[name] != value:
            yield f"settings.{name} is {settings[name]}, the mechanism has {value}"
    for row in _stated_steps(mechanism) or ():
        step = row["step"]
        if step["kind"] == "Trial" and step["test"] != mechanism["trial"]["test"]:
            yield f"a step of the run has the test {step['test']}, the mechanism another one"


def _implied_settings(mechanism: Mapping[str, Any]) -> dict[str, Any]:
    """Values of settings that the mechanism decides."""
    update, test = mechanism["trial"]["update"], mechanism["trial"]["test"]
    gate = _gate(mechanism)
    found = {"on_reject": mechanism["on_reject"]}
    found["gate"] = "none" if gate is None else GATE_OF[gate["kind"]]
    events = [test]
    if _stated_steps(mechanism) is None:  # else noise was chosen on the way
        events.append(update)
    if mechanism["filter"] is None:  # which leaves counts open
        found["updates"] = mechanism["updates"]
        found["trials"] = mechanism["trials"]
        if gate is None:
            found["updates"] = mechanism["trials"] or mechanism["updates"]
            found["trials"] = None
    menu = stated_menu(mechanism)
    if menu is not None:  # each choice on it has its own noise
        found["noise_multiplier"] = None
        found["norm_noise_multiplier"] = menu["steering"]["noise_multiplier"]
        found["refresh_every"] = menu["offer"]["repeats"]
    if "blocks" in mechanism:
        blocks = mechanism["blocks"]
        noise = "val_noise_multiplier" if blocks["searches"] else "metrics_noise_multiplier"
        found[noise] = blocks["test"]["noise_multiplier"]
        found["gate"] = "block" if blocks["searches"] else "none"
        found["updates"] = blocks["updates"][-1] if blocks["searches"] else sum(blocks["updates"])
        if menu is None:
            events.append(update)
    for event in events:
        if event is not None:
            names = SETTINGS_OF.get(event["kind"], {})
            found |= {name: event[key] for name, key in names.items()}
    return found


def _metric_faults(statement: Mapping[str, Any]) -> Iterator[str]:
    """One noisy value for each test, with the standard error that its noise gives."""
    mechanism, stated = statement["mechanism"], statement.get("metrics")
    if "blocks" not in mechanism:
        if stated is not None:
            yield "metrics are stated, and no test of the mechanism pays for them"
        return
    steps, test = mechanism["blocks"]["steps"], mechanism["blocks"]["test"]
    tests = sum(row["charged"] for row in steps if row["step"] == test)
    if stated is None or {row.get("test") for row in stated} != set(range(tests)):
        yield "there is not one metric or more for each test of the mechanism"
        return
    both = ["training accuracy", "clipped training loss"]
    whole = ["score", *both] if mechanism["blocks"]["searches"] else both
    for number in range(tests):
        found = [row.get("quantity") for row in stated if row["test"] == number]
        if found != whole and (len(found) != 1 or found[0] in whole):
            yield f"the metrics of test {number} are {found}, not {whole} or a single one"
    rate = test.get("sample_rate", 1.0)
    tested = rate * statement["dataset_size"]
    unit = math.hypot(test["noise_multiplier"] / tested, math.sqrt((1 - rate) / tested))
    for row in stated:
        if row.keys() != METRIC_KEYS:
            yield f"a metric has the keys {sorted(row)}, not {sorted(METRIC_KEYS)}"
        elif not isinstance(row["value"], float):
            yield f"a metric has the value {row['value']!r}, which is not a number"
        elif (row["standard_error"] is None) != (row["scale"] is None) or (
            row["scale"] is not None
            and not math.isclose(row["standard_error"], row["scale"] * unit, rel_tol=1e-9)
        ):
            yield (
                f"a metric of scale {row['scale']} has the standard error "
                f"{row['standard_error']}, its test has {unit} for a scale of 1"
            )


def _warning_faults(statement: Mapping[str, Any]) -> Iterator[str]:
    due, stated = stated_warnings(statement), statement["warnings"]
    for warning in due:
        if warning not in stated:
            yield f"a warning is missing: {warning}"
    if len(stated) != len(due):
        yield f"there are {len(stated)} warnings, {len(due)} are due"
