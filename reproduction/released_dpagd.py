"""DPAGD as the code released with the paper runs it, at the epsilon that this code claims.

It is no line search. The candidates are applied one after the other to the same weights and never
taken back, so that an iteration moves 52.5 gradients whatever is chosen; what is chosen moves up to
five more. This is an experiment, not a method: it cannot be named for training, and no epsilon is
known to hold for it.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from dpsur.functional.problem import Problem
from dpsur.functional.tree import Params, elementwise
from dpsur.mechanism.gaussian import Batch, dp_mean_gradient
from dpsur.mechanism.proposer import Sampler, Sgd
from dpsur.mechanism.state import Candidate, Procedure, State, Verdict
from dpsur.mechanism.streams import BATCH, NOISE, STEERING, VAL_BATCH, VAL_NOISE, Draws
from dpsur.methods.base import Method
from dpsur.options import option
from dpsur.privacy.accountants.rdp import (
    PAPER_ORDERS,
    RenyiFilter,
    epsilon_from_rdp,
    sampled_gaussian_rdp,
)
from dpsur.privacy.accounting import only_figure
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, Ledger, LossTest, SampledGaussian, Step, Trial
from dpsur.privacy.plan import MOST_TRIALS, TRIALS, Phase, Plan

# Candidate step lengths, and the factor of the noise after an iteration with a retry.
LARGEST, COUNT, DECAY = 5.0, 21, 0.99


@dataclass(frozen=True, repr=False)
class ReleasedDpagd(Method):
    """The authors' DPAGD. Formal guarantee: none.

    1. Candidates are applied cumulatively in place and never undone. 2. Each is scored on its own
    fresh batch. 3. The noisy sum is divided by the size of another draw of the batch. 4. A choice
    is charged only if it is not the length 0, as a sampled Gaussian, though its noise is
    exponential. 5. After the length 0 a new noisy gradient is charged, but the old one is used, and
    the weights move on. 6. All gradients are charged at the noise of the last one. 7. The budget is
    checked one iteration too late.

    A trial is one pass over the candidates.
    """

    name = "released-dpagd"
    summary = "the authors' DPAGD as it runs (experiments only)"

    batch_size: int = option(1024, "expected size of a Poisson batch")
    val_batch_size: int | None = option(
        None, "expected size of the batch of each candidate (default: the training batch's)"
    )
    max_grad_norm: float = option(0.1, "L2 norm to which each record's gradient is clipped")
    noise_multiplier: float = option(2.0, "noise of the first gradient")
    loss_clip: float = option(3.0, "clip bound of a record's loss in the choice")
    val_noise_multiplier: float = option(1.5, "scale of the exponential noise of a choice")

    def resolve(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, Plan]:
        """The plan that adds up what the code adds up."""
        rate = self.batch_size / dataset_size
        typical = Trial(
            SampledGaussian(rate, self.noise_multiplier),
            LossTest(rate, self.val_noise_multiplier, 0.0),
        )
        phases = (Phase(typical, None, TRIALS, MOST_TRIALS),)
        free = RenyiFilter(2.0, 0.0)
        return self, ClaimedPlan(budget, accounting, phases, setup, filter=free)

    def build(self, problem: Problem, plan: Plan) -> Procedure:
        """Tie the method to its data."""
        return ReleasedSteps(self, Sampler(problem), plan.typical)


@dataclass(frozen=True)
class ClaimedPlan(Plan):
    """Ends a run where the released code does, by its own sum. Formal guarantee: none."""

    def __post_init__(self) -> None:
        """Nothing to check: nothing is promised."""

    def affords(self, ledger: Ledger, step: Step) -> bool:
        """Whether the code begins another iteration; one that was begun is finished."""
        assert isinstance(step, Trial)
        return step.test is None or self.spent(ledger) < self.budget.epsilon

    def spent(self, ledger: Ledger, delta: float | None = None) -> float:
        """What the code says it has spent."""
        iterations = ledger.updates
        if not iterations:
            return 0.0
        test = self.typical.test
        assert isinstance(test, LossTest)
        retries = [(_noise(entry.step), entry.trials - entry.updates) for entry in ledger.entries]
        last = min(noise for noise, _ in retries)
        rate = test.sample_rate
        charges = [(last, iterations), (test.noise_multiplier, iterations)]
        charges += [(DECAY * noise, count) for noise, count in retries]
        return min(
            epsilon_from_rdp(
                sum(count * _rdp(rate, noise, order) for noise, count in charges if count),
                order,
                delta or self.budget.delta,
            )
            for order in PAPER_ORDERS
        )

    def position(self, ledger: Ledger) -> int:  # noqa: ARG002
        """Nothing is scheduled."""
        return 0

    def completed(self, ledger: Ledger) -> bool:  # noqa: ARG002
        """Always."""
        return True

    def epsilon(self, delta: float | None = None) -> float:  # noqa: ARG002
        """The claim."""
        return self.budget.epsilon

    def figures(self) -> dict[str, float | None]:
        """The claim alone."""
        return only_figure(self.accounting, self.budget.epsilon)


def _noise(step: Step) -> float:
    assert isinstance(step, Trial)
    assert isinstance(step.update, SampledGaussian)
    return step.update.noise_multiplier


@cache
def _rdp(rate: float, noise: float, order: int) -> float:
    return sampled_gaussian_rdp(rate, noise, order)


class ReleasedSteps:
    """One pass over the candidates as a trial. An iteration ends with a choice that is not 0."""

    setup: tuple[Event, ...] = ()

    def __init__(self, method: ReleasedDpagd, sampler: Sampler, typical: Trial) -> None:
        assert isinstance(typical.update, SampledGaussian)
        self._method, self._sampler, self._problem = method, sampler, sampler.problem
        self._typical = typical
        self._rate = typical.update.sample_rate
        scored = method.val_batch_size or method.batch_size
        self._val_rate = scored / len(self._problem.train)
        self._optimizer = Sgd(momentum=0.0)

    def initial_state(self) -> State:
        """No gradient yet."""
        params = self._problem.initial_params()
        nothing = torch.zeros((), dtype=torch.float64, device=self._problem.device)
        memory = {
            "retry": nothing,
            "noise": nothing + self._method.noise_multiplier,
            "size": nothing + 1,
            "chosen": nothing,
            **{f"gradient/{name}": torch.zeros_like(value) for name, value in params.items()},
        }
        updates = torch.zeros((), dtype=torch.int64, device=self._problem.device)
        return State(params, self._optimizer.init(params), updates, None, memory)

    def step(self, state: State) -> Step:
        """A gradient of the current noise; a retry has no test, so that the plan can tell."""
        memory = _memory(state)
        update = SampledGaussian(self._rate, float(memory["noise"]))
        return Trial(update, None if bool(memory["retry"]) else self._typical.test)

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:  # noqa: ARG002
        """Move along the candidates, score each where it stands, and move on by what is chosen."""
        memory = _memory(state)
        gradient, size = self._gradient(state, memory, draws)
        lengths = torch.linspace(
            0, LARGEST, COUNT, dtype=torch.float64, device=self._problem.device
        )
        travelled = lengths.cumsum(0)
        losses = []
        for length in travelled.unbind():
            batch = self._sampler.batch(self._val_rate, draws, VAL_BATCH)
            losses.append(self._mean_loss(_moved(state.params, gradient, length), batch))
        scale = self._method.loss_clip * self._method.val_noise_multiplier / size
        exponential = -torch.log1p(-draws[VAL_NOISE].uniform(COUNT))
        row = (torch.stack(losses) + scale * exponential).argmin()
        chosen = torch.take(lengths, row)
        params = _moved(state.params, gradient, travelled[-1] + chosen)
        after = {
            "retry": torch.zeros_like(chosen),
            "noise": torch.where(memory["retry"] > 0, DECAY * memory["noise"], memory["noise"]),
            "size": size,
            "chosen": chosen,
            **{f"gradient/{name}": value for name, value in gradient.items()},
        }
        return Candidate(State(params, state.optimizer, state.updates + 1, None, after))

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:  # noqa: ARG002
        """An iteration ends with any length but 0."""
        chosen = _memory(candidate.state)["chosen"]
        return Verdict(chosen > 0, {"step_length": chosen})

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The weights where the candidates left them, and the same gradient once more."""
        memory = {
            **_memory(candidate.state),
            "retry": torch.ones_like(_memory(state)["retry"]),
            "noise": _memory(state)["noise"],
        }
        return replace(candidate.state, updates=state.updates, memory=memory)

    def padded(self) -> "ReleasedSteps | None":
        """The same on padded batches."""
        sampler = self._sampler.padded()
        if sampler is None:
            return None
        copied = copy.copy(self)
        copied._sampler = sampler
        return copied

    def _gradient(
        self, state: State, memory: Mapping[str, Tensor], draws: Draws
    ) -> tuple[Params, Tensor]:
        """A noisy gradient and the size of its batch; on a retry the ones at hand."""
        batch = self._sampler.batch(self._rate, draws, BATCH)
        fresh = dp_mean_gradient(
            self._problem,
            state.params,
            batch,
            self._rate,
            memory["noise"],
            self._method.max_grad_norm,
            draws[NOISE],
        )
        records = len(self._problem.train)
        other = (draws[STEERING].uniform(records) < self._rate).sum().clamp(min=1)
        factor = self._rate * records / other
        again = memory["retry"] > 0
        gradient = elementwise(
            lambda new, old: torch.where(again, old, new * factor.to(new.dtype)),
            fresh,
            {name: memory[f"gradient/{name}"] for name in fresh},
        )
        drawn: Any = len(batch) if batch.mask is None else batch.mask.sum()
        size = torch.where(again, memory["size"], torch.ones_like(memory["size"]) * drawn)
        return gradient, size.clamp(min=1)

    def _mean_loss(self, params: Params, batch: Batch) -> Tensor:
        losses = self._problem.losses(params, batch.examples).double()
        return batch.mean(losses.clamp(max=self._method.loss_clip))


def _moved(params: Params, gradient: Params, length: Tensor) -> Params:
    return elementwise(
        lambda value, by: torch.addcmul(value, by, length.to(value.dtype), value=-1),
        params,
        gradient,
    )


def _memory(state: State) -> Mapping[str, Tensor]:
    assert state.memory is not None
    return state.memory
