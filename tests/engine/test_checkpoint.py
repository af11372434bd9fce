"""A checkpoint of a custom loop has the format of `fit`, and is refused for the same reasons."""

import copy
import json

import pytest
from safetensors import safe_open

import dpsur
from dpsur.runs.checkpoint import FILE_NAME, FORMAT
from tests.conftest import blobs, small_model
from tests.engine.test_loop import private, train


def test_both_drivers_write_the_same_format(tmp_path):
    data = blobs(60)
    method = dpsur.Dpsgd(batch_size=20, updates=3)
    run = dpsur.fit(
        small_model(), (data.inputs, data.targets), budget=dpsur.Budget(3.0, 1e-3), method=method,
        out=tmp_path / "run",
    )  # fmt: skip
    assert run is not None
    with safe_open(tmp_path / "run" / "private" / FILE_NAME, "pt") as file:
        facts = json.loads(file.metadata()["dpsur"])
    engine, *_ = private()
    state = engine.state_dict()
    assert facts.keys() <= state.keys()
    assert facts["format"] == state["format"] == FORMAT
    assert facts["ledger"].keys() == state["ledger"].keys()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "dpsur-engine/2"}, "another version of dpsur"),
        ({"format": None}, "not a whole checkpoint"),
        ({"ledger": {"setup": []}}, "its ledger cannot be read"),
    ],
)
def test_what_is_no_checkpoint_is_refused(change, words):
    engine, *rest = private()
    train(engine, *rest, steps=2)
    state = {**copy.deepcopy(engine.state_dict()), **change}
    with pytest.raises(dpsur.CheckpointError, match=words):
        private()[0].load_state_dict(state)


def test_steps_that_were_not_planned_are_refused():
    engine, *rest = private(steps=5)
    train(engine, *rest, steps=2)
    state = copy.deepcopy(engine.state_dict())
    (entry,) = state["ledger"]["entries"]
    entry |= {"trials": 10_000, "updates": 10_000}
    with pytest.raises(dpsur.CheckpointError, match="damaged"):
        private(steps=5)[0].load_state_dict(state)
