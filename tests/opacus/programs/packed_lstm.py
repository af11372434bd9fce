"""Texts with their lengths: the LSTM gets a packed sequence."""

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.lstm = nn.Embedding(20, 6), DPLSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.table(x), lengths, batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.lstm(packed)
        return self.head(hidden[-1])


lengths = torch.arange(40) % 5 + 2
data = TensorDataset(torch.randint(0, 20, (40, 6)), lengths, torch.randint(0, 2, (40,)))
model = Net()
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
    data_loader=DataLoader(data, batch_size=10),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for x, length, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x, length), y).backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
