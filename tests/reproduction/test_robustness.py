"""Sweeps of the learning rate: what is run, and how wide a range is called good."""

import math

import pytest

from reproduction.base import Options
from reproduction.experiments import robustness
from reproduction.series import Point
from tests.reproduction.made_up import check_every_part_renders, made_up

EXPERIMENT = robustness.EXPERIMENT


def accuracy_of(config, seed):
    """Falls by half a point per doubling away from 4, twice that for constant plain DP-SGD."""
    options = config["options"]
    plain = config["arm"] == "dpsgd-hf" and options["schedule"] == "constant"
    steps = abs(math.log2(options["learning_rate"] / 4))
    return 0.88 - (0.01 if plain else 0.005) * steps + 0.0001 * (seed - 1)


def points_of(*means):
    return [Point(2.0**k, mean, 0.1, 3) for k, mean in enumerate(means)]


def test_the_range_is_sixty_four_fold():
    cells = list(EXPERIMENT.cells(Options()))
    rates = sorted({cell["config"]["options"]["learning_rate"] for cell in cells})
    assert len(rates) == 7
    assert rates[-1] / rates[0] == 64
    assert len(cells) == 7 * 2 * 4 * 3
    for cell in cells:
        assert cell["config"]["accounting"] in {"every-trial", "proven"}  # proved ones only
        kept = cell["config"]["options"].get("on_reject") == "keep-momentum"
        assert kept == (cell["config"]["arm"] == "every-trial")


def test_the_width_stops_at_the_first_value_that_falls_too_far():
    assert robustness.tolerated(points_of(85, 88, 88.5, 87.6, 80)) == (2.0, 8.0)
    # good again behind a gap does not count
    assert robustness.tolerated(points_of(88, 80, 88.5, 88, 80)) == (4.0, 8.0)
    assert robustness.tolerated(points_of(88.5)) == (1.0, 1.0)


def test_the_table_tells_wide_from_narrow():
    records = robustness.records(made_up(EXPERIMENT, accuracy_of))
    assert len(records) == 2 * 4
    for record in records:
        assert record["best"] == pytest.approx(88.0)
        assert record["at"] == 4
        assert record["fold"] == (4 if record["what"] == "DP-SGD, constant rate" else 16)
        assert (record["rates"], record["seeds"]) == (7, 3)


def test_a_part_of_the_rows_is_rendered(tmp_path):
    check_every_part_renders(EXPERIMENT, made_up(EXPERIMENT, accuracy_of), tmp_path)
