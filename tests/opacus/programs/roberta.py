"""Named entities: the optimizer is driven by the inner methods of `DPOptimizer`."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randint(0, 20, (40, 5)), torch.randint(0, 3, (40, 5)))
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 3))
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    data_loader=DataLoader(data, batch_size=10),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for tokens, tags in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens).view(-1, 3), tags.view(-1)).backward()
    optimizer.clip_and_accumulate()
    optimizer.add_noise()
    optimizer.scale_grad()
    optimizer.original_optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
