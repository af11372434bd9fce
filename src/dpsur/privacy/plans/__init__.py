"""Plans: everything that decides a run's privacy, fixed before it starts.

A `Plan` repeats one kind of trial. Methods that steer themselves by what they have released have a
`MenuPlan`, whose steps are chosen from a menu, or a `FilteredPlan`, whose steps are free and end
with an allowance.
"""

from dpsur.privacy.plans.filtered import FilteredPlan
from dpsur.privacy.plans.fixed import Plan
from dpsur.privacy.plans.menu import MenuPlan

AnyPlan = Plan | FilteredPlan | MenuPlan

__all__ = ["AnyPlan", "FilteredPlan", "MenuPlan", "Plan"]
