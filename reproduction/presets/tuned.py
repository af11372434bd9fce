"""The best settings known here at a proven epsilon: simple models on good features, large batches.

Batch, number of updates and learning rate were tried on held-out training records (docs/tables/
tuning.md), on Fashion-MNIST one setting only; the noise follows from the budget.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpsur.errors import InvalidInputError
from dpsur.features import GROUP, NONE, PRIVATE
from dpsur.presets import Preset
from reproduction.presets.settings import tuned_setting

# By method, what the settings were chosen for: the test of `dpsur` is ours, the gate coin.
METHODS: Mapping[str, Mapping[str, Any]] = {"dpsgd": {}, "dpsur": {"gate": "coin"}}


@dataclass(frozen=True)
class _Model:
    """What is trained on a task."""

    features: str
    normalisation: str = NONE
    network: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


_LINEAR = {"name": "linear-features", "channels": 81, "height": 7, "width": 7, "classes": 10}
_ON_DIGITS = _Model("scattering", GROUP, _LINEAR)
MODELS: Mapping[str, _Model] = {
    "fmnist": _ON_DIGITS,
    "mnist": _ON_DIGITS,
    "cifar10": _Model("scattering", PRIVATE),
    "imdb-words": _Model("vectors", options={"max_grad_norm": 0.5}),
}


def tuned_preset(method: str, task: str, epsilon: int) -> Preset:
    """The settings of a method on a task."""
    if task not in MODELS:
        known = ", ".join(MODELS)
        raise InvalidInputError(f"preset tuned has no settings for task {task}; it has {known}")
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise InvalidInputError(f"preset tuned has no settings for method {method}; it has {known}")
    model = MODELS[task]
    options = {**model.options, **METHODS[method]}
    chosen = tuned_setting(f"best-{method}", task, epsilon)
    return Preset(options, model.features, model.normalisation, model.network, chosen)
