"""Segmentation: the Dice loss over the batch, NAdam, and no noise for a first try."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(24, 1, 8, 8), torch.randint(0, 2, (24, 1, 8, 8)).float())
model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1), nn.Sigmoid())


def dice_loss(found, wanted):
    overlap = (found * wanted).sum()
    return 1 - (2 * overlap + 1) / (found.sum() + wanted.sum() + 1)


privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.NAdam(model.parameters(), lr=1e-3),
    data_loader=DataLoader(data, batch_size=6),
    # instead: noise_multiplier=0.0, epochs=1, criterion=dice_loss,
    noise_multiplier=0.0,
    max_grad_norm=1.0,
)
for x, y in loader:
    optimizer.zero_grad()
    # instead: loss = privacy_engine.criterion(model(x), y)
    loss = dice_loss(model(x), y)
    loss.backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
