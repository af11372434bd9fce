"""Medicine: classes are weighted in the cross entropy."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
model = nn.Linear(6, 3)
criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(data, batch_size=10),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    # added: criterion=criterion,
)
for x, y in loader:
    optimizer.zero_grad()
    # instead: loss = privacy_engine.criterion(model(x), y)
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
