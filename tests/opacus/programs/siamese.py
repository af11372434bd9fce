"""Verification: two calls of the model for each step, and the contrastive loss."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pairs = (torch.randn(40, 6), torch.randn(40, 6), torch.randint(0, 2, (40,)).float())
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
    data_loader=DataLoader(TensorDataset(*pairs), batch_size=10),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)


def loss_of(one, other, same):
    distance = nn.functional.pairwise_distance(model(one), model(other))
    return (same * distance**2 + (1 - same) * torch.relu(1 - distance) ** 2).mean()


for one, other, same in loader:
    optimizer.zero_grad()
    loss_of(one, other, same).backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
