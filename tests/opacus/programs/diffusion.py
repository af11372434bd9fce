"""Tables: a diffusion model, whose loss is a method of the module."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.denoise = nn.Linear(7, 6)

    def mixed_loss(self, x):
        t = torch.rand(len(x), 1)
        noise = torch.randn_like(x)
        noisy = x * (1 - t) + noise * t
        return nn.functional.mse_loss(self.denoise(torch.cat([noisy, t], 1)), noise)

    def forward(self, x):
        return self.denoise(x)


data = TensorDataset(torch.randn(40, 6))
model = Diffusion()
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    data_loader=DataLoader(data, batch_size=10),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for (x,) in loader:
    optimizer.zero_grad()
    model._module.mixed_loss(x).backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
