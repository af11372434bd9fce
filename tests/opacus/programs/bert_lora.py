"""The tutorial on BERT, part 3: adapters and ghost clipping, with a sampler that is not used."""

import torch
from opacus import PrivacyEngine
from opacus.utils.uniform_sampler import UniformWithReplacementSampler  # noqa: F401
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.base = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 3)
        for part in (self.table, self.base):
            part.requires_grad_(False)

    def forward(self, x):
        x = self.table(x)
        return self.head((self.base(x) + self.up(self.down(x))).mean(1))


data = TensorDataset(torch.randint(0, 20, (40, 5)), torch.randint(0, 3, (40,)))
model = Adapted().train()
trained = [value for value in model.parameters() if value.requires_grad]
privacy_engine = PrivacyEngine()
model, optimizer, criterion, loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.AdamW(trained, lr=5e-4),
    data_loader=DataLoader(data, batch_size=10),
    target_delta=1e-3,
    target_epsilon=7.5,
    epochs=1,
    max_grad_norm=0.1,
    criterion=nn.CrossEntropyLoss(),
    grad_sample_mode="ghost",
)
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
