"""Losses that go through several calls of a model, or through its methods: sums in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from dpsur.engine.watch import Watcher
from dpsur.errors import CouplingError, StepError
from tests.mutants import Mutant, law_tests

NORM = 0.5


class Network(nn.Module):
    """An autoencoder that may be used as a whole, by its methods, and with its loss among them."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(6, 6), nn.Linear(3, 6)

    def encode(self, x):
        return self.down(x).tanh().chunk(2, 1)

    def decode(self, code):
        return self.up(code)

    def forward(self, x):
        return self.decode(self.encode(x)[0])

    def loss(self, x):
        mean, spread = self.encode(x)
        return F.mse_loss(self.decode(mean + spread), x) + spread.square().mean()

    def learn(self, x, optimizer):
        optimizer.zero_grad()
        F.mse_loss(self(x), x).backward()
        optimizer.step()


def critic(model, x, y):
    right, wrong = model(x), model(torch.ones_like(x))
    return F.softplus(-right).mean() + F.softplus(wrong).mean()


def wasserstein(model, x, y):
    return (model(torch.ones_like(x)) - 3 * model(x)).mean()


def siamese(model, x, y):
    return F.pairwise_distance(model(x), model(y)).square().mean()


def triplet(model, x, y):
    return F.relu(1 + (model(x) - model(y)).square() - model(x).square()).mean()


def parts(model, x, y):
    mean, spread = model.encode(x)
    return F.mse_loss(model.decode(mean + spread), x) + spread.square().mean()


def method(model, x, y):
    return model.loss(x)


def made(**options):
    torch.manual_seed(0)
    model = Network().double()
    data = TensorDataset(torch.randn(40, 6).double(), torch.randn(40, 6).double())
    engine = dpsur.PrivacyEngine()
    settings = {"noise_multiplier": 0.0, "max_grad_norm": NORM, "epochs": 1, "seed": 3, **options}
    found = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=10),
        **settings,
    )
    return engine, *found


def weights(model):
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def moved(loss, batches=1):
    """The batches, the weights before, and what steps of the form of Opacus do to them."""
    _, model, optimizer, loader = made()
    start, seen = weights(model), []
    for x, y in loader:
        seen.append((x, y))
        optimizer.zero_grad()
        loss(model, x, y).backward()
        optimizer.step()
        if len(seen) == batches:
            break
    return seen, weights(model) - start


def by_private_steps(loss, batches):
    engine, model, _, loader = made()
    step = engine.private_step(lambda model, batch: loss(model, *batch))
    start = weights(model)
    for count, batch in enumerate(loader, 1):
        step(batch)
        if count == batches:
            break
    return weights(model) - start


@pytest.mark.parametrize("loss", [siamese, triplet, parts, method])
def test_records_of_several_calls_are_clipped_as_in_a_private_step(loss):
    _, found = moved(loss, batches=3)
    assert found.norm() > 1e-2
    torch.testing.assert_close(found, by_private_steps(loss, 3), rtol=1e-9, atol=1e-12)


def apart_by_hand(x, terms):
    """Each row of each call by itself, clipped to half of the norm."""
    _, model, _, _ = made()
    model.eval()
    total = torch.zeros_like(weights(model))
    for rows, term in terms(x):
        for row in rows:
            gradient = torch.autograd.grad(term(model, row[None]), list(model.parameters()))
            gradient = torch.cat([value.flatten() for value in gradient])
            total += gradient * (NORM / 2 / gradient.norm()).clamp(max=1.0)
    return -total / 10


def rows_of_each_call_are_clipped_to_a_share():
    def of_critic(x):
        yield x, lambda model, row: F.softplus(-model(row)).mean()
        yield torch.ones_like(x), lambda model, row: F.softplus(model(row)).mean()

    def of_wasserstein(x):
        yield x, lambda model, row: -3 * model(row).mean()
        yield torch.ones_like(x), lambda model, row: model(row).mean()

    for loss, terms in ((critic, of_critic), (wasserstein, of_wasserstein)):
        ((x, _),), found = moved(loss)
        torch.testing.assert_close(found, apart_by_hand(x, terms), rtol=1e-9, atol=1e-12)


def whole_norm_for_each_call(monkeypatch):
    own = Watcher.after_backward

    def twice(watcher, calls, scale):
        watcher.max_grad_norm *= len(calls)
        own(watcher, calls, scale)
        watcher.max_grad_norm /= len(calls)

    monkeypatch.setattr(Watcher, "after_backward", twice)


def rows_in_another_order_are_refused():
    try:
        moved(lambda model, x, y: siamese(model, x, y.flip(0)))
    except CouplingError:
        return
    raise AssertionError("accepted")


def order_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(Watcher, "_in_order", lambda *_: True)


test_laws, test_mutants = law_tests(
    [
        Mutant(rows_of_each_call_are_clipped_to_a_share, whole_norm_for_each_call),
        Mutant(rows_in_another_order_are_refused, order_is_not_looked_at),
    ]
)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda m, x, y: siamese(m, x, (y + 1)), "not those that the loader has yielded"),
        (lambda m, x, y: critic(m, x, y) + siamese(m, x, y.flip(0)), "not those that"),
        (lambda m, x, y: m(x).mean() + m(x[:1]).mean(), "different numbers of rows"),
        (lambda m, x, y: F.mse_loss(m.decode(m.encode(x)[0].flip(0)), x), "operation `flip`"),
        (lambda m, x, y: m.decode(m.encode(x)[0]).mean() + m.up(y[:, :3]).mean(), "past the"),
    ],
)
def test_calls_that_may_couple_records_are_refused(loss, words):
    with pytest.raises(dpsur.DpsurError, match=words):
        moved(loss)


def test_what_is_called_stays_the_same():
    calls = iter((1, 2))
    with pytest.raises(CouplingError, match="other calls of the model than in the first"):
        moved(lambda m, x, y: sum(m(x).mean() for _ in range(next(calls))), batches=2)


def test_between_steps_a_model_trains_what_made_its_inputs():
    _, model, optimizer, loader = made()
    generator = nn.Linear(2, 6).double()
    steps = torch.optim.SGD(generator.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        critic(model, x, y).backward()
        optimizer.step()
        before = [value.grad.clone() for value in model.parameters()]
        steps.zero_grad()
        model(generator(torch.ones(5, 2).double())).mean().backward()
        steps.step()
        assert generator.weight.grad.norm() > 0
        assert all(map(torch.equal, before, [value.grad for value in model.parameters()]))
        with pytest.raises(StepError, match="without a batch of the private loader"):
            model(x)  # made by nothing that is trained
    with pytest.raises(CouplingError, match="another number of rows"):
        model(generator(torch.ones(6, 2).double()))


def test_a_method_that_takes_steps_is_left_alone():
    engine, model, optimizer, loader = made()
    for x, _ in loader:
        model.learn(x, optimizer)
    assert engine.accountant.steps == 4
