"""What plans promise stays what it was, whatever they are made of."""

import copy
import json

import pytest

from tests.epsilons import (
    ALIKE,
    ELSEWHERE,
    SEARCHED,
    TABLE,
    changes,
    configurations,
    figure_gap,
    rounding,
)

STORED = json.loads(TABLE.read_text(encoding="utf-8"))
ROWS = STORED["rows"]
SAME = ALIKE if rounding() == STORED["rounding"] else ELSEWHERE
QUICK = 6  # rows of each method and accounting that every test run plans again


def few() -> list[int]:
    """The first rows of each kind."""
    seen: dict[tuple[str, str], int] = {}
    chosen = []
    for number, row in enumerate(ROWS):
        kind = (row["method"], row["accounting"])
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= QUICK:
            chosen.append(number)
    return chosen


def dearer(rows):
    return [(row, gap) for row in rows if not (gap := figure_gap(row)) <= SAME]


def resettled(rows):
    return [(row, found) for row in rows if (found := changes(row))]


def test_stored_plans_promise_what_they_did():
    assert dearer([ROWS[number] for number in few()]) == []


@pytest.mark.slow
def test_the_same_plans_fit_the_budgets():
    assert resettled([ROWS[number] for number in few()]) == []


@pytest.mark.slow
def test_all_plans_are_and_promise_what_they_did():
    chosen = set(few())
    rest = [row for number, row in enumerate(ROWS) if number not in chosen]
    assert dearer(rest) == []
    assert resettled(rest) == []


@pytest.mark.parametrize("given", [True, False])
def test_another_noise_is_noticed(given):
    """Beyond what a search leaves open where it was searched for, and any where it was given."""
    row = next(
        row
        for row in ROWS
        if row["method"] == "dpsgd-ts" and (row["options"]["noise_multiplier"] is not None) == given
    )
    other = copy.deepcopy(row)
    other["plan"]["phases"][0]["step"]["update"]["noise_multiplier"] *= 1 + (
        1e-9 if given else 2 * SEARCHED
    )
    assert not changes(row)
    assert changes(other)
    assert figure_gap(other) > ALIKE


def test_the_table_has_every_plan_of_the_results():
    known = [{k: v for k, v in row.items() if k not in ("plan", "promised")} for row in ROWS]
    assert [config for config in configurations() if config not in known] == []
