"""A privacy statement in the forms that reviewers ask for.

    nist      the parts of NIST SP 800-226, "Guidelines for Evaluating Differential Privacy
              Guarantees" (March 2025): the layers of its pyramid and its hazards
    registry  a draft for the Differential Privacy Deployments Registry, in the fields of the
              deployments in github.com/opendp/deployments-registry-data

Everything comes from the statement. What it cannot know stays open, and says so.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from dpsur.privacy.conversion import Converted
from dpsur.privacy.statement import PERSON, counted_by, format_epsilon, unit_of

OPEN = "TO BE FILLED IN: not in a privacy statement"
Fields = dict[str, Any]


def nist(statement: Mapping[str, Any]) -> Fields:
    """What an evaluation by NIST SP 800-226 asks, from the top of its pyramid to the bottom."""
    promised, unit = statement["guarantee"], statement["unit"]
    sizes = f"{statement['dataset_size']} {counted_by(statement)}s"
    return {
        "privacy guarantee": {
            "epsilon": _number(promised["epsilon"]),
            "delta": promised["delta"],
            "variant": promised["definition"],
            "unit of privacy": unit,
            "neighbouring data sets": statement["adjacency"],
            "converted guarantee": statement.get("group", "none was stated"),
            "size": f"{sizes}, public or declared; to remove a unit is to zero it out",
            "bounded contributions": statement["public"].get(
                "records_per_person", "one record is one unit"
            ),
        },
        "algorithm": {
            "mechanism": statement["mechanism"],
            "sampling": statement["sampler"],
            "composition": f"{promised['accounting']}: {promised['theorem']}",
            "proved": promised["proved"],
            "assumptions": promised["assumes"],
            "other accountings": statement["epsilon"],
        },
        "correctness of the implementation": {
            "separation of units": statement["independence"],
            "arithmetic": statement["arithmetic"],
            "random numbers": statement["random"],
            "checked again by": "dpsur verify: the statement is rebuilt from its parameters",
            "empirical lower bounds": "dpsur audit and dpsur attack, on the method, not this run",
            "versions": statement["versions"],
        },
        "utility and bias": {
            "public test figures": statement.get("test", "none were stated"),
            "noisy figures": statement.get("metrics", statement.get("holdout", "none were paid")),
            "bias": f"{OPEN}; noise harms small groups most: compare errors by group",
        },
        "trust model": "central: who trains sees the records, who gets the release does not",
        "hyperparameters": statement["tuning"],
        "side channels": statement["side_channels"],
        "what is released": statement["released"],
        "not covered": statement["not_covered"],
        "data security and access control": OPEN,
        "data collection exposure": OPEN,
        "warnings": statement["warnings"],
    }


def registry(statement: Mapping[str, Any]) -> Fields:
    """A deployment of the registry, tiers 1 to 3, as far as a statement can fill it."""
    promised, person = statement["guarantee"], unit_of(statement) == PERSON
    private = promised["epsilon"] is not None and math.isfinite(promised["epsilon"])
    parameters = {"epsilon": promised["epsilon"], "delta": promised["delta"]} if private else {}
    arithmetic, versions = statement["arithmetic"], statement["versions"]
    return {
        "status": "Draft",
        "deployment": {
            "product": {
                "name": OPEN,
                "data_curators": [OPEN],
                "intended_use": OPEN,
                "data_product_type": "Machine learning model",
                "data_product_region": OPEN,
                "data_product_sector": OPEN,
                "description": OPEN,
                "publication_date": OPEN,
            },
            "dp_flavor": {
                "name": "Approximate DP",
                "data_domain": f"data sets of {statement['dataset_size']} {counted_by(statement)}s",
                "unprotected_quantities": ", ".join(
                    ["the number N", *(str(name) for name in statement["public"])]
                ),
            },
            "privacy_loss": {
                "privacy_unit": "person-level" if person else "record-level",
                "privacy_unit_description": f"{statement['unit']}; {statement['adjacency']}",
                "privacy_parameters": parameters,
                "privacy_parameters_description": f"accounting {promised['accounting']}, "
                f"{'' if promised['proved'] else 'not '}proved: {promised['theorem']}",
            },
            "model": {
                "model_name": "Central",
                "actors": OPEN,
                "release_type": "One release",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "accounting": {
                "post_processing": "none that reads records again",
                "composition": f"{promised['theorem']} {promised['assumes']}",
            },
            "implementation": {
                "pre_processing_eda_hyperparameter_tuning": statement["tuning"],
                "mechanisms": f"{statement['sampler']} {arithmetic} "
                f"dpsur {versions.get('dpsur', '')}; mechanism and settings: privacy.json",
                "justification": OPEN,
            },
            "resources": {"sources": OPEN, "registry_authors": [OPEN]},
        },
    }


def converted(statement: Mapping[str, Any], other: Converted) -> Fields:
    how = (
        "privacy losses of all mechanisms, converted one by one and composed"
        if other.exact
        else "group privacy of the guarantee as a whole, since its parts are not charged apart"
    )
    return {
        "stated unit": statement["unit"],
        "stated epsilon": _number(statement["guarantee"]["epsilon"]),
        "converted for": other.neighbours,
        "epsilon": _number(other.epsilon),
        "delta": other.delta,
        "how": how,
        "meaning": "a conversion of the stated guarantee; nothing was trained for this unit",
    }


def as_text(fields: Mapping[str, Any], indent: str = "") -> str:
    lines = []
    for name, value in fields.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", as_text(value, f"{indent}  ")]
        elif isinstance(value, list):
            items = (_plain(one) for one in value)
            lines += [f"{indent}{name}:", *(f"{indent}  - {one}" for one in items)]
        else:
            lines.append(f"{indent}{name}: {_plain(value)}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (Mapping, list)) else str(value)


def _number(epsilon: float | None) -> str:
    return "infinite" if epsilon is None else format_epsilon(epsilon)
