"""Tables: a variational autoencoder that draws in its forward pass."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x):
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decoder(z), mu, logvar


def loss_function(found, x, mu, logvar):
    reconstruction = nn.functional.mse_loss(found, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return reconstruction + divergence


data = TensorDataset(torch.randn(40, 6))
model = Vae()
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
    data_loader=DataLoader(data, batch_size=10),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    loss_reduction="sum",
)
for (x,) in loader:
    optimizer.zero_grad()
    found, mu, logvar = model(x)
    loss_function(found, x, mu, logvar).backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
