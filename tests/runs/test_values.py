"""Numbers that are none, or that no run can use, are refused where they are given."""

import math

import pytest

import dpsur
from reproduction import methods
from tests.conftest import blobs, small_model

BUDGET = dpsur.Budget(epsilon=3.0, delta=1e-4)


def test_epsilon_at_a_delta_that_is_none():
    run = dpsur.fit(small_model(), blobs(), budget=BUDGET, method=dpsur.Dpsgd(updates=2))
    for delta in (0, 1, 2, -1e-5, math.nan):
        with pytest.raises(dpsur.InvalidInputError, match=r"delta must be in \(0, 1\), got"):
            run.get_epsilon(delta)
    with pytest.raises(dpsur.InvalidInputError, match="delta must be a number, got '1e-5'"):
        run.get_epsilon("1e-5")


@pytest.mark.parametrize("value", ["1", None, [1.0], math.nan])
def test_numbers_that_are_none(value):
    for make in (
        lambda: dpsur.Dpsgd(max_grad_norm=value),
        lambda: dpsur.Dpsgd(momentum=value),
        lambda: dpsur.Budget(value, 1e-5),
        lambda: dpsur.Budget(1.0, value),
    ):
        with pytest.raises(dpsur.InvalidInputError, match="must be"):
            make()


@pytest.mark.parametrize("value", ["64", [1], math.nan, math.inf, 2.5])
def test_counts_that_are_none(value):
    with pytest.raises(dpsur.InvalidInputError, match="batch_size must be"):
        dpsur.Dpsgd(batch_size=value)


def test_the_clip_of_losses_belongs_to_their_gate():
    with pytest.raises(dpsur.InvalidInputError, match="loss_clip 0.5 belongs to the gate loss"):
        dpsur.Dpsur(gate="coin", loss_clip=0.5)
    with pytest.raises(dpsur.InvalidInputError, match="loss_clip 0.5.*the gate none"):
        methods.Dpis(loss_clip=0.5)
    with pytest.raises(dpsur.InvalidInputError, match="accept_ratio 2.0 belongs to the gate coin"):
        dpsur.Dpsur(accept_ratio=2.0, loss_clip=0.5)
    assert dpsur.Dpsur(loss_clip=0.5).resolve(4000, BUDGET, "proven")[0].gate == "loss"
    assert dpsur.Dpsur().resolve(4000, BUDGET, "proven")[0].gate == "loss"
    assert dpsur.Dpsur(gate="coin").resolve(4000, BUDGET, "proven")[0].gate == "coin"
