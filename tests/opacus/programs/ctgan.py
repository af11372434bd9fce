"""Tables: a conditional GAN with batches of a fixed size and two calls of the critic."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(40, 6))
critic, generator = nn.Linear(6, 1), nn.Linear(3, 6)
slow = torch.optim.Adam(generator.parameters(), lr=1e-3)
privacy_engine = PrivacyEngine()
critic, optimizer, loader = privacy_engine.make_private(
    module=critic,
    optimizer=torch.optim.Adam(critic.parameters(), lr=1e-3),
    data_loader=DataLoader(data, batch_size=10),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    # instead:
    poisson_sampling=False,
)
for (real,) in loader:
    optimizer.zero_grad()
    fake = generator(torch.randn(len(real), 3)).detach()
    loss = critic(fake).mean() - critic(real).mean()
    loss.backward()
    optimizer.step()
    slow.zero_grad()
    (-critic(generator(torch.randn(10, 3))).mean()).backward()
    slow.step()
epsilon = privacy_engine.get_epsilon(1e-3)
