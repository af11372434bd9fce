"""Layers under the names of Opacus: they are those of `torch.nn`, which need no replacement here.

Their weights have the names that `torch.nn` gives them, so that checkpoints fit both.
"""

from torch import nn


class DPLSTM(nn.LSTM):
    """`nn.LSTM`."""


class DPGRU(nn.GRU):
    """`nn.GRU`."""


class DPRNN(nn.RNN):
    """`nn.RNN`."""


class DPMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention`."""


__all__ = ["DPGRU", "DPLSTM", "DPRNN", "DPMultiheadAttention"]
