"""Federated learning with a proximal term on the weights, which Opacus drops silently."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
model, start = nn.Linear(6, 3), nn.Linear(6, 3)
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(data, batch_size=10),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)


# instead: @privacy_engine.private_step
# added: def step(model, batch):
def loss_of(x, y):
    # added: x, y = batch
    loss = nn.functional.cross_entropy(model(x), y)
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return loss + 0.5 * sum(((one - other.detach()) ** 2).sum() for one, other in pairs)


# instead: for batch in loader:
for x, y in loader:
    # instead: step(batch)
    optimizer.zero_grad()
    # instead:
    loss_of(x, y).backward()
    # instead:
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
