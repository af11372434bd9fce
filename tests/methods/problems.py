"""Tiny problems that every method can be run on, and short settings for each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.functional.tree import flatten
from dpsur.methods import METHODS, Method
from dpsur.privacy.budget import Budget
from tests.conftest import blobs, small_model

CPU = torch.device("cpu")
SIZE = 60
BUDGET = Budget(3.0, 1e-3)
PROVED = ("proven", "every-trial")
STEPS = {"batch_size": 20, "learning_rate": 0.5}
NOISE = {**STEPS, "noise_multiplier": 6.0}
TESTED = {"val_batch_size": 10}


def tiny_images(size: int = SIZE, seed: int = 2) -> Examples:
    """Images of 8x8 pixels in two classes: bright above, bright below."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % 2
    images = 0.2 * torch.rand(size, 1, 8, 8, generator=generator)
    images[labels == 0, :, :4] += 0.8
    images[labels == 1, :, 4:] += 0.8
    return Examples(images, labels)


def linear_on_scattering(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(81 * 2 * 2, 2))


# What makes a run of each method short: by proven and by every-trial accounting.
OPTIONS: dict[str, dict[str, Any]] = {
    "dpsur": {**NOISE, **TESTED},
    "dpsgd": {**NOISE, "updates": 6},
    "dpsgd-ts": {**NOISE, "updates": 6},
    "dpsgd-hf": {**NOISE, "updates": 6},
    "dpis": {**NOISE, "updates": 6, "refresh_every": 2, "norm_noise_multiplier": 10.0},
    "dpagd": {
        "batch_size": 20,
        "updates": 6,
        "step_sizes": 3,
        "raise_by": 0.5,
        "choice_share": 0.2,
    },
    "nonprivate": {**STEPS, "updates": 6},
    "dpsr-cg": {**NOISE, "updates": 9, "kept_first": 2, "max_grad_norm": 0.3},
    "sa-dpsgd": {**NOISE, **TESTED, "val_noise_multiplier": 6.0},
}
SELECTIVE = {
    "proven": {"gate": "coin", "accept_ratio": 1.5, "updates": 6},
    "every-trial": {"gate": "loss", "val_noise_multiplier": 6.0, "trials": 9},
}


def method_of(name: str, accounting: str, **changes: Any) -> Method:
    options = OPTIONS[name]
    if name == "dpsur":
        options = {**options, **SELECTIVE[accounting]}
    if name == "sa-dpsgd":
        options = {**options, **({"updates": 6} if accounting == "proven" else {"trials": 9})}
    return METHODS[name](**{**options, **changes})


@dataclass(frozen=True)
class Data:
    """Records and the network for them."""

    train: Callable[..., Examples]
    model: Callable[..., nn.Module]


def data_of(name: str) -> Data:
    if name == "dpsgd-hf":
        return Data(tiny_images, linear_on_scattering)
    return Data(lambda: blobs(SIZE), small_model)


def fit(method: Method, accounting: str = "proven", **more: Any) -> dpsur.Run:
    data = data_of(method.name)
    arguments = {"budget": BUDGET, "seed": 0, "device": "cpu", **more}
    return dpsur.fit(data.model(), data.train(), method=method, accounting=accounting, **arguments)


@cache
def settled(method: Method, size: int, accounting: str) -> tuple[Method, Any]:
    """A method and its plan; searching for the noise is what takes time in a tiny problem."""
    return method.resolve(size, BUDGET, accounting)


def bound(
    method: Method, accounting: str = "proven", problem: Problem | None = None
) -> tuple[Any, Any]:
    """A procedure and its plan."""
    problem = problem or Problem(small_model(), F.cross_entropy, blobs(SIZE))
    method, plan = settled(method, len(problem.train), accounting)
    return method.build(problem, plan), plan


def weights(run: dpsur.Run) -> torch.Tensor:
    return torch.cat([value.flatten().double() for value in run.model.state_dict().values()])


def assert_same(one: Any, two: Any) -> None:
    first, second = flatten(one), flatten(two)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
