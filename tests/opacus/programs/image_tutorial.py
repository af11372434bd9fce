"""The tutorial on image classification: a residual network and BatchMemoryManager."""

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(8, 3)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(x))
        out += x
        return self.fc(self.relu(out).mean((2, 3)))


data = TensorDataset(torch.randn(36, 3, 8, 8), torch.randint(0, 3, (36,)))
model = Residual()
errors = ModuleValidator.validate(model, strict=False)
print(errors[-5:])
model = ModuleValidator.fix(model)
ModuleValidator.validate(model, strict=False)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
privacy_engine = PrivacyEngine()
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=12),
    epochs=1,
    target_epsilon=8.0,
    target_delta=1e-3,
    max_grad_norm=1.2,
)
print(f"Using sigma={optimizer.noise_multiplier} and C={1.2}")
model.train()
losses, top1_acc = [], []
with BatchMemoryManager(
    data_loader=train_loader, max_physical_batch_size=5, optimizer=optimizer
) as memory_safe_data_loader:
    for images, target in memory_safe_data_loader:
        optimizer.zero_grad()
        output = model(images)
        loss = criterion(output, target)
        preds = np.argmax(output.detach().cpu().numpy(), axis=1)
        top1_acc.append((preds == target.detach().cpu().numpy()).mean())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-3)
