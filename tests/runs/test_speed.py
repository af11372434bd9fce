"""Speed settings: what they may change of a run, and what the statement says about them."""

import pytest
import torch
import torch.nn.functional as F

import dpsur
from dpsur.config import Performance, RunConfig
from dpsur.functional.records import HostExamples, place
from dpsur.mechanism.gaussian import exact_batch
from dpsur.mechanism.streams import BATCH, Streams
from dpsur.privacy.statement import TEXTS
from dpsur.runs.files import RunFolder
from dpsur.runs.fit import execute
from dpsur.runs.session import build_session
from reproduction.methods.dpis import Dpis
from tests.conftest import blobs, small_model
from tests.runs.test_fit import BUDGET, COIN, quick_fit, weights

CPU = torch.device("cpu")


def prepare_quick(speed):
    config = RunConfig(
        task=None,
        budget=BUDGET,
        method=dpsur.Dpsur(**COIN, updates=15),
        seed=0,
        device="cpu",
        performance=speed,
    )
    return build_session(config, small_model(), blobs(), loss=F.cross_entropy)


def test_bf16_is_recorded_and_changes_only_what_rounding_does():
    exact, rounded = quick_fit(), quick_fit(performance=Performance(bf16=True))
    assert TEXTS[1]["bf16"] in rounded.statement["arithmetic"]
    assert TEXTS[1]["bf16"] not in exact.statement["arithmetic"]
    assert TEXTS[1]["float32"] in exact.statement["arithmetic"]
    assert not torch.equal(weights(exact), weights(rounded))
    torch.testing.assert_close(weights(exact), weights(rounded), rtol=0.1, atol=0.1)
    assert rounded.epsilon == exact.epsilon


def test_a_run_in_bf16_is_not_resumed_in_float32(tmp_path):
    quick_fit(out=tmp_path / "run", performance=Performance(bf16=True))
    with pytest.raises(dpsur.CheckpointError):
        quick_fit(out=tmp_path / "run", resume=True)


METHODS = {
    "dpsur": dpsur.Dpsur(**COIN, updates=15),
    "dpsgd": dpsur.Dpsgd(noise_multiplier=20.0, updates=15),
    "dpis": Dpis(updates=15),
}


@pytest.mark.parametrize("method", METHODS)
def test_records_that_stay_on_the_host_change_nothing(method):
    on_device, on_host = (
        quick_fit(method=METHODS[method], performance=Performance(data_bytes=limit))
        for limit in (10**9, 1)
    )
    assert on_host.private.ledger == on_device.private.ledger
    torch.testing.assert_close(weights(on_host), weights(on_device), rtol=1e-4, atol=1e-6)


def test_a_resumed_run_on_the_host_draws_what_it_would_have(tmp_path):
    """What is gathered ahead must not move the streams that a checkpoint holds."""
    speed = Performance(data_bytes=1)
    whole = quick_fit(performance=speed)
    stopped = prepare_quick(speed)
    trials = iter(range(7))
    with pytest.raises(dpsur.InterruptedRunError):
        execute(
            stopped, folder=RunFolder(tmp_path), stop_requested=lambda: next(trials, None) is None
        )
    resumed = execute(prepare_quick(speed), folder=RunFolder(tmp_path), resume=True)
    assert torch.equal(weights(resumed), weights(whole))


def draws(records, seed, count=5):
    streams = Streams(seed, CPU)
    steps = range(1, count + 1)
    return [exact_batch(records, 0.3, streams.at(step)[BATCH]).examples for step in steps]


def test_what_is_gathered_ahead_is_what_is_drawn_next(monkeypatch):
    records = blobs()
    host = place(records, CPU, limit=1)
    assert isinstance(host, HostExamples)
    gathered = []
    gather = HostExamples._gather

    def counted(self, rows):
        gathered.append(len(rows))
        return gather(self, rows)

    monkeypatch.setattr(HostExamples, "_gather", counted)
    for ours, plain in zip(draws(host, 3), draws(records, 3), strict=True):
        assert torch.equal(ours.inputs, plain.inputs)
        assert torch.equal(ours.targets, plain.targets)
    host._worker.shutdown()
    assert len(gathered) == 6  # the first, and the next one after each of five


def test_another_draw_than_expected_is_gathered_anew():
    """A step is left out between two draws, so that what was gathered ahead is wrong."""
    records = blobs()
    host = place(records, CPU, limit=1)
    found = []
    for data in (records, host):
        streams = Streams(3, CPU)
        exact_batch(data, 0.3, streams.at(1)[BATCH])
        found.append(exact_batch(data, 0.3, streams.at(3)[BATCH]).examples)
    assert torch.equal(found[0].inputs, found[1].inputs)


def test_records_that_fit_go_to_the_device():
    records = blobs()
    size = records.inputs.nbytes + records.targets.nbytes
    assert not isinstance(place(records, CPU, limit=size), HostExamples)
    assert not isinstance(place(records, CPU, limit=None), HostExamples)
    assert isinstance(place(records, CPU, limit=size - 1), HostExamples)
    with pytest.raises(dpsur.InvalidInputError, match="data_bytes"):
        Performance(data_bytes=0)
