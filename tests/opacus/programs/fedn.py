"""Federated learning: the accountant goes from round to round in a file."""

import pickle

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
kept = None
for _ in range(2):
    model = nn.Linear(6, 3)
    privacy_engine = PrivacyEngine()
    privacy_engine.accountant = pickle.loads(kept) if kept else privacy_engine.accountant
    model, optimizer, loader = privacy_engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    kept = pickle.dumps(privacy_engine.accountant)
epsilon = pickle.loads(kept).get_epsilon(1e-3)
