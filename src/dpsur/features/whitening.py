"""A fixed linear map that evens out the variances of averages over image cells.

Formal guarantee: it is fitted on procedural images, so it contains nothing of private records and
costs no privacy.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def haar(block: Tensor) -> list[Tensor]:
    """Split (N, channels, cells) into the mean of each map and its details, coarse to fine.

    An orthonormal change of coordinates: 1, 3, 12, ... numbers per channel. The cells form a square
    whose side is a power of 2.
    """
    n, channels, cells = block.shape
    side = math.isqrt(cells)
    values = block.reshape(n, channels, side, side)
    details = []
    while side > 1:
        a, b = values[..., ::2, ::2], values[..., ::2, 1::2]
        c, d = values[..., 1::2, ::2], values[..., 1::2, 1::2]
        details.append(torch.stack([a + b - c - d, a - b + c - d, a - b - c + d], 2).flatten(2) / 2)
        values = (a + b + c + d) / 2
        side //= 2
    return [values.flatten(2), *reversed(details)]


class Whitening(nn.Module):
    """Standardise blocks of (N, channels, cells), split them into scales, whiten every scale.

    The covariance of a scale is taken as a product of one over channels (all blocks together) and
    one over cells. A full covariance would need the square of all features.

    The tensors are those of `fit`: `root` (an exponent of the averages), `by_scale` (whether blocks
    are split by `haar`), `mean.i` and `deviation.i` of block i, `channels.i`, `cells.i` and
    `factors.i` of scale i. They are no part of a state dict: a release names their file instead.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.root = float(tensors["root"])
        self.by_scale = bool(tensors.get("by_scale", True))
        for name, values in tensors.items():
            if name not in ("root", "by_scale"):
                self.register_buffer(name.replace(".", "_"), values.float(), persistent=False)

    def tensors(self) -> dict[str, Tensor]:
        """Everything as named tensors, 16 bit where the size matters."""
        named = {"root": torch.tensor(self.root), "by_scale": torch.tensor(self.by_scale)}
        for name, values in self.named_buffers():
            small = name.startswith(("channels_", "factors_"))
            named[name.replace("_", ".")] = values.half() if small else values
        return {name: values.contiguous().cpu() for name, values in named.items()}

    @classmethod
    def fit(
        cls,
        blocks: Sequence[Tensor],
        *,
        power: float,
        shrinkage: float,
        root: float = 1.0,
        consistency: float = 0.0,
        views: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
        by_scale: bool = True,
        per_feature: bool = False,
    ) -> "Whitening":
        """Fit on (N, channels, cells) blocks of procedural images.

        Directions of variance v are multiplied by ((1 - shrinkage) v + shrinkage)^-power. With
        `consistency`, they are also multiplied by that power of their correlation between two
        random views of the same image (`views`).

        Without `by_scale` a block is one scale and may have any number of cells, as scattering
        coefficients do. `per_feature` standardises every cell of a channel by itself.
        """
        named = {"root": torch.tensor(root), "by_scale": torch.tensor(by_scale)}
        over = (0,) if per_feature else (0, 2)
        for i, block in enumerate(_root(block, root) for block in blocks):
            named[f"mean.{i}"] = block.mean(over)
            named[f"deviation.{i}"] = block.std(over) + 1e-3 * block.std()
        plain = cls(named)
        seen = [plain._by_scale(view) for view in views] if views and consistency else []
        for number, values in enumerate(plain._by_scale(blocks)):
            n, channels, cells = values.shape
            over_channels = torch.einsum("ncs,nds->cd", values, values) / (n * cells)
            over_cells = torch.einsum("ncs,nct->st", values, values) / (n * channels)
            a, rotation = torch.linalg.eigh(over_channels)
            b, turn = torch.linalg.eigh(over_cells)
            variance = a[:, None].clamp(min=0) * b.clamp(min=0) / b.mean()
            factors = ((1 - shrinkage) * variance + shrinkage) ** -power
            if seen:
                one, two = (_rotate(view[number], rotation, turn) for view in seen)
                factors = factors * _correlation(one, two).clamp(min=0.02) ** consistency
            named |= {f"channels.{number}": rotation, f"cells.{number}": turn}
            named[f"factors.{number}"] = factors
        return cls(named)

    def _by_scale(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Standardise the channels and join the blocks scale by scale."""
        standard = [
            (_root(block, self.root) - _of_cells(self.get_buffer(f"mean_{i}")))
            / _of_cells(self.get_buffer(f"deviation_{i}"))
            for i, block in enumerate(blocks)
        ]
        if not self.by_scale:
            return standard
        pyramids = [haar(block) for block in standard]
        depth = max(len(pyramid) for pyramid in pyramids)
        return [torch.cat([p[i] for p in pyramids if len(p) > i], 1) for i in range(depth)]

    def forward(self, blocks: Sequence[Tensor]) -> Tensor:
        """Whitened features of norm 1, (N, dimension)."""
        rows = []
        for i, values in enumerate(self._by_scale(blocks)):
            channels, cells, factors = (
                self.get_buffer(f"{part}_{i}") for part in ("channels", "cells", "factors")
            )
            rows.append((_rotate(values, channels, cells) * factors).flatten(1))
        return F.normalize(torch.cat(rows, 1))


def _root(block: Tensor, root: float) -> Tensor:
    values = block.float()
    return values if root == 1 else values.clamp(min=0) ** root


def _of_cells(statistic: Tensor) -> Tensor:
    """Statistics per channel, (channels,), or per feature, (channels, cells), to broadcast."""
    return statistic[:, None] if statistic.dim() == 1 else statistic


def _rotate(values: Tensor, rotation: Tensor, turn: Tensor) -> Tensor:
    return torch.einsum("ncs,cd->nds", values, rotation) @ turn


def _correlation(one: Tensor, two: Tensor) -> Tensor:
    one, two = one - one.mean(0), two - two.mean(0)
    spread = one.square().mean(0) * two.square().mean(0)
    return (one * two).mean(0) / (spread.sqrt() + 1e-9)
