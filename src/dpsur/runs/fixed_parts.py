"""The parts of a model that training must leave alone: its buffers and its frozen parameters.

A forward pass that writes to them carries private records past clipping and noise, into later
gradients and into the release.
"""

import torch
from torch import Tensor, nn

from dpsur.core.hidden_state import changes
from dpsur.core.snapshots import Snapshot, difference, snapshot
from dpsur.core.types import LossFunction
from dpsur.errors import UnsupportedModelError


def fixed_parts(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, whether or not they are saved, and parameters that are not trained."""
    parts = dict(model.named_buffers(remove_duplicate=False))
    for name, value in model.named_parameters(remove_duplicate=False):
        if not value.requires_grad:
            parts[name] = value.detach()
    return parts


def check_fixed_parts(model: nn.Module, original: nn.Module) -> None:
    """Refuse a model whose fixed parts are no longer, bit by bit, those it had at the start."""
    before, after = fixed_parts(original), fixed_parts(model)
    for name in sorted(before.keys() | after.keys()):
        if name in before and name in after and _same_bits(before[name], after[name]):
            continue
        raise UnsupportedModelError(
            f"{name}, a buffer or frozen parameter, changed in a forward pass and would "
            "carry private records into the release, so nothing is released; make the forward "
            "pass free of side effects"
        )


class Unchanged:
    """What a model and a loss hold besides their weights, to compare with later."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        self._subjects = {"model": model, "loss": loss}
        self._before = {what: self._now(what) for what in self._subjects}

    def check(self) -> None:
        """Refuse a model or loss that has changed: what it did with records is not bounded."""
        for what, subject in self._subjects.items():
            changed = difference(self._before[what], self._now(what))
            if changed is not None:
                raise UnsupportedModelError(changes(what, subject, changed))

    def _now(self, what: str) -> Snapshot:
        return snapshot(self._subjects[what], weights=what == "loss")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bytes(one.to(other.device)), _bytes(other))


def _bytes(values: Tensor) -> Tensor:
    dense = values.detach().to_dense().contiguous()
    return dense.reshape(-1).view(torch.uint8)
