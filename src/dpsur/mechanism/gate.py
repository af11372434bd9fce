"""The gate of Algorithm 1: both models on one fresh batch, then a decision (lines 9 to 14).

The decision is a rule: `LossRule` is the paper's clipped, noisy loss difference against a
threshold, `CoinRule` a coin for candidates that got worse.

Both losses come from one evaluation where that is faster. On a CPU two evaluations cost no more
than one of both. On a GPU that waits for small kernels one evaluation costs half, but only for
layers whose weights can be stacked at no cost: a convolution with two sets of weights is grouped,
and grouped convolutions have slow kernels.
"""

import math
import warnings
from dataclasses import dataclass, replace
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.functional.call import call_on
from dpsur.functional.parameters import Params
from dpsur.functional.problem import EVALUATION_ROWS, Problem, example_losses, mode, output_rows
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.records import Examples
from dpsur.functional.tree import (
    TensorTree,
    concatenate_rows,
    device_of,
    map_tensors,
    signature,
    slice_rows,
    split_rows,
    tensors_of,
    with_tensors,
)
from dpsur.mechanism.sampling import (
    Batch,
    Draw,
    padded_batch,
    padded_sizes,
    steady_batch,
)
from dpsur.mechanism.state import Candidate, State, Verdict
from dpsur.mechanism.streams import VAL_BATCH, VAL_NOISE, Draws, Stream, Streams
from dpsur.per_example.evaluation import record_losses
from dpsur.privacy.events import CoinTest, Test

# Where one evaluation of both costs less than two, and for which layers with weights.
PAYS_ON = ("cuda",)
PAYS_FOR = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
# Weights of a larger model are not stacked: copies of them take longer than launching kernels, and
# memory for two more models.
MOST_STACKED = 2**20
_TOLERANCE = 1e-4
_agrees: WeakKeyDictionary[nn.Module, dict[object, bool]] = WeakKeyDictionary()


def paired_losses(problem: Problem, one: Params, other: Params, examples: Examples) -> Tensor:
    """Losses of every record by itself, in evaluation mode: a row for each set of weights."""
    inputs = examples.inputs
    if not evaluates_together(problem, one, inputs):
        return torch.stack([record_losses(problem, params, examples) for params in (one, other)])
    outputs = stacked_outputs(problem, one, other, inputs)
    losses = example_losses(
        problem.loss,
        map_tensors(lambda values: values.flatten(0, 1), outputs),
        concatenate_rows([examples.targets, examples.targets]),
    )
    return losses.view(2, -1)


def evaluates_together(problem: Problem, params: Params, inputs: TensorTree) -> bool:
    """Whether two sets of weights get one evaluation."""
    return stacking_pays(problem, inputs) and can_be_stacked(problem, params, inputs)


def stacking_pays(problem: Problem, inputs: TensorTree) -> bool:
    """Whether one evaluation of both costs less than two, from the device and the layers."""
    if device_of(inputs).type not in PAYS_ON:
        return False
    if sum(value.numel() for value in problem.model.parameters()) > MOST_STACKED:
        return False
    weighty = [m for m in problem.model.modules() if any(True for _ in m.parameters(recurse=False))]
    return all(isinstance(m, PAYS_FOR) for m in weighty)


def stacked_outputs(problem: Problem, one: Params, other: Params, inputs: TensorTree) -> TensorTree:
    """Outputs for both sets of weights, stacked."""
    both = {name: torch.stack([value, other[name]]) for name, value in one.items()}
    model = problem.model
    structure: TensorTree = None

    def outputs(params: Params, part: list[Tensor]) -> list[Tensor]:
        nonlocal structure
        structure = output_rows(call_on(model, params, with_tensors(inputs, part)))
        return tensors_of(structure)

    evaluate = vmap(outputs, in_dims=(0, None))
    with torch.no_grad(), mode(model, training=False), sdpa_kernel(SDPBackend.MATH):
        found = [evaluate(both, tensors_of(part)) for part in split_rows(inputs, EVALUATION_ROWS)]
    return concatenate_rows([with_tensors(structure, part) for part in found], 1)


def can_be_stacked(problem: Problem, params: Params, inputs: TensorTree) -> bool:
    """Whether one evaluation gives what two give, tried once on synthetic records and weights."""
    known = _agrees.setdefault(problem.model, {})
    device = device_of(inputs)
    key = (signature(inputs), device)
    if key not in known:
        with seeded_globally(0, device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a trial that may fail
            known[key] = _tried(problem, params, slice_rows(inputs, slice(3)))
    return known[key]


def _tried(problem: Problem, params: Params, inputs: TensorTree) -> bool:
    other = {name: value + 0.05 * torch.randn_like(value) for name, value in params.items()}
    try:
        stacked = stacked_outputs(problem, params, other, inputs)
        apart = [tensors_of(problem.outputs(one, inputs)) for one in (params, other)]
        return all(
            torch.allclose(together, torch.stack(each), rtol=_TOLERANCE, atol=_TOLERANCE)
            for together, *each in zip(tensors_of(stacked), *apart, strict=True)
        )
    except Exception:  # whatever goes wrong, two evaluations remain
        return False


@dataclass(frozen=True)
class LossRule:
    """Accept a candidate whose noisy loss difference is below the threshold (Alg. 1, L11-14).

    Formal guarantee: whatever the difference, NaN included, acceptance has a probability between
    the a_min and a_max of `dpsur.privacy.events.LossTest` with the same parameters, and the noisy
    difference is a Gaussian mechanism of noise multiplier `noise_multiplier`.
    """

    loss_clip: float
    noise_multiplier: float
    accept_threshold: float

    def __post_init__(self) -> None:
        checks.positive("loss_clip", self.loss_clip)
        checks.positive("val_noise_multiplier", self.noise_multiplier)
        if math.isnan(self.accept_threshold):
            raise InvalidInputError("accept_threshold must be a number, got nan")

    def decide(self, difference: Tensor, stream: Stream) -> Tensor:
        """Draw a verdict for a loss difference. The noise is drawn whatever the difference is."""
        bound = self.loss_clip
        # A comparison with NaN would reject with certainty, and a certain rejection has no
        # acceptance probability above a_min: count it as the worst finite difference instead.
        difference = torch.where(difference.abs() < math.inf, difference, bound)
        clipped = difference.clamp(-bound, bound)
        noise = stream.normal(difference.numel()).view(difference.shape)
        noisy = clipped + 2 * bound * self.noise_multiplier * noise
        return noisy < self.accept_threshold * bound


@dataclass(frozen=True)
class CoinRule:
    """Accept every improvement, and a worsening with probability 1 / accept_ratio.

    Formal guarantee: whatever the difference, NaN included, acceptance has a probability between
    1 / accept_ratio and 1. For the `proven` accounting this is all that matters, and against the
    paper's gate with the same ratio it needs about half the trials.
    """

    accept_ratio: float

    def decide(self, difference: Tensor, stream: Stream) -> Tensor:
        """Draw a verdict for a loss difference. The coin is tossed whatever the difference is."""
        toss = stream.uniform(difference.numel()).view(difference.shape)
        # a comparison with NaN is false, which makes NaN a worsening, as it should be
        return (difference < 0) | (toss < 1 / self.accept_ratio)


Rule = LossRule | CoinRule


def make_rule(test: Test, loss_clip: float) -> Rule:
    """The rule that an accounted test stands for."""
    if isinstance(test, CoinTest):
        return CoinRule(test.accept_ratio)
    return LossRule(loss_clip, test.noise_multiplier, test.accept_threshold)


def mean_losses(
    problem: Problem, candidate: Params, current: Params, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Mean losses of the candidate and of the current model, on one batch (Alg. 1, L10).

    An empty batch says nothing for or against: both are zero.
    """
    losses = torch.zeros(2, 0, device=problem.device)
    if len(batch):
        losses = paired_losses(problem, candidate, current, batch.examples)
    after, before = batch.mean(losses.double()).unbind()
    return after, before


@dataclass(frozen=True)
class StartedTest:
    """What of a test does not need the candidate: its batch and, where known, the loss before."""

    batch: Batch
    before: Tensor | None = None

    def losses(self, problem: Problem, candidate: Params, current: Params) -> tuple[Tensor, Tensor]:
        """The same two means as `mean_losses`."""
        if self.before is None:
            return mean_losses(problem, candidate, current, self.batch)
        after = record_losses(problem, candidate, self.batch.examples)
        return self.batch.mean(after.double()), self.before


def start_test(problem: Problem, current: Params, batch: Batch) -> StartedTest:
    """Evaluate the current model, unless it costs less to evaluate both models at once.

    The batch must have rows, as padded ones do. They are gathered for this, and again for the
    candidate: otherwise they would take memory beside the gradients.
    """
    if evaluates_together(problem, current, batch.data.inputs):
        return StartedTest(batch)
    before = record_losses(problem, current, replace(batch).examples)
    return StartedTest(batch, batch.mean(before.double()))


@dataclass(frozen=True)
class AlwaysAccept:
    """No gate: every candidate is kept."""

    test: Test | None = None
    rejects: ClassVar[bool] = False

    def begin(self, state: State, draws: Draws) -> None:
        """Nothing to prepare."""

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:  # noqa: ARG002
        """Accept."""
        return Verdict(torch.ones((), dtype=torch.bool, device=state.updates.device))

    def after_rejection(self, state: State, candidate: Candidate) -> State:  # noqa: ARG002
        """Nothing is ever rejected."""
        return state

    def padded(self) -> "AlwaysAccept":
        """It draws no batches."""
        return self


@dataclass(frozen=True)
class LossTestGate:
    """Compare both models on one fresh Poisson batch and let a rule decide.

    `keep_momentum` leaves the optimizer as a rejected candidate left it. What it then holds comes
    from a noisy gradient that the `every-trial` accounting has charged; under any other accounting
    a plan with that setting does not exist.
    """

    problem: Problem
    test: Test
    rule: Rule
    rejects: ClassVar[bool] = True
    keep_momentum: bool = False
    draw: Draw = steady_batch

    def begin(self, state: State, draws: Draws) -> "StartedTest":
        """Draw the batch, and evaluate the current model where that is worth it."""
        return start_test(self.problem, state.params, self._fresh_batch(draws))

    def judge(self, state: State, candidate: Candidate, draws: Draws) -> Verdict:
        """The rule's verdict on the loss difference."""
        test = candidate.test or StartedTest(self._fresh_batch(draws))
        after, before = test.losses(self.problem, candidate.state.params, state.params)
        difference = after - before
        accept = self.rule.decide(difference, draws[VAL_NOISE])
        private = {"loss": after, "loss_difference": difference}
        return Verdict(accept, private, test.batch.overflow)

    def after_rejection(self, state: State, candidate: Candidate) -> State:
        """The state as it was; with momentum kept, the optimizer as the candidate left it."""
        if self.keep_momentum:
            return replace(state, optimizer=candidate.state.optimizer)
        return state

    def padded(self) -> "LossTestGate":
        """The same on padded batches."""
        return replace(self, draw=padded_batch)

    @property
    def rooms(self) -> tuple[int, ...]:
        """Sizes of padded batches, by level."""
        return padded_sizes(len(self.problem.train), self.test.sample_rate)

    def batch_sizes(self, streams: Streams, steps: range) -> list[int]:
        """How many records the batches of some tests have."""
        size, rate = len(self.problem.train), self.test.sample_rate
        return streams.counts_below(rate, size, VAL_BATCH, steps)

    def _fresh_batch(self, draws: Draws) -> Batch:
        return self.draw(self.problem.train, self.test.sample_rate, draws[VAL_BATCH])
