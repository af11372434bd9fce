"""Lightning: an ordinary task, whose training step a callback makes private."""

import logging
import tempfile

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from dpsur.integrations.lightning import PrivateTraining

DELTA = 1e-5
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)


class Task(lightning.LightningModule):
    """An ordinary task."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.log("train_loss", loss)  # private: it is dropped, unless log_private=True
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


labels = torch.randint(0, 2, (2500,))
points = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])[labels] + torch.randn(2500, 2)
task, private = Task(), PrivateTraining(dpsur.PrivacyEngine())
loader = private.make_private(
    task,
    DataLoader(TensorDataset(points[:2000], labels[:2000]), batch_size=200),
    target_epsilon=2.0,
    target_delta=DELTA,
    max_grad_norm=1.0,
    epochs=3,
)
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[private],  # refuses what breaks the accounting, logs epsilon
    )
    trainer.fit(task, loader)
task.model.eval()
accuracy = (task.model(points[2000:]).argmax(1) == labels[2000:]).float().mean()
print(f"epsilon {float(trainer.callback_metrics['epsilon']):.2f}, accuracy {accuracy:.1%}")
