"""Federated learning: an accountant made by hand, and a generator for the noise."""

import torch
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
model = nn.Linear(6, 3)
total = RDPAccountant()
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(data, batch_size=10),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    # instead: seed=3,
    noise_generator=torch.Generator().manual_seed(3),
)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    total.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=1 / len(loader))
epsilon, alpha = total.get_privacy_spent(delta=1e-3)
