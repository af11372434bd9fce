"""`PrivacyEngine` as programs for Opacus call it."""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpsur.engine.privacy_engine import PrivacyEngine as Engine
from dpsur.errors import CheckpointError, InvalidInputError
from dpsur.opacus.validation import ModuleValidator

_log = logging.getLogger("dpsur.opacus")
_FUSED = ("ghost", "ghost_fsdp")


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

    def make_private(self, **options: Any) -> Any:
        """Three values, and the loss as a fourth, before the loader, in a ghost clipping mode."""
        options, criterion = _translate(options)
        model, optimizer, loader = super().make_private(**options)
        vars(model)["_module"] = model  # programs save `model._module.state_dict()`
        return (
            (model, optimizer, self.criterion, loader) if criterion else (model, optimizer, loader)
        )

    def make_private_with_epsilon(self, **options: Any) -> Any:
        """Like `make_private`, with the least noise for which the training fits a budget."""
        # the method of the base class calls `make_private` above
        return super().make_private_with_epsilon(**options)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A repaired copy of a model, which is refused if something is left."""
        return ModuleValidator.fix_and_validate(module)

    def is_compatible(self, *, module: nn.Module, **_: Any) -> bool:
        """Whether nothing is wrong with a model."""
        return ModuleValidator.is_valid(module)

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
        module: nn.Module,
        optimizer: Optimizer | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
    ) -> None:
        """Save weights, optimizer and ledger. The file is private."""
        saved = dict(checkpoint_dict or {})
        saved["module_state_dict"] = module.state_dict()
        saved["privacy_engine_state_dict"] = self.state_dict()
        if optimizer is not None:
            saved["optimizer_state_dict"] = optimizer.state_dict()
        torch.save(saved, Path(path))

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
        module: nn.Module,
        optimizer: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Load what `save_checkpoint` has saved, after `make_private` with the same settings."""
        saved: dict[str, Any] = torch.load(Path(path), weights_only=True)
        if "privacy_engine_state_dict" not in saved:
            raise CheckpointError(
                f"{path} holds no ledger of this library; for a checkpoint of Opacus use "
                "dpsur.from_opacus"
            )
        module.load_state_dict(saved["module_state_dict"])
        self.load_state_dict(saved["privacy_engine_state_dict"])
        if optimizer is not None and "optimizer_state_dict" in saved:
            optimizer.load_state_dict(saved["optimizer_state_dict"])
        return saved


def _translate(options: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Arguments of Opacus as those of this library, and whether the loss is returned as well."""
    options = dict(options)
    fused = options.get("grad_sample_mode", "hooks") in _FUSED
    if options.get("grad_sample_mode") == "ghost_fsdp":
        options["grad_sample_mode"] = "ghost"
    if fused and options.get("criterion") is None:
        options["criterion"] = nn.CrossEntropyLoss()  # as there
    return options, fused
