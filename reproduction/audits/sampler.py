"""Repetitions of a tiny problem: in the training loop, or many at once.

`in_the_loop` trains with the library's method and loop. `accepted_updates` draws from the same law
by the same gate and the same noise, many trials at a time; a test holds the two together.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from dpsur.mechanism import gaussian
from dpsur.mechanism.state import Candidate, Procedure, State, Verdict
from dpsur.mechanism.streams import Draws, Stream, Streams
from dpsur.mechanism.trial import make_rule
from dpsur.methods import Dpsur
from dpsur.per_example import ClippedSum
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, Step
from dpsur.privacy.plan import trial_cap
from dpsur.privacy.planning import repeated_plan
from reproduction.audits.worst_case_problems import Unit
from reproduction.loops import train

BLOCK = 200_000
_CLIP = 1.0


@dataclass(frozen=True)
class Trials:
    """Trials from the start of a unit: the noisy sum in units of the clip, and the verdict."""

    z: Tensor
    accept: Tensor


def draw_trials(unit: Unit, count: int, stream: Stream, *, present: bool) -> Trials:
    """Independent trials, with or without x. The others' gradients are zero."""
    setting = unit.setting

    def joins(rate: float) -> Tensor:
        draws = stream.uniform(count)
        return (draws < rate).double() * present

    in_batch = joins(setting.update.sample_rate)
    total = ClippedSum({"z": _CLIP * in_batch}, sensitivity=_CLIP)
    z = gaussian.add_noise(total, setting.noise_multiplier, stream)["z"]
    in_test = joins(setting.test.sample_rate)
    others = _sample_sizes(setting.records - 1, setting.test.sample_rate, count, stream)
    losses = others * unit.others(z) + in_test * unit.extra(z)
    difference = losses / (others + in_test).clamp(min=1.0)  # an empty batch says nothing
    rule = make_rule(setting.test, setting.loss_clip)
    return Trials(z, rule.decide(difference, stream))


def _sample_sizes(size: int, rate: float, count: int, stream: Stream) -> Tensor:
    """How many of `size` records join each of `count` Poisson samples."""
    cumulated = torch.from_numpy(binom.cdf(np.arange(size + 1), size, rate))
    draws = stream.uniform(count)
    return torch.searchsorted(cumulated, draws, right=True).clamp(max=size).double()


def accepted_updates(unit: Unit, repetitions: int, stream: Stream, *, present: bool) -> Tensor:
    """Accepted updates, one row a repetition and one column a unit.

    Trials are independent and every accepted one starts a unit afresh, so the accepted ones of a
    stream of trials are the accepted ones of the loop.
    """
    wanted = repetitions * unit.setting.updates
    found: list[Tensor] = []
    have = 0
    while have < wanted:
        trials = draw_trials(unit, BLOCK, stream, present=present)
        found.append(trials.z[trials.accept])
        have += len(found[-1])
    return torch.cat(found)[:wanted].reshape(repetitions, -1)


class UnitsInTurn:
    """A procedure that trains unit t at update t, by a public schedule, as the exact law has it.

    Formal guarantee: that of the procedure it repeats, once an update; the other weights are left.
    """

    def __init__(self, one: Procedure, units: int) -> None:
        self._one = one
        self._units = units
        self.setup: tuple[Event, ...] = one.setup

    def step(self, state: State) -> Step:
        """The same for every unit."""
        return self._one.step(state)

    def initial_state(self) -> State:
        """All units at 0."""
        state = self._one.initial_state()
        weight = state.params["weight"]
        return replace(state, params={"weight": weight.repeat(self._units)})

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """A candidate for the unit whose turn it is."""
        fresh = self._one.initial_state()
        one = self._one.propose(fresh, draws, position).state
        weights = state.params["weight"].clone()
        weights[position] = one.params["weight"][0]
        return Candidate(replace(state, params={"weight": weights}, updates=state.updates + 1))

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:
        """The verdict on the unit that moved."""
        turn = state.updates
        before, after = (
            replace(s, params={"weight": s.params["weight"][turn].reshape(1)})
            for s in (state, candidate.state)
        )
        return self._one.judge(before, Candidate(after), draws)

    def padded(self) -> None:
        """Batches are exact here."""
        return

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        """The state as it was."""
        return state


def in_the_loop(unit: Unit, repetitions: int, seed: int, *, present: bool) -> Tensor:
    """The same updates from the library's own method and training loop."""
    setting = unit.setting
    problem = unit.problem(present=present)
    budget = Budget(epsilon=1.0, delta=setting.delta)
    cap = trial_cap(setting.test, setting.updates, budget)
    plan = repeated_plan(budget, "proven", setting.trial, cap, setting.updates)
    method = Dpsur(
        # the weight moves by the noisy sum in units of the clip
        learning_rate=setting.update.sample_rate * len(problem.train),
        momentum=0.0,
        schedule="constant",
        max_grad_norm=_CLIP,
        loss_clip=setting.loss_clip,
    )
    streams = Streams(seed, torch.device("cpu"))
    procedure = UnitsInTurn(method.build(problem, plan), setting.updates)

    def run(repetition: int) -> Tensor:
        return train(procedure, plan, streams.spawn(repetition)).state.params["weight"]

    return torch.stack([run(repetition) for repetition in range(repetitions)])
