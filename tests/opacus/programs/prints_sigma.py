"""Images: the program prints the calibrated noise and other figures of the optimizer."""

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(40, 3, 8, 8), torch.randint(0, 3, (40,)))
model = nn.Sequential(
    nn.Conv2d(3, 8, 3),
    nn.BatchNorm2d(8),
    nn.ReLU(inplace=True),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(8, 3),
)
if ModuleValidator.validate(model, strict=False):
    model = ModuleValidator.fix(model)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
privacy_engine = PrivacyEngine()
model, optimizer, loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=8),
    epochs=1,
    target_epsilon=8.0,
    target_delta=1e-3,
    max_grad_norm=1.2,
)
print(f"sigma={optimizer.noise_multiplier} C={optimizer.max_grad_norm}")
print(f"expected batch {optimizer.expected_batch_size} of {optimizer.original_optimizer}")
with BatchMemoryManager(
    data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
) as memory_safe:
    for images, target in memory_safe:
        optimizer.zero_grad()
        loss = nn.CrossEntropyLoss()(model(images), target)
        loss.backward()
        optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
