"""The arms, by name. An arm is registered by being listed here."""

from dataclasses import dataclass

import torch

from dpsur.bench.own_steps import dpsgd_captured, dpsgd_step, dpsur_captured, dpsur_trial
from dpsur.bench.peer_steps import (
    CapturedPlainStep,
    LoopStep,
    PlainStep,
    VmapStep,
    ghost_step,
    hooks_step,
)
from dpsur.bench.settings import MakeArm
from dpsur.errors import InvalidInputError


@dataclass(frozen=True)
class Arm:
    """A way to make a training step: `make` builds it, what it returns makes one step a call.

    An arm that `gathers` makes a copy of the batch, as training on a data set does.
    """

    name: str
    summary: str
    make: MakeArm
    needs_cuda: bool = False
    largest_batch: int | None = None
    gathers: bool = False

    def refusal(self, batch_size: int, device: torch.device) -> str | None:
        """Why the arm is not even tried; None if it is."""
        if self.needs_cuda and device.type != "cuda":
            return "needs a CUDA device"
        if self.largest_batch is not None and batch_size > self.largest_batch:
            return f"measured up to a batch of {self.largest_batch}; its time grows in proportion"
        return None


PLAIN, OPACUS = "plain", "opacus-hooks"  # the arms that the others are compared with
ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(PLAIN, "PyTorch without privacy", PlainStep),
        Arm(
            "plain-captured",
            "PyTorch without privacy, as a CUDA graph",
            CapturedPlainStep,
            needs_cuda=True,
        ),
        Arm("dpsgd", "ours: DP-SGD step", dpsgd_step, gathers=True),
        Arm("dpsur", "ours: full DPSUR trial", dpsur_trial, gathers=True),
        Arm(
            "dpsgd-captured",
            "ours: DP-SGD step, as a CUDA graph",
            dpsgd_captured,
            needs_cuda=True,
            gathers=True,
        ),
        Arm(
            "dpsur-captured",
            "ours: DPSUR trial, as a CUDA graph",
            dpsur_captured,
            needs_cuda=True,
            gathers=True,
        ),
        Arm(OPACUS, "Opacus, per-example gradients", hooks_step),
        Arm("opacus-ghost", "Opacus, ghost clipping", ghost_step),
        Arm("vmap", "torch.func vmap", VmapStep),
        Arm("loop", "one example at a time", LoopStep, largest_batch=256),
    )
}


def arm_named(name: str) -> Arm:
    """Look an arm up by name."""
    try:
        return ARMS[name]
    except KeyError:
        raise InvalidInputError(f"unknown arm {name!r}; choose from {', '.join(ARMS)}") from None
