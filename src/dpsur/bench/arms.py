"""The arms, by name: plain and private. The benchmarks of the repository add their peers."""

from dataclasses import dataclass

import torch

from dpsur.bench.settings import MakeArm
from dpsur.bench.steps import CapturedPlainStep, PlainStep, dpsgd_captured, dpsgd_step
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
        Arm("dpsgd", "DP-SGD step", dpsgd_step, gathers=True),
        Arm(
            "dpsgd-captured",
            "DP-SGD step, as a CUDA graph",
            dpsgd_captured,
            needs_cuda=True,
            gathers=True,
        ),
    )
}


def arm_named(name: str) -> Arm:
    try:
        return ARMS[name]
    except KeyError:
        raise InvalidInputError(f"unknown arm {name!r}; choose from {', '.join(ARMS)}") from None
