"""Opacus's example dcgan.py: the critic judges real and made images in one step."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(32, 1, 4, 4))
critic = nn.Sequential(nn.Conv2d(1, 4, 4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(4, 1))
generator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Unflatten(1, (1, 4, 4)))
criterion = nn.BCEWithLogitsLoss()
slow = torch.optim.Adam(generator.parameters(), lr=1e-3)
privacy_engine = PrivacyEngine()
critic, optimizer, loader = privacy_engine.make_private(
    module=critic,
    optimizer=torch.optim.Adam(critic.parameters(), lr=1e-3),
    data_loader=DataLoader(data, batch_size=8),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)

for (real,) in loader:
    fake = generator(torch.randn(len(real), 3))
    optimizer.zero_grad()
    right, wrong = critic(real), critic(fake.detach())
    loss = criterion(right, torch.ones_like(right)) + criterion(wrong, torch.zeros_like(wrong))
    loss.backward()
    optimizer.step()
    # added: fake = generator(torch.randn(8, 3))
    slow.zero_grad()
    judged = critic(fake)
    criterion(judged, torch.ones_like(judged)).backward()
    slow.step()
epsilon = privacy_engine.get_epsilon(1e-3)
