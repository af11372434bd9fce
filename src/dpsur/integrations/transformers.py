"""`PrivateTrainer`: the `Trainer` of Hugging Face with private steps.

engine = dpsur.PrivacyEngine()
trainer = PrivateTrainer(model, args, train_dataset=data, engine=engine,
                         target_epsilon=3.0, target_delta=1e-5)
trainer.train()
print(engine.guarantee())
"""

import json
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer

from dpsur.engine.privacy_engine import PrivacyEngine
from dpsur.errors import CheckpointError, InvalidInputError

_LEDGER = "privacy_engine.json"
# What a trainer logs of the private records.
_PRIVATE = ("loss", "train_loss", "grad_norm", "num_input_tokens_seen")


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` whose steps are private.

    `per_device_train_batch_size` is the expected batch size. Steps are planned from
    `num_train_epochs` or `max_steps`, and checkpoints hold the ledger. The loss is the trainer's
    own (`compute_loss`, or `criterion`), called for each record alone (`engine.private_step`), with
    texts padded to public lengths. Evaluation is left to the base class: a metric
    on an evaluation set is public only if that set is.

    Training losses and the sizes of batches depend on private records: they are neither logged nor
    returned unless `log_private` is set.
    """

    optimizer: Any

    def __init__(
        self,
        *args: Any,
        engine: PrivacyEngine | None = None,
        max_grad_norm: float = 1.0,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        max_physical_batch_size: int | None = None,
        criterion: Any = None,
        log_private: bool = False,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the arguments of `Trainer`, and those of `PrivacyEngine.make_private`.

        Give `noise_multiplier`, or `target_epsilon` and `target_delta`.
        """
        super().__init__(*args, **kwargs)
        _check(self.args, noise_multiplier, target_epsilon, target_delta)
        if not log_private and self.args.include_num_input_tokens_seen not in ("no", False):
            raise InvalidInputError(
                "include_num_input_tokens_seen would save how many tokens private batches have; "
                "leave it out, or set log_private=True"
            )
        self.engine = PrivacyEngine() if engine is None else engine
        # clipped per record already, and the base class must not skip batches on resuming
        self.args.max_grad_norm, self.args.ignore_data_skip = 0.0, True
        self._log_private = log_private
        self._loader: DataLoader[Any] | None = None
        self._settings: dict[str, Any] = {
            "max_grad_norm": max_grad_norm,
            "noise_multiplier": noise_multiplier,
            "target_epsilon": target_epsilon,
            "target_delta": target_delta,
            "seed": seed,
        }
        if criterion is not None:
            self.compute_loss_func = lambda outputs, labels, **_: criterion(outputs, labels)
        # or the model would get the number of tokens in the batch, to divide its loss by
        self.model_accepts_loss_kwargs = False
        self._step = self.engine.private_step(self._loss)
        self._step.max_physical_batch_size = max_physical_batch_size

    def _loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        """The trainer's own loss, of a batch of one record."""
        return self.compute_loss(model, inputs)

    def training_step(self, model: Any, inputs: Any, *_args: Any, **_kwargs: Any) -> Any:
        """Clip the gradient of each record; the trainer then calls `optimizer.step()`."""
        model.train()
        with self.compute_loss_context_manager():
            return self._step.accumulate(inputs)["loss"].to(self.args.device)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The private loader; the first call makes model and optimizer private."""
        if self._loader is not None:
            return self._loader
        plain = DataLoader(
            self.train_dataset,
            batch_size=self._train_batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )
        self.create_optimizer()
        settings = {name: value for name, value in self._settings.items() if value is not None}
        make: Any = self.engine.make_private
        if "noise_multiplier" not in settings:
            make = self.engine.make_private_with_epsilon
        steps = self.args.max_steps
        if steps <= 0:
            steps = int(len(plain) * self.args.num_train_epochs)
        _, self.optimizer, self._loader = make(
            module=self.model, optimizer=self.optimizer, data_loader=plain, steps=steps, **settings
        )
        return self._loader

    def floating_point_ops(self, inputs: Any) -> int:  # noqa: ARG002
        """Nothing: the sizes of private batches, which would be added up and saved."""
        return 0

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the base class would rescale gradients to find their norm."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log public figures, and what has been spent so far."""
        if not self._log_private:
            for name in _PRIVATE:
                logs.pop(name, None)
        if self._loader is not None:
            ledger = self.engine.accountant
            logs["epsilon"] = ledger.get_epsilon(ledger.delta)
        super().log(logs, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and return a result without the training loss."""
        output = super().train(*args, **kwargs)
        if self._log_private:
            return output
        for name in _PRIVATE:
            output.metrics.pop(name, None)
        return output._replace(training_loss=float("nan"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        (Path(output_dir) / _LEDGER).write_text(
            json.dumps(self.engine.state_dict()), encoding="utf-8"
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / _LEDGER
        if not path.exists():
            raise CheckpointError(
                f"{checkpoint} holds no privacy ledger ({_LEDGER}); resume from a checkpoint of a "
                "PrivateTrainer"
            )
        self.engine.load_state_dict(json.loads(path.read_text(encoding="utf-8")))


def _check(args: Any, noise: float | None, epsilon: float | None, delta: float | None) -> None:
    """Refuse arguments under which the accounting would be wrong."""
    if noise is None and (epsilon is None or delta is None):
        raise InvalidInputError("give noise_multiplier, or target_epsilon and target_delta")
    if args.gradient_accumulation_steps != 1:
        raise InvalidInputError(
            "gradient_accumulation_steps must be 1: set per_device_train_batch_size to the batch "
            "size of a step, and max_physical_batch_size to what fits in memory"
        )
    if args.fp16:
        raise InvalidInputError("fp16=True needs a GradScaler; use bf16=True")
    if args.world_size > 1 or args.n_gpu > 1:
        raise InvalidInputError("PrivateTrainer trains on one device; set CUDA_VISIBLE_DEVICES")
    if args.torch_compile:
        raise InvalidInputError("torch_compile=True is not supported in private steps")
    if args.auto_find_batch_size:
        raise InvalidInputError(
            "auto_find_batch_size would change the sample rate; set max_physical_batch_size"
        )
