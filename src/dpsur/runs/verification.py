"""Check a release against its own statement.

read      the statement, in the format of today
rebuild   the whole statement from its plan, its steps and the facts of its run, with the
          version of texts that it names; then compare value by value
weights   their hash, and private statistics among them that must have been charged
pages     render them, and compare
opinion   ask dp-accounting for the same figures
plan      settle the method again with the stated settings, and compare the mechanisms

A value of a statement is rebuilt from the rest of it and compared, or taken over if nothing else
decides it; `CHECKED` and `NOT_CHECKED` say which, and `dpsur verify --help` prints them. A file may
hold anything: what cannot be read as a run writes it is a fault in one line.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from dpsur import checks
from dpsur.environment import versions
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.account import replays
from dpsur.privacy.accountants.rdp import RenyiFilter
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import (
    CoinTest,
    Gaussian,
    Ledger,
    LossTest,
    SampledGaussian,
    ThresholdedGaussian,
    Trial,
    event_from_json,
    feature_histograms,
    feature_mean,
    feature_statistics,
)
from dpsur.privacy.plan import CONSTANT, DELAY, NOT_HIDDEN, Plan, least_cap
from dpsur.privacy.search import ignore_cache
from dpsur.privacy.second_opinion import Opinion, statement_opinions
from dpsur.privacy.statement import (
    ACCURACY,
    BRIER,
    BY_CONSTRUCTION,
    CUSTOM_LOOP,
    DECLARED_SIZE,
    EARLIER,
    FORMAT,
    GROUP_SIZE,
    RECORD,
    RECORDS_PER_PERSON,
    SAMPLED_BY,
    WAS_CHECKED,
    RunFacts,
    Statement,
    current,
    plan_from_statement,
    privacy_statement,
    render_markdown,
    render_model_card,
    stated_holdout,
    stated_ledger,
    stated_mechanism,
    used_settings,
    warnings_of,
    with_counts,
    words_of,
)
from dpsur.runs.files import (
    CARD,
    MALFORMED,
    PAGE,
    STATEMENT,
    WEIGHTS,
    check_release,
    finite,
    from_json,
    release_folder,
    sha256,
)

# Figures recomputed by other versions of the numerical libraries may differ in the last digits.
TOLERANCE = 1e-5
# Noise of a menu, or behind a filter, is searched for again: known to about a ten-thousandth.
SEARCHED = 1e-3
# What is computed without a search, such as a sampling rate.
GIVEN = 1e-9
# Private statistics in a file of weights, by what their noise was charged as.
STATISTICS_OF = {
    feature_mean: re.compile(r"features\.\d+\.centre"),
    feature_histograms: re.compile(r"features\.\d+\.levels"),
    feature_statistics: re.compile(r"features\.\d+\.(mean|deviation)"),
}
VERSION = re.compile(r"\d[\w.+!-]*|absent")
PUBLIC = (
    *("classes", "keep_fraction", "schema", "labels", "inputs"),
    *(RECORDS_PER_PERSON, DECLARED_SIZE, SAMPLED_BY, GROUP_SIZE),
)
METRIC = ("test", "after", "quantity", "learning_rate", "value", "scale", "standard_error")
# The earlier format: what it lists for options that were left open, options that came after it,
# what tests measured before the Brier score, and a setting that custom loops had.
EARLIER_USUAL = {"loss_clip": 0.001, "clip_norm": "median"}
SINCE_EARLIER = ("records_joining",)
EARLIER_LOSS = "clipped training loss"
EARLIER_LOOP_SETTING = "views"

CHECKED: Final = (
    "every epsilon follows from the stated mechanism, delta and cap on trials, and fits the budget",
    "dp-accounting, an independent library, finds no larger epsilon for the same composition of "
    "Gaussian mechanisms or, where updates were selected, chosen from a menu or ended by a filter, "
    "for a simpler run that must not cost more",
    "the missing tail of the noise and the cap on trials are paid for by delta",
    "method and settings are those of a method of this installation, no setting is listed "
    "that the run did not use, and planning a run with them again, for the stated records, "
    "budget and accounting, gives the stated mechanism: rates, noise, counts, caps, filter, "
    "menu or blocks",
    "the steps of a run that steered itself fit its filter or are those of its menu or its blocks",
    "events before training are those of private feature statistics, and are stated if and only if "
    "the weights hold such statistics",
    "every sentence of the statement is the one that belongs to it in the version of texts "
    "that it names",
    "noisy figures of held-out records cost no more than the guarantee",
    "no key is missing, added or given twice, and versions look like versions",
    "PRIVACY.md and README.md say what privacy.json says, and the weights have the stated hash",
)
NOT_CHECKED: Final = (
    "by a second library: what selection, a menu or a filter adds, and figures without a proof",
    "that the run was made as stated, on records that were counted right: this is no signature, "
    "and takes the records (--replay)",
    "the number of records and the batch sizes where all of them are changed in proportion",
    "settings that no guarantee depends on: learning rates, schedules, momentum, weight decay, "
    "clip norms, step lengths, by how much a gradient's budget is raised, the decay of an average",
    "a budget that is larger than what was asked for, where noise and counts were given",
    "one method in place of another with the same settings",
    "how many of the charged trials were accepted, how many steps a filter let pass, and which "
    "choices of a menu were made, within what the plan allows",
    "whether records were independent by construction or checked, and whether the run was seeded, "
    "hid rejections by random delays, or used TF32 or bfloat16",
    "which versions were used, and what the user declared to be public",
    "the noisy values that tests of blocks released, and what they decided",
    "the figures on public test records, and the noisy ones of records held out",
)


class Verification(NamedTuple):
    """What is wrong with a release, its recomputed figures, and what dp-accounting says of them.

    There are opinions only where a release does not contradict itself.
    """

    faults: list[str]
    figures: dict[str, float | None]
    opinions: list[Opinion]


def verify(path: str | os.PathLike[str]) -> tuple[list[str], dict[str, float | None]]:
    """What is wrong with a release, and its recomputed figures. No faults means it is consistent.

    This is not a signature: anyone who can change the weights can change the statement to match.
    """
    found = verification(path)
    return found.faults, found.figures


def read_statement(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The statement of a release, in the format of today. It is read, not checked."""
    written = _read(path)
    try:
        statement = current(written)
        plan_from_statement(statement)
    except MALFORMED as error:
        raise InvalidInputError(_unreadable(error), code="damaged-release") from None
    return statement


def verification(path: str | os.PathLike[str]) -> Verification:
    """The same with the second opinions on its figures; a figure that they refute is a fault."""
    written, folder = _read(path), release_folder(path)
    faults, figures = statement_faults(written)
    opinions: list[Opinion] = []
    if not figures:
        return Verification(faults, figures, opinions)
    try:
        statement = current(written)
        faults += [*_weight_faults(folder, statement), *_page_faults(folder, statement)]
        if not faults:  # the rest takes seconds, and a statement that contradicts itself has failed
            plan = plan_from_statement(statement)
            opinions = statement_opinions(plan, statement["mechanism"], statement["epsilon"])
            faults = [opinion.describe() for opinion in opinions if opinion.refuted]
            with ignore_cache():
                faults += plan_faults(written)
    except MALFORMED as error:
        return Verification([_unreadable(error)], {}, [])
    return Verification(faults, figures, opinions)


def statement_faults(written: Mapping[str, Any]) -> tuple[list[str], dict[str, float | None]]:
    """What is wrong with a statement on its own, and its recomputed figures: none if unreadable."""
    try:
        statement = current(written)
        plan, made = plan_from_statement(statement), stated_ledger(statement)
        expected = finite(_rebuilt(statement, plan, made))
        if "weights" in statement:  # which are compared with the file beside it
            expected["weights"] = {"file": WEIGHTS, "sha256": statement["weights"]["sha256"]}
        faults = [
            *differences(finite(statement), expected, TOLERANCE),
            *_version_faults(statement["versions"]),
            *_plan_faults(plan, made, expected["guarantee"]["epsilon"]),
            *_filter_faults(statement, plan),
        ]
    except MALFORMED as error:
        return [_unreadable(error)], {}
    return faults, expected["epsilon"]


def differences(stated: Any, expected: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """Where plain values differ, each place in a sentence; fractions by more than a tolerance."""
    if isinstance(stated, Mapping) and isinstance(expected, Mapping):
        within = f"{where}." if where else ""
        for key in sorted(expected.keys() - stated.keys()):
            yield f"{within}{key} is missing"
        for key in sorted(stated.keys() - expected.keys()):
            yield f"{within}{key} is not part of a statement"
        for key in expected:
            if key in stated:
                yield from differences(stated[key], expected[key], tolerance, f"{within}{key}")
    elif isinstance(stated, list) and isinstance(expected, list) and len(stated) == len(expected):
        for number, pair in enumerate(zip(stated, expected, strict=True)):
            yield from differences(*pair, tolerance, f"{where}.{number}")
    elif not _same(stated, expected, tolerance):
        yield f"{where} is stated as {stated!r}, the rest of the statement gives {expected!r}"


def _same(one: Any, other: Any, tolerance: float) -> bool:
    numbers = [type(value) in (int, float) for value in (one, other)]
    if all(numbers) and float in (type(one), type(other)):
        return math.isclose(one, other, rel_tol=tolerance)
    return type(one) is type(other) and bool(one == other)


def _unreadable(error: Exception) -> str:
    return f"{STATEMENT} is not what a run writes: {type(error).__name__}: {error}"


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The statement of a release as it was written, in a format that is known."""
    file = check_release(path, STATEMENT) / STATEMENT
    try:
        statement = from_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"{file} is not a privacy statement: {error}", code="damaged-release"
        ) from error
    if not isinstance(statement, dict) or statement.get("format") not in (FORMAT, EARLIER):
        raise InvalidInputError(
            f"{file} is not a privacy statement of the format {FORMAT}", code="unknown-format"
        )
    return statement


# --- the statement rebuilt -----------------------------------------------------------------------


def _rebuilt(statement: Mapping[str, Any], plan: Plan, made: Ledger) -> Statement:
    """The statement that follows from what a statement says of plan, steps and run.

    Values that nothing else in it decides are taken over, once they are seen to be of the right
    kind: the method and its settings, sizes, versions, what the user declared, noisy values, and
    the number of accepted updates within what the steps allow.
    """
    words_of(statement)
    computed, settings, public = (statement[name] for name in ("computed", "settings", "public"))
    for name, value in (*computed.items(), *statement["random"].items()):
        checks.flag(name, value)
    how, way = statement["independence"]["how"], statement["hide_rejections"]
    checks.one_of("independence.how", how, (BY_CONSTRUCTION, WAS_CHECKED))
    ways: tuple[str, ...] = (NOT_HIDDEN,)
    if plan.run_all_trials:
        ways = (CONSTANT,)
    elif plan.updates and plan.typical.gate:
        ways = (NOT_HIDDEN, DELAY)
    checks.one_of("hide_rejections", way, ways)
    size = checks.whole("dataset_size", statement["dataset_size"], 1)
    _check_public(public, plan)
    test, held = statement.get("test"), statement.get("holdout")
    if test is not None:
        checks.whole("test.records", test["records"], 1)
        for name, value in test["scores"].items():
            if value is not None and type(value) not in (int, float):
                raise InvalidInputError(f"test.scores.{name} is {value!r}, which is not a number")
        test = {"records": test["records"], "scores": test["scores"]}
    facts = RunFacts(
        dataset_size=size,
        method=statement["method"],
        settings=settings,
        seeded=statement["random"]["seeded"],
        average=settings.get("average_decay") is not None,
        tf32=computed["tf32"],
        bf16=computed["bf16"],
        versions=statement["versions"],
        hide_rejections=way,
        public=public,
        independence=how,
        metrics=_metrics(statement, plan, made),
        test=test,
        holdout=None if held is None else _holdout(held, statement),
        replay=_commitments(statement.get("replay")),
    )
    found = privacy_statement(plan, made, facts, statement["texts"])
    least, most = _accepted_range(plan, made)
    accepted = checks.whole("accepted_updates", statement["accepted_updates"], 0)
    found["accepted_updates"] = min(max(accepted, least), most)
    # Words follow from the stated figures, whose last digits may be those of another machine.
    if found["guarantee"]["epsilon"] < math.inf:
        found["warnings"] = warnings_of(statement)
    return found


def _version_faults(stated: Mapping[str, Any]) -> Iterator[str]:
    """Versions of what every release states, which look like versions."""
    alike = {
        name: value if isinstance(value, str) and VERSION.fullmatch(value) else installed
        for name, installed in versions().items()
        for value in [stated.get(name)]
    }
    yield from differences(stated, alike, GIVEN, "versions")


def _accepted_range(plan: Plan, made: Ledger) -> tuple[int, int]:
    """The least and the most updates that a run which lists these steps can have accepted."""
    if not plan.steered:
        # Where all trials are charged, a gate that does not look at the data may reject some.
        return (0, plan.trials) if plan.updates is None else (plan.updates, plan.updates)
    if plan.typical.test is None:
        return made.trials, made.trials
    if plan.updates is not None and plan.typical.gate is not None:
        return made.trials, plan.updates  # stated as planned, whatever the filter let pass
    return 0, made.trials


def _check_public(public: Mapping[str, Any], plan: Plan) -> None:
    """Only what can be declared, in the form in which a run takes it."""
    for name in public:
        checks.one_of("what is public", name, PUBLIC)
    for name in (RECORDS_PER_PERSON, GROUP_SIZE):
        checks.whole(f"public.{name}", public.get(name, 1), 1)
    if public.get(DECLARED_SIZE, True) is not True:
        raise InvalidInputError(f"public.{DECLARED_SIZE} is {public[DECLARED_SIZE]!r}, not true")
    checks.whole("public.classes", public.get("classes", 2), 2)
    fraction = public.get("keep_fraction", 1.0)
    if type(fraction) not in (int, float) or not 0 < fraction <= 1:
        raise InvalidInputError(f"public.keep_fraction {fraction!r} is no fraction of the records")
    labels = public.get("labels", ["no", "yes"])
    if not isinstance(labels, list) or not 2 <= len(labels) == len(set(map(str, labels))):
        raise InvalidInputError("public.labels does not name different classes")
    inputs = public.get("inputs", {"kind": "images"})
    checks.one_of("public.inputs", inputs["kind"], ("images", "texts"))
    schema = public.get("schema", {"columns": {}, "target": {}})
    if not all(isinstance(schema[part], Mapping) for part in ("columns", "target")):
        raise InvalidInputError("public.schema does not declare columns and a target")
    # where records of a person join one by one, as many of them are charged
    by_record = SAMPLED_BY in public
    if by_record and (public[SAMPLED_BY] != RECORD or DECLARED_SIZE not in public):
        raise InvalidInputError(f"public.{SAMPLED_BY} is not what releases state there")
    due = public.get(RECORDS_PER_PERSON) if by_record else 1
    charged = {getattr(one.update, "records", 1) for phase in plan.phases for one in phase.choices}
    if charged != {due}:
        raise InvalidInputError(f"updates are not charged for {due} records of a person")


def _commitments(stated: Any) -> dict[str, str] | None:
    """What a replayable run commits to: three hashes, and its device in words."""
    if stated is None:
        return None
    for name in ("chain", "records", "key"):
        if not re.fullmatch("[0-9a-f]{64}", stated[name]):
            raise InvalidInputError(f"replay.{name} is no hash")
    if not re.fullmatch("(cpu|cuda): [ -~]{1,200}", stated["device"]):
        raise InvalidInputError("replay.device names no device")
    return {name: stated[name] for name in ("chain", "records", "key", "device")}


def _holdout(held: Mapping[str, Any], statement: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of held-out records, which cost what their noise gives, and no more than the run."""
    guarantee = statement["guarantee"]
    found = stated_holdout(held, guarantee["delta"], statement["texts"])
    checks.fraction_below_one("holdout.fraction", held["fraction"])
    checks.positive("holdout.fraction", held["fraction"])
    checks.whole("holdout.records", held["records"], 1)
    if found["epsilon"] > guarantee["epsilon"] * (1 + TOLERANCE):
        raise InvalidInputError(
            f"the held-out figures cost epsilon {found['epsilon']}, more than the guarantee"
        )
    columns = ("quantity", "value", "standard_error")
    found["figures"] = [{key: row[key] for key in columns} for row in held["figures"]]
    return found


def _metrics(statement: Mapping[str, Any], plan: Plan, made: Ledger) -> list[dict[str, Any]] | None:
    """One noisy value or more for each test, with the standard error that its noise gives."""
    if not plan.tests:
        return None
    stated, test = statement["metrics"], plan.test
    tests = sum(entry.trials for entry in made.entries if entry.step == test)
    measured = {row["quantity"] for row in stated}
    loss = EARLIER_LOSS if EARLIER_LOSS in measured else BRIER
    both = [ACCURACY, loss]
    whole = ["score", *both] if plan.searches else both
    for number in range(tests):
        found = [row["quantity"] for row in stated if row["test"] == number]
        if found != whole and (len(found) != 1 or found[0] in whole):
            raise InvalidInputError(
                f"the metrics of test {number} are {found}, not {whole} or a single one"
            )
    if {row["test"] for row in stated} != set(range(tests)):
        raise InvalidInputError("there is a metric for a test that was not made")
    rate = test.sample_rate if isinstance(test, SampledGaussian) else 1.0
    tested = rate * statement["dataset_size"]
    unit = math.hypot(test.noise_multiplier / tested, math.sqrt((1 - rate) / tested))
    rows = []
    for row in stated:
        if type(row["value"]) is not float:
            raise InvalidInputError(f"a metric has the value {row['value']!r}, which is no number")
        error = None if row["scale"] is None else row["scale"] * unit
        rows.append({**{key: row[key] for key in METRIC}, "standard_error": error})
    return rows


# --- what a run by its plan can have done -------------------------------------------------------


def _plan_faults(plan: Plan, made: Ledger, epsilon: float | None) -> Iterator[str]:
    """The plan fits its budget and its cap, and the steps are those of a whole run under it."""
    budget = plan.budget
    if epsilon is not None and epsilon > budget.epsilon * (1 + TOLERANCE):
        yield f"epsilon {epsilon} is above the budget of {budget.epsilon}"
    gate = plan.typical.gate
    if plan.charges_accepted and gate is not None and plan.updates is not None:
        least = least_cap(gate, plan.updates, budget)
        if plan.trials < least:
            # Giving up earlier would cost more than delta sets aside for it.
            yield f"the cap of {plan.trials} trials is below the {least} that delta needs"
    if plan.filter is not None:
        larger = replace(plan.filter, allowance=plan.filter.allowance * (1 + TOLERANCE))
        plan = replace(plan, filter=larger)
    if plan.steered and not replays(plan, made):
        yield "the steps are not those of a run by the stated plan"


def _filter_faults(statement: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """Behind a filter, updates have the stated rate and test, and noisy norms their own."""
    if plan.filter is None:
        return
    settings, steps = statement["settings"], stated_ledger(statement).entries
    norms = None
    if "norm_batch_size" in settings:
        rate = min(1.0, settings["norm_batch_size"] / statement["dataset_size"])
        norms = SampledGaussian(rate, settings["norm_noise_multiplier"])
    for entry in steps:
        step = entry.step
        if not isinstance(step, Trial):
            if step != norms:
                yield f"a step of the run is {step}, which its settings do not have"
        elif step.test != plan.typical.test:
            yield f"a step of the run has the test {step.test}, the mechanism another one"
        elif norms is None and getattr(step.update, "sample_rate", None) != plan.update.sample_rate:
            yield f"a step of the run is {step}, the mechanism has another sample rate"
    if norms is None:
        if not steps or steps[0].step != plan.typical:
            yield "the first step of the run is not the one that was planned"
        return
    # Norms are released at the start and after every this many accepted updates.
    charged = sum(entry.trials for entry in steps if isinstance(entry.step, Trial))
    accepted = statement["accepted_updates"] if plan.updates is None else charged
    releases = sum(entry.trials for entry in steps) - charged
    every = settings["refresh_every"]
    due = (max(1, -(-accepted // every)), accepted // every + 1)
    if not steps or isinstance(steps[0].step, Trial) or releases not in due:
        yield f"norms were released {releases} times, {due[0]} are due at refresh_every {every}"


# --- the method settled again -------------------------------------------------------------------


def plan_faults(written: Mapping[str, Any]) -> list[str]:
    """Settings are planned with again, and what comes out must be the stated mechanism."""
    from dpsur.methods import METHODS  # with it torch, which the help does not need

    statement = current(written)
    name, mechanism = statement["method"], statement["mechanism"]
    if name == CUSTOM_LOOP:
        return _loop_faults(statement)
    if name not in METHODS:
        return [
            f"method {name!r} is none that is installed here ({', '.join(METHODS)}); a custom "
            "method must be listed in METHODS to be verified"
        ]
    settings, kind = written["settings"], METHODS[name]
    known = {field.name: field for field in fields(kind)}
    # The earlier format lists all settings, and each of them is held against a run.
    earlier = written["format"] == EARLIER
    usual = {
        key: value
        for key, value in EARLIER_USUAL.items()
        if earlier and key in known and known[key].default is None
    }
    faults = [
        f"settings.{key} is not part of a statement of {name}"
        for key in settings
        if key not in known
    ] or [
        f"settings.{key} is {value!r}, which is of another type"
        for key, value in settings.items()
        if not _is_of(value, known[key].type) and (earlier or value is not None)
    ]
    if faults:
        return faults
    given = {k: v for k, v in settings.items() if v is not None and v != usual.get(k)}
    budget = statement["budget"]
    try:
        settled, plan = kind(**given).resolve(
            statement["dataset_size"],
            Budget(math.inf if budget["epsilon"] is None else budget["epsilon"], budget["delta"]),
            statement["guarantee"]["accounting"],
            tuple(event_from_json(event) for event in mechanism["setup"]),
        )
    except BudgetError as error:
        return [f"the settings do not fit the budget: {error}"]
    except InvalidInputError as error:
        return [f"the settings are not those of the method {name}: {error}"]
    if mechanism["to_the_cap"]:
        plan = plan.hide_rejections(CONSTANT)
    due = finite(with_counts(plan, asdict(settled)))
    if earlier:
        due |= {key: value for key, value in usual.items() if due[key] is None}
        due = {key: v for key, v in due.items() if v is not None or key not in SINCE_EARLIER}
    else:
        due = used_settings(due)
    return [*differences(settings, due, GIVEN, "settings"), *_mechanism_faults(statement, plan)]


def _mechanism_faults(statement: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """Where the stated mechanism is not that of a plan by the stated settings."""
    mechanism = statement["mechanism"]
    expected = finite(stated_mechanism(plan, stated_ledger(statement)))
    if "menu" in expected and "menu" in mechanism:
        # Its noise was chosen for a typical update, and for all updates of a run that may have
        # been cut short. It is held against epsilon alone.
        stated = mechanism["menu"]["offer"]["choices"]
        offered = expected["menu"]["offer"]["choices"]
        if len(stated) == len(offered):
            for choice, other in zip(offered, stated, strict=True):
                choice["noise_multiplier"] = other["noise_multiplier"]
        noise = mechanism["trial"]["update"]["noise_multiplier"]
        expected["trial"]["update"]["noise_multiplier"] = noise
        expected["menu"]["steps"] = mechanism["menu"]["steps"]
    allowed = mechanism["filter"]
    if (
        plan.filter is not None
        and allowed is not None
        and "norm_batch_size" in statement["settings"]
    ):
        # Noise may have been given for a typical update, which decided the order.
        most = RenyiFilter.for_budget(plan.kept_budget, allowed["order"]).allowance
        noise = mechanism["trial"]["update"]["noise_multiplier"]
        expected["trial"]["update"]["noise_multiplier"] = noise
        expected["filter"] |= {"order": allowed["order"], "allowance": most}
    exact = plan.filter is None and not (plan.menu is not None and plan.tests)
    yield from differences(mechanism, expected, GIVEN if exact else SEARCHED, "mechanism")


def _loop_faults(statement: Mapping[str, Any]) -> list[str]:
    """The settings of a custom loop, which were fixed before it, are those of its mechanism."""
    settings, plan = statement["settings"], plan_from_statement(statement)
    size, searches = statement["dataset_size"], bool(plan.tests) and plan.searches
    tested: Any = plan.test if searches else plan.typical.test
    earlier = {EARLIER_LOOP_SETTING} & settings.keys()
    names = ("batch_size", "noise_multiplier", "max_grad_norm", "optimizer", *earlier)
    due: dict[str, Any] = {name: settings[name] for name in names}
    update = plan.typical.update
    due["noise_multiplier"] = 0.0  # of a loop without privacy, where nothing depends on the rate
    if isinstance(update, SampledGaussian):
        due["batch_size"] = update.sample_rate * size
        due["noise_multiplier"] = update.noise_multiplier
    if plan.filter is None:  # of a search only the last block is counted
        due["steps"] = plan.blocks[-1] if searches else plan.length
    if isinstance(tested, SampledGaussian | LossTest | CoinTest):
        due["val_batch_size"] = round(tested.sample_rate * size)
    if isinstance(tested, SampledGaussian | Gaussian | LossTest):
        due["val_noise_multiplier"] = tested.noise_multiplier
    if isinstance(tested, LossTest):
        due |= {"accept_threshold": tested.accept_threshold, "loss_clip": settings["loss_clip"]}
    if isinstance(tested, CoinTest):
        due["accept_ratio"] = tested.accept_ratio
    if plan.tests and not searches:  # a loop that only measures
        due["metrics_noise_multiplier"] = plan.test.noise_multiplier
        if plan.may_stop:
            due["patience"] = settings["patience"]
    faults = [*differences(settings, due, GIVEN, "settings")]
    if plan.setup:
        faults.append("mechanism.setup charges what a custom loop does not do")
    return faults


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a plain value can be that of a setting; a whole number is a fraction too."""
    if isinstance(kind, str):  # the annotation of a custom method that was never evaluated
        return True
    kinds = get_args(kind) or (kind,)
    if isinstance(value, bool):
        return bool in kinds
    return type(value) in kinds or (type(value) is int and float in kinds)


# --- the files beside the statement -------------------------------------------------------------


def _weight_faults(folder: Path, statement: Mapping[str, Any]) -> list[str]:
    try:
        content = (folder / WEIGHTS).read_bytes()
    except OSError as error:
        return [f"{WEIGHTS} cannot be read: {error.strerror}"]
    stated, digest = statement["weights"]["sha256"], sha256(content)
    if digest != stated:
        return [f"{WEIGHTS} has the hash {digest}, stated is {stated}"]
    return _setup_faults(folder, statement)


def _setup_faults(folder: Path, statement: Mapping[str, Any]) -> list[str]:
    """A learned schema, and private statistics in the weights, are there if they were charged."""
    events = tuple(event_from_json(event) for event in statement["mechanism"]["setup"])
    faults = []
    learned = statement["public"].get("schema", {}).get("learned")
    if learned is not None:
        first, events = events[:1], events[1:]
        noise, delta = learned["noise_multiplier"], learned["threshold_delta"]
        if first != (ThresholdedGaussian(noise, delta),):
            faults.append("mechanism.setup is not what the learned schema is charged")
    content = (folder / WEIGHTS).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    # the layers that normalise features by private statistics are in `dpsur.features.layers`
    behind = json.loads(header["__metadata__"]["dpsur"])["model"] == "WithFeatures"
    held = {
        charge: {name for name in header if behind and pattern.fullmatch(name)}
        for charge, pattern in STATISTICS_OF.items()
    }
    kinds = [charge for charge, names in held.items() if names]
    if events and kinds:
        noise = events[-1].noise_multiplier if isinstance(events[-1], Gaussian) else 1.0
        if len(kinds) > 1 or events != kinds[0](noise):
            faults.append("mechanism.setup is not what private feature statistics are charged")
    elif kinds:
        faults.append(
            "the weights hold statistics of features, which no event before training is charged for"
        )
    elif events:
        faults.append("mechanism.setup charges feature statistics that the weights do not hold")
    return faults


def _page_faults(folder: Path, statement: dict[str, Any]) -> list[str]:
    """Pages that say something else than the statement. Older releases have no model card."""
    pages = {PAGE: render_markdown}
    if (folder / CARD).exists():
        pages[CARD] = render_model_card
    faults = []
    for name, render in pages.items():
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            faults.append(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}")
        else:
            if text != render(statement):
                faults.append(f"{name} does not say what {STATEMENT} does")
    return faults
