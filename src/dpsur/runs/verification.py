"""Check a release against its own statement: form, figures, claims, weights and page.

`replanning` checks that the stated settings lead to the stated mechanism.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from dpsur.environment import versions
from dpsur.errors import InvalidInputError
from dpsur.privacy.accounting import FIGURES, accounting_named, figure_names
from dpsur.privacy.budget import Budget
from dpsur.privacy.calibration_cache import calibrated_afresh
from dpsur.privacy.claims import claim_faults
from dpsur.privacy.events import (
    Gaussian,
    Trial,
    event_from_json,
    feature_histograms,
    feature_mean,
    feature_statistics,
)
from dpsur.privacy.page import render_markdown, render_model_card
from dpsur.privacy.rejections import least_cap
from dpsur.privacy.second_opinion import Opinion, statement_opinions
from dpsur.privacy.statement import (
    FORMAT,
    HOLDOUT_COMPOSITION,
    INDEPENDENCE,
    holdout_cost,
    plan_from_statement,
    step_faults,
)
from dpsur.runs.files import (
    CARD,
    PAGE,
    STATEMENT,
    WEIGHTS,
    finite,
    from_json,
    release_folder,
    sha256,
)
from dpsur.runs.replanning import key_faults, plan_faults

# Figures recomputed by other versions of the numerical libraries may differ in the last digits.
TOLERANCE = 1e-5
# What reading and recomputing a statement raises where a value is missing or of another kind.
MALFORMED = (
    LookupError,
    TypeError,
    ValueError,  # with it every refusal of this package
    AttributeError,
    ArithmeticError,
    AssertionError,
)
KEYS = {
    *(
        "format",
        "guarantee",
        "budget",
        "epsilon",
        "unit",
        "adjacency",
        "dataset_size",
        "public",
        "sampler",
        "independence",
    ),
    *("mechanism", "accepted_updates", "method", "settings", "released", "random", "arithmetic"),
    *("tuning", "side_channels", "not_covered", "warnings", "versions", "weights"),
}
# The keys inside, where there is a fixed set of them.
PARTS: Final[Mapping[str, frozenset[str]]] = {
    "guarantee": frozenset(
        {"definition", "epsilon", "delta", "accounting", "proved", "theorem", "assumes"}
    ),
    "budget": frozenset({"epsilon", "delta"}),
    "epsilon": frozenset(FIGURES),
    "random": frozenset({"seeded"}),
    "independence": frozenset({"how", "meaning"}),
    "weights": frozenset({"file", "sha256"}),
    "versions": frozenset(versions()),
    "mechanism": frozenset(
        {"trial", "filter", "setup", "on_reject", "updates", "trials", "trial_cap", "to_the_cap"}
    ),
    "mechanism.filter": frozenset({"order", "allowance", "steps"}),
    "mechanism.menu": frozenset({"offer", "steering", "steps"}),
    "mechanism.blocks": frozenset({"updates", "searches", "may_stop", "test", "steps"}),
}
# Private statistics of features in a file of weights, and what they are charged.
STATISTICS = re.compile(r"features\.\d+\.(mean|deviation)")
CENTRE = re.compile(r"features\.\d+\.centre")
LEVELS = re.compile(r"features\.\d+\.levels")
VERSION = re.compile(r"\d[\w.+!-]*|absent")
HOLDOUT_KEYS = {"fraction", "records", "event", "epsilon", "composition", "figures"}
OPTIONAL = ("mechanism.filter", "mechanism.menu", "mechanism.blocks")

CHECKED: Final = (
    "every epsilon follows from the stated mechanism, delta and cap on trials, and fits the budget",
    "dp-accounting, an independent library, finds no larger epsilon for the same composition of "
    "Gaussian mechanisms or, where updates were selected, chosen from a menu or ended by a filter, "
    "for a simpler run that must not cost more",
    "the missing tail of the noise and the cap on trials are paid for by delta",
    "method and settings are those of a method of this installation, and planning a run with them "
    "again, for the stated records, budget and accounting, gives the stated mechanism: rates, "
    "noise, counts, caps, filter, menu or blocks",
    "the steps of a run that steered itself fit its filter or are those of its menu or its blocks",
    "events before training are those of private feature statistics, and are stated if and only if "
    "the weights hold such statistics",
    "definition, theorem, assumptions, unit, side channels and warnings are those that belong to "
    "the mechanism",
    "noisy figures of held-out records cost no more than the guarantee",
    "no key is missing, added or given twice, and versions look like versions",
    "PRIVACY.md and README.md say what privacy.json says, and the weights have the stated hash",
)
NOT_CHECKED: Final = (
    "by a second library: what selection, a menu or a filter adds, and figures without a proof",
    "that the run was made as stated, on records that were counted right: this is not a signature",
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


def verification(path: str | os.PathLike[str]) -> Verification:
    """The same with the second opinions on its figures; a figure that they refute is a fault."""
    folder = release_folder(path)
    statement = _read(folder / STATEMENT)
    faults, figures = statement_faults(statement)
    opinions: list[Opinion] = []
    if not figures:
        return Verification(faults, figures, opinions)
    try:
        faults += [*_weight_faults(folder, statement), *_page_faults(folder, statement)]
        if not faults:  # the rest takes seconds, and a statement that contradicts itself has failed
            opinions = second_opinions(statement)
            faults = [opinion.describe() for opinion in opinions if opinion.refuted]
            with calibrated_afresh():
                faults += plan_faults(statement)
    except MALFORMED as error:
        return Verification([_unreadable(error)], {}, [])
    return Verification(faults, figures, opinions)


def second_opinions(statement: Mapping[str, Any]) -> list[Opinion]:
    """What dp-accounting says of the stated figures."""
    plan = plan_from_statement(statement)
    return statement_opinions(plan, statement["mechanism"], statement["epsilon"])


def statement_faults(
    statement: dict[str, Any],
) -> tuple[list[str], dict[str, float | None]]:
    """What is wrong with a statement by itself, and its recomputed figures: none if unreadable."""
    try:
        figures = finite(plan_from_statement(statement).figures())
        faults = [
            *_form_faults(statement),
            *_figure_faults(statement, figures),
            *claim_faults(statement),
        ]
    except MALFORMED as error:
        return [_unreadable(error)], {}
    return faults, figures


def _unreadable(error: Exception) -> str:
    return f"{STATEMENT} cannot be read: {type(error).__name__}: {error}"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        from_json(content)  # refuses what is too large or nested too deeply
        statement = json.loads(content.decode(), object_pairs_hook=_without_repeats)
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidInputError(
            f"{path.parent} holds no release ({path.name} is missing); give the folder of a run "
            "that has finished"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not a privacy statement: {error}") from error
    if not isinstance(statement, dict) or statement.get("format") != FORMAT:
        raise InvalidInputError(f"{path} is not a privacy statement of the format {FORMAT}")
    return statement


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file. Readers differ in which of two equal keys counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise InvalidInputError(f"the key {repeated!r} is given twice")
    return found


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=TOLERANCE)


def _figure_faults(statement: dict[str, Any], figures: dict[str, float | None]) -> list[str]:
    faults = [
        f"epsilon.{key} is stated as {statement['epsilon'].get(key)}, its parameters give {value}"
        for key, value in figures.items()
        if not _same(statement["epsilon"].get(key), value)
    ]
    guarantee, budget = statement["guarantee"], statement["budget"]
    accounting = accounting_named(guarantee["accounting"])
    figure = figures[accounting.name.replace("-", "_")]
    if not _same(guarantee["epsilon"], figure):
        faults.append(
            f"the guarantee states epsilon {guarantee['epsilon']}, its parameters give {figure}"
        )
    if guarantee["proved"] != (accounting.proved and figure is not None):
        faults.append(f"proved is {guarantee['proved']}, but {accounting.name} says otherwise")
    if guarantee["delta"] != budget["delta"]:
        faults.append(f"delta {guarantee['delta']} is not the budget's {budget['delta']}")
    if figure is not None and figure > budget["epsilon"] * (1 + TOLERANCE):
        faults.append(f"epsilon {figure} is above the budget of {budget['epsilon']}")
    steps = step_faults(statement, TOLERANCE)
    return [*faults, *_cap_faults(statement), *steps]


def _cap_faults(statement: dict[str, Any]) -> list[str]:
    """Giving up earlier than the plan allows would cost more than delta sets aside for it."""
    mechanism, budget = statement["mechanism"], statement["budget"]
    trial = event_from_json(mechanism["trial"])
    accounting = accounting_named(statement["guarantee"]["accounting"])
    if mechanism["updates"] is None or accounting.charges == "trials":
        return []
    if not isinstance(trial, Trial) or trial.gate is None:
        return []
    least = least_cap(trial.gate, mechanism["updates"], Budget(budget["epsilon"], budget["delta"]))
    if mechanism["trial_cap"] >= least:
        return []
    return [f"the cap of {mechanism['trial_cap']} trials is below the {least} that delta needs"]


def _test_faults(test: Any) -> list[str]:
    """Figures on public records: how many records, and numbers by name."""
    if test is None:
        return []
    if not isinstance(test, dict) or test.keys() != {"records", "scores"}:
        return ["test must have records and scores, and nothing else"]
    numbers = [test["records"], *test["scores"].values()]
    if all(v is None or (isinstance(v, (int, float)) and not isinstance(v, bool)) for v in numbers):
        return []
    return ["test holds something that is not a number"]


def _holdout_faults(statement: dict[str, Any]) -> list[str]:
    """The figures of held-out records must cost what is stated, and no more than the run."""
    stated, guarantee = statement["holdout"], statement["guarantee"]
    faults = key_faults("holdout.", stated, HOLDOUT_KEYS)
    event = event_from_json(stated["event"])
    if not isinstance(event, Gaussian):
        return [*faults, "holdout.event is not a Gaussian mechanism"]
    spent = holdout_cost(event.noise_multiplier, guarantee["delta"])
    if not _same(stated["epsilon"], spent):
        faults.append(f"holdout.epsilon is stated as {stated['epsilon']}, its noise gives {spent}")
    if spent > guarantee["epsilon"] * (1 + TOLERANCE):
        faults.append(f"the held-out figures cost epsilon {spent}, more than the guarantee")
    if stated["composition"] != HOLDOUT_COMPOSITION:
        faults.append("holdout.composition is not the text that belongs to it")
    if not 0 < stated["fraction"] < 1 or not stated["records"] >= 1:
        faults.append("holdout.fraction or holdout.records is no part of the records")
    for row in stated["figures"]:
        faults += key_faults("a held-out figure's ", row, {"quantity", "value", "standard_error"})
    return faults


def _form_faults(statement: dict[str, Any]) -> list[str]:
    """Nothing may be left out, and nothing added that the rest would not be held against."""
    mechanism = statement["mechanism"]
    more = {"metrics"} if "blocks" in mechanism else set()
    more |= {"test", "holdout"} & statement.keys()
    faults = [*key_faults("", statement, KEYS | more), *_test_faults(statement.get("test"))]
    if "holdout" in statement:
        faults += _holdout_faults(statement)
    for name, keys in PARTS.items():
        part: Any = statement
        for key in name.split("."):
            part = part.get(key)
        if part is not None or name not in OPTIONAL:
            more = {"menu", "blocks"} & mechanism.keys() if name == "mechanism" else set()
            if name == "mechanism.blocks" and "offer" in part:  # updates from a menu
                more = {"offer", "steering"}
            if name == "epsilon":
                more = set(figure_names(statement["guarantee"]["accounting"]))
            faults += key_faults(f"{name}.", part, keys | more)
    for steered in (mechanism["filter"], mechanism.get("menu"), mechanism.get("blocks")):
        for row in () if steered is None else steered["steps"]:
            faults += key_faults("a step's ", row, {"step", "charged"})
    independence = statement["independence"]
    if (independence.get("how"), independence.get("meaning")) not in INDEPENDENCE.items():
        faults.append(f"independence is {independence!r}, which no release states")
    if not isinstance(statement["random"]["seeded"], bool):
        faults.append("random.seeded is neither true nor false")
    for name, version in statement["versions"].items():
        if not (isinstance(version, str) and VERSION.fullmatch(version)):
            faults.append(f"versions.{name} is {version!r}, which is not a version")
    return faults


def _weight_faults(folder: Path, statement: dict[str, Any]) -> list[str]:
    try:
        digest = sha256((folder / WEIGHTS).read_bytes())
    except OSError as error:
        return [f"{WEIGHTS} cannot be read: {error.strerror}"]
    stated = statement["weights"]["sha256"]
    faults = [] if digest == stated else [f"{WEIGHTS} has the hash {digest}, stated is {stated}"]
    if statement["weights"]["file"] != WEIGHTS:
        faults.append(f"weights.file is {statement['weights']['file']!r}, not {WEIGHTS!r}")
    if digest == stated:
        faults += _setup_faults(folder, statement["mechanism"]["setup"])
    return faults


def _setup_faults(folder: Path, setup: list[Mapping[str, Any]]) -> list[str]:
    """Private statistics of features are in the weights if and only if they were charged."""
    events = tuple(event_from_json(event) for event in setup)
    faults = []
    names = _statistics_in((folder / WEIGHTS).read_bytes())
    held = bool(names)
    if events:
        last = events[-1]
        noise = last.noise_multiplier if isinstance(last, Gaussian) else 1.0
        of_kind = {
            feature_mean: [name for name in names if CENTRE.fullmatch(name)],
            feature_histograms: [name for name in names if LEVELS.fullmatch(name)],
        }
        charged = next((kind for kind, found in of_kind.items() if found), feature_statistics)
        if events != charged(noise) or of_kind.get(charged, names) != names:
            faults.append("mechanism.setup is not what private feature statistics are charged")
    if held and not events:
        faults.append(
            "the weights hold statistics of features, which no event before training is charged for"
        )
    if events and not held:
        faults.append("mechanism.setup charges feature statistics that the weights do not hold")
    return faults


def _statistics_in(content: bytes) -> list[str]:
    """The tensors of layers that normalise features by private statistics."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    described = json.loads(header["__metadata__"]["dpsur"])
    if described["model"] != "WithFeatures":  # of `dpsur.features.layers`
        return []
    return [n for n in header if any(p.fullmatch(n) for p in (STATISTICS, CENTRE, LEVELS))]


def _page_faults(folder: Path, statement: dict[str, Any]) -> list[str]:
    """Pages that say something else than the statement. Older releases have no model card."""
    pages = {PAGE: render_markdown}
    if (folder / CARD).exists():
        pages[CARD] = render_model_card
    faults = []
    for name, render in pages.items():
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except OSError as error:
            faults.append(f"{name} cannot be read: {error.strerror}")
        except ValueError as error:
            faults.append(f"{name} cannot be read: {error}")
        else:
            if text != render(statement):
                faults.append(f"{name} does not say what {STATEMENT} does")
    return faults
