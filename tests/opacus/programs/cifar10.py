"""Opacus's example cifar10.py, with its imports for several processes."""

import torch
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.grad_sample.functorch import make_functional
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(32, 3, 8, 8), torch.randint(0, 10, (32,)))
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
)
if torch.distributed.is_initialized():
    model = DPDDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
privacy_engine = PrivacyEngine(secure_mode=False)
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=8),
    noise_multiplier=1.5,
    max_grad_norm=10.0,
    clipping="flat",
    grad_sample_mode="functorch",
)
for epoch in range(2):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (epoch + 1)
    for images, target in loader:
        output = model(images)
        loss = nn.CrossEntropyLoss()(output, target)
        preds = output.argmax(1).detach()
        accuracy = (preds == target).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(make_functional.__name__)
epsilon = privacy_engine.accountant.get_epsilon(delta=1e-3)
