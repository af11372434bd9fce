"""`PrivateTraining`: a callback that keeps private training right under Lightning.

    engine = dpsur.PrivacyEngine()
    task.model, task.optimizer, loader = engine.make_private(
        module=task.model, optimizer=task.optimizer, data_loader=loader, ...)
    Trainer(callbacks=[PrivateTraining(engine)], ...).fit(task, loader)

`task` is a `LightningModule` that calls `self.model` in `training_step` and returns
`self.optimizer` from `configure_optimizers`.
"""

from typing import Any

import lightning

from dpsur.engine.privacy_engine import PrivacyEngine
from dpsur.errors import InvalidInputError


class PrivateTraining(lightning.Callback):  # type: ignore[misc]
    """Refuses settings that break the accounting, logs epsilon, keeps the ledger in checkpoints.

    What `training_step` logs of a batch, such as its loss, is not private.
    """

    def __init__(self, engine: PrivacyEngine) -> None:
        """Take the engine that has made the model private."""
        super().__init__()
        self.engine = engine

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse what is done to gradients beside the private step."""
        if trainer.accumulate_grad_batches != 1:
            raise InvalidInputError(
                "accumulate_grad_batches must be 1; set max_physical_batch_size in make_private"
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
        if not pl_module.automatic_optimization:
            raise InvalidInputError(
                "automatic_optimization=False is not supported: make one step per batch"
            )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Log what has been spent so far: a figure of the number of steps."""
        ledger = self.engine.accountant
        pl_module.log("epsilon", ledger.get_epsilon(ledger.delta))

    def state_dict(self) -> dict[str, Any]:
        """The ledger, for a checkpoint."""
        return self.engine.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the ledger of a checkpoint."""
        self.engine.load_state_dict(state_dict)
