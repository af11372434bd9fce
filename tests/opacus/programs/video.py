"""Video: frames through a CNN, then an LSTM of Opacus."""

import torch
from opacus import PrivacyEngine
from opacus.layers.dp_rnn import DPLSTM
from opacus.validators.module_validator import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.lstm = DPLSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        records, frames = x.shape[:2]
        found = self.cnn(x.flatten(0, 1)).view(records, frames, -1)
        return self.head(self.lstm(found)[0][:, -1])


data = TensorDataset(torch.randn(24, 3, 1, 8, 8), torch.randint(0, 2, (24,)))
model = Net()
ModuleValidator.validate(model, strict=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=6),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for x, y in loader:
    optimizer.zero_grad()
    nn.CrossEntropyLoss()(model(x), y).backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
