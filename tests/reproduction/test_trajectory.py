"""The runs behind the trajectories."""

import numpy as np
import pytest
import torch

from reproduction.base import Options
from reproduction.experiments.trajectory import (
    ARMS,
    EXPERIMENT,
    excess_losses,
    make_records,
    quadratic,
)
from tests.reproduction.test_registered import committed


def rows_by_arm():
    rows = committed(EXPERIMENT).rows
    return {arm: [row for row in rows if row["config"]["arm"] == arm] for arm in ARMS}


def test_the_contours_are_those_of_the_loss():
    records = make_records(500, 7)
    loss = quadratic(records)
    for weights in ([-1.0, 3.0], [2.0, 1.0], [0.3, -0.8]):
        predicted = records.inputs.double() * weights[0] + weights[1]
        direct = (predicted - records.targets.double()).square().mean().item()
        row = {"path": [weights], "loss": loss}
        assert loss["least"] + excess_losses(row)[0] == pytest.approx(direct, rel=1e-5)
        # control: the same comparison rejects contours around another point
        moved = {**loss, "best": [loss["best"][0] + 0.1, loss["best"][1]]}
        elsewhere = moved["least"] + excess_losses({"path": [weights], "loss": moved})[0]
        assert elsewhere != pytest.approx(direct, rel=1e-5)


def test_arms_share_the_noise_or_the_epsilon():
    plain, selective, same = (rows[0] for rows in rows_by_arm().values())
    assert plain["noise_multiplier"] == selective["noise_multiplier"] > same["noise_multiplier"]
    assert same["epsilon"] == pytest.approx(selective["epsilon"], rel=1e-3)
    assert same["epsilon"] <= selective["epsilon"]
    assert plain["epsilon"] < selective["epsilon"]


def test_paths_hold_every_kept_update():
    for arm, rows in rows_by_arm().items():
        for row in rows:
            assert len(row["path"]) == row["updates"] + 1 == row["config"]["updates"] + 1
            assert row["path"][0] == row["config"]["start"]
            assert (row["trials"] > row["updates"]) == (arm == "DPSUR")
            assert excess_losses(row)[-1] < excess_losses(row)[0]


def test_the_order_of_the_arms_is_no_accident():
    """Each comparison in the text, seed by seed, is more than three standard errors from zero."""
    plain, selective, same = (
        np.array([excess_losses(row)[25:].mean() for row in rows])
        for rows in rows_by_arm().values()
    )
    assert _clearly_above(plain, selective)
    assert _clearly_above(selective, same)
    # control: seeds of one arm against other seeds of it
    for losses in (plain, selective, same):
        assert not _clearly_above(losses[::2], losses[1::2])
        assert not _clearly_above(losses[1::2], losses[::2])


def _clearly_above(worse, better):
    difference = worse - better
    return difference.mean() > 3 * difference.std(ddof=1) / len(difference) ** 0.5


def _last_half(row):
    along = excess_losses(row)
    return np.log(along[len(along) // 2 :].mean())


@pytest.mark.parametrize("arm", ARMS)
def test_committed_runs_have_the_law_of_the_code(arm):
    """The rows were made with other random numbers: what is not random is compared exactly."""
    old = rows_by_arm()[arm]
    configs = [row["config"] for row in old[:8]]
    new = [EXPERIMENT.measure({"config": config}, Options()) for config in configs]
    for name in ("noise_multiplier", "epsilon", "updates"):
        assert new[0][name] == pytest.approx(old[0][name], rel=1e-4)
    for value in (_last_half, lambda row: row["trials"]):
        before, after = (np.array([value(row) for row in rows]) for rows in (old, new))
        error = (before.var(ddof=1) / len(before) + after.var(ddof=1) / len(after)) ** 0.5
        assert abs(before.mean() - after.mean()) <= 5 * error
    torch.manual_seed(5)  # a run depends on its own seed only
    again = EXPERIMENT.measure({"config": configs[0]}, Options())
    assert again["path"] == new[0]["path"]
    assert new[1]["path"] != new[0]["path"]
