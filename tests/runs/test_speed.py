"""Speed settings: what they may change of a run, and what the statement says about them."""

import pytest
import torch

import dpsur
from dpsur.privacy.statement import BF16_ON, TF32_OFF
from dpsur.runs.session import Speed
from tests.runs.test_fit import quick_fit, weights


def test_bf16_is_recorded_and_changes_only_what_rounding_does():
    exact, rounded = quick_fit(), quick_fit(speed=Speed(bf16=True))
    assert BF16_ON in rounded.statement["arithmetic"]
    assert BF16_ON not in exact.statement["arithmetic"]
    assert TF32_OFF in exact.statement["arithmetic"]
    assert not torch.equal(weights(exact), weights(rounded))
    torch.testing.assert_close(weights(exact), weights(rounded), rtol=0.1, atol=0.1)
    assert rounded.epsilon == exact.epsilon


def test_a_run_in_bf16_is_not_resumed_in_float32(tmp_path):
    quick_fit(out=tmp_path / "run", speed=Speed(bf16=True))
    with pytest.raises(dpsur.CheckpointError):
        quick_fit(out=tmp_path / "run", resume=True)
