"""Faults held against tiny trainings that are repeated in the library's own loop.

Here no law is assumed: the score of an outcome is learned from a part of the repetitions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dpsur.audits.bounds import Array, Finding
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism.state import Procedure, Verdict
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import Progress
from dpsur.methods import Dpsgd, Dpsur
from dpsur.methods.gradient_method import GradientMethod
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import CoinTest, LossTest, SampledGaussian, Trial
from dpsur.privacy.plan import Plan, trial_cap
from dpsur.privacy.planning import repeated_plan
from reproduction.audits.negative_controls import Fault
from reproduction.audits.repetitions import CHOICE_SHARE, epsilon_lower_bound
from reproduction.audits.worst_case_problems import OneWeight
from reproduction.loops import train

DELTA = 0.01
BINS = 16
SLIGHT = 1e-9  # a slope that orders losses and moves nothing


@dataclass(frozen=True)
class Tiny:
    """A training of one weight, which x pulls up by the clip norm and every other record down.

    `pull` is the others' gradient; with 0 they are silent. Momentum only matters after rejections.
    """

    name: str
    trial: Trial
    others: int
    pull: float
    updates: int = 1
    momentum: float = 0.0

    @property
    def accounting(self) -> str:
        """Every trial is charged where there is no test; else accepted updates are."""
        return "every-trial" if self.trial.test is None else "proven"

    def plan(self) -> Plan:
        """The plan that is claimed."""
        budget = Budget(1.0, DELTA)
        test = self.trial.gate
        if test is None:
            return repeated_plan(budget, self.accounting, self.trial, self.updates)
        cap = trial_cap(test, self.updates, budget)
        return repeated_plan(budget, self.accounting, self.trial, cap, self.updates)

    def claimed(self) -> float:
        """Epsilon as the accounting has it."""
        accounting = accounting_named(self.accounting)
        return accounting.planned((), self.trial, self.updates, DELTA)

    def problem(self, *, present: bool) -> Problem:
        """The records, with or without x, under a linear loss."""
        slopes = torch.full((self.others + present, 1), self.pull, dtype=torch.float64)
        if present:
            slopes[-1] = -1.0
        return Problem(
            _Slope(), lambda outputs, _: outputs.sum(), Examples(slopes, torch.zeros(len(slopes)))
        )

    def observed(self, path: Sequence[float]) -> float:
        """What the auditor looks at, of the weights after each accepted update."""
        return path[-1]

    def method(self, records: int) -> GradientMethod:
        """A method whose weight moves by the noisy sum, if that is divided for so many records."""
        assert isinstance(self.trial.update, SampledGaussian)
        kind: type[GradientMethod] = Dpsgd if self.trial.gate is None else Dpsur
        return kind(
            learning_rate=self.trial.update.sample_rate * records,
            momentum=self.momentum,
            schedule="constant",
            max_grad_norm=1.0,
        )


class Outlier(Tiny):
    """A training in which the loss of x, and not its gradient, is what shows.

    No record moves the weight to speak of: candidates are noise. The others would have it near 0,
    where it starts, so that the first search accepts by coin alone, and the second prefers to go
    back. The loss of x falls by more than all others can, whatever the first step is. So the batch
    that accepts it is likelier to hold x than a batch is by itself. Where losses of one batch are
    compared, this has no consequence. But beside a mean loss with x in it, remembered from that
    batch, nothing is an improvement, and the second search has no preference.
    """

    def problem(self, *, present: bool) -> Problem:
        """The records, with or without x, under losses of which only the order matters."""
        kinds = torch.zeros(self.others + present, 1, dtype=torch.float64)
        if present:
            kinds[-1] = 1.0

        def loss(outputs: Tensor, _: Tensor) -> Tensor:
            weight, kind = outputs[:, 0], outputs[:, 1]
            return (SLIGHT * weight.abs() - kind * (weight != 0)).sum()

        return Problem(OneWeight(), loss, Examples(kinds, torch.zeros(len(kinds))))

    def observed(self, path: Sequence[float]) -> float:
        """How far the first update went; with a minus where the second came back."""
        first, second = abs(path[0]), abs(path[1])
        return first if second > first else -first


class _Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, slopes: Tensor) -> Tensor:
        return slopes * self.weight


_ALL = SampledGaussian(1.0, 1.0)
# Hardly distinguishes candidates and accepts one in fifteen: its own price is small, and it leaves
# many rejected gradients.
_STRICT = LossTest(0.5, 10.0, -30.0)
# Of x in a batch by itself the probability is 1/64; in one that accepts, where x decides, 1/3.
_RARELY_LOOKS = CoinTest(1 / 64, 32.0)
TINY: dict[str, Tiny] = {
    tiny.name: tiny
    for tiny in (
        Tiny("one step", Trial(_ALL), others=1, pull=1.0),
        Tiny("one step on half", Trial(SampledGaussian(0.5, 1.0)), others=3, pull=1.0),
        Tiny(
            "one accepted step with momentum",
            Trial(SampledGaussian(1.0, 1.5), _STRICT),
            others=3,
            pull=0.0,
            momentum=0.99,
        ),
        Outlier(
            "two accepted steps, an outlier",
            Trial(SampledGaussian(1.0, 20.0), _RARELY_LOOKS),
            others=400,  # so that hardly any batch is empty
            pull=0.0,
            updates=2,
        ),
    )
}
# where each fault shows most
PLACES = {
    "no-noise": "one step",
    "noise-1/4": "one step",
    "noise-2/3": "one step",
    "drawn-size": "one step",
    "fixed-batches": "one step on half",
    "kept-momentum": "one accepted step with momentum",
    "stale-loss": "two accepted steps, an outlier",
}


def outcomes(tiny: Tiny, fault: Fault, repetitions: int, seed: int, *, present: bool) -> Array:
    """What the auditor sees of the released weights, one number a repetition."""
    problem, plan = tiny.problem(present=present), tiny.plan()
    streams = Streams(seed, torch.device("cpu"))
    # The size of the data set is public: dividing by it must not reveal x.
    records = tiny.others + 1 if fault.own_divisor else len(problem.train)
    procedure = fault.bind(tiny.method(records), problem, plan)
    runs = (streams.spawn(2 * repetition + present) for repetition in range(repetitions))
    return np.array([tiny.observed(_path(procedure, plan, run)) for run in runs])


def _path(procedure: Procedure, plan: Plan, streams: Streams) -> list[float]:
    """The weight after each accepted update of one run."""
    path: list[float] = []

    def note(progress: Progress, verdicts: Sequence[Verdict]) -> None:
        if verdicts[-1].accept:
            path.append(float(progress.state.params["weight"]))

    train(procedure, plan, streams, on_block=note)
    return path


def learned_scores(with_x: Array, without: Array) -> tuple[Array, Array]:
    """Log-likelihood ratios by a histogram over the part of the runs that chooses the event."""
    first = int(CHOICE_SHARE * min(len(with_x), len(without)))
    pooled = np.concatenate([with_x[:first], without[:first]])
    edges = np.unique(np.quantile(pooled, np.linspace(0, 1, BINS + 1)[1:-1]))

    def log_counts(values: Array) -> Array:
        found = np.bincount(np.searchsorted(edges, values, "right"), minlength=len(edges) + 1)
        return np.asarray(np.log(found + 0.5))

    ratio = log_counts(with_x[:first]) - log_counts(without[:first])
    with_scores, without_scores = (
        ratio[np.searchsorted(edges, values, "right")] for values in (with_x, without)
    )
    return with_scores, without_scores


def audit_repeated(
    tiny: Tiny, fault: Fault, repetitions: int, confidence: float = 0.999, seed: int = 0
) -> Finding:
    """Repeat a tiny training with and without x, and hold it against its claim."""
    with_x, without = (
        outcomes(tiny, fault, repetitions, seed, present=present) for present in (True, False)
    )
    bound = epsilon_lower_bound(*learned_scores(with_x, without), DELTA, confidence)
    return Finding(
        audit="repeated",
        subject=f"{tiny.name}; fault: {fault.name}",
        accounting=tiny.accounting,
        claimed=tiny.claimed(),
        delta=DELTA,
        lower=bound.epsilon,
        confidence=confidence,
        details={
            "fault": fault.name,
            "problem": tiny.name,
            "likelier": bound.likelier,
            "rarer": bound.rarer,
            "repetitions": bound.repetitions,
            "seed": seed,
        },
    )
