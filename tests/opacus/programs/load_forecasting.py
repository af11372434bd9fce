"""Time series: an LSTM with a hidden state given by the model, and the mean squared error."""

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = DPLSTM(3, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        start = torch.zeros(2, x.size(0), 5)
        found, _ = self.lstm(x, (start, start))
        return self.head(found[:, -1, :])


data = TensorDataset(torch.randn(30, 6, 3), torch.randn(30, 1))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=10),
    noise_multiplier=0.8,
    max_grad_norm=1.0,
)
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.MSELoss()(model(x), y)
    loss.backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
