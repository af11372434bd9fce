"""RMIA (Zarifzadeh, Liu and Shokri 2024): a record against many others, with few shadow models.

The likelihood that the target gives to a record is divided by what models give to it on average;
the score is the share of population records whose own such ratio is smaller by a factor gamma.
"""

import numpy as np
import torch
from torch import Tensor

from dpsur.attacks.metrics import Array
from dpsur.errors import InvalidInputError

GAMMA = 1.0
# Offline, models that know the record are not there; their likelihood is taken as a line through
# that of the models that do not: p_in = a p_out + (1 - a).
OFFLINE_SLOPE = 0.3


def true_probability(outputs: Tensor, targets: Tensor) -> Tensor:
    """Probability of the true class; `outputs` may have further dimensions in front."""
    probabilities = outputs.double().softmax(-1)
    index = targets.to(outputs.device).expand(outputs.shape[:-1]).unsqueeze(-1)
    return probabilities.gather(-1, index).squeeze(-1).clamp(min=1e-30)


def relative_likelihood(target: Tensor, shadows: Tensor, member: Tensor, *, online: bool) -> Tensor:
    """Likelihood under the target over the average of models that know a record and that do not.

    `shadows` is (models, records); `member` says which model knows which record. Offline, models
    that know a record are not asked about it.
    """
    if member.all(0).any() or (online and (~member).all(0).any()):
        raise InvalidInputError("some record is in all shadow models or in none; train more")
    member = member.to(shadows.device)
    outside = torch.where(member, 0.0, shadows).sum(0) / (~member).sum(0)
    if online:
        inside = torch.where(member, shadows, 0.0).sum(0) / member.sum(0)
    else:
        inside = OFFLINE_SLOPE * outside + (1 - OFFLINE_SLOPE)
    return target / (0.5 * (inside + outside))


def rmia_scores(records: Tensor, population: Tensor, gamma: float = GAMMA) -> Array:
    """Share of the population whose relative likelihood is at least gamma times smaller."""
    ordered = torch.sort(population).values
    below = torch.searchsorted(ordered, records / gamma, right=True)
    # ties of saturated shares are broken by the likelihood itself, which orders them the same way
    share = below.double() / len(ordered)
    tie_break = 1e-6 * torch.sigmoid(records.log())
    return np.asarray((share + tie_break).cpu().numpy())
