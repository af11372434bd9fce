"""Captured trials: on the CPU their parts, on CUDA the whole."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import dpsur
from dpsur.config import Intervals, Performance
from dpsur.functional.problem import Problem, mode
from dpsur.functional.tree import flatten
from dpsur.mechanism import captured_batches, cuda_graph_loop
from dpsur.mechanism import gaussian as sampling
from dpsur.mechanism.captured_batches import CapturedBatches
from dpsur.mechanism.cuda_graph_loop import CudaGraphLoop
from dpsur.mechanism.streams import BATCH, Streams
from dpsur.mechanism.trial import has_next, make_trial, start
from dpsur.methods import Dpsgd, Dpsur
from dpsur.per_example import clipped_sum, draws_randomness
from dpsur.privacy.budget import Budget
from reproduction.loops import run_loop, train
from reproduction.methods import Dpagd
from reproduction.methods.dpagd import AdaptiveSteps
from tests.conftest import blobs, small_model

CPU = torch.device("cpu")
BUDGET = Budget(3.0, 1e-4)
ADAPTIVE = Dpagd(batch_size=20, val_batch_size=20, updates=10, step_sizes=3, raise_by=0.5)


def bound(method, seed=0, size=200, accounting="proven"):
    problem = Problem(small_model(), F.cross_entropy, blobs(size))
    settled, plan = method.resolve(size, BUDGET, accounting)
    return settled.build(problem, plan), plan


@pytest.mark.parametrize(
    "method",
    [
        Dpsgd(updates=6, noise_multiplier=20.0, batch_size=20),
        Dpsur(updates=6, noise_multiplier=20.0, batch_size=20, accept_ratio=1.5),
        ADAPTIVE,
    ],
)
def test_padded_trials_are_the_exact_ones(method):
    exact, plan = bound(method)
    other, _ = bound(method)
    padded = other.padded()
    one, two = start(exact), start(padded)
    for made in range(6):
        if made == 3 and not has_next(exact, plan, one):
            break
        one, verdict = make_trial(exact, plan, Streams(0, CPU), one)
        two, same = make_trial(padded, plan, Streams(0, CPU), two)
        assert bool(verdict.accept) == bool(same.accept)
        for name, value in flatten(one.state).items():
            torch.testing.assert_close(value, flatten(two.state)[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [1, 2, 100])
def test_blocks_of_updates_are_captured_and_their_tests_are_not(block):
    method = Dpsgd(gate="block", updates=5, batch_size=20, blocks=3, block_updates=3)
    exact, plan = bound(method)
    padded = exact.padded()
    one = train(exact, plan, Streams(0, CPU))
    loop = CudaGraphLoop(exact, padded, plan, Streams(0, CPU), start(exact), block)
    two = run_loop(loop, plan)
    assert one.ledger == two.ledger
    for name, value in flatten(one.state).items():
        torch.testing.assert_close(value, flatten(two.state)[name], rtol=1e-4, atol=1e-5)


def test_random_layers_are_seen_and_not_padded():
    still, noisy = small_model(), nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 3))
    assert not draws_randomness(still, blobs())
    before = torch.get_rng_state()
    assert draws_randomness(noisy, blobs())
    assert torch.equal(before, torch.get_rng_state())
    problem = Problem(noisy, F.cross_entropy, blobs())
    settled, plan = Dpsgd(updates=3, noise_multiplier=20.0).resolve(200, BUDGET, "proven")
    assert settled.build(problem, plan).padded() is None


class Counted(CudaGraphLoop):
    """Counts the steps that were made with exact batches."""

    exact = 0

    def _exactly(self):
        self.exact += 1
        return super()._exactly()


def in_blocks(procedure, plan, block, on_block=lambda *_: None):
    loop = Counted(procedure, procedure.padded(), plan, Streams(0, CPU), start(procedure), block)
    return run_loop(loop, plan, on_block), loop.exact


@pytest.mark.parametrize("on_reject", ["restore", "keep-momentum"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("block", [1, 7, 100])
def test_blocks_of_trials_are_the_single_trials(block, optimizer, on_reject):
    accounting = "every-trial" if on_reject == "keep-momentum" else "proven"
    gate = {"gate": "loss"} if on_reject == "keep-momentum" else {"accept_ratio": 1.5}
    count = {"trials": 12} if on_reject == "keep-momentum" else {"updates": 8}
    method = Dpsur(
        noise_multiplier=20.0, batch_size=20, on_reject=on_reject, average_decay=0.9,
        optimizer=optimizer, learning_rate=0.05, **gate, **count,
    )  # fmt: skip
    (single, plan), (padded, _) = (bound(method, accounting=accounting) for _ in range(2))
    one = train(single, plan, Streams(0, CPU))
    blocks = []
    two, again = in_blocks(padded, plan, block, lambda _, verdicts: blocks.append(verdicts))
    assert not again
    assert two.ledger == one.ledger
    assert sum(len(verdicts) for verdicts in blocks) == one.ledger.trials
    assert sum(bool(v.accept) for verdicts in blocks for v in verdicts) == one.ledger.updates
    for name, value in flatten(one.state).items():
        torch.testing.assert_close(value, flatten(two.state)[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("block", [4, 100])
def test_verdicts_without_figures_of_their_own_are_all_kept(block):
    padded, plan = bound(Dpsgd(updates=6, noise_multiplier=20.0, batch_size=20))
    verdicts = []
    in_blocks(padded, plan, block, lambda _, made: verdicts.extend(made))
    assert [bool(v.accept) for v in verdicts] == [True] * 6
    assert all(v.private == {} for v in verdicts)


def test_parameters_without_numbers_and_of_two_types_are_captured():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0))
            self.first = nn.Linear(2, 4)
            self.last = nn.Linear(4, 3).double()

        def forward(self, x):
            return self.last(self.first(x).double()).float()

    method = Dpsgd(updates=3, noise_multiplier=20.0, batch_size=20)
    problem = Problem(Mixed(), F.cross_entropy, blobs())
    settled, plan = method.resolve(200, BUDGET, "proven")
    padded = settled.build(problem, plan).padded()
    before = start(padded)
    loop = CudaGraphLoop(padded, padded, plan, Streams(0, CPU), before, 3)
    loop.launch()
    loop.collect()
    after = loop.progress.state.params
    moved = {n: not torch.equal(v, after[n]) for n, v in before.state.params.items() if v.numel()}
    assert all(moved.values())


def test_a_batch_without_room_is_drawn_exactly(monkeypatch):
    method = Dpsur(updates=8, noise_multiplier=20.0, batch_size=20, accept_ratio=1.5)
    single, plan = bound(method)
    one = train(single, plan, Streams(0, CPU))
    monkeypatch.setattr(sampling, "padded_size", lambda size, rate: 20)
    exact, _ = bound(method)
    two, again = in_blocks(exact, plan, 3)
    assert again
    assert two.ledger == one.ledger
    for name, value in flatten(one.state).items():
        torch.testing.assert_close(value, flatten(two.state)[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("largest", [None, 20])
@pytest.mark.parametrize(
    "method",
    [
        Dpsgd(updates=12, noise_multiplier=20.0, batch_size=20),
        Dpsur(updates=8, noise_multiplier=20.0, batch_size=20, accept_ratio=1.5),
    ],
)
def test_trials_have_the_smallest_rooms_that_hold_their_batches(method, largest, monkeypatch):
    """A batch that is larger than every room is taken whole, as without rooms."""
    monkeypatch.setattr(cuda_graph_loop, "LEAST_WORK", 0.0)
    single, plan = bound(method)
    one = train(single, plan, Streams(0, CPU))
    if largest is not None:
        monkeypatch.setattr(sampling, "padded_size", lambda size, rate: largest)
    used, held = [], []

    def watched(examples, mask, room, ranks):
        used.append(room)
        held.append(int(mask.sum()) <= room)
        return sampling.padded_to(examples, mask, room, ranks)

    exact, _ = bound(method)
    monkeypatch.setattr(captured_batches, "padded_to", watched)
    two, again = in_blocks(exact, plan, 6)
    assert bool(again) == (largest is not None)
    assert two.ledger == one.ledger
    for name, value in flatten(one.state).items():
        torch.testing.assert_close(value, flatten(two.state)[name], rtol=1e-4, atol=1e-6)
    if largest is None:
        assert len(set(used)) > 2
        batches = 2 if isinstance(method, Dpsur) else 1  # first of the trial that looks for them
        assert all(held[batches:][: batches * one.ledger.trials])  # those beyond have no effect


@pytest.mark.parametrize("work", [0.0, 1e12])
def test_rooms_are_chosen_by_the_size_of_a_trial(work, monkeypatch):
    """Never by a clock: a seeded run would not be the same every time."""
    monkeypatch.setattr(cuda_graph_loop, "LEAST_WORK", work)
    procedure, plan = bound(Dpsgd(updates=6, noise_multiplier=20.0, batch_size=20))
    loop = CudaGraphLoop(procedure, procedure.padded(), plan, Streams(0, CPU), start(procedure), 3)
    loop.prepare()
    rooms = len(sampling.padded_sizes(200, 0.1))
    assert set(loop._by_level) == ({0} if work else set(range(rooms)))


def test_large_samples_are_worked_on_in_parts():
    """So that memory does not follow the largest sample."""
    problem = Problem(small_model(), F.cross_entropy, blobs())
    rooms, found = sampling.padded_sizes(200, 0.1), []
    for sized in (False, True):
        batches = CapturedBatches(Streams(0, CPU), sized=sized)
        for batches.level in range(len(rooms) if sized else 1):
            batch = batches.batch(problem.train, 0.1, Streams(0, CPU).at(4)[BATCH])
            found.append((len(batch), batch.at_once))
    assert found[0] == (rooms[-1], None)
    for room, (size, at_once) in zip(rooms, found[1:], strict=True):
        assert size == room
        assert at_once == size if size <= 23 else at_once <= 23
        assert at_once * -(-size // at_once) < size + -(-size // at_once)  # equal parts
    params = problem.initial_params()
    whole, parts = (
        clipped_sum(problem, params, problem.train, 0.1, at_once=at_once).params
        for at_once in (None, 23)
    )
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-6)


def test_rooms_end_with_the_one_for_any_sample():
    rooms = sampling.padded_sizes(50_000, 512 / 50_000)
    assert rooms == (480, 496, 504, 512, 512, 520, 528, 536, 536, 552, 560, 584, 640)
    assert [rooms[sampling.level_for(rooms, n)] for n in (0, 512, 513, 641)] == [
        480, 512, 520, 640,
    ]  # fmt: skip
    few = sampling.padded_sizes(256, 32 / 256)
    assert few == (26, 28, 30, 32, 32, 34, 36, 36, 38, 40, 44, 48, 64)
    assert set(sampling.padded_sizes(100, 1.0)) == {100}
    assert sampling.padded_sizes(10, 0.01)[-1] == 10


@pytest.mark.parametrize("room", [200, 20])
def test_steps_that_differ_are_asked_for_one_by_one(room, monkeypatch):
    """Whatever block is asked for: what a retry costs is known only after the trial before it."""
    single, plan = bound(ADAPTIVE)
    one = train(single, plan, Streams(0, CPU))
    assert len(one.ledger.entries) > 2  # there were retries
    monkeypatch.setattr(sampling, "padded_size", lambda size, rate: room)
    exact, _ = bound(ADAPTIVE)
    positions = []
    propose = AdaptiveSteps.propose

    def watched(self, state, draws, position):
        positions.append(int(position))
        return propose(self, state, draws, position)

    def on_block(progress, verdicts):
        assert len(verdicts) == 1

    monkeypatch.setattr(AdaptiveSteps, "propose", watched)
    two, again = in_blocks(exact, plan, 100, on_block)
    assert two.ledger == one.ledger
    assert bool(again) == (room == 20)
    assert positions == sorted(positions)
    assert positions[0] == 0 < positions[-1] < plan.length
    for name, value in flatten(one.state).items():
        torch.testing.assert_close(value, flatten(two.state)[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("room", [200, 20])
@pytest.mark.parametrize("block", [1, 7, 100])
def test_blocks_go_on_to_the_cap_like_single_trials(block, room, monkeypatch):
    """Also where batches overflow, among trials that count and among those that are dropped."""
    method = Dpsur(updates=8, noise_multiplier=20.0, batch_size=20, accept_ratio=1.5)
    single, shorter = bound(method)
    plan = shorter.hide_rejections("constant")
    one = train(single, plan, Streams(0, CPU))
    assert (one.ledger.trials, one.ledger.updates) == (plan.trials, 8)
    monkeypatch.setattr(sampling, "padded_size", lambda size, rate: room)
    exact, _ = bound(method)
    verdicts = []
    two, again = in_blocks(exact, plan, block, lambda _, made: verdicts.extend(made))
    assert two.ledger == one.ledger
    assert len(verdicts) == plan.trials
    accepted = [number for number, verdict in enumerate(verdicts, 1) if verdict.accept]
    assert len(accepted) == 8
    assert bool(again) == (room == 20)
    for name, value in flatten(one.state).items():
        torch.testing.assert_close(value, flatten(two.state)[name], rtol=1e-4, atol=1e-6)
    stopped = train(
        bound(method)[0], shorter, Streams(0, CPU)
    )  # the control: without the option it stops
    assert stopped.ledger.trials < plan.trials
    assert all(
        torch.equal(value, flatten(stopped.state)[name])
        for name, value in flatten(one.state).items()
    )


def fit(capture, method, **more):
    return dpsur.fit(
        small_model(),
        blobs(500),
        budget=BUDGET,
        method=method,
        test_set=blobs(50, seed=2),
        device="cuda",
        performance=Performance(capture=capture),
        seed=0,
        **more,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_captured_training_on_cuda(optimizer):
    method = Dpsur(
        updates=30, noise_multiplier=20.0, accept_ratio=2.0, optimizer=optimizer, average_decay=0.9,
        learning_rate=0.05,
    )  # fmt: skip
    eager, replayed = fit(False, method), fit(True, method)
    assert replayed.private.ledger.updates == 30
    rows = [row for row in replayed.private.rows if row["kind"] == "trial"]
    assert len(rows) == replayed.private.ledger.trials
    assert sum(row["accepted"] for row in rows) == 30
    again = fit(True, method)
    for name, value in replayed.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])
    assert eager.private.ledger.updates == 30


@pytest.mark.gpu
def test_captured_steps_that_differ():
    """The noise changes with every retry; a captured trial reads it where it lies."""
    eager, replayed, again = (fit(capture, ADAPTIVE) for capture in (False, True, True))
    assert len(replayed.private.ledger.entries) > 1  # there was a retry
    assert replayed.private.ledger == again.private.ledger == eager.private.ledger
    for name, value in replayed.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])
        torch.testing.assert_close(value, eager.model.state_dict()[name], rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_captured_runs_resume_exactly(tmp_path):
    method = Dpsur(updates=60, noise_multiplier=40.0, accept_ratio=2.0)
    whole = fit(True, method, out=tmp_path / "whole", intervals=Intervals(checkpoint_every=10))

    class Stop:
        def started(self, plan, progress):
            pass

        def evaluated(self, progress, scores, epsilon):
            pass

        def trials(self, progress, verdicts):
            if progress.ledger.trials >= 35:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(
            True,
            method,
            out=tmp_path / "b",
            intervals=Intervals(checkpoint_every=10),
            observers=[Stop()],
        )
    resumed = fit(
        True, method, out=tmp_path / "b", intervals=Intervals(checkpoint_every=10), resume=True
    )
    assert resumed.private.ledger == whole.private.ledger
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name])


@pytest.mark.gpu
def test_overflow_falls_back_to_exact_batches(monkeypatch):
    method = Dpsur(updates=30, noise_multiplier=20.0, accept_ratio=2.0, batch_size=100)
    monkeypatch.setattr(sampling, "padded_size", lambda size, rate: 96)
    small = fit(True, method)
    assert small.private.ledger.updates == 30


@pytest.mark.gpu
def test_captured_runs_go_on_to_the_cap():
    method = Dpsur(updates=30, noise_multiplier=20.0, accept_ratio=2.0)
    plain = fit(True, method)
    hidden = fit(True, method, hide_rejections="constant")
    assert plain.private.ledger.trials < hidden.private.ledger.trials == hidden.plan.trials
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, hidden.model.state_dict()[name])


class Wandering(nn.Module):
    """Moves its weights in memory, as recurrent layers do on CUDA with weights they are lent."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, inputs):
        if not self.training:
            weight = self.first.weight
            weight.data = weight.detach().clone()  # not counted as a change of the weight
        return self.second(torch.tanh(self.first(inputs)))


def test_a_model_that_moves_its_weights_is_refused():
    """Updates would be written to where the weights no longer are."""
    method = Dpsur(noise_multiplier=20.0, batch_size=20, updates=4, accept_ratio=1.5)
    problem = Problem(Wandering(), F.cross_entropy, blobs())
    settled, plan = method.resolve(200, BUDGET, "proven")
    procedure = settled.build(problem, plan)
    with pytest.raises(dpsur.UnsupportedModelError, match="moves its weights"):
        in_blocks(procedure, plan, 4)


def test_recurrent_layers_leave_lent_weights_where_they_are(monkeypatch):
    moved = []
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda self: moved.append(self))
    model = nn.LSTM(3, 4, batch_first=True)
    moved.clear()
    lent = {name: value.detach().clone() for name, value in model.named_parameters()}
    for training in (True, False):
        with mode(model, training=training):
            functional_call(model, lent, (torch.zeros(2, 5, 3),))
    assert not moved
    others = {name: value.clone() for name, value in lent.items()}
    functional_call(model, others, (torch.zeros(2, 5, 3),))
    assert moved  # the control: without the guard they do move them


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(20, 6), nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, tokens):
        return self.head(self.lstm(self.words(tokens))[0].mean(1))


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
def test_a_recurrent_network_learns_when_captured(capture):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(20, (4000, 7), generator=generator)
    labels = (tokens[:, 0] < 10).long()
    torch.manual_seed(0)
    model = Words()
    run = dpsur.fit(
        model, (tokens, labels), budget=Budget(1e4, 1e-4), test_set=(tokens, labels),
        method=Dpsur(updates=60, batch_size=1000, noise_multiplier=0.6, optimizer="adam",
                     learning_rate=0.02, accept_ratio=1.5),
        seed=0, device="cuda", performance=Performance(capture=capture),
    )  # fmt: skip
    assert run.scores["accuracy"] > 0.8
