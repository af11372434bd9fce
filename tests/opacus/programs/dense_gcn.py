"""Graphs: a graph is a record, with its adjacency matrix; the optimizer is made by hand."""

import torch
from opacus import PrivacyEngine

# instead:
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Gcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, adjacency):
        hidden = torch.relu(adjacency @ self.one(x))
        return (adjacency @ self.two(hidden)).mean(1)


graphs = torch.rand(32, 5, 5)
data = TensorDataset(torch.randn(32, 5, 4), graphs + graphs.mT, torch.randint(0, 2, (32,)))
model = Gcn()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
# instead:
optimizer = DPOptimizer(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8)
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    # instead: optimizer=optimizer,
    optimizer=optimizer.original_optimizer,
    data_loader=DataLoader(data, batch_size=8),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for x, adjacency, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x, adjacency), y).backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
