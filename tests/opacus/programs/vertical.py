"""Vertical federated learning: two loaders whose batches have to hold the same records."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

left, right, labels = torch.randn(40, 3), torch.randn(40, 3), torch.randint(0, 2, (40,))
model = nn.Linear(6, 2)
privacy_engine = PrivacyEngine()
# instead: data_loader = DataLoader(TensorDataset(left, right, labels), batch_size=10)
data_loader = DataLoader(TensorDataset(left, labels), batch_size=10)
other = DataLoader(TensorDataset(right), batch_size=10)
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=data_loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    # instead:
    poisson_sampling=False,
)
# instead: for a, b, y in loader:
for (a, y), (b,) in zip(loader, other, strict=True):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.cat([a, b], 1)), y).backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
