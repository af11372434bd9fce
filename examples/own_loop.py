"""A private training loop: three lines more than a plain one."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur

DELTA = 1e-5
torch.manual_seed(0)

# 4,000 records in two classes, as any map-style data set has them
centers = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
labels = torch.randint(0, 2, (5000,))
points = centers[labels] + torch.randn(5000, 2)
train = TensorDataset(points[:4000], labels[:4000])
test_x, test_y = points[4000:], labels[4000:]

model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
loader = DataLoader(train, batch_size=200, shuffle=True)

# the noise follows from the budget and the number of epochs, which are fixed here
engine = dpsur.PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    target_epsilon=2.0,
    target_delta=DELTA,
    max_grad_norm=1.0,
    epochs=3,
)
for epoch in range(3):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()  # clips each record's gradient, adds noise, charges
    model.eval()
    accuracy = (model(test_x).argmax(1) == test_y).float().mean()
    # the training loss is private; the accuracy on public records is not
    print(f"epoch {epoch + 1}: epsilon {engine.get_epsilon(DELTA):.2f}, accuracy {accuracy:.1%}")
print(f"guarantee: epsilon {engine.guarantee():.2f} at delta {DELTA:g}")
