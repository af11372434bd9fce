"""A model that keeps something of its records, or a loss that remembers others, is refused."""

import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.errors import CouplingError, InvalidInputError
from dpsur.functional.records import Examples
from dpsur.per_example import check_model
from dpsur.runs.data import check_loss
from tests.conftest import blobs, small_model

BUDGET = dpsur.Budget(epsilon=3.0, delta=1e-4)
X, Y = blobs().inputs, blobs().targets


class Scaled(nn.Module):
    """A cross entropy divided by a running mean of itself: the base of losses with memory."""

    def __init__(self):
        super().__init__()
        self.start()

    def start(self):
        self.mean = 1.0

    def forward(self, outputs, targets):
        loss = F.cross_entropy(outputs, targets)
        self.update(loss.detach())
        return loss / self.mean

    def update(self, loss):
        self.mean = 0.9 * self.mean + 0.1 * float(loss)


class ScaledByBuffer(Scaled):
    def start(self):
        self.register_buffer("mean", torch.ones(()))

    def update(self, loss):
        self.mean = 0.9 * self.mean + 0.1 * loss


class ScaledInPlace(ScaledByBuffer):
    def update(self, loss):
        self.mean.mul_(0.9).add_(0.1 * loss)


class ScaledByTensor(ScaledByBuffer):
    def start(self):
        self.mean = torch.ones(())


class ScaledByData(ScaledByTensor):
    def update(self, loss):
        self.mean.data.mul_(0.9)


class ScaledByArray(Scaled):
    def start(self):
        self.mean = np.ones(1)

    def update(self, loss):
        self.mean *= 0.9

    def forward(self, outputs, targets):
        loss = F.cross_entropy(outputs, targets)
        self.update(loss)
        return loss / float(self.mean[0])


class Counted(Scaled):
    def start(self):
        self.mean, self.calls = 1.0, 0

    def update(self, loss):
        self.calls += 1


class InASetting(Scaled):
    """Deep inside of what it holds."""

    def start(self):
        self.mean, self.settings = 1.0, {"history": [[]]}

    def update(self, loss):
        self.settings["history"][0].append(1)


class OnlyWithGradients(Scaled):
    """Nothing changes where nobody asks for a gradient."""

    def update(self, loss):
        if torch.is_grad_enabled():
            self.mean = self.mean + 1.0


class OfTheClass(Scaled):
    seen = 0

    def update(self, loss):
        type(self).seen += 1


class PlainObject:
    def __init__(self):
        self.total = 0.0

    def __call__(self, outputs, targets):
        self.total += 1.0
        return F.cross_entropy(outputs, targets) / self.total


class Slotted:
    __slots__ = ("total",)

    def __init__(self):
        self.total = 0.0

    def __call__(self, outputs, targets):
        self.total += 1.0
        return F.cross_entropy(outputs, targets) / self.total


def closure():
    total = 0.0

    def loss(outputs, targets):
        nonlocal total
        total += 1.0
        return F.cross_entropy(outputs, targets) / total

    return loss


def container_in_a_closure():
    history = []

    def loss(outputs, targets):
        history.append(1)
        return F.cross_entropy(outputs, targets) / len(history)

    return loss


def default():
    def loss(outputs, targets, history=[]):  # noqa: B006
        history.append(1)
        return F.cross_entropy(outputs, targets) / len(history)

    return loss


def attribute_of_a_function():
    def loss(outputs, targets):
        loss.calls += 1
        return F.cross_entropy(outputs, targets) / loss.calls

    loss.calls = 0
    return loss


CALLS = 0


def of_the_file():
    def loss(outputs, targets):
        global CALLS
        CALLS += 1
        return F.cross_entropy(outputs, targets) / CALLS

    return loss


def bound_method():
    return PlainObject().__call__


def in_a_lambda():
    inner = Scaled()
    return lambda outputs, targets: inner(outputs, targets)


def out_of_sight():
    """In a place that is not looked at: found because the loss is another one later."""
    held = threading.local()
    held.total = 0.0

    def loss(outputs, targets):
        held.total += 1.0
        return F.cross_entropy(outputs, targets) / held.total

    return loss


LOSSES = (
    Scaled,
    ScaledByBuffer,
    ScaledInPlace,
    ScaledByTensor,
    ScaledByData,
    ScaledByArray,
    OnlyWithGradients,
    PlainObject,
    Slotted,
    closure,
    container_in_a_closure,
    default,
    attribute_of_a_function,
    of_the_file,
    bound_method,
    in_a_lambda,
    out_of_sight,
)


@pytest.mark.parametrize("build", LOSSES)
def test_a_loss_with_memory_is_refused_before_training(build, monkeypatch):
    monkeypatch.setattr(
        "dpsur.runs.session.Session.run", lambda *_, **__: pytest.fail("a trial was made")
    )
    with pytest.raises(InvalidInputError, match="loss keeps state") as caught:
        dpsur.fit(small_model(), (X, Y), loss=build(), budget=BUDGET, method=dpsur.Dpsgd(updates=2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("build", [Counted, InASetting, OfTheClass])
def test_a_loss_may_count_its_calls(build):
    """They follow no record."""
    run = dpsur.fit(
        small_model(), (X, Y), loss=build(), budget=BUDGET, method=dpsur.Dpsgd(updates=2)
    )
    assert run.model is not None


def weighted():
    weights = torch.tensor([1.0, 2.0, 3.0])
    return lambda outputs, targets: F.cross_entropy(outputs, targets, weight=weights)


def drawn():
    return lambda outputs, targets: F.cross_entropy(F.dropout(outputs, 0.5), targets)


@pytest.mark.parametrize(
    "build",
    [nn.CrossEntropyLoss, weighted, drawn, lambda: nn.CrossEntropyLoss(label_smoothing=0.1)],
)
def test_a_loss_without_memory_is_accepted(build):
    check_loss(build(), small_model()(X[:2]), Y)


class Model(nn.Module):
    """The base of models with memory."""

    def __init__(self):
        super().__init__()
        self.head, self.held = nn.Linear(2, 3), [0.0]

    def forward(self, x):
        self.remember(x)
        return self.head(x)

    def remember(self, x):
        pass


class LastBatch(Model):
    def remember(self, x):
        self.last = x.detach()


class BatchSize(Model):
    def remember(self, x):
        self.size = len(x)


class Largest(Model):
    """What comes back is the largest batch so far."""

    def remember(self, x):
        self.most = max(getattr(self, "most", 0), len(x))


class Calls(Model):
    def remember(self, x):
        self.calls = getattr(self, "calls", 0) + 1


class InAList(Model):
    def remember(self, x):
        self.held[0] += 1.0


class FirstBatch(Model):
    """Set once, from the first records that come."""

    def forward(self, x):
        if not hasattr(self, "centre"):
            self.centre = x.detach().mean(0)
        return self.head(x - self.centre)


class InAClosure(Model):
    """In a place where nobody looks for attributes."""

    def __init__(self):
        super().__init__()
        kept = []
        self.keep = lambda x: kept.append(x.detach().mean())

    def remember(self, x):
        self.keep(x)


class WithGradients(Model):
    def remember(self, x):
        if torch.is_grad_enabled():
            self.held.append(1)


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Model(), Calls.__new__(Calls))
        Calls.__init__(self.body[1])
        self.body[1].head = nn.Linear(3, 3)

    def forward(self, x):
        return self.body(x)


def hooked():
    model, seen = small_model(), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    return model


def test_a_model_that_keeps_records_is_refused():
    """A later step could read what it keeps."""
    for use in (
        lambda: dpsur.clipped_sum(InAClosure(), F.cross_entropy, X, Y, 1.0),
        lambda: dpsur.fit(InAClosure(), (X, Y), budget=BUDGET, method=dpsur.Dpsgd(updates=2)),
    ):
        with pytest.raises(CouplingError, match="outlives its step") as caught:
            use()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("build", "name"),
    [(LastBatch, "last"), (FirstBatch, "centre"), (BatchSize, "size"), (Largest, "most")],
)
def test_attributes_are_put_back(build, name, caplog):
    """What a call sets is for this call."""
    model = build()
    dpsur.clipped_sum(model, F.cross_entropy, X, Y, 1.0)
    assert not hasattr(model, name)
    run = dpsur.fit(build(), (X, Y), budget=BUDGET, method=dpsur.Dpsgd(updates=2))
    assert not hasattr(run.model, name)
    assert f"reaches later steps: {name}" in caplog.text


@pytest.mark.parametrize("build", [Calls, InAList, WithGradients, Inside, hooked])
def test_a_model_may_count_its_calls(build):
    """They follow no record, and the released model is made of weights and buffers alone."""
    run = dpsur.fit(build(), (X, Y), budget=BUDGET, method=dpsur.Dpsgd(updates=2))
    assert run.model is not None


def test_the_size_of_a_batch_cannot_be_read():
    """A private step sees one record; its size says nothing."""
    model, sizes = Model(), []
    model.remember = lambda x: sizes.append(len(x))
    dpsur.clipped_sum(model, F.cross_entropy, X, Y, 1.0)
    assert sizes[-1] == 1


class Mask(Model):
    """A cache that depends on nothing but the shape of a record."""

    def __init__(self):
        super().__init__()
        self.mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(x.shape[1])
        return self.head(x * self.mask)


@pytest.mark.parametrize("build", [Model, Mask])
def test_a_model_that_remembers_nothing_of_records_is_accepted(build):
    check_model(build(), Examples(X, Y))
    run = dpsur.fit(build(), (X, Y), budget=BUDGET, method=dpsur.Dpsgd(updates=2))
    assert run.model is not None
