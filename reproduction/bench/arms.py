"""All arms of the benchmarks: plain and private steps, DPSUR's trial, Opacus and two simple ways.

Importing this module registers them, also in the process that measures memory.
"""

from reproduction.bench.basic_arms import ARMS, OPACUS, Arm
from reproduction.bench.peer_steps import LoopStep, VmapStep, ghost_step, hooks_step
from reproduction.bench.training_steps import dpsur_captured, dpsur_trial

__all__ = ["ARMS"]
_OWN = dict(ARMS)
_ADDED = {
    arm.name: arm
    for arm in (
        Arm("dpsur", "ours: full DPSUR trial", dpsur_trial, gathers=True),
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
_ORDER = (
    "plain",
    "plain-captured",
    "dpsgd",
    "dpsur",
    "dpsgd-captured",
    "dpsur-captured",
    OPACUS,
    "opacus-ghost",
    "vmap",
    "loop",
)
ARMS.clear()
ARMS.update({name: {**_OWN, **_ADDED}[name] for name in _ORDER})
