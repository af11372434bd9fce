"""Plan a run again from the settings of a statement, and compare: part of `verify`."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, get_args

from dpsur.errors import BudgetError, InvalidInputError
from dpsur.privacy.accountants.rdp import RenyiFilter
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import event_from_json
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.plan import Plan
from dpsur.privacy.rejections import CONSTANT
from dpsur.privacy.statement import stated_mechanism
from dpsur.runs.files import finite

if TYPE_CHECKING:
    from dpsur.methods import Method

# The method of a release that a `PrivacyEngine` writes, and its settings.
CUSTOM_LOOP = "custom-loop"
LOOP_SETTINGS = frozenset(
    {
        *("batch_size", "noise_multiplier", "max_grad_norm", "steps", "optimizer", "views"),
        *("val_batch_size", "val_noise_multiplier", "accept_threshold", "loss_clip"),
    }
)
# Noise that a search found is known to about a ten-thousandth.
SEARCHED = 1e-3


def plan_faults(statement: dict[str, Any]) -> list[str]:
    """Settings are planned with again, and what comes out must be the stated mechanism."""
    from dpsur.methods import METHODS  # with it torch, which the help does not need

    name, settings = statement["method"], statement["settings"]
    if name == CUSTOM_LOOP:
        return _loop_faults(statement)
    if name not in METHODS:
        return [
            f"method {name!r} is none that is installed here ({', '.join(METHODS)}); a custom "
            "method must be listed in METHODS to be verified"
        ]
    kind, mechanism = METHODS[name], statement["mechanism"]
    faults = key_faults("settings.", settings, {field.name for field in fields(kind)})
    faults = faults or [
        f"settings.{field.name} is {settings[field.name]!r}, which is of another type"
        for field in fields(kind)
        if not _is_of(settings[field.name], field.type)
    ]
    if faults:
        return faults
    try:
        method = kind(**settings)
        settled, plan = _planned(method, statement)
    except BudgetError as error:
        return [f"the settings do not fit the budget: {error}"]
    except InvalidInputError as error:
        return [f"the settings are not those of the method {name}: {error}"]
    faults += [
        f"settings.{key} is {settings[key]!r}, a run has {value!r} there"
        for key, value in finite(asdict(settled)).items()
        if not _near(settings[key], value)
    ]
    expected = finite(stated_mechanism(plan, Ledger()))
    if "menu" in expected:
        return [*faults, *_offer_faults(mechanism, expected)]
    if "blocks" in expected and "blocks" in mechanism:  # whose steps are checked by themselves
        expected["blocks"]["steps"] = mechanism["blocks"]["steps"]
    if plan.filter is not None and mechanism["filter"] is not None:
        stated = mechanism["filter"]
        expected["filter"]["steps"] = stated["steps"]
        if settings.get("noise_multiplier", 0.0) is None:
            # It may have been given for a typical update, which decided the order.
            noise = mechanism["trial"]["update"]["noise_multiplier"]
            expected["trial"]["update"]["noise_multiplier"] = noise
            allowed = RenyiFilter.for_budget(plan.kept_budget, stated["order"]).allowance
            expected["filter"] |= {"order": stated["order"], "allowance": allowed}
    faults += [
        f"mechanism.{key} is {mechanism.get(key)!r}, a run with these settings has {value!r} there"
        for key, value in expected.items()
        if not _near(mechanism.get(key), value)
    ]
    return faults


def _loop_faults(statement: dict[str, Any]) -> list[str]:
    """The mechanism of a custom loop is stated by its settings, which were fixed before it."""
    settings, mechanism = statement["settings"], statement["mechanism"]
    faults = key_faults("settings.", settings, LOOP_SETTINGS)
    if faults:
        return faults
    trial, size = mechanism["trial"], statement["dataset_size"]
    test, steps = trial["test"] or {}, mechanism["trials"] or mechanism["updates"]
    if "blocks" in mechanism:  # of which the last one is counted
        test, steps = mechanism["blocks"]["test"], mechanism["blocks"]["updates"][-1]
    update = trial["update"]
    if "noise_multiplier" not in update:  # without privacy, where nothing depends on the rate
        update = {"noise_multiplier": 0.0, "sample_rate": settings["batch_size"] / size}
    stated = {
        "batch_size": update["sample_rate"] * size,
        "noise_multiplier": update["noise_multiplier"],
        "steps": None if mechanism["filter"] else steps,
        "val_noise_multiplier": test.get("noise_multiplier"),
        "accept_threshold": test.get("accept_threshold"),
    }
    faults = [
        f"settings.{name} is {settings[name]!r}, the mechanism has {value!r} there"
        for name, value in stated.items()
        if not _near(settings[name], value)
    ]
    if mechanism["setup"]:
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


def _planned(method: "Method", statement: dict[str, Any]) -> "tuple[Method, Plan]":
    """What a run with the stated settings would be settled to."""
    budget, mechanism = statement["budget"], statement["mechanism"]
    settled, plan = method.settle(
        statement["dataset_size"],
        Budget(math.inf if budget["epsilon"] is None else budget["epsilon"], budget["delta"]),
        statement["guarantee"]["accounting"],
        tuple(event_from_json(event) for event in mechanism["setup"]),
    )
    return settled, plan.hide_rejections(CONSTANT) if mechanism["to_the_cap"] else plan


def _near(one: Any, other: Any) -> bool:
    """Whether plain values are equal, fractions to the accuracy of a search."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_near(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_near, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=SEARCHED)
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _offer_faults(mechanism: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """A menu offers the rates of its settings. Their noise is held against epsilon alone.

    It was chosen for a typical update and for all updates of a run that may have been cut short.
    """
    if "menu" not in mechanism:
        return ["a run with these settings has a menu of updates, the mechanism has none"]
    stated, due = (values["menu"]["offer"]["choices"] for values in (mechanism, expected))
    pairs = zip(stated, due, strict=False)
    alike = len(stated) == len(due) and all(
        _near(one["sample_rate"], other["sample_rate"]) for one, other in pairs
    )
    same = _near(mechanism["menu"]["steering"], expected["menu"]["steering"])
    return [] if alike and same else ["the menu is not that of a run with these settings"]


def key_faults(where: str, part: Mapping[str, Any], keys: set[str] | frozenset[str]) -> list[str]:
    """Keys that are missing, and keys that do not belong there."""
    missing = [f"{where}{key} is missing" for key in sorted(keys - part.keys())]
    added = [f"{where}{key} is not part of a statement" for key in sorted(part.keys() - keys)]
    return [*missing, *added]
