"""What a user of `fit` meets: objects that print well, refusals in one line, errors as they are."""

import logging
import traceback

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import dpsur
from dpsur.cli import main
from dpsur.functional.records import Examples
from reproduction import methods
from tests.conftest import blobs, small_model

BUDGET = dpsur.Budget(epsilon=3.0, delta=1e-4)
X, Y = blobs().inputs, blobs().targets
METHOD = dpsur.Dpsgd(updates=2)


def fit(model=None, data=(X, Y), **changes):
    options = {"budget": BUDGET, "method": METHOD, **changes}
    return dpsur.fit(small_model() if model is None else model, data, **options)


# --- 10: what is printed --------------------------------------------------------------------------


def test_a_run_prints_in_a_few_lines_and_tells_nothing_private(tmp_path):
    run = fit(method=dpsur.Dpsur(noise_multiplier=20.0, accept_ratio=1.5, updates=5), seed=0)
    text = repr(run)
    assert len(text.splitlines()) <= 4
    assert len(text) < 300
    for wanted in ("dpsur", "epsilon", "delta 0.0001", "5 updates", "not saved"):
        assert wanted in text
    for secret in ("tensor", "Ledger", "trials", "loss_difference", "Linear"):
        assert secret not in text
    run.save(tmp_path / "out")
    assert str(tmp_path / "out" / "release") in repr(run)
    assert str(tmp_path / "two" / "release") in repr(fit(out=tmp_path / "two"))


class Keeps:
    def __init__(self):
        self.found = []

    def started(self, plan, progress):
        self.found += [plan, progress, progress.state, progress.ledger]

    def trials(self, progress, verdicts):
        self.found += verdicts

    def evaluated(self, progress, scores, epsilon):
        pass


def test_every_public_object_prints_short():
    keeps = Keeps()
    run = fit(observers=[keeps], test_set=(X, Y))
    settled = run.method
    objects = [run, run.private, run.plan, run.statement, run.engine, settled, BUDGET, *keeps.found]
    objects += [dpsur.Intervals(), dpsur.Performance(), blobs(), *(kind() for kind in KINDS)]
    for one in objects:
        assert len(repr(one)) < 400, type(one)
        assert "tensor(" not in repr(one), type(one)
    assert repr(dpsur.Dpsgd(updates=2)) == "Dpsgd(updates=2)"
    assert repr(dpsur.Dpsur()) == "Dpsur()"
    assert "private" in repr(run.private)
    assert run.statement["guarantee"]["delta"] == 1e-4


KINDS = (dpsur.Dpsur, dpsur.Dpsgd, methods.DpsgdTs, dpsur.DpsgdHf, methods.Dpis, methods.Dpagd)


# --- 24: evaluation mode --------------------------------------------------------------------------


def test_the_released_model_is_in_evaluation_mode(tmp_path):
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    run = fit(model)
    assert not any(module.training for module in run.model.modules())
    assert torch.equal(run.model(X), run.model(X))
    assert model.training
    run.save(tmp_path / "out")
    loaded = dpsur.load(tmp_path / "out", nn.Sequential(*model)).module
    assert not loaded.training
    assert torch.equal(loaded(X), run.model(X))


# --- 25: several processes ------------------------------------------------------------------------


def test_several_processes_without_torchrun_are_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(dpsur.InvalidInputError, match="WORLD_SIZE is 4, but RANK .*torchrun"):
        fit()
    assert main(["train", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "WORLD_SIZE is 4" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    fit()


# --- 26: records that change ----------------------------------------------------------------------


class Augmented(Dataset):
    def __init__(self, rate=0.5, draw=torch.rand):
        self.rate, self.draw = rate, draw

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        flip = float(self.draw(1)[0]) < self.rate
        return (-X[index] if flip else X[index]), Y[index]


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand])
def test_random_augmentation_is_refused(draw):
    with pytest.raises(dpsur.InvalidInputError, match="train_set.*read twice.*random") as caught:
        fit(data=Augmented(draw=draw))
    assert "\n" not in str(caught.value)
    with pytest.raises(dpsur.InvalidInputError, match="test_set.*read twice"):
        fit(test_set=Augmented(draw=draw))
    with pytest.raises(dpsur.InvalidInputError, match="read twice"):
        fit(data=torch.utils.data.Subset(Augmented(), [3, 4]))


def test_reading_twice_changes_no_random_numbers():
    torch.manual_seed(3)
    np.random.seed(3)
    data = Augmented(rate=0.0)
    for index in range(len(data)):
        data[index]
    expected = torch.rand(3)
    torch.manual_seed(3)
    fit(data=data)
    assert torch.equal(torch.rand(3), expected)


# --- 27: the engine -------------------------------------------------------------------------------


class Odd(nn.Module):
    """Looks at values, and folds examples in an order that no rule expects."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        parts = x.view(len(x), 2, -1).transpose(0, 1).flatten(0, 1) * self.scale[:1]
        whole = parts.view(2, len(x), -1).transpose(0, 1).flatten(1)
        return whole if bool(x.isfinite().any()) else x * 0 + self.scale.sum()


def test_a_fast_engine_is_named(caplog):
    with caplog.at_level(logging.INFO, logger="dpsur"):
        run = fit()
    assert run.engine.name == "one-pass"
    assert run.engine.reason is None
    assert "one-pass" in str(run.engine)
    assert any("one-pass" in record.getMessage() for record in caplog.records)
    assert not any(record.levelno >= logging.WARNING for record in caplog.records)


def test_a_slow_engine_says_why(caplog):
    model = nn.Sequential(Odd(), nn.Linear(2, 3))
    run = fit(model)
    assert run.engine.name == "one-by-one"
    assert run.engine.reason.startswith("module 0 (Odd): ")
    assert "data-dependent control flow" in run.engine.reason
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert run.engine.reason in said


def test_a_slow_engine_is_warned_of_once(caplog):
    """Gradients, losses of tests and metrics run by it, in batches of several sizes."""
    model, method = nn.Sequential(Odd(), nn.Linear(2, 3)), dpsur.Dpsur(updates=2)
    fit(model, method=method, test_set=blobs(30))
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) == 1


def test_a_loss_that_cannot_be_batched_says_why(caplog):
    run = fit(loss=lambda o, t: F.cross_entropy(o, t) + float(o.detach().sum()))
    assert run.engine.name == "one-by-one"
    assert ".item()" in run.engine.reason
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "model or loss runs one record at a time" in said


def test_no_engine_is_needed_without_privacy():
    assert "nonprivate" in str(fit(method=dpsur.Nonprivate(updates=2)).engine)


# --- 29: arguments --------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        yield X[0], Y[0]


BAD = [
    (lambda: fit(epocs=3), "epocs"),
    (lambda: fit(max_update=3), "max_update.*did you mean max_updates"),
    (lambda: fit(epsilon=3), r"epsilon of fit; write budget=dpsur\.Budget"),
    (lambda: fit(learning_rate=0.1), r"write method=dpsur\.Dpsgd\(learning_rate=\.\.\.\)"),
    (lambda: fit(accept_ratio=2), r"write method=dpsur\.\w+\(accept_ratio=\.\.\.\)"),
    (lambda: fit(sede=3), "sede.*did you mean seed"),
    (lambda: dpsur.Dpsgd(learningrate=1.0), "learningrate.*did you mean learning_rate"),
    (lambda: dpsur.Dpsur(lr=1.0), "unknown argument lr of Dpsur"),
    (lambda: dpsur.Budget(epsilon=1.0, delte=1e-5), "delte.*did you mean delta"),
    (lambda: dpsur.Budget(epsilon=1.0), "Budget needs the argument delta"),
    (lambda: dpsur.Intervals(checkpoint=3), "checkpoint.*did you mean checkpoint_every"),
    (lambda: dpsur.Performance(tf23=True), "tf23.*did you mean tf32"),
    (lambda: fit(budget="3.0"), "budget must be a dpsur.Budget, got '3.0'"),
    (lambda: fit(budget=dpsur.Budget), "budget must be a dpsur.Budget, got the class Budget"),
    (lambda: fit(budget=(3.0, 1e-5)), "budget must be a dpsur.Budget"),
    (
        lambda: dpsur.fit(small_model(), (X, Y), budget=3.0),
        "budget must be a dpsur.Budget, got 3.0",
    ),
    (lambda: dpsur.fit(small_model(), (X, Y)), "fit needs the argument budget"),
    (lambda: dpsur.fit(small_model()), "fit needs the argument budget"),
    (
        lambda: fit(intervals=dpsur.Intervals),
        "intervals must be a dpsur.Intervals, got the class Intervals",
    ),
    (lambda: fit(intervals=10), "intervals must be a dpsur.Intervals, got 10"),
    (lambda: fit(performance="fast"), "performance must be a dpsur.Performance, got 'fast'"),
    (lambda: fit(observers=Keeps()), "observers must be a list"),
    (lambda: fit(observers=[Keeps]), "observers.*the class Keeps"),
    (lambda: fit(observers=[print]), "observers.*started"),
    (lambda: fit(device=None), "device None"),
    (lambda: fit(out=3), "out must be a path"),
    (lambda: fit(data=DataLoader(TensorDataset(X, Y))), r"DataLoader.*loader\.dataset"),
    (lambda: fit(data=Stream()), "map-style data set.*got Stream"),
    (lambda: fit(data=TensorDataset), "train_set is the class TensorDataset"),
    (lambda: fit(data=X), r"train_set.*one tensor.*\(inputs, targets\)"),
    (lambda: fit(data=X.numpy()), r"train_set.*one array.*\(inputs, targets\)"),
    (
        lambda: fit(data=pd.DataFrame({"a": [1]})),
        r"train_set is a data frame.*pass schema=dpsur\.Schema",
    ),
    (
        lambda: fit(data=(X, X[:, :1]), model=nn.Linear(X.shape[1], 1)),
        "one output, and the cross entropy of a single class is always 0; pass loss=",
    ),
    (lambda: fit(data={"x": X, "y": Y}), r"\(inputs, targets\).*got dict"),
    (lambda: fit(data=None), r"train_set.*NoneType"),
    (lambda: fit(data="mnits"), r"unknown task 'mnits'; choose one of .*images:DIR for your"),
    (lambda: fit(data=(X, Y, Y)), r"train_set.*3 parts.*\(inputs, targets\)"),
    (lambda: fit(data=([[1.0, 2.0], [3.0]], [0, 1])), "train_set holds what cannot be made"),
    (lambda: fit(test_set=DataLoader(TensorDataset(X, Y))), r"test_set.*loader\.dataset"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_what_cannot_be_used_is_refused_in_one_line(call, message):
    with pytest.raises(dpsur.InvalidInputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_arrays_lists_and_frames_are_records():
    wanted = fit(seed=0).model[0].weight
    frame = pd.DataFrame(X.numpy())
    for data in (
        (X.tolist(), Y.tolist()),
        [X.numpy(), Y.tolist()],
        (X, Y.numpy()),
        (frame, pd.Series(Y.numpy())),
        list(zip(X, Y, strict=True)),
        [(x, int(y)) for x, y in zip(X.tolist(), Y, strict=True)],
        Examples(X, Y),
    ):
        assert torch.equal(fit(data=data, seed=0).model[0].weight, wanted), type(data)


def test_unknown_arguments_are_type_errors_too():
    """As Python's own are."""
    with pytest.raises(TypeError):
        fit(epocs=3)


# --- 30: errors of a user -------------------------------------------------------------------------


class MineError(Exception):
    pass


class Broken(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.layer, self.error = nn.Linear(2, 3), error

    def forward(self, x):
        self.fail_here()
        return self.layer(x)

    def fail_here(self):
        raise self.error


ERRORS = [ValueError("boom"), RuntimeError("boom"), TypeError("boom"), KeyError("boom")]
ERRORS += [IndexError("boom"), AssertionError("boom"), MineError("boom"), RuntimeError()]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_in_a_model_comes_through(error):
    with pytest.raises(type(error)) as caught:
        fit(Broken(error))
    assert_comes_through(caught.value, error)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_in_a_loss_comes_through(error):
    def loss(outputs, targets):
        fail_here()

    def fail_here():
        raise error

    with pytest.raises(type(error)) as caught:
        fit(loss=loss)
    assert_comes_through(caught.value, error)


def assert_comes_through(found, error):
    assert type(found) is type(error)
    assert found.args == error.args
    assert "fail_here" in [frame.name for frame in traceback.extract_tb(found.__traceback__)]
    chain = "".join(traceback.format_exception(found))
    assert "During handling" not in chain
    assert "direct cause" not in chain


class Fails:
    """A loss that fails in the middle of training, after the checks."""

    armed = False

    def __call__(self, outputs, targets):
        if KeepsArmed.armed:
            raise RuntimeError("late")
        return F.cross_entropy(outputs, targets)


class KeepsArmed(Keeps):
    armed = False

    def started(self, plan, progress):
        type(self).armed = True


def test_an_error_while_training_comes_through(monkeypatch):
    monkeypatch.setattr(KeepsArmed, "armed", False)
    with pytest.raises(RuntimeError, match="late") as caught:
        fit(loss=Fails(), observers=[KeepsArmed()])
    assert "During handling" not in "".join(traceback.format_exception(caught.value))


class Shape(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x)


def test_a_wrong_shape_says_what_the_records_are():
    with pytest.raises(dpsur.UnsupportedModelError, match=r"inputs of shape \(2, 2\)"):
        fit(nn.Linear(5, 3))
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        fit(Shape())
    assert any("inputs of shape (2, 2)" in note for note in caught.value.__notes__)
