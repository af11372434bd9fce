"""Attacks that score records: correctness, confidence, likelihood ratio, relative likelihood."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpsur.attacks.metrics import Array, Flags, Scores
from dpsur.attacks.models import Models, Trainer
from dpsur.attacks.targets import log_odds, posteriors
from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples


def gap_attack(target: Models, members: Examples, others: Examples) -> Scores:
    """Score 1 for a correct answer of the first model, else 0."""

    def correct(examples: Examples) -> torch.Tensor:
        answers = posteriors(target, examples)
        right: torch.Tensor = answers.argmax(1) == examples.targets.to(answers.device)
        return right.double().cpu()

    return Scores(correct(members).numpy(), correct(others).numpy(), 0.5)


def confidence_attack(target: Models, members: Examples, others: Examples) -> Scores:
    """Score the log-odds of the true class: a threshold on the loss (Yeom et al. 2018)."""
    return Scores.halved(target_log_odds(target, members), target_log_odds(target, others))


SMALLEST_DEVIATION = 1e-3


@dataclass(frozen=True)
class Shadows:
    """Log-odds under shadow models, (models, records), and which had which record."""

    odds: Array
    member: Flags
    outputs: Tensor


def train_shadows(
    trainer: Trainer, pool: Examples, candidates: Tensor, size: int, models: int, seed: int
) -> Shadows:
    """Train shadow models on random parts of the pool, each of the target's size."""
    if models < 2:
        raise InvalidInputError(f"the attack compares models with and without: got {models} models")
    rows = random_parts(len(pool), size, models, seed)
    trained = trainer(pool, rows, seed)
    chosen = pool.select(candidates.to(pool.inputs.device))
    outputs = trained.outputs(chosen.inputs)
    member = torch.zeros(models, len(pool), dtype=torch.bool)
    for model, part in zip(member, rows, strict=True):
        model[part] = True
    odds = log_odds(outputs, chosen.targets).cpu().numpy()
    return Shadows(odds, member[:, candidates].numpy(), outputs)


def random_parts(pool: int, size: int, parts: int, seed: int) -> list[Tensor]:
    """Random parts of equal size that cover every record equally often, but for one.

    One shuffled deck after another is dealt out. A part that runs over the end of a deck continues
    with the next, less the records that it has already.
    """
    generator = torch.Generator().manual_seed(seed)
    deck = torch.randperm(pool, generator=generator)
    found: list[Tensor] = []
    while len(found) < parts:
        part, deck = deck[:size], deck[size:]
        if len(part) < size:
            fresh = torch.randperm(pool, generator=generator)
            repeated = torch.isin(fresh, part)
            fresh = torch.cat([fresh[~repeated], fresh[repeated]])
            part, deck = torch.cat([part, fresh[: size - len(part)]]), fresh[size - len(part) :]
        found.append(part)
    return found


def lira_online(target_odds: Array, shadows: Shadows) -> Array:
    """Log-likelihood ratio of in against out, with means a record and deviations in common."""
    inside, outside = (
        _normals(shadows.odds, chosen) for chosen in (shadows.member, ~shadows.member)
    )
    return _log_density(target_odds, *inside) - _log_density(target_odds, *outside)


def lira_offline(target_odds: Array, shadows: Shadows) -> Array:
    """How many deviations the target is surer of a record than models that do not know it."""
    mean, deviation = _normals(shadows.odds, ~shadows.member)
    return np.asarray((target_odds - mean) / deviation)


def target_log_odds(target: Models, examples: Examples) -> Array:
    """Log-odds of the true class under the first model."""
    return log_odds(target.outputs(examples.inputs)[0], examples.targets).cpu().numpy()


def _normals(odds: Array, chosen: Flags) -> tuple[Array, Array]:
    """Means by record and one deviation for all, which few models estimate better than many.

    A record that no chosen model covers gets the mean of all.
    """
    counts = chosen.sum(0)
    sums = np.where(chosen, odds, 0.0).sum(0)
    overall = float(odds[chosen].mean())
    mean = np.where(counts > 0, sums / np.maximum(counts, 1), overall)
    residual = np.where(chosen, odds - mean, 0.0)
    free = max(1, int(np.maximum(counts - 1, 0).sum()))
    deviation = max(float(np.sqrt((residual**2).sum() / free)), SMALLEST_DEVIATION)
    return mean, np.full_like(mean, deviation)


def _log_density(values: Array, mean: Array, deviation: Array) -> Array:
    return np.asarray(-0.5 * ((values - mean) / deviation) ** 2 - np.log(deviation))


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
