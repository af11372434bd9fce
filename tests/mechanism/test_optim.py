import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpsur.errors import InvalidInputError
from dpsur.functional.tree import flatten
from dpsur.mechanism.proposer import SHAPES, Adam, Schedule, Sgd, WeightAverage

OPTIMIZERS = {
    "sgd": (Sgd(0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "plain": (Sgd(0.0), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adam": (Adam(), lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-7)),
    "adam-slow": (
        Adam(0.5, 0.9, 1e-3),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.9), eps=1e-3),
    ),
}


@pytest.fixture(params=sorted(OPTIMIZERS))
def pair(request):
    return OPTIMIZERS[request.param]


class TestContractOfEveryOptimizer:
    def test_agrees_with_torch(self, pair):
        ours, make_theirs = pair
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        params = {n: p.detach().clone() for n, p in model.named_parameters()}
        state, theirs = ours.init(params), make_theirs(model.parameters())
        x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
        for _ in range(25):
            theirs.zero_grad()
            F.cross_entropy(model(x), y).backward()
            theirs.step()
            leaves = {n: p.requires_grad_() for n, p in params.items()}
            loss = F.cross_entropy(torch.func.functional_call(model, leaves, (x,)), y)
            gradient = dict(
                zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)
            )
            # the functional model follows its own weights, so errors would grow
            params, state = ours.step(
                {n: p.detach() for n, p in leaves.items()},
                gradient,
                state,
                torch.tensor(0.1, dtype=torch.float64),
            )
        for name, value in model.named_parameters():
            torch.testing.assert_close(params[name], value.detach(), rtol=1e-4, atol=1e-5)

    def test_changes_nothing_in_place(self, pair):
        ours, _ = pair
        params = {"w": torch.randn(3)}
        state = ours.init(params)
        before = {k: v.clone() for k, v in flatten(state).items()}
        kept = params["w"].clone()
        ours.step(params, {"w": torch.ones(3)}, state, torch.tensor(0.1))
        assert torch.equal(params["w"], kept)
        assert all(torch.equal(v, before[k]) for k, v in flatten(state).items())


@pytest.mark.parametrize("bad", [-0.1, 1.0, float("nan")])
def test_bad_momentum(bad):
    with pytest.raises(InvalidInputError, match="momentum"):
        Sgd(bad)


@pytest.mark.parametrize("shape", SHAPES)
def test_schedules_start_at_the_rate_and_stay_positive(shape):
    schedule = Schedule(shape, 2.0, 10)
    values = [float(schedule(torch.tensor(i))) for i in range(10)]
    assert values[0] == 2.0
    assert all(value > 0 for value in values)
    assert values == sorted(values, reverse=True)


def test_known_values_of_schedules():
    middle = torch.tensor(5)
    assert float(Schedule("constant", 2.0, 10)(middle)) == 2.0
    assert float(Schedule("linear", 2.0, 10)(middle)) == pytest.approx(1.0)
    assert float(Schedule("cosine", 2.0, 10)(middle)) == pytest.approx(1.0)
    assert float(Schedule("cosine", 2.0, 10)(torch.tensor(2))) == pytest.approx(1.8090, abs=1e-4)


def test_average_follows_and_forgets_the_start():
    average = {"w": torch.zeros(1)}
    rule = WeightAverage(0.9)
    for step in range(1, 200):
        average = rule(average, {"w": torch.ones(1)}, torch.tensor(step))
    assert float(average["w"]) == pytest.approx(1.0, abs=1e-4)
    # the first steps follow the weights closely: (1 + 1) / (10 + 1) of the old is kept
    early = rule({"w": torch.zeros(1)}, {"w": torch.ones(1)}, torch.tensor(1))
    assert float(early["w"]) == pytest.approx(1 - 2 / 11)
