"""Whatever cannot work is told at once, by one sentence, before a record is trained on."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.functional.records import Examples
from dpsur.runs.data import check_tokens
from tests.conftest import blobs, small_model

BUDGET = dpsur.Budget(epsilon=3.0, delta=1e-4)
X, Y = blobs().inputs, blobs().targets
WEIGHTS = torch.tensor([1.0, 5.0, 0.0])


def forbidden(*_, **__):
    pytest.fail("a trial was made")


@pytest.fixture
def no_trials(monkeypatch):
    monkeypatch.setattr("dpsur.runs.session.Session.run", forbidden)


def fit(model=None, data=(X, Y), **changes):
    options = {"budget": BUDGET, "method": dpsur.Dpsgd(updates=2), **changes}
    return dpsur.fit(small_model() if model is None else model, data, **options)


def token_model(rows=20, **options):
    layers = (nn.Embedding(rows, 4, **options), nn.Flatten(), nn.Linear(12, 3))
    return nn.Sequential(*layers)


def tokens(most=20):
    found = torch.randint(0, most, (200, 3), generator=torch.Generator().manual_seed(0))
    found[17, 1] = most - 1
    return found


BAD = [
    ({"method": "dpsur"}, "method must be an instance.*'dpsur'.*choose one of dpsur.Dpsur"),
    ({"method": dpsur.Dpsur}, "got the class Dpsur"),
    ({"budget": 3.0}, "budget must be a dpsur.Budget, got 3.0; write dpsur.Budget"),
    ({"budget": dpsur.Budget(math.inf, 1e-5)}, "epsilon must be finite.*method nonprivate"),
    ({"seed": "a"}, "seed must be a whole number or None, got 'a'"),
    ({"loss": 3}, "loss must be a function such as F.cross_entropy.*got 3"),
    ({"loss": "ce"}, "got 'ce'"),
    ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss.*CrossEntropyLoss()"),
    ({"loss": lambda o, t: 1.0}, "must return a tensor of one number, got float"),
    ({"loss": lambda o, t: o}, r"must return one number, got the shape \(1, 3\).*\.mean\(\)"),
    ({"loss": lambda o, t: torch.tensor(1.0)}, "the loss has no gradient"),
    ({"loss": lambda o, t: F.cross_entropy(o.detach(), t)}, "the loss has no gradient"),
    ({"loss": lambda o, t: F.cross_entropy(o, t) * math.nan}, "the loss is nan"),
    ({"loss": F.binary_cross_entropy}, "the loss cannot be computed"),
    ({"data": (X, Y.float())}, r"labels of train_set are of type torch.float32.*\.long\(\)"),
    ({"data": (X, Y[:, None])}, r"label of train_set has the shape \(1,\).*\.squeeze\(1\)"),
    ({"test_set": (X[:, :1], Y)}, r"test_set have the shape \(1,\).*train_set \(2,\)"),
    ({"test_set": (X.double(), Y)}, "test_set.*torch.float64.*torch.float32"),
    ({"test_set": (X, Y.float())}, "targets of a record of test_set.*torch.float32"),
    ({"test_set": (X, Y + 7)}, "test_set holds a label that the model has no output for: it has 3"),
    ({"data": (np.array(["a", "b"]), Y[:2])}, r"number of classes must be declared.*classes=K"),
    ({"data": (np.array([b"a", b"b"]), Y[:2])}, "train_set holds what cannot be made a tensor"),
    ({"data": (torch.tensor(1.0), Y)}, "train_set must have a row per record"),
    ({"resume": True}, "need the folder of the run"),
]
BAD_MODELS = [
    (lambda x: x, "must be a torch.nn.Module, got function"),
    (nn.Linear, "got the class Linear"),
    (nn.LazyLinear(3), "weight has no shape yet.*call the model once"),
    (nn.Linear(2, 3, device="meta"), "weight is on the device meta"),
    (token_model(sparse=True), r"module 0 \(Embedding\) makes sparse gradients.*sparse=False"),
]


@pytest.mark.usefixtures("no_trials")
@pytest.mark.parametrize(("changes", "message"), BAD)
def test_arguments_and_records(changes, message):
    with pytest.raises(dpsur.InvalidInputError, match=message):
        fit(**changes)


@pytest.mark.usefixtures("no_trials")
@pytest.mark.parametrize(("model", "message"), BAD_MODELS)
def test_models(model, message):
    with pytest.raises(dpsur.UnsupportedModelError, match=message):
        fit(model=model, data=(tokens(), Y) if "sparse" in message else (X, Y))


@pytest.mark.usefixtures("no_trials")
def test_a_token_beyond_the_table():
    beyond = "hold a number that the embedding 0 has no row for: it has 20 rows .0 to 19"
    with pytest.raises(dpsur.InvalidInputError, match=f"train_set {beyond}"):
        fit(token_model(), (tokens(21), Y))
    with pytest.raises(dpsur.InvalidInputError, match=f"test_set {beyond}"):
        fit(token_model(), (tokens(), Y), test_set=(tokens(21), Y))
    with pytest.raises(dpsur.InvalidInputError, match="embedding 0 has no row"):
        fit(token_model(), (tokens() - 1, Y))


class Combined(nn.Module):
    """Looks up a table by the sum of two inputs: the largest of each need not come together."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 3)

    def forward(self, inputs):
        return self.table(inputs.sum(1))


class Unwatched(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(10, 3))

    def forward(self, inputs):
        return F.embedding(inputs, self.table).sum(1)


def test_tokens_are_looked_up_as_the_model_does():
    apart = Examples(torch.tensor([[9, 0], [0, 9]]), torch.tensor([0, 1]))
    check_tokens(Combined(), apart, "train_set")
    together = Examples(torch.tensor([[9, 0], [9, 1]]), torch.tensor([0, 1]))
    with pytest.raises(dpsur.InvalidInputError, match="the embedding table has no row for"):
        check_tokens(Combined(), together, "train_set")
    check_tokens(Unwatched(), apart, "train_set")
    with pytest.raises(dpsur.InvalidInputError, match="cannot look up"):
        check_tokens(Unwatched(), Examples(together.inputs + 3, together.targets), "train_set")
    model = Combined()
    check_tokens(model, apart, "train_set")
    assert not model.table._forward_pre_hooks


def test_good_tokens_train():
    run = fit(token_model(), (tokens(), Y), test_set=(tokens(), Y))
    assert run.model(tokens()).shape == (200, 3)


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.bool])
def test_labels_of_other_whole_types(kind):
    targets = (Y > 0).to(kind)
    one, two = (fit(data=(X, t), seed=0, test_set=(X, Y)) for t in (targets, (Y > 0).long()))
    assert torch.equal(one.model[0].weight, two.model[0].weight)


def test_numpy_arrays_are_records():
    wanted = fit(seed=0)
    read_only = X.double().numpy().copy()
    read_only.flags.writeable = False
    for pair in ((X.numpy(), Y.numpy()), [read_only, Y.numpy().astype(np.int32)]):
        found = fit(data=pair, test_set=pair, seed=0)
        assert torch.equal(found.model[0].weight, wanted.model[0].weight)
    doubles = fit(small_model().double(), (X.numpy().astype(np.float64), Y.numpy()))
    assert doubles.model[0].weight.dtype == torch.float64


def test_nothing_to_resume_leaves_nothing_behind(tmp_path):
    with pytest.raises(dpsur.CheckpointError, match="nothing to resume"):
        fit(out=tmp_path / "new", resume=True)
    assert not (tmp_path / "new").exists()


def test_infinite_epsilon_is_for_no_privacy():
    run = fit(budget=dpsur.Budget(math.inf, 1e-5), method=dpsur.Nonprivate(updates=2))
    assert run.epsilon["proven"] == math.inf
