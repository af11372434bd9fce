"""What `fit` chooses from public facts where its user leaves it open, with the reasons."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from dpsur.config import STEERING_ACCOUNTINGS, data_facts
from dpsur.methods import Dpsgd, Dpsur, Method
from dpsur.presets import AUTO, DataFacts, explain_auto, preset_named
from dpsur.privacy.budget import Budget
from dpsur.tasks import Task

CHOOSE_YOURSELF = (
    "to choose the settings yourself, pass a method, such as dpsur.Dpsgd(learning_rate=0.5)"
)


def choose_for_model(
    *,
    records: int | None,
    features: str | None,
    normalisation: str | None,
    accounting: str,
    budget: Budget,
    gpu: bool,
    linear: bool,
    short: bool,
    target: tuple[str, int] | None = None,
    unit: str = "record",
) -> tuple[Method, str | None, tuple[str, ...]]:
    """The method and the normalisation for a model that is given as an object, and the reasons.

    `linear` says that the model is one linear layer of zeros, `short` that `max_updates` is set,
    `target` what the model of a table predicts, and by how many outputs.
    """
    if accounting not in STEERING_ACCOUNTINGS:
        return Dpsur(), normalisation, ()
    shown = budget.epsilon, budget.delta
    facts = DataFacts(
        records, None, None, gpu=gpu, own_model=not linear, features=features, short=short
    )
    facts = replace(facts, target=target, budget=shown, unit=unit)
    preset = preset_named(AUTO, Dpsgd.name, "", budget.epsilon, facts)
    method = Dpsgd(**preset.options)
    normalisation = preset.normalisation if normalisation is None else normalisation
    lines = explain_auto(
        replace(facts, own_model=True), features, normalisation, asdict(method), shown
    )
    return method, normalisation, (*lines, CHOOSE_YOURSELF)


def choose_for_task(
    task: Task,
    features: str | None,
    normalisation: str | None,
    accounting: str,
    budget: Budget,
    facts: Mapping[str, Any],
) -> tuple[Method, str, str | None, dict[str, Any], tuple[str, ...]]:
    """The method, features, normalisation and network for a task in memory, and the reasons.

    `facts` are the device and `max_updates`.
    """
    usual = features or task.auto_features
    if accounting not in STEERING_ACCOUNTINGS:
        return Dpsur(), usual, normalisation, dict(task.networks[usual]), ()
    known = data_facts(task, {**facts, "features": features, "budget": budget})
    preset = preset_named(AUTO, Dpsgd.name, task.name, budget.epsilon, known)
    usual = preset.features or usual
    method = Dpsgd(**preset.options)
    normalisation = preset.normalisation if normalisation is None else normalisation
    shown = budget.epsilon, budget.delta
    lines = explain_auto(known, usual, normalisation, asdict(method), shown)
    network = {**task.networks[usual], **preset.network}
    return method, usual, normalisation, network, (*lines, CHOOSE_YOURSELF)
