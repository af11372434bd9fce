"""Plans: everything that decides a run's privacy, fixed before it starts.

All satisfy `PrivacyPlan`. A `Plan` repeats one kind of trial. Methods whose steps depend on what
they have released have a `MenuPlan`, whose steps are chosen from a list fixed in advance (a menu),
or a `FilteredPlan`, whose steps are free and end with an allowance. A `BlockPlan` has blocks of
updates with a test after each. A loop that you own charges a `PrivacyLedger` step by step.
"""

from collections.abc import Mapping
from typing import Any

from dpsur.privacy.plans.blocks import BlockPlan
from dpsur.privacy.plans.filtered import FilteredPlan
from dpsur.privacy.plans.fixed import Plan
from dpsur.privacy.plans.menu import MenuPlan
from dpsur.privacy.plans.open_ended import PrivacyLedger
from dpsur.privacy.plans.protocol import PrivacyPlan

__all__ = [
    "BlockPlan",
    "FilteredPlan",
    "MenuPlan",
    "Plan",
    "PrivacyLedger",
    "PrivacyPlan",
    "plan_from_statement",
]


def plan_from_statement(statement: Mapping[str, Any]) -> PrivacyPlan:
    """The plan that a privacy statement describes, made anew from its mechanism and budget."""
    mechanism = statement["mechanism"]
    if mechanism["filter"] is not None:
        return FilteredPlan.from_statement(statement)
    if "menu" in mechanism:
        return MenuPlan.from_statement(statement)
    if "blocks" in mechanism:
        return BlockPlan.from_statement(statement)
    return Plan.from_statement(statement)
