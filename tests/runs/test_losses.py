"""The loss of a record by itself: what works, and what its class weights are worth."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.functional.problem import Problem, weight_by_record
from dpsur.runs.data import check_loss
from tests.conftest import blobs, small_model

BUDGET = dpsur.Budget(epsilon=3.0, delta=1e-4)
X, Y = blobs().inputs, blobs().targets
WEIGHTS = torch.tensor([1.0, 5.0, 0.0])


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (lambda o, t: F.cross_entropy(o, t, reduction="none"), Y),
        (lambda o, t: F.poisson_nll_loss(o[:, 0], t, full=True), Y.float()),
        (lambda o, t: (torch.log(t) * o[:, 0]).sum(), Y.float()),  # not defined at 0
        (lambda o, t: (torch.log1p(-t) * o[:, 0]).sum(), Y.float()),  # not defined at 1
        (F.cross_entropy, F.one_hot(Y, 3).float()),  # probabilities
    ],
)
def test_losses_that_work_are_not_refused(loss, targets):
    outputs = small_model()(X[:2])
    check_loss(loss, outputs, targets)


WEIGHTED = [
    nn.CrossEntropyLoss(weight=WEIGHTS),
    functools.partial(F.cross_entropy, weight=WEIGHTS),
    nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"),
    nn.CrossEntropyLoss(weight=WEIGHTS, reduction="none"),
]


@pytest.mark.parametrize("loss", WEIGHTED)
def test_weights_of_classes_count_for_every_record(loss):
    problem = Problem(small_model(), weight_by_record(loss), blobs())
    params = problem.initial_params()
    plain = Problem(problem.model, F.cross_entropy, problem.train).losses(params, problem.train)
    found = problem.losses(params, problem.train)
    torch.testing.assert_close(found, WEIGHTS[Y] * plain)
    assert not torch.allclose(found, plain)


def test_weights_of_log_likelihoods_and_of_many_places():
    outputs, targets = torch.randn(4, 3, 5), torch.tensor([[0, 1, 2, 0, 1]]).expand(4, 5)
    scores = F.log_softmax(outputs, 1)
    weighted = weight_by_record(nn.NLLLoss(weight=WEIGHTS))
    wanted = (WEIGHTS[targets] * F.nll_loss(scores, targets, reduction="none")).mean()
    torch.testing.assert_close(weighted(scores, targets), wanted)
    for loss in (nn.CrossEntropyLoss(), F.cross_entropy, functools.partial(F.mse_loss)):
        assert weight_by_record(loss) is loss


def test_a_class_without_weight_is_not_learned():
    """The whole way through a run: without the weights all three classes would be."""
    weighted, plain = (
        dpsur.fit(
            small_model(), blobs(600), budget=BUDGET, loss=loss, test_set=blobs(90, seed=3), seed=0
        )
        for loss in (WEIGHTED[0], F.cross_entropy)
    )
    chosen = weighted.model(blobs(90, seed=3).inputs).argmax(1)
    assert (chosen == 2).sum() <= 10
    assert plain.scores["accuracy"] > 0.9


def test_a_target_that_the_loss_cannot_take_is_found_before_training():
    """A run that ended when such a record is drawn would tell that it is there."""
    x, y = torch.randn(300, 4), torch.rand(300, 1)
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    options = {"loss": F.binary_cross_entropy, "budget": dpsur.Budget(3.0, 1e-4)}
    method = dpsur.Dpsgd(updates=2, batch_size=20)
    assert dpsur.fit(model, (x, y), method=method, **options).model is not None
    y[-1] = 1.5
    with pytest.raises(dpsur.InvalidInputError, match="some target of train_set"):
        dpsur.fit(model, (x, y), method=method, **options)
