"""Private training under Lightning."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur

lightning = pytest.importorskip("lightning", reason="needs the extra dev: lightning")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about workers and loggers


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def training_step(self, batch, _):
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return self.optimizer


def private_task(epochs=2):
    torch.manual_seed(0)
    task, engine = Task(), dpsur.PrivacyEngine()
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))
    task.model, task.optimizer, loader = engine.make_private(
        module=task.model,
        optimizer=task.optimizer,
        data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        epochs=epochs,
        seed=0,
    )
    return task, engine, loader


def trainer(engine, folder, epochs=2, **options):
    from dpsur.integrations.lightning import PrivateTraining

    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PrivateTraining(engine)],
        **options,
    )


def test_every_batch_is_one_charged_step(tmp_path):
    task, engine, loader = private_task()
    before = task.model.weight.detach().clone()
    fitted = trainer(engine, tmp_path, enable_checkpointing=False)
    fitted.fit(task, loader)
    assert engine.accountant.steps == 2 * len(loader)
    assert not torch.equal(task.model.weight, before)
    assert float(fitted.callback_metrics["epsilon"]) == pytest.approx(
        engine.get_epsilon(engine.accountant.delta)
    )


def test_a_checkpoint_holds_the_ledger(tmp_path):
    task, engine, loader = private_task()
    fitted = trainer(engine, tmp_path, epochs=1)
    fitted.fit(task, loader)
    fitted.save_checkpoint(tmp_path / "one.ckpt")
    task, engine, loader = private_task()
    trainer(engine, tmp_path, epochs=2).fit(task, loader, ckpt_path=tmp_path / "one.ckpt")
    assert engine.accountant.steps == 2 * len(loader)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate_grad_batches": 2}, "max_physical_batch_size"),
        ({"gradient_clip_val": 1.0}, "clipped per record"),
    ],
)
def test_what_is_done_to_gradients_beside_the_step_is_refused(tmp_path, options, words):
    task, engine, loader = private_task()
    with pytest.raises(dpsur.InvalidInputError, match=words):
        trainer(engine, tmp_path, enable_checkpointing=False, **options).fit(task, loader)


def test_another_loader_is_refused(tmp_path):
    task, engine, loader = private_task()
    with pytest.raises(dpsur.InvalidInputError, match="make_private returned"):
        trainer(engine, tmp_path, enable_checkpointing=False).fit(
            task, DataLoader(loader.dataset, batch_size=10)
        )
