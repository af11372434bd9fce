"""`dpsur.check` names every problem; `dpsur.fix` repairs what it can and keeps weights."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import dpsur

IMAGES, LABELS = torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)


def troubled():
    """A model with a problem of every kind that is seen without calling it."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, track_running_stats=True)),
        nn.SyncBatchNorm(8),
        nn.Flatten(),
        spectral_norm(nn.Linear(128, 4)),
    )


def test_every_problem_is_listed_with_path_reason_and_remedy():
    report = dpsur.check(troubled(), (IMAGES, LABELS))
    assert not report
    found = {one.path: one for one in report.problems}
    assert set(found) == {"1", "2", "3.1", "4", "6"}
    assert {path for path, one in found.items() if one.severity == "slow"} == {"2"}
    assert all(one.fixable and one.reason and one.remedy for one in found.values())
    assert "nn.GroupNorm" in found["1"].remedy
    assert "track_running_stats=False" in found["3.1"].remedy
    assert "error: 3.1 (InstanceNorm2d): keeps statistics of private records" in str(report)


def test_what_was_fixed_is_said_and_has_no_problem_left():
    model = troubled()
    fixed, changes = dpsur.fix(model)
    assert [text.partition(" ")[0] for text in changes] == ["1", "2", "3.1", "4", "6"]
    assert dpsur.check(fixed, (IMAGES, LABELS)).problems == ()
    assert isinstance(model[1], nn.BatchNorm2d)  # the model itself is left alone
    assert fixed(IMAGES).shape == (4, 4)


def test_weights_are_kept_where_there_is_a_place_for_them():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, eps=1e-3))
    nn.init.normal_(model[1].weight)
    nn.init.normal_(model[1].bias)
    model[1].bias.requires_grad_(False)
    fixed = dpsur.fix(model.double().eval()).model
    assert isinstance(fixed[1], nn.GroupNorm)
    assert (fixed[1].num_groups, fixed[1].eps) == (3, 1e-3)
    for name in ("weight", "bias"):
        assert torch.equal(getattr(fixed[1], name), getattr(model[1], name))
    assert not fixed[1].bias.requires_grad
    assert torch.equal(fixed[0].weight, model[0].weight)
    assert not fixed[1].training


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm1d, (5, 4)), (nn.BatchNorm2d, (5, 4, 3, 3))]
)
def test_frozen_statistics_compute_what_evaluation_did(kind, shape):
    model = nn.Sequential(kind(4), nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(20, *shape[1:]) * 3 + 1)  # pretraining on public data
    x = torch.randn(*shape)
    fixed = dpsur.fix(model, batch_norm="frozen").model
    assert torch.allclose(fixed.train()(x), model.eval()(x), atol=1e-5)
    report = dpsur.explain(fixed, x)
    assert not report.copies
    assert dpsur.check(fixed, x)


def test_a_group_is_never_a_single_number():
    for channels in range(2, 70):
        norm = dpsur.fix(nn.BatchNorm1d(channels)).model
        assert channels // norm.num_groups >= 2
        assert channels % norm.num_groups == 0
        assert norm.num_groups <= 32


def test_shared_layers_stay_shared():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    fixed = dpsur.fix(model).model
    assert fixed[1] is fixed[3]
    assert len(list(fixed.parameters())) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("option", "value"), [("max_norm", 1.0), ("sparse", True), ("scale_grad_by_freq", True)]
)
def test_options_of_tables(option, value):
    model = nn.Sequential(nn.Embedding(5, 4, **{option: value}), nn.Flatten(), nn.Linear(8, 2))
    (problem,) = dpsur.check(model).problems
    assert problem.path == "0"
    assert problem.remedy.startswith(f"set {option}=")
    fixed = dpsur.fix(model).model
    assert not dpsur.check(fixed, torch.zeros(3, 2, dtype=torch.int64)).problems


class Remembers(nn.Module):
    """Changes a buffer when it is called, which no look at its modules shows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen += x.detach().sum(0)
        return x


def test_what_is_found_by_calling_the_model_is_a_problem():
    model = nn.Sequential(nn.Linear(4, 4), Remembers(), nn.Linear(4, 2))
    (problem,) = dpsur.check(model, torch.randn(3, 4)).problems
    assert not problem.fixable
    assert "buffer 1.seen changes" in problem.reason
    assert dpsur.check(model)  # without a batch only modules are looked at


def test_a_fixable_problem_does_not_hide_another():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Remembers(), nn.Linear(4, 2))
    first, second = dpsur.check(model, torch.randn(3, 4)).problems
    assert first.path == "1"
    assert "buffer 2.seen" in second.reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.requires_grad_(False), "no parameter requires a gradient"),
        (lambda model: model.to(torch.bfloat16), "too coarse"),
        (lambda model: nn.init.constant_(model.weight, torch.nan) is None or model, "not finite"),
    ],
)
def test_parameters(change, words):
    model = nn.Linear(4, 2)
    change(model)
    assert any(words in one.reason for one in dpsur.check(model).problems)


def test_wrappers_are_taken_off_and_half_precision_is_widened():
    model, changes = dpsur.fix(nn.DataParallel(nn.Linear(4, 2).half()))
    assert type(model) is nn.Linear
    assert model.weight.dtype == torch.float32
    assert len(changes) == 2


def test_a_good_model_and_its_dict_batch():
    assert str(dpsur.check(nn.Linear(4, 2), {"input": torch.randn(3, 4), "labels": LABELS})) == (
        "no problem found"
    )


@pytest.mark.parametrize("batch", ["text", torch.randn(0, 4)])
def test_no_batch(batch):
    with pytest.raises((dpsur.InvalidInputError, TypeError)):
        dpsur.check(nn.Linear(4, 2), batch)


def test_an_unknown_way_is_refused():
    with pytest.raises(dpsur.InvalidInputError, match="batch_norm"):
        dpsur.fix(nn.Linear(1, 1), batch_norm="batch")
