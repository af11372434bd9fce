"""Runs of several processes over `torch.distributed`: gloo on CPUs, NCCL on CUDA devices.

`ranks.py` knows the processes and what they exchange. Everything else asks a `Ranks` for its share
of the work and for sums over all ranks; one process alone is the case of size 1.
"""

from dpsur.distributed.ranks import ALONE, Ranks, Reduction, connect, is_distributed, restarted

__all__ = ["ALONE", "Ranks", "Reduction", "connect", "is_distributed", "restarted"]
