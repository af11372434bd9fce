"""A private linear model of a table, on noisy quantiles in soft bins.

One setting for all tables, from the number of records, what is predicted, epsilon and delta. It was
chosen on held-out training records of nine tables; docs/tables/tables-rule.md has what other
settings give, and what leaving a table out would choose.
"""

import math
from typing import Any

from dpsur.presets.base import DataFacts
from dpsur.privacy.events import single_release_noise

UPDATES = 150
# Gradients of a cross entropy on rows of norm 1 have a norm of at most the root of 2: a clip norm
# of 1 keeps the sizes of nearly all. Much smaller ones make the model overconfident.
CLIP_NORM = 1.0
# The noise that all updates together leave in a weight, without momentum.
WEIGHT_NOISE = 0.13
# Learning rates beyond are unstable for some rows of norm 1, at momentum 0.9: half of
# 2 (1 + momentum) over the largest curvature, which is 1/2 for a cross entropy and 2 for a square.
MOST_STABLE = {"classes": 4.0, "labels": 8.0, "number": 1.0}


def table_options(facts: DataFacts) -> dict[str, Any]:
    """Hyper-parameters of a linear model from zero on the features of a table.

    Every batch has all records, where their number is exactly known, else nearly all: draws leave
    fewer than expected by ten standard deviations at most.
    """
    assert facts.records is not None
    kind, outputs = facts.target or ("classes", 1)
    clip, stable = CLIP_NORM, MOST_STABLE[kind]
    if kind == "labels":  # the loss is a mean over them
        clip, stable = clip / math.sqrt(outputs), stable * outputs
    noise = single_release_noise(*(facts.budget or (1.0, 1e-5)))
    batch = facts.records
    if not facts.whole:
        batch = max(1, batch - math.ceil(5 * math.sqrt(batch)))
    rate = WEIGHT_NOISE * facts.records / (noise * UPDATES * clip)
    return {
        "batch_size": batch,
        "updates": UPDATES,
        "max_grad_norm": clip,
        "learning_rate": min(rate, stable),
        "schedule": "cosine",
        "momentum": 0.9,
        "gate": "none",
    }
