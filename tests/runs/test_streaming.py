"""Records that do not fit in memory: streamed from files and data sets, with the same results."""

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import dpsur
from dpsur.functional.records import Examples, StreamedExamples
from dpsur.runs.data import IDENTIFYING, as_examples, identifying, is_mapped
from reproduction.bench import large_data
from tests.conftest import blobs, small_model

BUDGET = dpsur.Budget(epsilon=8.0, delta=1e-4)
X, Y = blobs().inputs, blobs().targets


class Counting(Dataset):
    """Gives records one by one, and counts how often each is read in this process."""

    def __init__(self, inputs=X, targets=Y):
        self.inputs, self.targets = inputs, targets
        self.reads = np.zeros(len(inputs), int)
        self.lengths = 0

    def __len__(self):
        self.lengths += 1
        return len(self.inputs)

    def __getitem__(self, row):
        self.reads[row] += 1
        return self.inputs[row], int(self.targets[row])


def write(tmp_path, inputs=X, targets=Y):
    np.save(tmp_path / "x.npy", inputs.numpy())
    np.save(tmp_path / "y.npy", targets.numpy())
    return tuple(np.load(tmp_path / name, mmap_mode="r") for name in ("x.npy", "y.npy"))


def fit(data, method, **changes):
    torch.manual_seed(0)
    return dpsur.fit(small_model(), data, budget=BUDGET, method=method, seed=0, **changes)


def weights(run):
    return torch.cat([value.flatten() for value in run.model.parameters()])


METHODS = [
    dpsur.Dpsgd(updates=6, noise_multiplier=4.0),
    dpsur.Dpsur(updates=4, noise_multiplier=20.0, accept_ratio=1.5),
    dpsur.Dpsgd(gate="block", updates=40),
]


@pytest.mark.parametrize(
    "method",
    METHODS,
    ids=lambda method: f"{method.name}-{method.gate}" if hasattr(method, "gate") else method.name,
)
def test_streamed_records_train_the_same_model(tmp_path, method):
    held = fit((X, Y), method, test_set=(X, Y))
    arrays = write(tmp_path)
    for data, speed in (
        (arrays, None),
        (Counting(), dpsur.Performance(workers=0)),
    ):
        run = fit(data, method, test_set=data, performance=speed)
        torch.testing.assert_close(weights(run), weights(held), rtol=1e-5, atol=1e-6)
        assert run.scores == pytest.approx(held.scores, rel=1e-5)


def test_workers_read_the_same_records():
    method = METHODS[0]
    run = fit(Counting(), method, performance=dpsur.Performance(workers=2))
    torch.testing.assert_close(weights(run), weights(fit((X, Y), method)), rtol=1e-5, atol=1e-6)
    gc.collect()  # ends the workers


def test_only_what_is_drawn_is_read():
    data = Counting()
    examples = as_examples(data, "train_set", workers=0)
    assert isinstance(examples, StreamedExamples)
    assert data.lengths == 1
    data.reads[:] = 0
    batch = examples.select(torch.tensor([3, 5]))
    assert data.reads.sum() == 2
    assert torch.equal(batch.inputs, X[[3, 5]])
    assert torch.equal(batch.targets, Y[[3, 5]])
    parts = list(examples.parts(100))
    assert torch.equal(torch.cat([part.inputs for part in parts]), X)
    # what stands in for the values takes no memory, and no value of a record
    assert examples.inputs.shape == X.shape
    assert examples.inputs.untyped_storage().nbytes() == X[0].nbytes
    assert examples.inputs.isnan().all()


def test_all_records_are_checked_once_and_then_only_batches_are_read():
    data = Counting()
    fit(
        data,
        dpsur.Dpsgd(updates=3, noise_multiplier=20.0, batch_size=4),
        performance=dpsur.Performance(workers=0),
    )
    assert data.reads.min() >= 1
    # checked once, some twice for random augmentation, and five batches of about four
    assert data.reads.sum() < len(X) + 100 + 5 * 16


def test_the_next_batch_is_read_while_the_device_computes():
    data = Counting()
    readers = set()
    first = data.__class__.__getitem__

    class Noting(Counting):
        def __getitem__(self, row):
            readers.add(threading.current_thread() is threading.main_thread())
            return first(self, row)

    fit(Noting(), METHODS[0], performance=dpsur.Performance(workers=0))
    assert readers == {True, False}


def test_small_data_sets_are_held_and_large_ones_are_not():
    assert type(as_examples(Counting(), "train_set")) is Examples
    few = X.nbytes // 2
    assert isinstance(as_examples(Counting(), "train_set", held_bytes=few), StreamedExamples)
    with pytest.raises(dpsur.InvalidInputError, match="workers must be a whole number"):
        dpsur.Performance(workers=-1)


def test_arrays_in_files_are_recognised_and_converted(tmp_path):
    x, y = write(tmp_path, X.double())
    assert is_mapped(x)
    assert is_mapped(x[3:, ::2])
    assert not is_mapped(X.numpy())
    (tmp_path / "large").write_bytes(bytes(2**21))
    for shared in (False, True):
        name, size = str(tmp_path / "large"), 2**19
        assert is_mapped(torch.from_file(name, shared=shared, size=size, dtype=torch.float32))
    torch.save(torch.zeros(2**19), tmp_path / "saved")
    assert is_mapped(torch.load(tmp_path / "saved", mmap=True))
    assert not is_mapped(torch.zeros(2**19))
    assert not is_mapped(torch.zeros(2**19).share_memory_())
    examples = as_examples((x, y), "train_set")
    assert examples.inputs.dtype == torch.float32
    assert torch.equal(examples.part(slice(2, 5)).inputs, X[2:5])
    pair = as_examples(({"a": x, "b": x}, y), "train_set")
    assert torch.equal(pair.select(torch.tensor([7])).inputs["b"], X[7:8])


def test_bad_records_are_found_before_training(tmp_path):
    bad = X.clone()
    bad[17] = float("nan")
    with pytest.raises(dpsur.InvalidInputError, match="hold NaN or infinity"):
        fit(write(tmp_path, bad), METHODS[0])
    labels = Y.clone()
    labels[11] = 99
    for data in (write(tmp_path, X, labels), Counting(X, labels)):
        with pytest.raises(dpsur.InvalidInputError, match="has no output for") as found:
            fit(data, METHODS[0], performance=dpsur.Performance(workers=0))
        assert "99" not in str(found.value)

    class Ragged(Counting):
        def __getitem__(self, row):
            record, target = super().__getitem__(row)
            return record[:1] if row == 20 else record, target

    with pytest.raises(dpsur.InvalidInputError, match="of several shapes"):
        fit(Ragged(), METHODS[0], performance=dpsur.Performance(workers=0))
    images = np.lib.format.open_memmap(tmp_path / "i.npy", "w+", np.float32, (20, 1, 28, 28))
    with pytest.raises(dpsur.InvalidInputError, match="but train_set is streamed"):
        fit((images, np.zeros(20, int)), METHODS[0], features="scattering")


def test_random_augmentation_is_refused_here_too():
    class Augmented(Counting):
        def __getitem__(self, row):
            record, target = super().__getitem__(row)
            return record + torch.randn(record.shape), target

    with pytest.raises(dpsur.InvalidInputError, match="random augmentation"):
        fit(Augmented(), METHODS[0], performance=dpsur.Performance(workers=0))


class Dying(Counting):
    def __getitem__(self, row):
        if row == 77 and os.getpid() != PARENT:
            os._exit(1)
        return super().__getitem__(row)


PARENT = os.getpid()


def test_a_worker_that_dies_ends_the_run_with_a_remedy():
    with pytest.raises(dpsur.InvalidInputError, match="a worker .* has died"):
        fit(Dying(), METHODS[0], performance=dpsur.Performance(workers=1))


def test_streamed_records_are_identified_by_some_of_them(tmp_path):
    arrays = write(tmp_path)
    first = identifying(as_examples(arrays, "train_set"))
    assert len(first["inputs"]) <= IDENTIFYING
    assert int(first["count"]) == len(X)
    method = dpsur.Dpsgd(updates=6, noise_multiplier=4.0)
    stopping = dpsur.Intervals(checkpoint_every=2)

    class Stop(Exception):
        pass

    class Stopper:
        def started(self, plan, progress): ...

        def evaluated(self, progress, scores, epsilon): ...

        def trials(self, progress, verdicts):
            if progress.ledger.trials == 4:
                raise Stop

    with pytest.raises(Stop):
        fit(arrays, method, out=tmp_path / "run", intervals=stopping, observers=[Stopper()])
    other = write(tmp_path, X.flip(0))
    with pytest.raises(dpsur.CheckpointError, match="other records"):
        fit(other, method, out=tmp_path / "run", intervals=stopping, resume=True)
    arrays = write(tmp_path)
    run = fit(arrays, method, out=tmp_path / "run", intervals=stopping, resume=True)
    torch.testing.assert_close(weights(run), weights(fit((X, Y), method)), rtol=1e-5, atol=1e-6)


ON_LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


@ON_LINUX
def test_memory_stays_flat_on_a_file_of_a_gigabyte():
    row = large_data.memory_row(1.0, width=2000)
    assert row["file_bytes"] > 1e9
    assert row["peak_bytes"] - row["small_run_bytes"] < 300e6


@ON_LINUX
@pytest.mark.slow
def test_memory_stays_flat_on_a_file_of_20_gigabytes():
    row = large_data.memory_row(20.0)
    assert row["file_bytes"] > 20e9
    assert row["peak_bytes"] - row["small_run_bytes"] < 300e6


def test_batches_are_read_about_as_fast_as_by_a_data_loader():
    row = large_data.loader_row(workers=0, count=600, batches=4)
    assert row["ratio"] > 0.4  # two thirds of what was measured, on a machine that others use


def test_the_figures_of_the_page_are_those_of_the_rows():
    page = large_data.PAGE.read_text(encoding="utf-8")
    rows = large_data.read_rows(large_data.ROWS)
    assert large_data.rendered(page, rows) == page
    (memory,) = (row for row in rows if row["kind"] == "memory")
    assert memory["file_bytes"] > 20e9
    assert memory["peak_bytes"] - memory["small_run_bytes"] < 300e6


def test_a_model_of_several_inputs_is_streamed():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(X.shape[1], 3)

        def forward(self, a, b):
            return self.one(a) + self.one(b)

    class Pairs(Counting):
        def __getitem__(self, row):
            record, target = super().__getitem__(row)
            return {"a": record, "b": record}, target

    run = dpsur.fit(
        Both(), Pairs(), budget=BUDGET, method=METHODS[0], performance=dpsur.Performance(workers=0)
    )
    assert run.statement["dataset_size"] == len(X)
