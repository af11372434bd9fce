"""Plans against what training gave: the figures of the page, and those that plans start from."""

from pathlib import Path

import pytest

from dpsur.runs.planning import PRODUCTS, PUBLIC_DATA
from reproduction.experiments import planning
from reproduction.rows import read_rows

ROWS = list(read_rows(Path(__file__).parents[2] / "results" / "planning.jsonl"))


def test_plans_start_from_the_rows():
    found = planning.public_data(ROWS)
    assert set(found) == set(PUBLIC_DATA)
    for name, losses in PUBLIC_DATA.items():
        assert found[name] == pytest.approx(dict(zip(PRODUCTS, losses, strict=False)))


def made(arm, **figures):
    return {"data": "mnist", "records": 1000, "arm": arm, **figures}


def test_what_is_outside_of_its_range_is_bold_and_counted():
    losses = dict.fromkeys(map("{:g}".format, planning.EPSILONS), 0.85)
    trained = made(
        planning.TRAIN,
        accuracy={**losses, "0.5": 0.5, "8": 0.95},
        without_privacy=0.9,
        processor_seconds=3.0,
        memory_mb=900,
    )
    planned = made(
        planning.PLAN,
        train_records=1000,
        lost=dict.fromkeys(losses, (0.0, 0.1)),
        seconds=(1.0, 2.0),
        memory_bytes=(5e8, 1e9),
    )
    (pair,) = planning.compared([trained, planned])
    assert not planning.held(*pair, "0.5")
    assert planning.held(*pair, "1")
    assert planning.held(*pair, "8")  # better than without privacy counts as no loss
    assert "**4 of 5**" in planning.accuracy_text([pair])
    assert "**0 of 1** cases, the memory in **1 of 1**" in planning.costs_text([pair])
    (record,) = planning.accuracy_records([pair])
    assert record["0.5"] == "**40.0** (0.0 to 10.0)"
    assert record["1"] == "5.0 (0.0 to 10.0)"
