"""SA-DPSGD (Fu, Chen, Ling 2022): a worse candidate passes less and less often, as in annealing."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.mechanism import gates
from dpsur.mechanism.gates import USUAL_LOSS_CLIP, Metrics
from dpsur.mechanism.proposer import GradientProposer, GradientSource
from dpsur.mechanism.state import Candidate, Gate, State
from dpsur.mechanism.streams import VAL_NOISE, Draws
from dpsur.mechanism.trial import LossRule, LossTestGate
from dpsur.methods.gradient_method import GATE_HELP, GATES, GradientMethod
from dpsur.options import GATE, option
from dpsur.privacy.accounting import KEEP_MOMENTUM, SELECTIVE_ACCOUNTING, accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import Event, LossTest, Test
from dpsur.privacy.plan import Plan

RELEASED_COOLING = 10.0  # k of the released code
EVERY_TRIAL = "every-trial"
_GROUP = "method sa-dpsgd"


@dataclass(frozen=True, repr=False)
class SaDpsgd(GradientMethod):
    """DP-SGD whose candidates pass with probability min(1, exp(-k t dE)).

    t is the number of updates accepted so far, dE the loss of the candidate minus that of the
    current model. The rule is that of the first author's code (github.com/JeffffffFu,
    Awesome-Differential-Privacy-and-Meachine-Learning, SGD_and_DP/SA_DPSGD.py until commit
    5698034), with its k = 10 and an acceptance after `max_rejections` rejections in a row, there
    5. There dE is exact, of the records that accuracy is reported on, and accepted updates alone
    are charged. Ours are: dE of a fresh Poisson batch of training records, clipped and noised as
    by the paper's test, and the charge.

    Formal guarantee of one trial: a sampled Gaussian for the candidate, and a test that costs no
    more than `LossTest` with the threshold 0, which it becomes as t grows (README.md
    here). An acceptance that the number of rejections forces is for the accounting "every-trial".
    """

    name = "sa-dpsgd"
    summary = "simulated annealing (Fu et al. 2022): worse candidates pass less and less often"

    gate: str | gates.Gate | None = option("loss", GATE_HELP, GATES, group=GATE, common=True)
    cooling: float = option(
        RELEASED_COOLING,
        "k: after t updates a candidate whose noisy loss is higher by d passes with probability "
        "exp(-k t d)",
        group=_GROUP,
    )
    max_rejections: int | None = option(
        None,
        "accept after so many rejections in a row (accounting every-trial; 5 in the released code; "
        "default: never)",
        group=_GROUP,
    )

    def __post_init__(self, metrics: Metrics | None) -> None:
        super().__post_init__(metrics)
        checks.positive("cooling", self.cooling)
        checks.at_least_one_each(self, "max_rejections")
        if self._implied_gate() != "loss" or self.accept_threshold not in (None, 0):
            raise InvalidInputError(
                f"{self.name} has a test of its own, by the noisy loss difference and without a "
                "threshold; leave gate and accept_threshold out"
            )

    @property
    def usual_accounting(self) -> str:
        """By distributions behind the test; with forced acceptances the one that covers them."""
        return SELECTIVE_ACCOUNTING if self.max_rejections is None else EVERY_TRIAL

    def resolve(
        self,
        dataset_size: int,
        budget: Budget,
        accounting: str,
        setup: tuple[Event, ...] = (),
    ) -> tuple[Self, Plan]:
        """Settle it as the paper's test with the threshold 0, which costs no less."""
        if self.max_rejections is not None and accounting_named(accounting).charges != "trials":
            raise InvalidInputError(
                f"max_rejections {self.max_rejections} accepts by how many candidates were "
                f"rejected, which the {accounting} accounting does not cover; use the accounting "
                f"{EVERY_TRIAL}, or leave it out"
            )
        return replace(self, accept_threshold=0.0)._settle_repeated(
            dataset_size, budget, accounting, setup
        )

    def proposer(self, problem: Problem, source: GradientSource, length: int) -> GradientProposer:
        """Steps along gradients, which count rejections where these force an acceptance."""
        plain = super().proposer(problem, source, length)
        if self.max_rejections is None:
            return plain
        return CountingProposer(problem, source, plain.optimizer, plain.schedule, plain.average)

    def make_gate(self, problem: Problem, plan: Plan) -> Gate:
        """The test, at the temperature of the update."""
        test = plan.typical.gate
        assert isinstance(test, LossTest)
        rule = LossRule(self.loss_clip or USUAL_LOSS_CLIP, test.noise_multiplier, 0.0)
        return AnnealingGate(
            problem,
            test,
            rule,
            plan.on_reject == KEEP_MOMENTUM,
            cooling=self.cooling,
            max_rejections=self.max_rejections,
        )

    def acceptance_in_words(self, test: Test) -> str:
        """Every candidate passes before the first update; later ones as in a colder test."""
        return (
            f"passes with a probability that falls from 1 towards {test.accept_max:.2f}, a worse "
            f"one from 1 towards {test.accept_min:.2f}"
        )


@dataclass(frozen=True)
class AnnealingGate(LossTestGate):
    """Accept with probability min(1, exp(-k t d)), d being the clipped, noisy loss difference.

    The rule must be a `LossRule`. `max_rejections` needs a `CountingProposer`.

    Formal guarantee: given the updates accepted so far and without `max_rejections`, acceptance has
    a probability in an interval whose ends have at most the ratio of those of a `LossTest` with the
    threshold 0, and whose lower end is no lower. The verdict is a function of the noisy difference,
    of a coin, and of earlier verdicts.
    """

    cooling: float = RELEASED_COOLING
    max_rejections: int | None = None

    def decide(self, state: State, difference: Tensor, draws: Draws) -> Tensor:
        """Toss a coin whose bias is that of the noisy difference at this temperature."""
        assert isinstance(self.rule, LossRule)
        noisy = self.rule.noisy(difference, draws[VAL_NOISE])
        toss = draws[VAL_NOISE].uniform(1).view(difference.shape)
        accept = toss < torch.exp(-self.cooling * state.updates * noisy)
        if self.max_rejections is None:
            return accept
        assert state.memory is not None
        return accept | (state.memory["rejected"] >= self.max_rejections)

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The state as it was, with one rejection more where they are counted."""
        after = super().after_rejection(state, candidate)
        if self.max_rejections is None:
            return after
        assert state.memory is not None
        return replace(after, memory={"rejected": state.memory["rejected"] + 1})


@dataclass(frozen=True)
class CountingProposer(GradientProposer):
    """Counts rejections in a row: an accepted candidate begins anew."""

    def initial_state(self) -> State:
        """Nothing was rejected yet."""
        state = super().initial_state()
        return replace(state, memory={"rejected": torch.zeros_like(state.updates)})

    def propose(self, state: State, draws: Draws, position: Tensor) -> Candidate:
        """One optimizer step, after which nothing was rejected."""
        candidate = super().propose(state, draws, position)
        none = {"rejected": torch.zeros_like(state.updates)}
        return replace(candidate, state=replace(candidate.state, memory=none))

    def padded(self) -> None:
        """Trials are made one by one."""
        return
