"""Captured trials whose batches arrive from the host: the same trials as with records on the GPU.

On a CPU a replay makes the trial, so that buffers, padding and the order of reads are tested here.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

import dpsur
from dpsur.config import Performance
from dpsur.errors import InvalidInputError, NothingReleasedError
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples, HostExamples, place, stream
from dpsur.functional.tree import flatten
from dpsur.mechanism import captured_batches, cuda_graph_loop
from dpsur.mechanism import gaussian as sampling
from dpsur.mechanism.captured_batches import CapturedBatches, capture_obstacle
from dpsur.mechanism.cuda_graph_loop import CudaGraphLoop
from dpsur.mechanism.gaussian import exact_batch
from dpsur.mechanism.streams import BATCH, VAL_BATCH, Streams
from dpsur.mechanism.trial import Progress, make_trial, start
from dpsur.methods import Dpsgd, Dpsur
from dpsur.per_example import EngineReport
from dpsur.privacy.budget import Budget
from dpsur.runs.data import as_examples
from dpsur.runs.session import Session
from reproduction.loops import run_loop, train
from reproduction.methods import Dpagd
from tests.conftest import StopAt, blobs, small_model

CPU = torch.device("cpu")
BUDGET = Budget(3.0, 1e-4)
DPSGD = Dpsgd(updates=12, noise_multiplier=20.0, batch_size=20)
DPSUR = Dpsur(updates=8, noise_multiplier=20.0, batch_size=20, accept_ratio=1.5)
METHODS = {
    "dpsgd": DPSGD,
    "dpsur": DPSUR,
    "dpagd": Dpagd(batch_size=20, val_batch_size=20, updates=10, step_sizes=3, raise_by=0.5),
    "blocks": Dpsgd(gate="block", updates=5, batch_size=20, blocks=3, block_updates=3),
}


class Reader:
    """Reads records of `blobs`, and notes which batches were asked for and by which thread."""

    def __init__(self, records):
        self.records, self.sizes, self.threads, self.last = records, [], set(), None

    def __call__(self, rows):
        self.sizes.append(len(rows))
        self.last = threading.current_thread()
        self.threads.add(self.last)
        return self.records.select(rows)


def streamed(records=None):
    reader = Reader(blobs() if records is None else records)
    examples = stream(reader, len(reader.records))
    reader.sizes.clear()
    reader.threads.clear()
    return examples, reader


def on_host(kind):
    return streamed()[0] if kind == "streamed" else place(blobs(), CPU, limit=1)


def bound(method, records):
    settled, plan = method.resolve(len(records), BUDGET, "proven")
    return settled.build(Problem(small_model(), F.cross_entropy, records), plan), plan


def captured(procedure, plan, block, progress=None):
    progress = start(procedure) if progress is None else progress
    return CudaGraphLoop(procedure, procedure.padded(), plan, Streams(0, CPU), progress, block)


def assert_same(one, two):
    assert two.ledger == one.ledger
    for name, value in flatten(one.state).items():
        torch.testing.assert_close(value, flatten(two.state)[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "block", "sized"),
    [("memory", 1, False), ("memory", 5, True), ("streamed", 100, False), ("streamed", 5, True)],
)
@pytest.mark.parametrize("method", METHODS)
def test_captured_trials_on_host_records_are_those_on_device_records(
    method, kind, block, sized, monkeypatch
):
    """For every method that is captured, with one size of the padding and with several."""
    monkeypatch.setattr(cuda_graph_loop, "LEAST_WORK", 0.0 if sized else 1e12)
    exact, plan = bound(METHODS[method], blobs())
    one = train(exact, plan, Streams(0, CPU))
    procedure, _ = bound(METHODS[method], on_host(kind))
    loop = captured(procedure, plan, block)
    two = run_loop(loop, plan)
    assert loop._batches.read_from_host
    assert_same(one, two)


@pytest.mark.parametrize("method", ["dpsgd", "dpsur"])
def test_a_batch_that_is_larger_than_its_padding_is_taken_whole(method, monkeypatch):
    exact, plan = bound(METHODS[method], blobs())
    one = train(exact, plan, Streams(0, CPU))
    monkeypatch.setattr(sampling, "padded_size", lambda size, rate: 20)
    procedure, _ = bound(METHODS[method], on_host("memory"))
    loop, again = captured(procedure, plan, 3), []
    exactly = loop._exactly
    loop._exactly = lambda: again.append(1) or exactly()
    assert_same(one, run_loop(loop, plan))
    assert again


@pytest.mark.parametrize("offset", [0, 1])
def test_batches_have_the_bits_of_the_draws(offset):
    """Row by row, also where a purpose has drawn before in the same step."""
    records, host = blobs(), on_host("memory")
    batches, streams = CapturedBatches(Streams(3, CPU), sized=False), Streams(3, CPU)
    for step in range(1, 9):
        batches.load(step, 8)
        for purpose, rate in ((BATCH, 0.1), (VAL_BATCH, 0.3)):
            ours, plain = streams.at(step)[purpose], streams.at(step)[purpose]
            for drawn in (ours, plain):
                drawn.uniform(5 * offset)
            batch = batches.batch(host, rate, ours)
            wanted = exact_batch(records, rate, plain).examples
            found = batch.examples.select(batch.mask)
            assert torch.equal(found.inputs, wanted.inputs)
            assert torch.equal(found.targets, wanted.targets)
            left_out = batch.examples.select(~batch.mask)
            assert len(left_out)
            # valid for the model, and not what a larger batch has left there
            assert (left_out.inputs == wanted.inputs[0]).all()
            assert (left_out.targets == wanted.targets[0]).all()
            assert float(ours.uniform(1)) == float(plain.uniform(1))
    assert len(batches._feeds) == 2
    assert not any(batches.cut)


@pytest.mark.parametrize("method", ["dpsgd", "dpsur"])
def test_rows_that_only_pad_count_for_nothing_whatever_they_hold(method, monkeypatch):
    exact, plan = bound(METHODS[method], blobs())
    one = train(exact, plan, Streams(0, CPU))
    real = captured_batches._Feed.batch

    def spoiled(self, room):
        batch, drawn = real(self, room)
        batch.data.inputs[~batch.mask] = torch.nan
        return batch, drawn

    monkeypatch.setattr(captured_batches._Feed, "batch", spoiled)
    procedure, _ = bound(METHODS[method], on_host("memory"))
    assert_same(one, run_loop(captured(procedure, plan, 5), plan))


def test_samples_are_read_ahead_once_each_and_not_beyond_the_end():
    examples, reader = streamed()
    procedure, plan = bound(DPSGD, examples)
    loop = captured(procedure, plan, 5)
    run_loop(loop, plan)
    drawn = [
        len(exact_batch(blobs(), 0.1, Streams(0, CPU).at(step)[BATCH])) for step in range(1, 13)
    ]
    assert reader.sizes == drawn
    assert reader.threads == {threading.main_thread(), reader.last}  # after the first two steps
    assert reader.last is not threading.main_thread()


def test_no_more_than_the_last_updates_are_read_for():
    """A gate may reject, but trials after the last update would be read in vain."""
    examples, reader = streamed()
    procedure, plan = bound(DPSUR, examples)
    end = run_loop(captured(procedure, plan, 8), plan)
    made = 2 * end.ledger.trials
    assert made <= len(reader.sizes) <= made + 2


def test_the_next_step_is_read_while_a_trial_is_made():
    examples, reader = streamed()
    batches, streams = CapturedBatches(Streams(0, CPU), sized=False), Streams(0, CPU)
    batches.batch(examples, 0.1, streams.at(1)[BATCH])
    assert len(reader.sizes) == 1
    for step in (2, 3, 4):
        batches.load(step, 100)
        batches.resolve()
        assert len(reader.sizes) == step + 1
    # a step that is no trial was read in vain, and one that comes again is read again
    batches.load(6, 100)
    batches.resolve()
    assert len(reader.sizes) == 7
    batches.load(2, 2)
    batches.resolve()
    assert len(reader.sizes) == 8


def test_a_run_continues_from_the_middle():
    exact, plan = bound(DPSUR, blobs())
    one = train(exact, plan, Streams(0, CPU))
    procedure, _ = bound(DPSUR, on_host("memory"))
    progress = start(procedure)
    for _ in range(4):
        progress, _ = make_trial(procedure, plan, Streams(0, CPU), progress)
    loop = captured(procedure, plan, 3, Progress(progress.state, progress.ledger))
    assert_same(one, run_loop(loop, plan))


class FailsAt(Reader):
    """Fails when a batch is read for the n-th time."""

    def __init__(self, records, at, error):
        super().__init__(records)
        self.at, self.error = at, error

    def __call__(self, rows):
        found = super().__call__(rows)
        if len(self.sizes) == self.at:
            if isinstance(self.error, Exception):
                raise self.error
            return self.error(found)
        return found


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InvalidInputError("a worker has died"), "a worker has died"),
        (OSError("the disk is gone"), "the disk is gone"),
        (lambda found: Examples(found.inputs[:, :1], found.targets), "of several shapes"),
        (lambda found: Examples(found.inputs[:1], found.targets[:1]), "of several shapes"),
    ],
)
def test_an_error_of_the_reader_ends_the_run(error, message):
    reader = FailsAt(blobs(), 5, error)
    examples = stream(reader, 200)
    procedure, plan = bound(DPSGD, examples)
    loop = captured(procedure, plan, 2)
    with pytest.raises((InvalidInputError, OSError), match=message):
        run_loop(loop, plan)
    read = len(reader.sizes)
    examples.resolve()
    assert len(reader.sizes) == read == 5  # nothing more is tried
    with pytest.raises(NothingReleasedError, match="last checkpoint"):
        loop.progress  # noqa: B018


def test_an_interrupted_run_reads_no_more():
    examples, reader = streamed()
    procedure, plan = bound(DPSGD, examples)

    def interrupt(progress, verdicts):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_loop(captured(procedure, plan, 3), plan, interrupt)
    examples.resolve()
    read = len(reader.sizes)
    assert read <= 3 + 1
    examples.resolve()
    assert len(reader.sizes) == read


class Zeros(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, row):
        return torch.zeros(2), row % 3


INTERRUPTED = """
import sys
from reproduction.loops import run_loop
from dpsur.runs.data import as_examples
from tests.mechanism.test_captured_batches import DPSGD, Zeros, bound, captured
procedure, plan = bound(DPSGD, as_examples(Zeros(), "train_set", workers=2))
def interrupt(progress, verdicts):
    raise KeyboardInterrupt
try:
    run_loop(captured(procedure, plan, 3), plan, interrupt)
except KeyboardInterrupt:
    print("interrupted")
if sys.argv[1] == "error":
    raise RuntimeError("and it ends with an error")
"""


@pytest.mark.parametrize("end", ["return", "error"])
def test_a_process_ends_after_an_interrupted_run(end):
    """Neither the thread nor the workers keep it alive."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root)])
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, end],
        capture_output=True, text=True, timeout=120, check=False, cwd=root,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout == "interrupted\n"
    assert done.returncode == (end == "error")


class Ragged(Zeros):
    """Once it was checked, some of its records have another shape."""

    def __init__(self):
        self.changed = torch.zeros(1).share_memory_()  # for workers to see

    def __getitem__(self, row):
        record, target = super().__getitem__(row)
        return record[: 1 if self.changed and row >= 100 else 2], target


@pytest.mark.parametrize("workers", [0, 2])
def test_records_of_another_shape_are_named(workers):
    data = Ragged()
    examples = as_examples(data, "train_set", workers=workers)
    data.changed.fill_(1)
    with pytest.raises(InvalidInputError, match="of several shapes"):
        examples.select(torch.arange(50, 150))


def test_records_that_cannot_be_captured_are_named(monkeypatch):
    assert capture_obstacle(blobs(), [0.1]) is None
    assert capture_obstacle(on_host("memory"), [0.1]) is None
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    sparse = torch.eye(3).to_sparse()
    for inputs in (nested, sparse):
        records = HostExamples.__new__(HostExamples)
        for name, value in (("inputs", inputs), ("targets", None), ("device", CPU)):
            object.__setattr__(records, name, value)
        assert "not dense" in capture_obstacle(records, [0.1])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**5, 10**6))
    records = HostExamples(torch.zeros(1000, 8), torch.zeros(1000), torch.device("cuda"))
    assert capture_obstacle(records, [0.1]) is None
    assert "more than 25% of the free memory" in capture_obstacle(records, [0.5, 0.5])


def test_the_engine_report_says_why_trials_are_not_captured():
    report = EngineReport("one-pass", not_captured="the records are not dense")
    assert "trials are not captured as CUDA graphs: the records are not dense" in str(report)
    assert "captured" not in str(EngineReport("one-pass"))


def test_the_same_numbers_are_drawn_on_another_device():
    streams = Streams(5, CPU)
    other = streams.on(torch.device("meta")).on(CPU)
    assert torch.equal(streams.at(3)[BATCH].uniform(9), other.at(3)[BATCH].uniform(9))
    drawn = other.at(3)[BATCH]
    assert drawn.skip(5) == 0
    assert drawn.skip(1) == 8
    assert torch.equal(drawn.uniform(3), streams.at(3)[BATCH].uniform(15)[12:])


def fit(method, data, device="cuda", **speed):
    torch.manual_seed(0)
    return dpsur.fit(
        small_model(), data, budget=BUDGET, method=method, seed=0, device=device,
        performance=Performance(**speed),
    )  # fmt: skip


class Rows(Dataset):
    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, row):
        return self.records.inputs[row], int(self.records.targets[row])


ON_CUDA = {
    "dpsgd": Dpsgd(updates=40, noise_multiplier=20.0),
    "dpsur": Dpsur(updates=30, noise_multiplier=20.0, accept_ratio=2.0),
    "blocks": METHODS["blocks"],
    "dpagd": METHODS["dpagd"],
}


def weights(run):
    return torch.cat([value.flatten().cpu() for value in run.model.parameters()])


@pytest.mark.parametrize("method", ["dpsgd", "dpsur"])
def test_whole_runs_in_blocks_read_records_on_the_host(method, tmp_path, monkeypatch):
    """What CUDA does, without the graph: in memory, from workers, interrupted and resumed."""
    how, records = ON_CUDA[method], blobs()
    plain = fit(how, records, "cpu")
    monkeypatch.setattr(Session, "_may_capture", lambda self: True)
    runs = [fit(how, records, "cpu", data_bytes=1), fit(how, Rows(records), "cpu", workers=2)]
    options = {
        "budget": BUDGET, "method": how, "seed": 0, "device": "cpu", "out": tmp_path / "run",
        "intervals": dpsur.Intervals(checkpoint_every=7), "performance": Performance(data_bytes=1),
    }  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        dpsur.fit(small_model(), records, observers=[StopAt(14)], **options)
    runs.append(dpsur.fit(small_model(), records, resume=True, **options))
    for run in runs:
        assert run.private.ledger == plain.private.ledger
        torch.testing.assert_close(weights(run), weights(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "sized"),
    [("dpsgd", True), ("dpsur", False), ("dpsur", True), ("blocks", False), ("dpagd", False)],
)
def test_host_records_on_cuda(method, sized, tmp_path, monkeypatch):
    """In memory, from workers and from a file: captured, with the results of device records."""
    if sized:
        monkeypatch.setattr(cuda_graph_loop, "LEAST_WORK", 0.0)
    loops = []
    make = Session.loop
    monkeypatch.setattr(
        Session, "loop", lambda self, progress: loops.append(make(self, progress)) or loops[-1]
    )
    records, how = blobs(500), ON_CUDA[method]
    np.save(tmp_path / "x.npy", records.inputs.numpy())
    np.save(tmp_path / "y.npy", records.targets.numpy())
    mapped = tuple(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "xy")
    device = fit(how, records)
    eager = fit(how, records, capture=False, data_bytes=1)
    loops.clear()
    runs = [
        fit(how, records, data_bytes=1),
        fit(how, Rows(records), workers=2),
        fit(how, mapped),
        fit(how, records, data_bytes=1),
    ]
    assert torch.equal(weights(runs[0]), weights(runs[-1]))  # the same bits every time
    for run, loop in zip(runs, loops, strict=True):
        assert isinstance(loop, CudaGraphLoop)
        assert loop._batches.read_from_host
        assert run.engine.not_captured is None
        assert run.private.ledger == device.private.ledger == eager.private.ledger
        torch.testing.assert_close(weights(run), weights(device), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(weights(run), weights(eager), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["dpsgd", "dpsur"])
def test_no_buffer_is_overwritten_while_it_is_read(method, monkeypatch):
    """Batches that take longer to copy than a trial, and trials that take longer than a copy."""
    for width in (20_000, 4):
        torch.manual_seed(0)
        inputs = torch.randn(2000, width)
        records = Examples(inputs, (inputs[:, 0] > 0).long())
        found = []
        for limit in (10**10, 1):
            torch.manual_seed(0)
            run = dpsur.fit(
                torch.nn.Linear(width, 2), records, budget=BUDGET, method=ON_CUDA[method], seed=0,
                device="cuda", performance=Performance(data_bytes=limit),
            )  # fmt: skip
            found.append(run)
        assert found[0].private.ledger == found[1].private.ledger
        torch.testing.assert_close(weights(found[1]), weights(found[0]), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_overflow_on_cuda_with_host_records(monkeypatch):
    how = Dpsur(updates=30, noise_multiplier=20.0, accept_ratio=2.0, batch_size=100)
    whole = fit(how, blobs(500), data_bytes=1)
    monkeypatch.setattr(sampling, "padded_size", lambda size, rate: 96)
    small = fit(how, blobs(500), data_bytes=1)
    assert small.private.ledger == whole.private.ledger
    torch.testing.assert_close(weights(small), weights(whole), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_batches_without_room_on_the_gpu_are_not_captured(monkeypatch):
    monkeypatch.setattr(captured_batches, "_PART_FOR_BATCHES", 0.0)
    run = fit(ON_CUDA["dpsgd"], blobs(500), data_bytes=1)
    assert "of the free memory" in run.engine.not_captured
