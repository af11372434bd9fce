"""Random loops, right and wrong ones: what is charged is never less than what was really drawn.

An independent recorder notes every draw of noise with its address, every record that was read and
every change of the weights. Epsilon is recomputed from its notes by another library.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

import dpsur
from dpsur.mechanism import streams
from tests.engine.helpers import linear_model, private, records

accountants = pytest.importorskip("opacus.accountants", reason="needs the extra dev: opacus")

RECORDS = 40
ACTIONS = (
    *("step", "step", "step", "step twice", "backward twice", "skip", "peek", "evaluate"),
    *("split", "clip", "end the epoch", "train in evaluation mode", "forget backward"),
    *("use half of the records", "closure", "zero the gradients"),
)


class Recorder(Dataset):
    """Reads like the data set, and notes what was read, drawn and changed."""

    def __init__(self, monkeypatch, model):
        self.data, self.model = records(RECORDS), model
        self.read, self.noise, self.changes = [], [], 0
        self._last = self._weights()
        for name in ("normal", "add_normal"):
            monkeypatch.setattr(streams.Stream, name, self._noted(getattr(streams.Stream, name)))

    def _noted(self, plain):
        def draw(stream, *args, **options):
            if stream.purpose in (streams.NOISE, streams.VAL_NOISE):
                self.noise.append((stream.purpose, int(stream.step), stream._next))
            return plain(stream, *args, **options)

        return draw

    def __len__(self):
        return RECORDS

    def __getitem__(self, index):
        self.read.append(index)
        return self.data[index]

    def _weights(self):
        return torch.cat([value.detach().flatten() for value in self.model.parameters()]).clone()

    def look(self):
        """Count a change of the weights."""
        now = self._weights()
        self.changes += not torch.equal(now, self._last)
        self._last = now


def perform(action, model, optimizer, batch):
    """What a loop does with one batch; False ends the epoch."""
    x, y = batch
    if action == "skip":
        return True
    if action == "end the epoch":
        return False
    if action == "evaluate":
        model.eval()
        F.cross_entropy(model(x), y)
        model.train()
    if action == "train in evaluation mode":
        model.eval()
    if action == "use half of the records":
        x, y = x[: len(x) // 2 + 1], y[: len(y) // 2 + 1]

    def closure():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    if action == "closure":
        optimizer.step(closure)
        return True
    optimizer.zero_grad()
    if action == "split":
        for part, target in zip(x.split(3), y.split(3), strict=True):
            F.cross_entropy(model(part), target).backward()
    elif action != "forget backward":
        closure()
    if action == "backward twice":
        closure()
    if action == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if action == "zero the gradients":
        optimizer.zero_grad()
    optimizer.step()
    if action == "step twice":
        optimizer.step()
    return True


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    actions=st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=14),
    largest=st.sampled_from([None, 2, 5]),
    gated=st.booleans(),
    adam=st.booleans(),
)
def test_the_ledger_covers_what_was_really_drawn(actions, largest, gated, adam):
    with pytest.MonkeyPatch.context() as monkeypatch:
        model = linear_model()
        recorder = Recorder(monkeypatch, model)
        gate = dpsur.LossGate(lambda m, b: F.cross_entropy(m(b[0]), b[1]), val_batch_size=10)
        kind = torch.optim.Adam if adam else torch.optim.SGD
        engine, model, optimizer, loader = private(
            model,
            recorder,
            batch_size=8,
            optimizer=kind(model.parameters(), lr=0.1),
            steps=9,
            max_physical_batch_size=largest,
            gate=gate if gated else None,
        )
        remaining = list(actions)
        while remaining:
            try:
                for batch in loader:
                    recorder.look()
                    model.train()
                    if not remaining or not perform(remaining.pop(), model, optimizer, batch):
                        break
                    recorder.look()
            except (dpsur.InvalidInputError, dpsur.DpsurError) as error:
                recorder.look()
                if isinstance(error, dpsur.BudgetError):
                    break
        recorder.look()
    check(recorder, engine, gated)


def check(recorder, engine, gated):
    """No noise is drawn twice, nothing moves without noise, and everything drawn is charged."""
    updates = [step for purpose, step, _ in recorder.noise if purpose == streams.NOISE]
    tests = [step for purpose, step, _ in recorder.noise if purpose == streams.VAL_NOISE]
    charged = engine.accountant.steps
    assert len(set(updates)) == len(updates)
    assert len(set(tests)) == len(tests)
    assert recorder.changes <= len(updates) <= charged <= 9
    assert tests == (updates if gated else [])
    if not charged or gated:
        return
    peer = accountants.PRVAccountant()
    peer.history = [(1.0, 1 / 5, len(updates))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert peer.get_epsilon(delta=1e-5) <= 1.01 * engine.get_epsilon(1e-5)
    assert engine.get_epsilon(1e-5) <= engine.guarantee(1e-5) + 1e-9


def test_the_recorder_notices_a_loop_that_is_charged_too_little(monkeypatch):
    """The mutant: steps are charged as if their noise were twice as large."""
    model = linear_model()
    recorder = Recorder(monkeypatch, model)
    engine, model, optimizer, loader = private(model, recorder, batch_size=8)
    honest = engine.accountant.book

    def cheap(step):
        honest(dpsur.SampledGaussian(step.update.sample_rate, 2 * step.update.noise_multiplier))

    monkeypatch.setattr(engine.accountant, "book", cheap)
    for batch in loader:
        perform("step", model, optimizer, batch)
        recorder.look()
    with pytest.raises(AssertionError):
        check(recorder, engine, gated=False)


def test_batches_have_the_rate_that_is_charged(monkeypatch):
    """Poisson: the mean and the spread of the sizes, within five standard errors."""
    model = linear_model()
    recorder = Recorder(monkeypatch, model)
    engine, _, _, loader = private(model, recorder, batch_size=8)
    sizes, rounds = [], 300
    sampler = loader.poisson
    sampler.steps = range(1, rounds + 1)
    drawn = list(sampler)
    sizes = torch.tensor([float(len(rows)) for rows in drawn])
    expected = engine.expected_batch_size
    spread = (expected * (1 - loader.sample_rate)) ** 0.5
    assert abs(float(sizes.mean()) - expected) <= 5 * spread / rounds**0.5
    assert abs(float(sizes.std()) / spread - 1) <= 5 / (2 * rounds) ** 0.5
    joined = torch.zeros(RECORDS)
    for rows in drawn:
        joined[rows] += 1
    assert bool(
        ((joined / rounds - loader.sample_rate).abs() <= 5 * (0.2 * 0.8 / rounds) ** 0.5).all()
    )
