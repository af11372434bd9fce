"""Several views of a record: the norm is that of their averaged gradient, not of a view."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.engine.loader import groups_of
from dpsur.functional.problem import Objective
from dpsur.functional.records import Examples
from dpsur.per_example import clipping
from tests.engine.helpers import private, records, without_noise

VIEWS, CLIP = 3, 0.4


def shifted(x):
    """Views that follow from the place of a row, so that they can be made again."""
    place = torch.arange(len(x)) % VIEWS
    return x + place.view(-1, *[1] * (x.dim() - 1)).to(x)


def by_hand(model, x, y, bound):
    """Average each record's gradient over its views, then clip, then add up."""
    total = [torch.zeros_like(value) for value in model.parameters()]
    for one, target in zip(x, y, strict=True):
        views = shifted(one[None].repeat_interleave(VIEWS, 0))
        loss = F.cross_entropy(model(views), target[None].repeat(VIEWS))
        found = torch.autograd.grad(loss, list(model.parameters()))
        norm = float(torch.stack([value.norm() for value in found]).norm())
        for place, value in zip(total, found, strict=True):
            place += value * min(1.0, bound / norm)
    return total


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


@pytest.mark.parametrize(("build", "shape"), [(mlp, (6,)), (network, (1, 6, 6))])
def test_views_are_averaged_inside_one_clipped_gradient(build, shape, monkeypatch):
    without_noise(monkeypatch)
    data = records(40, shape)
    engine, model, _, loader = private(build(), data, seed=1, max_grad_norm=CLIP)
    plain = copy.deepcopy(model)

    @engine.private_step
    def step(model, batch):
        x, y = batch
        return F.cross_entropy(model(shifted(x.repeat_interleave(VIEWS, 0))), y.repeat(VIEWS))

    batch = next(iter(loader))
    (group,) = groups_of(batch)
    x, y = (value.squeeze(1) for value in group)
    step(batch)
    expected = by_hand(plain, x, y, CLIP)
    for value, parameter in zip(expected, model.parameters(), strict=True):
        found = parameter.grad * loader.sample_rate * 40
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)


def test_clipped_sums_of_fit_have_the_same_views():
    model, data = mlp(), records(12)
    x, y = data.tensors
    objective = Objective(model, F.cross_entropy, augment=shifted, views=VIEWS)
    params = objective.initial_params()
    found = clipping.clipped_sum(objective, params, Examples(x, y), CLIP).params
    expected = by_hand(model, x, y, CLIP)
    for value, name in zip(expected, found, strict=True):
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_clipping_each_view_by_itself_would_be_noticed():
    """The mutant: views as records of their own have another sum."""
    model, data = mlp(), records(12)
    x, y = data.tensors
    views = shifted(x.repeat_interleave(VIEWS, 0))
    wrong = dpsur.clipped_sum(model, F.cross_entropy, views, y.repeat_interleave(VIEWS), CLIP)
    expected = by_hand(model, x, y, CLIP)
    gap = sum(
        float((value / VIEWS - other).norm())
        for value, other in zip(wrong.params.values(), expected, strict=True)
    )
    assert gap > 0.1 * sum(float(value.norm()) for value in expected)


def test_fit_trains_on_views():
    x, y = records(80).tensors
    run = dpsur.fit(
        mlp(),
        (x, y),
        budget=dpsur.Budget(4.0, 1e-3),
        method=dpsur.Dpsgd(updates=3, batch_size=20),
        augment=lambda rows: rows + 0.1 * torch.randn_like(rows),
        views=2,
        device="cpu",
    )
    assert run.statement["guarantee"]["epsilon"] <= 4.0


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (lambda x: torch.cat([x, x]), "must return what it is given"),
        (lambda x: x[:, :3], "must return what it is given"),
    ],
)
def test_augmentations_that_are_refused(augment, message):
    with pytest.raises(dpsur.InvalidInputError, match=message):
        dpsur.fit(
            mlp(), records(20).tensors, budget=dpsur.Budget(4.0, 1e-3), augment=augment, views=2
        )


def test_an_augmentation_that_mixes_records_sees_those_views_of_one_alone():
    """Mixup is harmless: there is nothing to mix a record with but its own views."""
    model, data, bound = mlp(), records(12), 0.2
    x, y = data.tensors
    objective = Objective(model, F.cross_entropy, augment=lambda x: x + x.mean(0), views=VIEWS)
    params = objective.initial_params()
    total = clipping.clipped_sum(objective, params, Examples(x, y), bound).params
    each = [
        clipping.clipped_sum(objective, params, Examples(x[[row]], y[[row]]), bound).params
        for row in range(12)
    ]
    for name, value in total.items():
        torch.testing.assert_close(value, sum(one[name] for one in each))
    plain = Objective(model, F.cross_entropy, augment=lambda x: 2 * x, views=VIEWS)
    wanted = clipping.clipped_sum(plain, params, Examples(x, y), bound).params
    for name, value in total.items():
        torch.testing.assert_close(value, wanted[name])
