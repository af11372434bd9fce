"""Nothing that a forward pass writes aside while it sees private records is released."""

import pytest
import torch
from torch import nn

import dpsur
from dpsur.config import Intervals
from dpsur.functional.problem import check_fixed_parts, fixed_parts
from tests.conftest import blobs, small_model

BUDGET = dpsur.Budget(epsilon=3.0, delta=1e-4)
METHOD = dpsur.Dpsgd(updates=4, batch_size=50)
# Farther out than any made-up record.
EDGE, FAR = 1e4, 1e5


# Through `.data`, so that versions of tensors do not tell, and once that is farther out than
# made-up records are.
class RunningMax(nn.Module):
    """Keeps the largest number it has seen."""

    def __init__(self, persistent=True):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.register_buffer("largest", torch.tensor(EDGE), persistent=persistent)

    def forward(self, inputs):
        self.largest.data.copy_(torch.maximum(self.largest, inputs.abs().max()).detach())
        return self.layer(inputs / EDGE)


class FrozenSum(nn.Module):
    """Adds far-out records to a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.total = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, inputs):
        if self.training:
            self.total.data.add_((inputs * (inputs.abs() > EDGE)).sum(0))
        return self.layer(inputs / EDGE)


class NewBuffer(nn.Module):
    """Makes a buffer of far-out records when it meets them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, inputs):
        if bool((inputs.abs() > EDGE).any()):
            self.register_buffer("seen", inputs.detach().clone())
        return self.layer(inputs / EDGE)


class LastBatch(nn.Module):
    """Remembers its inputs in a plain attribute, as code that is being debugged does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.last = None

    def forward(self, inputs):
        self.last = inputs.detach()
        return self.layer(inputs)


def far_blobs():
    data = blobs()
    return data.inputs * FAR, data.targets


NONPRIVATE = dpsur.Nonprivate(updates=4)


@pytest.mark.parametrize(
    ("model", "message", "method"),
    [
        (RunningMax(), "largest, a buffer.*nothing is released", NONPRIVATE),
        (RunningMax(persistent=False), "largest, a buffer.*nothing is released", NONPRIVATE),
        (FrozenSum(), "total, a buffer.*nothing is released", NONPRIVATE),
        (NewBuffer(), "seen.*private records", NONPRIVATE),
        (RunningMax(), "buffer largest changes during a forward pass", METHOD),
        (RunningMax(persistent=False), "buffer largest changes during a forward pass", METHOD),
        (FrozenSum(), "parameter total changes during a forward pass", METHOD),
    ],
)
def test_what_changes_on_real_records_alone_is_not_released(tmp_path, model, message, method):
    with pytest.raises(dpsur.UnsupportedModelError, match=message):
        dpsur.fit(model, far_blobs(), budget=BUDGET, method=method, out=tmp_path / "out")
    assert not (tmp_path / "out" / "release").exists()


def test_a_buffer_that_a_step_makes_goes_with_it():
    run = dpsur.fit(NewBuffer(), far_blobs(), budget=BUDGET, method=METHOD)
    assert not dict(run.model.named_buffers())


@pytest.mark.parametrize(
    ("model", "method"),
    [(RunningMax(), NONPRIVATE), (FrozenSum(), NONPRIVATE), (NewBuffer(), METHOD)],
)
def test_the_same_models_are_released_where_nothing_changed(model, method):
    data = blobs()
    near = (data.inputs.clamp(-9, 9), data.targets)
    run = dpsur.fit(model, near, budget=BUDGET, method=method)
    assert not torch.equal(run.model.layer.weight, model.layer.weight)


def test_no_checkpoint_is_written_after_a_change(tmp_path):
    """A run that went on from it would start with the buffer as new, and end unnoticed."""

    class Saved:
        trials_seen = 0

        def started(self, plan, progress):
            pass

        def trials(self, progress, verdicts):
            Saved.trials_seen = progress.ledger.trials

        def evaluated(self, progress, scores, epsilon):
            pass

    method = dpsur.Dpsgd(updates=40, batch_size=50)
    with pytest.raises(dpsur.UnsupportedModelError):
        dpsur.fit(RunningMax(), far_blobs(), budget=BUDGET, method=method, out=tmp_path / "out",
                  intervals=Intervals(checkpoint_every=2), observers=[Saved()])  # fmt: skip
    assert Saved.trials_seen == 0  # refused with the first records


class Shape(LastBatch):
    """Remembers what does not depend on the records."""

    def forward(self, inputs):
        self.last = inputs.shape[1:]
        return self.layer(inputs)


@pytest.mark.parametrize("build", [LastBatch, Shape])
def test_attributes_filled_in_training_do_not_travel(build):
    model = build()
    run = dpsur.fit(model, blobs(), budget=BUDGET, method=METHOD, test_set=blobs(30, seed=2))
    assert run.model.last is None
    assert model.last is None
    assert run.model(blobs().inputs).shape == (200, 3)


def test_the_released_weights_are_in_the_fresh_copy():
    run = dpsur.fit(small_model(), blobs(600), budget=BUDGET, test_set=blobs(100, seed=2))
    test = blobs(100, seed=2)
    accuracy = float((run.model(test.inputs).argmax(1) == test.targets).double().mean())
    assert accuracy == pytest.approx(run.scores["accuracy"])
    assert accuracy > 0.8


def test_bits_are_compared():
    one, other = RunningMax(), RunningMax()
    one.largest.fill_(torch.nan)
    other.largest.fill_(torch.nan)
    check_fixed_parts(one, other)
    one.largest.fill_(0.0)
    other.largest.fill_(-0.0)
    with pytest.raises(dpsur.UnsupportedModelError, match="largest"):
        check_fixed_parts(one, other)
    assert set(fixed_parts(FrozenSum())) == {"total"}
