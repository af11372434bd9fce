"""`PrivateTraining`: a callback that makes the steps of a Lightning module private.

    private = PrivateTraining(dpsur.PrivacyEngine())
    loader = private.make_private(task, loader, noise_multiplier=1.0, max_grad_norm=1.0, epochs=10)
    Trainer(callbacks=[private], max_epochs=10).fit(task, loader)

`training_step` becomes the function of a private step (`engine.private_step`): it is called so that
it sees one record at a time, and may use any part of the module. A module with manual optimization
calls a private step itself, in `training_step`:

    task.critic, task.critic_optimizer, loader = engine.make_private(module=task.critic, ...)
    task.critic_step = engine.private_step(critic_loss)

Its other optimizers may do what they like, as long as they see no record.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import lightning
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpsur.engine.loader import PrivateBatch
from dpsur.engine.privacy_engine import PrivacyEngine
from dpsur.errors import InvalidInputError


class PrivateTraining(lightning.Callback):  # type: ignore[misc]
    """Private steps for a `LightningModule`, epsilon in the log, the ledger in checkpoints.

    What `training_step` logs depends on private records: it is dropped, unless `log_private` is
    set. Then the means over the batch are logged, and are not private.
    """

    def __init__(self, engine: PrivacyEngine, *, log_private: bool = False) -> None:
        super().__init__()
        self.engine, self.log_private = engine, log_private

    def make_private(
        self, task: Any, data_loader: DataLoader[Any], **settings: Any
    ) -> DataLoader[Any]:
        """Make the training step of a module private; returns the loader to train with.

        `settings` are those of `PrivacyEngine.make_private`, or of `make_private_with_epsilon`. The
        optimizer is that of `configure_optimizers`, which is called here.
        """
        if not task.automatic_optimization:
            raise InvalidInputError(
                "a module with automatic_optimization=False makes its steps itself: call "
                "engine.make_private with the part and the optimizer that see private records, and "
                "step = engine.private_step(loss), then step(batch) in training_step"
            )
        configured = task.configure_optimizers()
        make: Any = self.engine.make_private
        if "noise_multiplier" not in settings:
            make = self.engine.make_private_with_epsilon
        most = settings.pop("max_physical_batch_size", None)
        _, _, loader = make(
            module=task, optimizer=_optimizer(configured), data_loader=data_loader, **settings
        )
        plain_step, plain_log = task.training_step, task.log
        logged: dict[str, Any] = {}  # how each name was logged

        def loss(_: Any, *args: Any) -> dict[str, Any]:
            figures: dict[str, Any] = {}

            def log(name: str, value: Any, *more: Any, **options: Any) -> None:
                figures[name], logged[name] = value, (more, options)

            task.log, task.log_dict = log, _each(log)
            try:
                found = plain_step(*args)
            finally:
                del task.log, task.log_dict
            found = found if isinstance(found, Mapping) else {"loss": found}
            return {**{f"log/{name}": value for name, value in figures.items()}, **found}

        step = self.engine.private_step(loss)
        step.max_physical_batch_size = most  # a batch of the loader is a step of the trainer

        @wraps(plain_step)
        def training_step(*args: Any) -> Tensor:
            found = step.accumulate(*args)
            if self.log_private:
                for name, (more, options) in logged.items():
                    if f"log/{name}" in found:
                        plain_log(name, found[f"log/{name}"], *more, **{"batch_size": 1, **options})
            return found["loss"]

        task.training_step = training_step
        task.configure_optimizers = lambda: configured
        # gradients of records are known after the step, and `.grad` is written in its update
        task.backward = task.optimizer_zero_grad = lambda *_, **__: None
        return loader  # type: ignore[no-any-return]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Leave private batches as they are: a private step moves them to its device."""
        pl_module.transfer_batch_to_device = _transfer(pl_module.transfer_batch_to_device)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Refuse what is done to gradients beside the private step."""
        if trainer.accumulate_grad_batches != 1:
            raise InvalidInputError(
                "accumulate_grad_batches must be 1; give the loader a larger batch_size, and set "
                "max_physical_batch_size in make_private"
            )
        if trainer.gradient_clip_val:
            raise InvalidInputError(
                "gradient_clip_val must be left out: gradients are clipped per record"
            )
        if str(trainer.precision) == "16-mixed":
            raise InvalidInputError("precision 16-mixed needs a GradScaler; use bf16-mixed")
        if trainer.world_size > 1:
            raise InvalidInputError("private training runs on one device; set devices=1")
        if getattr(trainer.train_dataloader, "owner", None) is not self.engine:
            raise InvalidInputError("fit must get the loader that make_private returned")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Log what has been spent so far: a figure of the number of steps."""
        ledger = self.engine.accountant
        pl_module.log("epsilon", ledger.get_epsilon(ledger.delta))

    def state_dict(self) -> dict[str, Any]:
        return self.engine.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.engine.load_state_dict(state_dict)


def _optimizer(configured: Any) -> Optimizer:
    """The one optimizer of what `configure_optimizers` returns."""
    found = configured
    if isinstance(found, tuple | list) and found and isinstance(found[0], tuple | list):
        found = found[0]  # optimizers and schedulers
    if isinstance(found, tuple | list) and len(found) == 1:
        found = found[0]
    if isinstance(found, Mapping):
        found = found.get("optimizer")
    if not isinstance(found, Optimizer):
        raise InvalidInputError(
            "configure_optimizers must return one optimizer, with a scheduler or without; several "
            "need automatic_optimization=False, where training_step calls an engine.private_step"
        )
    return found


def _each(log: Callable[..., None]) -> Callable[..., None]:
    """`log_dict` in terms of `log`."""

    def log_dict(values: Mapping[str, Any], *more: Any, **options: Any) -> None:
        for name, value in values.items():
            log(name, value, *more, **options)

    return log_dict


def _transfer(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def transfer(batch: Any, *args: Any) -> Any:
        return batch if isinstance(batch, PrivateBatch) else plain(batch, *args)

    return transfer
