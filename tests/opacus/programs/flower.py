"""Federated learning: a client makes an engine for each round and loads the global weights."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
weights = [value.detach().numpy() for value in nn.Linear(6, 3).state_dict().values()]
for _ in range(2):
    model = nn.Linear(6, 3)
    keys = model.state_dict().keys()
    model.load_state_dict(
        {key: torch.tensor(value) for key, value in zip(keys, weights, strict=True)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    privacy_engine = PrivacyEngine(secure_mode=False)
    private, optimizer, loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(private(x), y).backward()
        optimizer.step()
    weights = [value.numpy() for value in private._module.state_dict().values()]
epsilon = privacy_engine.get_epsilon(delta=1e-3)
