"""Runs that hide how many trials were rejected."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import dpsur
from dpsur.config import Intervals
from dpsur.functional.problem import Problem
from dpsur.mechanism import gaussian as sampling
from dpsur.mechanism.state import Verdict
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import Progress
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import CoinTest, Ledger, LossTest, SampledGaussian, Trial
from dpsur.privacy.planning import repeated_plan
from dpsur.runs.observers import RandomDelays
from dpsur.runs.session import Session
from dpsur.runs.verification import verify
from reproduction.loops import train
from tests.conftest import StopAt, blobs, small_model

UPDATES = 12
METHOD = dpsur.Dpsur(
    updates=UPDATES, noise_multiplier=20.0, accept_ratio=2.0, optimizer="adam", average_decay=0.9,
    learning_rate=0.3, schedule="linear", batch_size=10, val_batch_size=8,
)  # fmt: skip

STREAMS = Streams(0, torch.device("cpu"))


def fit(way="constant", seed=0, **more):
    arguments = {
        "budget": dpsur.Budget(epsilon=8.0, delta=1e-4),
        "method": METHOD,
        "test_set": blobs(30, seed=4),
        "intervals": Intervals(checkpoint_every=4),
        **more,
    }
    return dpsur.fit(small_model(), blobs(), seed=seed, hide_rejections=way, **arguments)


def same_weights(one, other):
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


@pytest.fixture(scope="module")
def runs():
    """The same seeds without the option, and with either way to hide."""
    return {way: [fit(way, seed) for seed in range(3)] for way in ("no", "delay", "constant")}


def test_the_number_of_trials_is_the_public_one(runs):
    public = runs["constant"][0].plan.trials
    assert {run.private.ledger.trials for run in runs["constant"]} == {public}
    assert {run.private.ledger.updates for run in runs["constant"]} == {UPDATES}
    # the control: without the option it depends on what was rejected, and so do evaluations
    for way in ("no", "delay"):
        assert len({run.private.ledger.trials for run in runs[way]}) > 1


def test_the_weights_are_those_of_a_run_that_hides_nothing(runs):
    for plain, delayed, constant in zip(*runs.values(), strict=True):
        assert same_weights(plain, delayed)
        assert same_weights(plain, constant)
        assert plain.epsilon == delayed.epsilon == constant.epsilon
        assert plain.scores == delayed.scores == constant.scores
    assert not same_weights(runs["no"][0], runs["constant"][1])


def test_evaluations_come_at_the_same_trials(runs):
    def evaluated(way):
        return [
            [row["trial"] for row in run.private.rows if row["kind"] == "evaluation"]
            for run in runs[way]
        ]

    first, *others = evaluated("constant")
    assert first[-1] == runs["constant"][0].plan.trials
    assert all(other == first for other in others)
    assert evaluated("no")[0] != evaluated("no")[1]


@pytest.mark.parametrize("threshold", [math.inf, 1.0, 0.0])
def test_whatever_the_gate_does(threshold):
    """An open gate is done after 5 trials, others later: all go on to the same number."""
    test = LossTest(0.2, 1.0, threshold)
    trial = Trial(SampledGaussian(0.2, 1.5), test)
    plan = repeated_plan(Budget(3.0, 1e-5), "published", trial, 60, 5, run_all_trials=True)
    accepted, states = [], []

    def note(progress, verdicts):
        accepted.append(bool(verdicts[-1].accept))
        states.append(progress.state)

    problem = Problem(small_model(), F.cross_entropy, blobs())
    procedure = dpsur.Dpsur().build(problem, plan)
    end = train(procedure, plan, STREAMS, on_block=note)
    assert (end.ledger.trials, end.ledger.updates, len(accepted)) == (60, 5, 60)
    last = max(number for number, flag in enumerate(accepted) if flag)
    assert sum(accepted) == 5
    assert all(state is states[last] for state in states[last:])


def test_a_run_that_hits_its_cap_makes_as_many_trials():
    trial = Trial(SampledGaussian(0.2, 1.5), LossTest(0.2, 1.0, -math.inf))
    plan = repeated_plan(Budget(3.0, 1e-5), "published", trial, 60, 5, run_all_trials=True)
    made = []
    problem = Problem(small_model(), F.cross_entropy, blobs())
    procedure = dpsur.Dpsur().build(problem, plan)
    with pytest.raises(dpsur.NothingReleasedError):
        train(procedure, plan, STREAMS, on_block=lambda *trial: made.append(trial))
    assert len(made) == 60


@pytest.mark.parametrize("at", [1, 9, 35, 50])
def test_an_interrupted_run_goes_on_to_the_same_end(tmp_path, at):
    """Also where it is broken off among trials that are dropped."""
    whole = fit(out=tmp_path / "whole")
    searched = sum(row["updates"] < UPDATES for row in whole.private.rows)
    assert 9 < searched < 35 < 50 < whole.private.ledger.trials
    with pytest.raises(KeyboardInterrupt):
        fit(out=tmp_path / "broken", observers=[StopAt(at)])
    with pytest.raises(dpsur.CheckpointError, match="belongs to another run"):
        fit("no", out=tmp_path / "broken", resume=True)
    resumed = fit(out=tmp_path / "broken", resume=True)
    assert resumed.private.ledger == whole.private.ledger
    assert same_weights(resumed, whole)
    trials = [row["trial"] for row in resumed.private.rows if row["kind"] == "trial"]
    assert trials == list(range(1, whole.plan.trials + 1))


@pytest.mark.parametrize("room", [200, 10])
def test_blocks_of_a_session_go_on_to_the_same_end(runs, room, monkeypatch, tmp_path):
    """As on CUDA: trials in blocks, made again one by one where a batch had no room."""
    monkeypatch.setattr(Session, "_may_capture", lambda _: True)
    monkeypatch.setattr(sampling, "padded_size", lambda size, rate: room)
    with pytest.raises(KeyboardInterrupt):
        fit(out=tmp_path / "run", observers=[StopAt(40)])
    run = fit(out=tmp_path / "run", resume=True)
    assert run.private.ledger == runs["constant"][0].private.ledger
    trials = [row["trial"] for row in run.private.rows if row["kind"] == "trial"]
    assert trials == list(range(1, run.plan.trials + 1))
    pairs = (found.model.state_dict().values() for found in (run, runs["constant"][0]))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def published(folder):
    """What a release says, but for the weights, their hash and their figures on public records."""
    statement = json.loads((folder / "release" / "privacy.json").read_text())
    statement.pop("test", None)
    content = (folder / "release" / "model.safetensors").read_bytes()
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    del statement["weights"]["sha256"]
    return statement, (folder / "release" / "PRIVACY.md").read_text(), header, len(content)


def test_releases_differ_in_their_weights_only(tmp_path):
    counts = set()
    for seed in range(3):
        run = fit(seed=seed, out=tmp_path / f"{seed}")
        counts.add(sum(row["updates"] < UPDATES for row in run.private.rows))
        assert verify(tmp_path / f"{seed}")[0] == []
    assert len(counts) > 1
    one, *others = (published(tmp_path / f"{seed}") for seed in range(3))
    assert all(other == one for other in others)
    statement, page, *_ = one
    assert f"{run.plan.trials}, fixed in advance; those after the last update dropped" in page
    assert "was fixed before the run and tells nothing" in " ".join(statement["side_channels"])
    # the control: where verdicts are charged a release tells of them, and the comparison sees it
    method = dpsur.Dpsur(trials=20, noise_multiplier=20.0, val_noise_multiplier=4.0)
    for seed in range(3):
        fit("no", seed, method=method, accounting="every-trial", out=tmp_path / f"every-{seed}")
    charged = [published(tmp_path / f"every-{seed}") for seed in range(3)]
    assert any(other != charged[0] for other in charged)


def test_the_statement_says_what_was_done(runs):
    said = {way: " ".join(found[0].statement["side_channels"]) for way, found in runs.items()}
    assert "Random delays" in said["delay"]
    assert "Random delays" not in said["no"]
    assert "How many trials were rejected" in said["no"]
    assert "How many trials were rejected" in said["delay"]
    assert "How many trials were rejected" not in said["constant"]


def test_a_cap_that_delta_does_not_pay_for_is_found(tmp_path):
    fit(out=tmp_path / "run")
    path = tmp_path / "run" / "release" / "privacy.json"
    statement = json.loads(path.read_text())
    statement["mechanism"]["trial_cap"] -= 1
    path.write_text(json.dumps(statement))
    assert any("below the" in fault for fault in verify(tmp_path / "run")[0])


def test_an_unknown_way_is_refused_before_the_records_are_read():
    with pytest.raises(dpsur.InvalidInputError, match="hide_rejections must be one of no, delay"):
        dpsur.fit(small_model(), None, budget=Budget(1.0, 1e-5), hide_rejections="sometimes")


def waits(accept_ratio, accepted, count=20_000):
    """Delays of a run whose trials take half a second, and whose waits take none."""
    plan = repeated_plan(
        Budget(1.0, 1e-5), "proven", Trial(SampledGaussian(0.1, 1.0), CoinTest(0.1, accept_ratio)),
        2 * count, count,
    )  # fmt: skip
    waited, now = [], [0.0]
    delays = RandomDelays(waited.append, lambda: now[0])
    progress = Progress(None, Ledger())
    delays.started(plan, progress)
    for _ in range(count):
        now[0] += 0.5
        delays.trials(progress, [Verdict(torch.tensor(accepted))])
    return torch.tensor(waited)


def test_delays_are_as_long_as_a_search_at_worst():
    def agrees(found, accept):
        spread = 0.5 * math.sqrt(1 - accept) / accept
        return abs(float(found.mean()) - 0.5 / accept) < 6 * spread / math.sqrt(len(found))

    found = waits(5.0, accepted=True)
    assert agrees(found, 1 / 5.0)
    assert len(found) == 20_000
    assert float(found.min()) == 0.5
    assert not agrees(found, 1 / 4.0)  # the control
    assert len(waits(5.0, accepted=False, count=50)) == 0
    assert set(waits(1.0, accepted=True, count=50).tolist()) == {0.5}


def test_a_limited_run_has_a_number_of_its_own():
    short = replace(METHOD, updates=4)
    assert fit(method=short).plan.trials < fit().plan.trials
