"""Images with several augmented views of each record inside its one clipped gradient."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur

DELTA = 1e-4
torch.manual_seed(0)

# Noisy images of a horizontal or a vertical bar, at a random place.
count, side = 1300, 12
images = 0.3 * torch.randn(count, 1, side, side)
labels = torch.randint(0, 2, (count,))
for image, label in zip(images, labels, strict=True):
    place = int(torch.randint(2, side - 2, ()))
    (image[:, place] if label else image[:, :, place]).add_(1.0)
train = TensorDataset(images[:1000], labels[:1000])
test_x, test_y = images[1000:], labels[1000:]


def shift(x: torch.Tensor) -> torch.Tensor:
    """Move every image by up to two pixels, each by itself.

    In tensors: code that reads their values into Python (`tolist`, `item`) runs record by record.
    """
    down, along = ((torch.arange(side) + torch.randint(-2, 3, (len(x), 1))) % side for _ in "yx")
    moved = x.gather(2, down[:, None, :, None].expand_as(x))
    return moved.gather(3, along[:, None, None, :].expand_as(x))


# BatchNorm mixes records: `dpsur.check` names it, and `dpsur.fix` replaces it
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.MaxPool2d(3),
    nn.Flatten(),
    nn.Linear(128, 2),
)
print(dpsur.check(model, (images[:4], labels[:4])))
model, changes = dpsur.fix(model)
print(*changes, sep="\n")

engine = dpsur.PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
    data_loader=DataLoader(train, batch_size=100),
    target_epsilon=4.0,
    target_delta=DELTA,
    max_grad_norm=1.0,
    epochs=3,
)


@engine.private_step
def step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """The mean loss over four views of a record."""
    x, y = batch
    return nn.functional.cross_entropy(model(shift(x.repeat(4, 1, 1, 1))), y.repeat(4))


for epoch in range(3):
    model.train()
    for batch in loader:
        step(batch)
    model.eval()
    accuracy = (model(test_x).argmax(1) == test_y).float().mean()
    print(f"epoch {epoch + 1}: epsilon {engine.get_epsilon(DELTA):.2f}, accuracy {accuracy:.1%}")
