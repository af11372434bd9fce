"""Check a release against its own statement."""

import math
import os
from pathlib import Path
from typing import Any

from dpsur.errors import InvalidInputError
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.claims import claim_faults
from dpsur.privacy.events import Trial, event_from_json
from dpsur.privacy.ledger import Ledger
from dpsur.privacy.mechanism import (
    mechanism_of,
    recomputed_epsilons,
    stated_filter,
    stated_menu,
)
from dpsur.privacy.page import render_markdown
from dpsur.privacy.plans.hiding import least_cap
from dpsur.privacy.statement import FORMAT
from dpsur.runs.files import PAGE, STATEMENT, WEIGHTS, finite, from_json, release_folder, sha256

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
    ),
    *("mechanism", "accepted_updates", "method", "settings", "released", "random", "arithmetic"),
    *("tuning", "side_channels", "not_covered", "warnings", "versions", "weights"),
}


def verify(path: str | os.PathLike[str]) -> tuple[list[str], dict[str, float | None]]:
    """What is wrong with a release, and its recomputed figures. No faults means it is consistent.

    This is no signature: whoever can write the weights can write a statement to match.
    """
    folder = release_folder(path)
    statement = _read(folder / STATEMENT)
    try:
        figures = finite(recomputed_epsilons(statement))
        faults = [
            *_form_faults(statement),
            *_figure_faults(statement, figures),
            *claim_faults(statement),
            *_weight_faults(folder, statement),
            *_page_faults(folder, statement),
        ]
    except MALFORMED as error:
        return [f"{STATEMENT} cannot be read: {type(error).__name__}: {error}"], {}
    return faults, figures


def _read(path: Path) -> dict[str, Any]:
    try:
        statement = from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} is not a privacy statement: {error}") from error
    if not isinstance(statement, dict) or statement.get("format") != FORMAT:
        raise InvalidInputError(f"{path} is not a privacy statement of the format {FORMAT}")
    return statement


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
    steered = (*_filter_faults(statement), *_menu_faults(statement))
    return [*faults, *_cap_faults(statement), *steered]


def _filter_faults(statement: dict[str, Any]) -> list[str]:
    """The steps of an adaptive run must fit the allowance that was fixed before it."""
    mechanism = statement["mechanism"]
    if mechanism["filter"] is None:
        return []
    plan = stated_filter(statement)
    charges = [(event, 1) for event in mechanism["setup"]]
    charges += [(row["step"], row["charged"]) for row in mechanism["filter"]["steps"]]
    spent = sum(count * plan.cost(event_from_json(event)) for event, count in charges)
    if spent <= plan.allowance * (1 + TOLERANCE):
        return []
    return [f"the steps spend {spent:g} at order {plan.order:g}, of {plan.allowance:g} allowed"]


def _menu_faults(statement: dict[str, Any]) -> list[str]:
    """The steps of a run must be those that its menu offers, as many as were planned."""
    mechanism = statement["mechanism"]
    if "menu" not in mechanism:
        return []
    rows = [
        {"step": row["step"], "trials": row["charged"], "updates": row["charged"]}
        for row in mechanism["menu"]["steps"]
    ]
    plan, ledger = stated_menu(statement), Ledger.from_json({"setup": [], "entries": rows})
    faults = []
    if not plan.allows(ledger):
        faults.append("the steps are not those of a run by the stated menu")
    if mechanism != mechanism_of(plan, ledger):
        faults.append("the mechanism says more or something else than its menu")
    return faults


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


def _form_faults(statement: dict[str, Any]) -> list[str]:
    """Nothing may be left out, and nothing added that the rest would not be held against."""
    faults = [f"{key} is missing" for key in sorted(KEYS - statement.keys())]
    faults += [f"{key} is no part of a statement" for key in sorted(statement.keys() - KEYS)]
    if not isinstance(statement["random"]["seeded"], bool):
        faults.append("random.seeded is neither true nor false")
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
    return faults


def _page_faults(folder: Path, statement: dict[str, Any]) -> list[str]:
    try:
        page = (folder / PAGE).read_text()
    except OSError as error:
        return [f"{PAGE} cannot be read: {error.strerror}"]
    return (
        [] if page == render_markdown(statement) else [f"{PAGE} does not say what {STATEMENT} does"]
    )
