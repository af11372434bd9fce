"""Opacus's example mnist.py."""

import numpy as np
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class SampleConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 8, 2, padding=3), nn.Conv2d(16, 32, 4, 2)
        self.fc1, self.fc2 = nn.Linear(32 * 4 * 4, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.view(-1, 32 * 4 * 4))))


data = TensorDataset(torch.randn(24, 1, 28, 28), torch.randint(0, 10, (24,)))
model = SampleConvNet()
optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0)
privacy_engine = PrivacyEngine(secure_mode=False)
model, optimizer, train_loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=8),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
model.train()
losses = []
for images, target in train_loader:
    optimizer.zero_grad()
    loss = nn.CrossEntropyLoss()(model(images), target)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
epsilon = privacy_engine.accountant.get_epsilon(delta=1e-3)
print(f"loss {np.mean(losses):.3f} epsilon {epsilon:.2f}")
