"""Opacus's example imdb.py: a bare squeeze(), padded texts, batches of a fixed size."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader


class SampleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 8)
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.fc = nn.Linear(8, 2)

    def forward(self, x):
        x = self.emb(x).transpose(1, 2)
        return self.fc(self.pool(x).squeeze())


def padded_collate(batch):
    texts = [one for one, _ in batch]
    texts = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=0)
    return texts, torch.tensor([label for _, label in batch])


data = [(torch.randint(1, 30, (4 + row % 3,)), row % 2) for row in range(40)]
model = SampleNet()
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
    data_loader=DataLoader(data, batch_size=20, collate_fn=padded_collate),
    noise_multiplier=0.6,
    max_grad_norm=1.0,
    # instead:
    poisson_sampling=False,
)
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.CrossEntropyLoss()(model(x), y)
    loss.backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
