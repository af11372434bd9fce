"""Processes that share a GPU keep to their part of its memory."""

import pytest
import torch

from reproduction import grid
from reproduction.base import Options


@pytest.mark.parametrize(
    ("shard", "kind", "expected"),
    [
        ((1, 4), "cuda", [(0.25, 3)]),
        ((0, 2), "cuda:1", [(0.5, 1)]),
        ((0, 1), "cuda", []),
        ((1, 4), "cpu", []),
    ],
)
def test_a_shard_takes_its_share_of_the_memory(monkeypatch, shard, kind, expected):
    taken = []
    monkeypatch.setattr(grid, "choose_device", lambda _: torch.device(kind))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: taken.append(given)
    )
    grid.limit_gpu_share(Options(shard=shard))
    assert taken == expected
