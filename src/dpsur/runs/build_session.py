"""From what a user has to a session that is ready to run."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import LossFunction, Problem
from dpsur.functional.records import Examples, place
from dpsur.mechanism.streams import Streams
from dpsur.methods import Method
from dpsur.per_example import check_model
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.noise_tail import MOST_WEIGHTS
from dpsur.privacy.plans.hiding import NOT_HIDDEN, check_way_to_hide, hiding_plan
from dpsur.runs.checkpoint import Statistics
from dpsur.runs.data import as_examples, check_alike, check_labels, check_tokens, with_indices
from dpsur.runs.input_features import Preparation, like_features, prepare_inputs
from dpsur.runs.session import Pace, Session, Speed
from dpsur.runs.validation import check_arguments, check_loss, check_targets, loss_on
from dpsur.status import status


def choose_device(device: str | torch.device) -> torch.device:
    """Resolve "auto", and refuse a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInputError(f"unknown device {device!r}; use cpu, cuda or auto") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(
            f"device {device} was asked for, but this machine has no usable CUDA device; "
            "use --device cpu"
        )
    return chosen


def prepare(
    model: nn.Module,
    train_set: Any,
    *,
    loss: LossFunction,
    budget: Budget,
    method: Method,
    test_set: Any,
    accounting: str,
    preparation: Preparation | None = None,
    seed: int | None,
    device: str | torch.device,
    max_updates: int | None = None,
    hide_rejections: str = NOT_HIDDEN,
    pace: Pace | None = None,
    speed: Speed | None = None,
    released: Statistics | None = None,
) -> Session:
    """Check everything and fix the privacy of the run, then compute features. Nothing is trained.

    `max_updates` ends the planned run early. What it then spends is less than the budget, except
    under a filter, which promises its allowance. `released` are the statistics of a run that is
    resumed (see `load_statistics`), so that they are drawn once for one run.
    """
    accounting_named(accounting)
    check_way_to_hide(hide_rejections)
    check_arguments(model, loss, budget, method, seed)
    chosen_device = choose_device(device)
    train, test = _records(train_set, test_set, model, loss)
    preparation = _with_features_of(method, preparation or Preparation())
    original = copy.deepcopy(method.adapt(model))
    model = copy.deepcopy(original).to(chosen_device)
    shape = preparation.check(train.record_shape)
    outputs = check_model(model, like_features(train, shape).part(slice(1)).to(chosen_device))
    for name, examples in (("train_set", train), ("test_set", test)):
        if examples is not None:
            check_labels(examples, outputs, loss, name)
            if shape == examples.record_shape:
                check_tokens(model, examples, name)
    loss = loss_on(loss, chosen_device)
    check_loss(loss, outputs, train.targets)
    check_targets(loss, outputs, train.targets, "train_set")
    _check_size(model)
    with status(f"choosing noise and length of a {method.name} run, epsilon {budget.epsilon:g}"):
        settled, plan = method.settle(len(train), budget, accounting, preparation.setup)
    if max_updates is not None:
        checks.at_least_one("max_updates", max_updates)
        plan = plan.limited(max_updates)
    plan = hiding_plan(plan, hide_rejections)
    streams = Streams(seed, chosen_device)
    prepared = prepare_inputs(preparation, train, test, streams, released)
    test = None if prepared.test is None else prepared.test.to(chosen_device)
    speed = speed or Speed()
    records = place(prepared.train, chosen_device, speed.data_bytes)
    problem = Problem(model, loss, records, bf16=speed.bf16)
    procedure = settled.bind(problem, plan)
    return Session(
        settled,
        plan,
        problem,
        original,
        test,
        streams,
        procedure,
        pace or Pace(),
        speed,
        prepared.layers,
        prepared.descriptions,
        prepared.statistics,
        hide_rejections,
    )


def _check_size(model: nn.Module) -> None:
    """Refuse a network with more weights than the bound on noise tails holds for."""
    count = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    if count > MOST_WEIGHTS:
        raise InvalidInputError(
            f"the model has {count} trainable weights, and guarantees are computed for at most "
            f"{MOST_WEIGHTS}; freeze some of them with requires_grad_(False)"
        )


def _records(
    train_set: Any, test_set: Any, model: nn.Module, loss: LossFunction
) -> tuple[Examples, Examples | None]:
    """Both sets as tensors of the types that model and loss take, alike in shape."""
    fraction = next((p.dtype for p in model.parameters()), torch.get_default_dtype())
    train = with_indices(as_examples(train_set, "train_set", fraction), loss)
    if test_set is None:
        return train, None
    test = with_indices(as_examples(test_set, "test_set", fraction), loss)
    check_alike(test, train)
    return train, test


def _with_features_of(method: Method, preparation: Preparation) -> Preparation:
    """A method brings its own features where none are named."""
    if preparation.features is not None or method.features is None:
        return preparation
    return replace(preparation, features=method.features)
