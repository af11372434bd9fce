"""What tests of custom loops share."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur


def records(count=60, shape=(6,), classes=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, *shape, generator=generator, dtype=dtype)
    return TensorDataset(inputs, torch.arange(count) % classes)


def linear_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def private(model=None, data=None, *, batch_size=12, lr=0.1, optimizer=None, **options):
    """An engine and what it returns, for a small problem."""
    model = linear_model() if model is None else model
    data = records() if data is None else data
    if optimizer is None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True)
    engine = dpsur.PrivacyEngine()
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    made = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **settings)
    return (engine, *made)


def without_noise(monkeypatch):
    """Let the noise be zero, to see the clipped sum."""
    monkeypatch.setattr("dpsur.mechanism.gaussian.add_noise", lambda total, *_: total.params)
