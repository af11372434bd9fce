"""One training run with canaries, held against what is claimed for it.

Canaries are records made to be recognised, planted among the private ones by fair coins.

A gradient canary's gradient is a separate coordinate: the model gets a block with one weight per
canary, and a canary's loss is linear in its weight, so that its clipped gradient has exactly the
clip norm at every step. Nothing else moves that weight but noise. An input canary is an ordinary
record with a label drawn at random, which only a model that has seen it will get right.

Both are ordinary records to the training: they are sampled, clipped and tested like any other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.audits.bounds import (
    Finding,
    claimed_curve,
    epsilon_of_guesses,
    gaussian_epsilon_of_guesses,
    tail_probability_under,
)
from dpsur.config import RunConfig
from dpsur.errors import InvalidInputError
from dpsur.functional.persons import Groups, record_loss
from dpsur.functional.problem import LossFunction, Problem
from dpsur.functional.records import Examples
from dpsur.functional.tree import Params
from dpsur.methods import Method
from dpsur.privacy.budget import Budget
from dpsur.runs.observers import Observer
from dpsur.runs.session import Session, build_session

# A canary's gradient is this many clip norms long before it is clipped.
EXCESS = 1.01
BLOCK = "canaries.weight"


@dataclass(frozen=True)
class CanaryProblem:
    """A problem with canaries in it: `included` says which, `scores` what training says of each.

    `scores` maps the problem and trained weights to one number per canary, larger for a canary that
    seems to have been trained on.
    """

    model: nn.Module
    loss: LossFunction
    train: Examples
    included: Tensor
    scores: Callable[[Problem, Params], Tensor]


# Tosses the coins and adds what they say to a model, a loss and records.
Planter = Callable[[nn.Module, LossFunction, Examples, torch.Generator], CanaryProblem]


class WithCanaries(nn.Module):
    """A model with a block of one weight per canary beside it.

    The last column of an input is 0 for an ordinary record, else the number of its canary, from 1.
    Outputs have two more columns: whether the record is a canary, and the weight of that canary.
    """

    def __init__(self, model: nn.Module, canaries: int, shape: torch.Size) -> None:
        super().__init__()
        self.model = model
        self.canaries = nn.Linear(canaries, 1, bias=False)
        nn.init.zeros_(self.canaries.weight)
        self._shape = shape
        self._numbers: Tensor
        self.register_buffer("_numbers", torch.arange(1, canaries + 1), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Outputs of the model, whether a row is a canary, and that canary's weight."""
        number = rows[:, -1:]
        outputs = self.model(rows[:, :-1].reshape(-1, *self._shape))
        own = torch.eq(number, self._numbers).to(outputs.dtype)
        is_canary = own.sum(1, keepdim=True)
        return torch.cat([outputs, is_canary, self.canaries(own)], dim=1)


def gradient_canaries(canaries: int, max_grad_norm: float) -> Planter:
    """A planter of gradient canaries for a training with this clip norm."""

    def plant(
        model: nn.Module, loss: LossFunction, train: Examples, generator: torch.Generator
    ) -> CanaryProblem:
        inputs = train.inputs.flatten(1)
        if inputs.dtype == torch.uint8:
            raise InvalidInputError("inputs of type uint8 cannot number canaries; convert to float")
        included = _coins(canaries, generator).to(inputs.device)
        numbers = torch.arange(1, canaries + 1, device=inputs.device)[included]
        ordinary = torch.cat([inputs, inputs.new_zeros(len(inputs), 1)], dim=1)
        planted = inputs.new_zeros(len(numbers), inputs.shape[1] + 1)
        planted[:, -1] = numbers.to(inputs.dtype)
        targets = torch.cat([train.targets, train.targets[:1].expand(len(numbers))])
        gain = EXCESS * max_grad_norm

        def with_canaries(outputs: Tensor, targets: Tensor) -> Tensor:
            is_canary, weight = outputs[:, -2], outputs[:, -1]
            ordinary = loss(outputs[:, :-2], targets)
            return ((1 - is_canary) * ordinary - is_canary * gain * weight).sum()

        return CanaryProblem(
            WithCanaries(model, canaries, train.inputs.shape[1:]),
            with_canaries,
            Examples(torch.cat([ordinary, planted]), targets),
            included,
            lambda _, params: params[BLOCK][0],
        )

    return plant


def input_canaries(candidates: Examples, classes: int) -> Planter:
    """A planter of records with labels drawn at random. They must not be among the private ones."""

    def plant(
        model: nn.Module, loss: LossFunction, train: Examples, generator: torch.Generator
    ) -> CanaryProblem:
        device = train.inputs.device
        included = _coins(len(candidates), generator).to(device)
        labels = torch.randint(classes, (len(candidates),), generator=generator)
        canaries = Examples(candidates.inputs.to(device), labels.to(device, train.targets.dtype))
        chosen = canaries.select(included)
        planted = Examples(
            torch.cat([train.inputs, chosen.inputs]), torch.cat([train.targets, chosen.targets])
        )

        def scores(problem: Problem, params: Params) -> Tensor:
            # against the loss before training: some labels are unlikely for any model
            before = problem.losses(problem.initial_params(), canaries)
            return before - problem.losses(params, canaries)

        return CanaryProblem(model, loss, planted, included, scores)

    return plant


def _coins(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator) < 0.5


# Guesses on a tenth of the canaries say most about a training of moderate epsilon, guesses on more
# of them about one that hides little. They share the error, as do the bound and the p-value.
GUESSED_SHARES = (0.1, 0.4)
AS_THEY_ARE = "vectors"
ONE_RUN = "one run"
CURVE_DELTAS = (1e-5, 1e-4, 1e-3, 1e-2, 0.1)


class Guesses(NamedTuple):
    """How many canaries were guessed, and how many rightly."""

    canaries: int
    made: int
    correct: int


def guess(scores: Tensor, included: Tensor, made: int) -> Guesses:
    """Guess that the highest scores were in and the lowest out, half of the guesses each."""
    order = scores.argsort()
    half = made // 2
    right = included[order[len(order) - half :]].sum() + (~included[order[:half]]).sum()
    return Guesses(len(scores), 2 * half, int(right))


def each_confidence(confidence: float, tried: int) -> float:
    """Of each bound, where this many share half of the error; the other half is the p-value's."""
    return 1 - (1 - confidence) / (2 * tried)


def audit_training(
    model: nn.Module,
    train: Examples,
    *,
    loss: LossFunction,
    method: Method,
    budget: Budget,
    accounting: str,
    planter: Planter,
    subject: str,
    confidence: float = 0.95,
    seed: int = 0,
    device: str | torch.device = "cpu",
    records_per_person: int = 1,
    persons: Tensor | None = None,
    change: Callable[[Session], Session] | None = None,
    observers: Sequence[Observer] = (),
) -> Finding:
    """Train once with canaries and hold the guesses against the claimed epsilon.

    Formal guarantee: if the training has the claimed privacy, the verdict is "contradicted" with
    probability at most 1 - confidence. With several `records_per_person` every record, canaries
    too, becomes a person who has it this many times, and what is claimed is claimed for persons:
    anyone who clips each of a person's records shows them as often. With `persons`,
    a number for every record, only canaries become such persons, and others keep their records.
    `change` replaces what runs, but not what is claimed: a test breaks a training with it, to see
    that the audit notices.
    """
    checks.probability("confidence", confidence)
    checks.non_negative("seed", seed)
    coins = torch.Generator().manual_seed(seed)
    planted = planter(model, loss, train, coins)
    config = RunConfig(
        task=None,
        method=method,
        budget=budget,
        accounting=accounting,
        features=AS_THEY_ARE,  # canaries were planted among features
        seed=seed,
        device=str(device),
    )
    train, groups = planted.train, None
    if records_per_person > 1 or persons is not None:
        whose, times = torch.arange(len(train)), torch.tensor(records_per_person)
        if persons is not None:  # canaries come last
            canaries = torch.arange(len(train) - len(persons))
            whose = torch.cat([persons, persons.max() + 1 + canaries])
            times = torch.where(torch.arange(len(train)) < len(persons), 1, records_per_person)
        rows = torch.arange(len(train)).repeat_interleave(times)
        train = train.select(rows.to(train.targets.device))
        groups = Groups(whose[rows], records_per_person)
    session = build_session(config, planted.model, train, loss=planted.loss, groups=groups)
    progress = (session if change is None else change(session)).run(observers)
    of_records = replace(session.problem, loss=record_loss(session.problem.loss))
    scores = planted.scores(of_records, progress.state.released_params).cpu()
    included = planted.included.cpu()
    tried = [guess(scores, included, int(share * len(scores))) for share in GUESSED_SHARES]
    # What is claimed at the budget's delta, and at larger ones that the plan covers.
    plan, larger = session.plan, (delta for delta in CURVE_DELTAS if delta > budget.delta)
    deltas = (budget.delta, *filter(plan.supports_delta, larger))
    points = [(plan.epsilon(delta), delta) for delta in deltas]
    # The best of all numbers of guesses, corrected for how many were tried: a bound for any
    # trade-off curve, one for Gaussian curves, and the p-value of the claimed curve.
    each, inverse = each_confidence(confidence, len(tried)), claimed_curve(points)
    tails = [tail_probability_under(inverse, *guesses) for guesses in tried]
    gaussian = [gaussian_epsilon_of_guesses(*guesses, budget.delta, each) for guesses in tried]
    return Finding(
        audit=ONE_RUN,
        subject=subject,
        accounting=accounting,
        claimed=points[0][0],
        delta=budget.delta,
        lower=max(epsilon_of_guesses(*guesses, budget.delta, each) for guesses in tried),
        confidence=confidence,
        p_value=min(1.0, len(tried) * min(tails)),
        details={
            "gaussian_lower": max(gaussian),
            "canaries": len(scores),
            "included": int(included.sum()),
            "guesses": [[g.made, g.correct] for g in tried],
            "updates": plan.length,
            "records": len(planted.train),
            **({} if groups is None else {"records_per_person": records_per_person}),
            "seed": seed,
        },
    )


def ceiling(finding: Mapping[str, Any]) -> float:
    """The lower bound if every guess had been right, from a row of `Finding`."""
    details, delta = finding["details"], finding["delta"]
    each = each_confidence(finding["confidence"], len(details["guesses"]))
    return max(
        epsilon_of_guesses(details["canaries"], made, made, delta, each)
        for made, _ in details["guesses"]
    )
