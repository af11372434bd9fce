"""`PrivacyEngine` as programs for Opacus call it."""

import logging
import os
from collections.abc import Callable
from typing import IO, Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpsur.engine.privacy_engine import PrivacyEngine as Engine
from dpsur.errors import CheckpointError, InvalidInputError
from dpsur.opacus.accounting import History, IAccountant, LedgerView
from dpsur.opacus.names import MissingError
from dpsur.opacus.validation import ModuleValidator

_log = logging.getLogger("dpsur.opacus")
_FUSED = ("ghost", "ghost_fsdp")
_INSIDE = {
    *("grad_samples", "params", "accumulated_iterations", "step_hook", "secure_mode", "generator"),
    *("attach_step_hook", "signal_skip_step", "loss_reduction"),
}
File = str | os.PathLike[str] | IO[bytes]


class PrivacyEngine(Engine):
    """`dpsur.PrivacyEngine`, with checkpoints and return values as in Opacus.

    Nothing but the interface is different: what `dpsur.PrivacyEngine` refuses is refused here.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        """Begin with an empty ledger; "rdp" is accepted, and accounted for more tightly."""
        if accountant == "gdp":
            raise InvalidInputError(
                "accountant 'gdp' can report too low an epsilon; leave it out: figures come from "
                "privacy loss distributions"
            )
        if accountant == "rdp":
            _log.info("dpsur: figures come from privacy loss distributions, which are below RDP's")
            accountant = "prv"
        super().__init__(accountant=accountant, secure_mode=secure_mode)
        self._earlier: History = []

    @property
    def accountant(self) -> Any:
        """The ledger, with the names of an accountant: `history`, `get_privacy_spent`."""
        return LedgerView(self._ledger, self._earlier)

    @accountant.setter
    def accountant(self, other: Any) -> None:
        """Count the steps of earlier trainings on the same records as well."""
        if self._ledger is not None or not isinstance(other, IAccountant):
            raise InvalidInputError(
                f"the ledger of an engine cannot be replaced by a {type(other).__name__}: it "
                "counts the steps of this engine; to add up earlier trainings on the same records, "
                "set an accountant of dpsur.opacus before make_private"
            )
        self._earlier = list(other.history)
        if self._earlier:
            _log.warning(
                "dpsur: the accountant holds steps of earlier trainings: get_epsilon and guarantee "
                "count them; target_epsilon, statement and save are those of this training alone"
            )

    def get_epsilon(self, delta: float, alphas: Any = None) -> float:  # noqa: ARG002
        """Epsilon of the steps made so far; `alphas` of Opacus have no effect."""
        return super().get_epsilon(delta)

    def make_private(self, **options: Any) -> Any:
        """Three values, and the loss as a fourth, before the loader, in a ghost clipping mode."""
        for unused in ("wrap_model", "rand_on_empty", "alphas", "epsilon_tolerance"):
            options.pop(unused, None)  # models are never wrapped, an empty batch is noise alone
        fused = options.get("grad_sample_mode", "hooks") in _FUSED
        if options.get("grad_sample_mode") == "ghost_fsdp":
            options["grad_sample_mode"] = "ghost"
        if fused and options.get("criterion") is None:
            options["criterion"] = nn.CrossEntropyLoss()  # as there
        model, optimizer, loader = super().make_private(**options)
        kind = type(optimizer)
        optimizer.__class__ = type(kind.__name__, (_InsideOfOpacus, kind), {})
        vars(model)["to_standard_module"] = lambda: model
        vars(model)["_module"] = model  # programs save `model._module.state_dict()`
        vars(model)["cleanup"] = self._watcher.detach  # and end with it, with wrap_model=False
        return (model, optimizer, self.criterion, loader) if fused else (model, optimizer, loader)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        return ModuleValidator.fix_and_validate(module)

    def is_compatible(self, *, module: nn.Module, **_: Any) -> bool:
        return ModuleValidator.is_valid(module)

    def save_checkpoint(
        self,
        *,
        path: File,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Save weights, optimizer and ledger. The file is private."""
        _no_schedules(noise_scheduler, grad_clip_scheduler)
        saved = dict(checkpoint_dict or {})
        saved["module_state_dict"] = module.state_dict(**(module_state_dict_kwargs or {}))
        saved["privacy_engine_state_dict"] = self.state_dict()
        if optimizer is not None:
            saved["optimizer_state_dict"] = optimizer.state_dict()
        torch.save(saved, path, **(torch_save_kwargs or {}))

    def load_checkpoint(
        self,
        *,
        path: File,
        module: nn.Module,
        optimizer: Optimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` has saved, after `make_private` with the same settings."""
        _no_schedules(noise_scheduler, grad_clip_scheduler)
        options = dict(torch_load_kwargs or {})
        options.pop("weights_only", None)  # code in a file is not run
        saved: dict[str, Any] = torch.load(path, weights_only=True, **options)
        if "privacy_engine_state_dict" not in saved:
            raise CheckpointError(
                f"{path} holds no ledger of this library; for a checkpoint of Opacus use "
                "dpsur.from_opacus"
            )
        module.load_state_dict(saved["module_state_dict"], **(module_load_dict_kwargs or {}))
        self.load_state_dict(saved["privacy_engine_state_dict"])
        if optimizer is not None and "optimizer_state_dict" in saved:
            optimizer.load_state_dict(saved["optimizer_state_dict"])
        return saved


class _InsideOfOpacus:
    """Methods of Opacus's optimizer, for programs that drive it by hand.

    What they do there is a part of `step()` here, which clips, adds noise, scales and updates in
    one: so they do nothing, and a step without them has noise as well.
    """

    def clip_and_accumulate(self) -> None:
        """Nothing: `step()` does it."""
        _log.info("dpsur: clipping, noise and scaling are parts of optimizer.step()")

    add_noise = scale_grad = clip_and_accumulate

    def pre_step(self, closure: Callable[[], Any] | None = None) -> bool:
        """Whether `original_optimizer.step()` is to follow: always."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        return True

    def __getattr__(self, name: str) -> Any:
        if name in _INSIDE:
            raise MissingError(
                f"optimizer.{name} is a part of the inside of Opacus; gradients of records are not "
                "stored, and epsilon is charged by optimizer.step(): call loss.backward() and "
                "optimizer.step()"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")


def _no_schedules(*given: Any) -> None:
    for schedule in given:
        if schedule is not None:
            raise InvalidInputError(
                f"a {type(schedule).__name__} is not supported: noise and clipping norm are fixed "
                "in make_private; leave it out"
            )
