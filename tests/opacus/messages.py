"""What loops of users do that is easily refused: some works, the rest is told what to write."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dpsur.errors import DpsurError
from dpsur.opacus import PrivacyEngine


def data(*more):
    return TensorDataset(torch.randn(24, 6), torch.arange(24) % 3, *more)


def private(model, loader=None, **options):
    engine = PrivacyEngine()
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data_loader=DataLoader(data(), batch_size=6) if loader is None else loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )


def loop(loss, model=None, **options):
    torch.manual_seed(0)
    _, model, optimizer, loader = private(nn.Linear(6, 3) if model is None else model, **options)
    for batch in loader:
        optimizer.zero_grad()
        loss(model, *batch).backward()
        optimizer.step()


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 2), nn.Linear(2, 6)

    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(code + torch.randn_like(code))

    def loss(self, x, y):
        return F.mse_loss(self.decoder(self.encoder(x)), x)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def private_loader_again():
    *_, loader = private(nn.Linear(6, 3))
    loop(cross_entropy, loader=loader)


def model_again():
    _, model, *_ = private(nn.Linear(6, 3))
    loop(cross_entropy, model=model)


def critic(model, x, y):
    return F.softplus(-model(x)).mean() + F.softplus(model(torch.randn_like(x))).mean()


def pairs_within_the_batch(model, x, y):
    return F.pairwise_distance(model(x), model(x.roll(1, 0))).mean()


def positive_weight(model, x, y):
    weight = torch.ones(3)
    wanted = F.one_hot(y, 3).float()
    return F.binary_cross_entropy_with_logits(model(x), wanted, pos_weight=weight)


def frozen_batch_norm():
    backbone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)
    loop(cross_entropy, model=nn.Sequential(backbone, nn.Linear(6, 3)))


def names():
    engine, model, optimizer, _ = private(nn.Linear(6, 3), epochs=1)
    assert optimizer.noise_multiplier == 1.0
    assert optimizer.original_optimizer is optimizer
    assert model._module is model
    assert engine.accountant.history == []


def modules():
    from dpsur.opacus.optimizers import DPOptimizer

    DPOptimizer(None)


# What a program does, and a function that does it.
CASES = [
    (
        "a VAE, which draws numbers in `forward`",
        lambda: loop(lambda m, x, y: F.mse_loss(m(x), x), model=Parts()),
    ),
    (
        "the private loader is given again",
        private_loader_again,
    ),
    (
        "the private model is given again",
        model_again,
    ),
    (
        "a GAN's critic judges real and made rows",
        lambda: loop(critic, model=nn.Linear(6, 1)),
    ),
    (
        "pairs of records of one batch",
        lambda: loop(pairs_within_the_batch),
    ),
    (
        "the loss is a method: `model.loss(x)`",
        lambda: loop(lambda m, x, y: m.loss(x, y), model=Parts()),
    ),
    (
        "parts are called: `model.decoder(model.encoder(x))`",
        lambda: loop(lambda m, x, y: F.mse_loss(m.decoder(m.encoder(x)), x), model=Parts()),
    ),
    (
        "a frozen backbone with BatchNorm",
        frozen_batch_norm,
    ),
    (
        "`optimizer.noise_multiplier`, `model._module`, `accountant.history`",
        names,
    ),
    (
        "`from opacus.optimizers import DPOptimizer`",
        modules,
    ),
    (
        "a norm over the batch in the loss",
        lambda: loop(lambda m, x, y: m(x).square().sum().sqrt()),
    ),
    (
        "`1 - x` in the loss, as in focal losses",
        lambda: loop(
            lambda m, x, y: (1 - F.cross_entropy(m(x), y, reduction="none")).square().mean()
        ),
    ),
    (
        "`pos_weight` of `BCEWithLogitsLoss`",
        lambda: loop(positive_weight),
    ),
    (
        "a data set that is a stream",
        lambda: private(nn.Linear(6, 3), DataLoader(Stream(), batch_size=6)),
    ),
    (
        "`get_epsilon` before the first step",
        lambda: PrivacyEngine().get_epsilon(1e-5),
    ),
    (
        "`poisson_sampling=False`",
        lambda: private(nn.Linear(6, 3), poisson_sampling=False),
    ),
]


def told(case) -> str:
    """What is said now, on one line; "works" where nothing has to be said."""
    try:
        case()
    except DpsurError as error:
        return str(error)
    return "works"
