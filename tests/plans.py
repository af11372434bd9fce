"""Plans for tests, with parameters that no budget was searched for."""

from typing import Any

from dpsur.privacy.accountants.rdp import RenyiFilter
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Ledger, Trial
from dpsur.privacy.plan import ACCEPTED, MOST_TRIALS, TRIALS, Phase, Plan


def plan_behind_filter(
    budget: Budget,
    accounting: str,
    order: float,
    allowance: float,
    typical: Trial,
    updates: int | None,
    trials: int = MOST_TRIALS,
    stop_after: int | None = None,
    **more: Any,
) -> Plan:
    """Free steps behind a filter of this order and allowance."""
    phase = Phase(typical, updates, TRIALS if updates is None else ACCEPTED, trials)
    allowed = RenyiFilter(order, allowance, stop_after)
    return Plan(budget, accounting, (phase,), filter=allowed, **more)


def spent(accounting: str, ledger: Ledger, delta: float) -> float:
    """Epsilon of what a ledger holds, under an accounting."""
    kind = accounting_named(accounting)
    counts = [
        (entry.step, entry.trials if kind.charges == "trials" else entry.updates)
        for entry in ledger.entries
    ]
    return kind.epsilon([*((event, 1) for event in ledger.setup), *counts], delta)
