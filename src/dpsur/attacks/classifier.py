"""Train a network that tells members from others, with gradients zeroed at every step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Features = Sequence[Tensor]


@dataclass(frozen=True)
class Fitting:
    """How an attack network is trained."""

    epochs: int = 30
    batch_size: int = 256
    learning_rate: float = 1e-3


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw what torch draws globally (weights, dropout) from a seed, and put it back."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def fit_classifier(
    network: nn.Module, members: Features, others: Features, fitting: Fitting, seed: int
) -> None:
    """Train a network in place on as many members as others, in expectation, in each batch.

    Its inputs are tensors with one row a record, its outputs two scores: other and member.
    """
    device = members[0].device
    sizes = len(members[0]), len(others[0])
    features = [torch.cat(pair) for pair in zip(members, others, strict=True)]
    labels = torch.cat([torch.ones(sizes[0]), torch.zeros(sizes[1])]).long().to(device)
    # the two classes count alike, however many there are of each
    weight = torch.tensor([sum(sizes) / (2 * n) for n in reversed(sizes)], device=device)
    optimizer = torch.optim.Adam(network.parameters(), lr=fitting.learning_rate)
    generator = torch.Generator().manual_seed(seed)
    network.train()
    for _ in range(fitting.epochs):
        order = torch.randperm(sum(sizes), generator=generator).to(device)
        for rows in torch.split(order, fitting.batch_size):
            optimizer.zero_grad(set_to_none=True)
            scores = network(*(feature[rows] for feature in features))
            loss = F.cross_entropy(scores, labels[rows], weight=weight)
            torch.autograd.backward(loss)
            optimizer.step()
    network.eval()


def membership_scores(network: nn.Module, features: Features) -> Tensor:
    """Log-odds of membership, one a record; above 0 means member."""
    with torch.no_grad():
        parts = zip(*(torch.split(feature, 4096) for feature in features), strict=True)
        pieces = [network(*part) for part in parts]
    scores = torch.cat(pieces).double()
    return (scores[:, 1] - scores[:, 0]).cpu()
