"""A private choice among candidates: the exponential mechanism on clipped losses."""

import torch
from torch import Tensor

from dpsur import checks


def noisy_least(
    losses: Tensor, loss_clip: float, choice_epsilon: float, generator: torch.Generator
) -> Tensor:
    """Row of `losses` (candidates by records) whose noisy clipped sum is least.

    Formal guarantee: the exponential mechanism on sums of values in [0, loss_clip], an event
    `NoisyChoice` with this epsilon: a row is chosen with probability in proportion to
    exp(-choice_epsilon * sum / loss_clip). A loss that is not finite counts as the clip bound.
    """
    checks.positive("loss_clip", loss_clip)
    checks.positive("choice_epsilon", choice_epsilon)
    worst = torch.full((), loss_clip, dtype=torch.float64, device=losses.device)
    clipped = torch.where(losses.isfinite(), losses.double().clamp(0.0, loss_clip), worst)
    draws = torch.rand(
        len(losses), generator=generator, device=generator.device, dtype=torch.float64
    )
    # The largest of scores plus Gumbel noise is distributed as the exponential mechanism.
    gumbel = -torch.log(-torch.log(draws.clamp(min=torch.finfo(torch.float64).tiny)))
    scores = -choice_epsilon / loss_clip * clipped.sum(1)
    return (scores + gumbel).argmax()
