"""Private training under Lightning."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur

lightning = pytest.importorskip("lightning", reason="needs the extra dev: lightning")
from dpsur.integrations.lightning import PrivateTraining  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about workers and loggers


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class AutoEncoder(lightning.LightningModule):
    """That of Lightning's documentation: two submodules, called by themselves."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        z = self.encoder(x)
        x_hat = self.decoder(z)
        loss = F.mse_loss(x_hat, x)
        self.log_dict({"train_loss": loss, "spread": z.std()})
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Gan(lightning.LightningModule):
    """That of Lightning's documentation: manual optimization, two optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(2, 4)
        self.discriminator = nn.Linear(4, 1)

    def training_step(self, batch):
        optimizer = self.optimizers()[0]
        self.toggle_optimizer(optimizer)  # the generator learns from the critic, not from records
        judged = self.discriminator(self.generator(torch.randn(16, 2)))
        self.manual_backward(F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged)))
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
        self.critic_step(batch)

    def critic_loss(self, critic, batch):
        (real, _), fake = batch, self.generator(torch.randn(1, 2)).detach()
        right, wrong = critic(real), critic(fake)
        loss = F.binary_cross_entropy_with_logits
        return loss(right, torch.ones_like(right)) + loss(wrong, torch.zeros_like(wrong))

    def configure_optimizers(self):
        self.critic_optimizer = torch.optim.Adam(self.discriminator.parameters(), lr=0.01)
        return torch.optim.Adam(self.generator.parameters(), lr=0.01), self.critic_optimizer


def data():
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(40, 4, generator=generator),
        torch.randint(0, 3, (40,), generator=generator),
    )
    return DataLoader(TensorDataset(x, y), batch_size=10)


def private_task(kind=Task, log_private=False, **options):
    torch.manual_seed(0)
    task, engine = kind(), dpsur.PrivacyEngine()
    private = PrivateTraining(engine, log_private=log_private)
    settings = {"max_grad_norm": 1.0, "epochs": 2, "seed": 0, **options}
    if "target_epsilon" not in settings:
        settings["noise_multiplier"] = 1.0
    return task, private, private.make_private(task, data(), **settings)


def trainer(private, folder, epochs=2, **options):
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[private],
        **options,
    )


@pytest.mark.parametrize("kind", [Task, AutoEncoder])
def test_every_batch_is_one_charged_step(kind, tmp_path):
    task, private, loader = private_task(kind)
    before = {name: value.detach().clone() for name, value in task.named_parameters()}
    fitted = trainer(private, tmp_path, enable_checkpointing=False)
    fitted.fit(task, loader, data() if kind is Task else None)
    engine = private.engine
    assert engine.accountant.steps == 2 * len(loader)
    assert all(not torch.equal(value, before[name]) for name, value in task.named_parameters())
    assert float(fitted.callback_metrics["epsilon"]) == pytest.approx(
        engine.get_epsilon(engine.accountant.delta)
    )
    assert engine.independence.startswith("by construction")
    # what the step logs of private records is not logged, and what validation logs is
    assert set(fitted.callback_metrics) == {"epsilon"} | ({"val_loss"} if kind is Task else set())


def test_the_weights_are_those_of_the_step_in_a_loop(tmp_path):
    task, private, loader = private_task()
    trainer(private, tmp_path, enable_checkpointing=False).fit(task, loader)
    torch.manual_seed(0)
    plain, engine = Task(), dpsur.PrivacyEngine()
    (optimizer,), (scheduler,) = plain.configure_optimizers()
    _, optimizer, loader = engine.make_private(
        module=plain,
        optimizer=optimizer,
        data_loader=data(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        epochs=2,
        seed=0,
    )
    step = engine.private_step(lambda m, batch: F.cross_entropy(m.model(batch[0]), batch[1]))
    for _ in range(2):
        for batch in loader:
            step(batch)
        scheduler.step()
    assert torch.equal(task.model.weight, plain.model.weight)


def test_figures_of_the_step_are_logged_where_that_is_asked_for(tmp_path):
    task, private, loader = private_task(AutoEncoder, log_private=True)
    fitted = trainer(private, tmp_path, enable_checkpointing=False)
    fitted.fit(task, loader)
    assert set(fitted.callback_metrics) == {"epsilon", "train_loss", "spread"}
    assert 0 < float(fitted.callback_metrics["train_loss"]) < 10


def test_a_gan_with_manual_optimization(tmp_path):
    torch.manual_seed(0)
    task, engine = Gan(), dpsur.PrivacyEngine()
    configured = task.configure_optimizers()
    task.configure_optimizers = lambda: configured
    _, _, loader = engine.make_private(
        module=task.discriminator,
        optimizer=task.critic_optimizer,
        data_loader=data(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        epochs=2,
    )
    task.critic_step = engine.private_step(task.critic_loss)
    before = {name: value.detach().clone() for name, value in task.named_parameters()}
    trainer(PrivateTraining(engine), tmp_path, enable_checkpointing=False).fit(task, loader)
    assert engine.accountant.steps == 2 * len(loader)
    assert all(not torch.equal(value, before[name]) for name, value in task.named_parameters())
    assert engine.independence.startswith("by construction")


def test_a_checkpoint_holds_the_ledger(tmp_path):
    task, private, loader = private_task()
    fitted = trainer(private, tmp_path, epochs=1)
    fitted.fit(task, loader)
    fitted.save_checkpoint(tmp_path / "one.ckpt")
    task, private, loader = private_task()
    trainer(private, tmp_path, epochs=2).fit(task, loader, ckpt_path=tmp_path / "one.ckpt")
    assert private.engine.accountant.steps == 2 * len(loader)


def test_a_target_epsilon_and_microbatches(tmp_path):
    task, private, loader = private_task(
        target_epsilon=3.0, target_delta=1e-3, max_physical_batch_size=3
    )
    trainer(private, tmp_path, enable_checkpointing=False).fit(task, loader)
    assert private.engine.accountant.steps == 2 * len(loader)
    assert private.engine.guarantee() <= 3.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate_grad_batches": 2}, "max_physical_batch_size"),
        ({"gradient_clip_val": 1.0}, "clipped per record"),
    ],
)
def test_what_is_done_to_gradients_beside_the_step_is_refused(tmp_path, options, words):
    task, private, loader = private_task()
    with pytest.raises(dpsur.InvalidInputError, match=words):
        trainer(private, tmp_path, enable_checkpointing=False, **options).fit(task, loader)


def test_another_loader_is_refused(tmp_path):
    task, private, _ = private_task()
    with pytest.raises(dpsur.InvalidInputError, match="make_private returned"):
        trainer(private, tmp_path, enable_checkpointing=False).fit(task, data())


def test_several_optimizers_are_for_manual_optimization():
    class Two(Task):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]

    for kind in (Two, Gan):
        with pytest.raises(dpsur.InvalidInputError, match=r"engine\.private_step"):
            private_task(kind)
