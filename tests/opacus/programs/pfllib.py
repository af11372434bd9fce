"""Federated learning: parameters are overwritten before each round of one engine."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
model, server = nn.Linear(6, 3), nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=10),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for _ in range(2):
    for new, old in zip(server.parameters(), model.parameters(), strict=True):
        old.data = new.data.clone()
    model.train()
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    for new, old in zip(model.parameters(), server.parameters(), strict=True):
        old.data = new.data.clone()
epsilon = privacy_engine.get_epsilon(1e-3)
