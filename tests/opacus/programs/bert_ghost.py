"""The tutorial on BERT, part 2: ghost clipping, with the loader that is private already."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randint(0, 20, (40, 5)), torch.randint(0, 3, (40,)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.table(x).mean(1))


model = Net()
loader = DataLoader(data, batch_size=10)
first = Net()
_, _, loader = PrivacyEngine().make_private(
    module=first,
    optimizer=torch.optim.SGD(first.parameters(), lr=0.1),
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
privacy_engine = PrivacyEngine()
model, optimizer, criterion, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    data_loader=loader,
    criterion=nn.CrossEntropyLoss(reduction="mean"),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    grad_sample_mode="ghost",
)
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
