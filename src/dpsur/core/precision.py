"""How exactly products are computed on CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def precision(tf32: bool) -> Iterator[None]:
    """Compute matrix products and convolutions in full float32, or with TF32 where asked for.

    PyTorch rounds convolutions to TF32 by default. A clipped contribution that is summed with other
    roundings than its norm was measured with could pass the bound. So layers may round, and norms
    and clipped sums never do, whatever a run asks for.
    """
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
