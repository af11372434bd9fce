"""`PrivateTrainer`: the `Trainer` of Hugging Face with private steps.

engine = dpsur.PrivacyEngine()
trainer = PrivateTrainer(model, args, train_dataset=data, engine=engine,
                         target_epsilon=3.0, target_delta=1e-5)
trainer.train()
print(engine.guarantee())
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from dpsur.engine.privacy_engine import PrivacyEngine
from dpsur.errors import CheckpointError, InvalidInputError

_IGNORED = -100  # the label of padding
_LEDGER = "privacy_engine.json"
# What is logged without `log_private`, and figures of evaluation sets, whose names begin so.
_PUBLIC = (
    *("step", "epoch", "learning_rate", "epsilon", "total_flos"),
    *("train_runtime", "train_samples_per_second", "train_steps_per_second"),
)
_OF_PUBLIC_SETS = ("eval_", "test_", "predict_")


class _Private(float):
    """A figure of private records that is not shown: not a number, and printed as "private"."""

    def __new__(cls) -> "_Private":
        return super().__new__(cls, "nan")

    def __format__(self, _: str) -> str:
        return "private"

    def __repr__(self) -> str:
        return "private"

    __str__ = __repr__


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` whose steps are private.

    `per_device_train_batch_size` times `gradient_accumulation_steps` is the expected batch size,
    worked on in microbatches of the former. Steps are planned from `num_train_epochs` or
    `max_steps`, and checkpoints hold the ledger. The loss is the trainer's
    own (`compute_loss`, or `criterion`), called for each record alone (`engine.private_step`), with
    texts padded to public lengths. Evaluation is left to the base class: a metric
    on an evaluation set is public only if that set is.

    What is logged is a list of public figures (`learning_rate`, `epsilon`, and what begins with
    `eval_`). Training losses, the sizes of batches and whatever a subclass logs of private records
    are neither logged nor returned unless `log_private` is set.
    """

    optimizer: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *more: Any,
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
        accumulated = 1
        if args is not None:  # a logical batch, where the base class would add up several
            args, accumulated = copy.copy(args), int(args.gradient_accumulation_steps)
            args.gradient_accumulation_steps = 1
        super().__init__(model, args, *more, **kwargs)
        _check(self.args, noise_multiplier, target_epsilon, target_delta)
        if not log_private and self.args.include_num_input_tokens_seen not in ("no", False):
            raise InvalidInputError(
                "include_num_input_tokens_seen would save how many tokens private batches have; "
                "leave it out, or set log_private=True"
            )
        self.engine = PrivacyEngine() if engine is None else engine
        # clipped per record already, and the base class must not skip batches on resuming
        self.args.max_grad_norm, self.args.ignore_data_skip = 0.0, True
        self._log_private, self._accumulated = log_private, accumulated
        if accumulated > 1 and max_physical_batch_size is None:
            max_physical_batch_size = self._train_batch_size
        self._hear, self.callback_handler.on_log = self.callback_handler.on_log, self._on_log
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
        self._step = self.engine.private_step(self._loss)
        self._step.max_physical_batch_size = max_physical_batch_size

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The loss of the base class; a decoder reads labels that are taken out of the inputs."""
        taken_out = self.label_smoother is not None or self.compute_loss_func is not None
        if taken_out and "labels" in inputs and "decoder_input_ids" not in inputs:
            whole = self.accelerator.unwrap_model(model)
            if getattr(whole.config, "is_encoder_decoder", False):
                shifted = _decoder_inputs(whole, inputs["labels"])
                inputs = {**inputs, "decoder_input_ids": shifted}
        return super().compute_loss(model, inputs, *args, **kwargs)

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
            batch_size=self._train_batch_size * self._accumulated,
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
        if self._loader is not None:
            ledger = self.engine.accountant
            logs["epsilon"] = ledger.get_epsilon(ledger.delta)
        super().log(logs, *args, **kwargs)

    def _on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float]) -> Any:
        """Drop what is not public before anyone hears of it, no matter who put it there."""
        if not self._log_private:
            for found in (logs, state.log_history[-1]):
                for name in [name for name in found if not _is_public(name)]:
                    del found[name]
        return self._hear(args, state, control, logs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and return a result without the training loss."""
        output = super().train(*args, **kwargs)
        if self._log_private:
            return output
        public = {name: value for name, value in output.metrics.items() if _is_public(name)}
        return output._replace(training_loss=_Private(), metrics=public)

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


def _is_public(name: str) -> bool:
    return name in _PUBLIC or name.startswith(_OF_PUBLIC_SETS)


def _decoder_inputs(model: Any, labels: Any) -> Any:
    """What a decoder reads: the labels behind a first token, as the model itself does it."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if hasattr(inner, "prepare_decoder_input_ids_from_labels"):
        return inner.prepare_decoder_input_ids_from_labels(labels=labels)
    first = torch.full_like(labels[:, :1], inner.config.decoder_start_token_id)
    shifted = torch.cat([first, labels[:, :-1]], 1)
    return shifted.masked_fill(shifted == _IGNORED, inner.config.pad_token_id)


def _check(args: Any, noise: float | None, epsilon: float | None, delta: float | None) -> None:
    """Refuse arguments under which the accounting would be wrong."""
    if noise is None and (epsilon is None or delta is None):
        raise InvalidInputError("give noise_multiplier, or target_epsilon and target_delta")
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
