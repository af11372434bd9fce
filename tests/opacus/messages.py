"""What loops of users were told and could not use, and what they are told now.

`BEFORE` is from a review of real programs. A case that works now says so.
"""

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


# What a program does, what it was told, and what does it.
CASES = [
    (
        "a VAE, which draws numbers in `forward`",
        "draws random numbers in evaluation mode, so that candidates would be tested by chance",
        lambda: loop(lambda m, x, y: F.mse_loss(m(x), x), model=Parts()),
    ),
    (
        "the private loader is given again",
        "data_loader has a custom batch_sampler or no batch_size",
        private_loader_again,
    ),
    (
        "the private model is given again",
        "the model cannot take inputs: called in training mode without a batch",
        model_again,
    ),
    (
        "a GAN's critic judges real and made rows",
        "one backward pass goes through several calls of the model",
        lambda: loop(critic, model=nn.Linear(6, 1)),
    ),
    (
        "pairs of records of one batch",
        "one backward pass goes through several calls of the model",
        lambda: loop(pairs_within_the_batch),
    ),
    (
        "the loss is a method: `model.loss(x)`",
        "optimizer.step() was called without a private backward pass",
        lambda: loop(lambda m, x, y: m.loss(x, y), model=Parts()),
    ),
    (
        "parts are called: `model.decoder(model.encoder(x))`",
        "optimizer.step() was called without a private backward pass",
        lambda: loop(lambda m, x, y: F.mse_loss(m.decoder(m.encoder(x)), x), model=Parts()),
    ),
    (
        "a frozen backbone with BatchNorm",
        "mixes the examples of a batch; replace it with nn.GroupNorm",
        frozen_batch_norm,
    ),
    (
        "`optimizer.noise_multiplier`, `model._module`, `accountant.history`",
        "AttributeError",
        names,
    ),
    (
        "`from opacus.optimizers import DPOptimizer`",
        "ModuleNotFoundError",
        modules,
    ),
    (
        "a norm over the batch in the loss",
        "contains SqrtBackward0",
        lambda: loop(lambda m, x, y: m(x).square().sum().sqrt()),
    ),
    (
        "`1 - x` in the loss, as in focal losses",
        "contains RsubBackward1",
        lambda: loop(
            lambda m, x, y: (1 - F.cross_entropy(m(x), y, reduction="none")).square().mean()
        ),
    ),
    (
        "`pos_weight` of `BCEWithLogitsLoss`",
        "weights which a mean over the batch divides by",
        lambda: loop(positive_weight),
    ),
    (
        "a data set that is a stream",
        "TypeError: object of type 'Stream' has no len()",
        lambda: private(nn.Linear(6, 3), DataLoader(Stream(), batch_size=6)),
    ),
    (
        "`get_epsilon` before the first step",
        "call make_private first",
        lambda: PrivacyEngine().get_epsilon(1e-5),
    ),
    (
        "`poisson_sampling=False`",
        "poisson_sampling=False is not supported",
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
