"""Opacus's example char-lstm-classification.py, and the tutorial on names."""

import torch
from opacus import PrivacyEngine
from opacus.layers import DPGRU
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CharNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.rnn = DPGRU(8, 6, num_layers=2, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x, hidden=None):
        found, hidden = self.rnn(self.embedding(x), hidden)
        return self.out(found[:, -1, :]), hidden


data = TensorDataset(torch.randint(0, 20, (30, 7)), torch.randint(0, 3, (30,)))
model = CharNN()
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=2.0),
    data_loader=DataLoader(data, batch_size=6),
    noise_multiplier=1.0,
    max_grad_norm=1.5,
)
for x, y in loader:
    logits, _ = model(x)
    loss = nn.CrossEntropyLoss()(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(delta=1e-3)
