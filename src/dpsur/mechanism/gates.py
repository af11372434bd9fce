"""Gates and metrics as objects: what `fit`, `PrivacyEngine` and the command line all take.

    LossGate    tests each candidate by a noisy loss difference (the paper's gate)
    CoinGate    keeps every improvement, and a worse candidate with a known probability
    BlockGate   finds the learning rate by tests after blocks of updates
    Metrics     pays for noisy training accuracy and Brier score, without deciding anything

`fit` takes them as `Dpsgd(gate=..., metrics=...)`, a custom loop as `make_private(gate=...,
metrics=...)`, and the options of the command line are their fields. They hold settings only. What
is None is left open, and chosen for the data and the budget.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.mechanism.proposer import SHAPES
from dpsur.privacy.events import CoinTest, LossTest

EVERY_TRIAL, PROVEN = "every-trial", "proven"
# The paper's noise, clip bound and threshold.
USUAL_TEST_NOISE = 1.0
USUAL_LOSS_CLIP = 0.001
USUAL_THRESHOLD = -1.0
USUAL_RATIO = 2.0
METRICS_PER_RUN = 10  # how often paid metrics are measured

# In a custom loop, functions of the model and a batch of the loader give a loss,
BatchLoss = Callable[[nn.Module, Any], Tensor]
# outputs and targets, or the loss of each record.
Outputs = Callable[[nn.Module, Any], tuple[Any, Any]]
Losses = Callable[[nn.Module, Any], Tensor]


def check_tested(val_batch_size: int | None, records: int) -> None:
    if val_batch_size is not None and val_batch_size > records:
        raise InvalidInputError(
            f"val_batch_size {val_batch_size} is larger than the {records} records"
        )


def power_of_two_near(value: float) -> int:
    """The power of two nearest to a value on the logarithmic scale, at least 1."""
    power = 1
    while power * 2**0.5 < value:
        power *= 2
    return power


@dataclass(frozen=True)
class _CandidateGate:
    """A test of every candidate on a fresh Poisson batch."""

    loss: BatchLoss | None = None
    val_batch_size: int | None = None
    only_in_loops: ClassVar[tuple[str, ...]] = ("loss", "show_verdicts")
    usual: ClassVar[Mapping[str, float]] = {}  # of what may be left open

    def __post_init__(self) -> None:
        if self.loss is not None and not callable(self.loss):
            raise InvalidInputError("the loss of a gate must be a function of (model, batch)")
        checks.at_least_one_each(self, "val_batch_size")

    def resolve(self, records: int) -> Self:
        """The same with what was left open."""
        check_tested(self.val_batch_size, records)
        usual: dict[str, Any] = dict(self.usual)
        usual["val_batch_size"] = min(power_of_two_near(records**0.5), records)
        return replace(self, **{n: v for n, v in usual.items() if getattr(self, n) is None})


@dataclass(frozen=True)
class LossGate(_CandidateGate):
    """Keep a candidate if its noisy loss difference on a fresh batch is below a threshold.

    Args:
        loss: in a custom loop, `loss(model, batch)` gives the mean loss of a batch as the loader
            yields it. How it adds up records does not matter, since the difference of two such
            means is clipped. It is called in evaluation mode, without gradients.
        val_batch_size: expected number of records in a test (default: about sqrt(N)).
        val_noise_multiplier: noise over twice the clip bound (default: 1; `fit` takes more where
            tests alone would spend over half of the budget).
        accept_threshold: in clip bounds, beta of the paper (default: -1; 0 separates best).
        loss_clip: clip bound of the loss difference, C_v (default: 0.001).
        show_verdicts: in a custom loop, list verdicts in `engine.verdicts`; with the accounting
            "every-trial", which pays for them.

    Formal guarantee: with the update of the step, a trial of `dpsur.LossTest(val_batch_size / N,
    val_noise_multiplier, accept_threshold)`. With the accounting "every-trial" each of them is
    charged. With "proven" only accepted ones are; then the number of accepted updates is fixed in
    advance, and a run that reaches the cap on trials gets its first weights back and releases
    nothing. The number of batches that a loop saw is then private.
    """

    val_noise_multiplier: float | None = None
    accept_threshold: float | None = None
    loss_clip: float | None = None
    show_verdicts: bool = False
    name: ClassVar[str] = "loss"
    usual: ClassVar[Mapping[str, float]] = {
        "val_noise_multiplier": USUAL_TEST_NOISE,
        "accept_threshold": USUAL_THRESHOLD,
        "loss_clip": USUAL_LOSS_CLIP,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive_each(self, "val_noise_multiplier", "loss_clip")
        if self.accept_threshold is not None:
            checks.finite("accept_threshold", self.accept_threshold)

    def test(self, records: int) -> LossTest:
        """What a verdict is charged with."""
        found: Any = self.resolve(records)
        rate = found.val_batch_size / records
        return LossTest(rate, found.val_noise_multiplier, found.accept_threshold)


@dataclass(frozen=True)
class CoinGate(_CandidateGate):
    """Keep every improvement on a fresh batch, and a worse candidate with a known probability.

    `loss` and `val_batch_size` are those of `LossGate`; a worse candidate passes with probability
    1 / `accept_ratio` (default: 2).

    Formal guarantee: acceptance has a probability between 1 / accept_ratio and 1 whatever the
    records are, which is all that the accounting "proven" needs. No other covers it.
    """

    accept_ratio: float | None = None
    name: ClassVar[str] = "coin"
    usual: ClassVar[Mapping[str, float]] = {"accept_ratio": USUAL_RATIO}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accept_ratio is not None:
            CoinTest(1.0, self.accept_ratio)

    def test(self, records: int) -> CoinTest:
        """What a verdict is charged with."""
        found: Any = self.resolve(records)
        return CoinTest(found.val_batch_size / records, found.accept_ratio)


@dataclass(frozen=True)
class BlockGate:
    """Find the learning rate by rare, precise tests of blocks of updates; all are charged.

    Short blocks that start from the first weights try learning rates. A test on all records after
    each of them says how well it did. The last block trains with the best rate, which decays to
    zero (docs/selection.md). The number of steps that is planned is the length of the last block;
    the search comes on top. In a custom loop one pass over the loader is the whole training, and
    the gate sets the learning rate of the optimizer: only the ratios between its parameter groups
    are kept. Leave `max_grad_norm` of `make_private` out, and the clipping norm is measured as
    well.

    Args:
        outputs: in a custom loop, `outputs(model, batch)` gives the outputs of the model and the
            targets, for a batch as the loader yields it. The loss of each record comes from
            `make_private(criterion=)`. By default a batch is a pair, and the model is called on its
            first part.
        losses: instead of `outputs` and a criterion, `losses(model, batch)` gives the loss of each
            record of a batch, a tensor with a row per record.
        learning_rate: is tried as well; it is used if it is better.
        schedule: how the rate decays within a block: "linear" (default), "cosine" or "constant".
        blocks: the number of short blocks.
        block_updates: the updates in each of them.
        val_batch_size: test on Poisson samples of this expected size, instead of all records.
        val_noise_multiplier: the noise of a test; by default such that all tests together raise
            the noise of the updates by 1.5%.
        averages: modules that follow the weights, such as a `torch.optim.swa_utils.AveragedModel`.
            They are saved and restored with the model.

    Formal guarantee: that of a `Plan` with a phase for each block. Every update is a sampled
    Gaussian, every test a (sampled) Gaussian on a sum of per-record values of L2 norm at most 1,
    all charged, whatever they decide. A record's value depends on that record alone: `outputs`
    and `losses` run in the record level.
    """

    outputs: Outputs | None = None
    losses: Losses | None = None
    learning_rate: float | None = None
    schedule: str | None = None
    blocks: int | None = None
    block_updates: int | None = None
    val_batch_size: int | None = None
    val_noise_multiplier: float | None = None
    averages: tuple[nn.Module, ...] = ()
    name: ClassVar[str] = "block"
    only_in_loops: ClassVar[tuple[str, ...]] = ("outputs", "losses", "averages")

    def __post_init__(self) -> None:
        for name in ("outputs", "losses"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise InvalidInputError(f"{name} of a gate must be a function of (model, batch)")
        if self.outputs is not None and self.losses is not None:
            raise InvalidInputError("give a gate outputs or losses, not both")
        checks.at_least_one_each(self, "blocks", "block_updates", "val_batch_size")
        checks.positive_each(self, "learning_rate", "val_noise_multiplier")
        if self.schedule is not None:
            checks.one_of("schedule", self.schedule, tuple(SHAPES))
        object.__setattr__(self, "averages", tuple(self.averages))
        if not all(isinstance(one, nn.Module) for one in self.averages):
            raise InvalidInputError("averages of a gate must be modules")


@dataclass(frozen=True)
class Metrics:
    """Pay for noisy training accuracy and Brier score of a classifier, ten times in a run.

    Args:
        budget: fraction by which they may increase the noise of the updates, such as 0.01.
        noise_multiplier: their noise over what one record can change, instead of `budget`.
        patience: end the run when the noisy Brier score has not improved in so many measurements.
            Epsilon stays that of the whole plan.
        outputs: in a custom loop, `outputs(model, batch)` gives outputs and targets, as for a
            `BlockGate`.
    """

    budget: float | None = 0.01
    noise_multiplier: float | None = None
    patience: int | None = None
    outputs: Outputs | None = None
    only_in_loops: ClassVar[tuple[str, ...]] = ("outputs",)

    def __post_init__(self) -> None:
        checks.positive_each(self, "budget", "noise_multiplier")
        checks.at_least_one_each(self, "patience")
        if self.budget is None and self.noise_multiplier is None:
            raise InvalidInputError("give metrics a budget, such as 0.01, or a noise_multiplier")


Gate = LossGate | CoinGate | BlockGate


def settings_for_fit(given: Gate | Metrics) -> dict[str, Any]:
    """What a gate or metrics fix, without what they leave open; for `fit`, which has no loop."""
    found = {field.name: getattr(given, field.name) for field in fields(given)}
    for name in given.only_in_loops:
        if found.pop(name, None):
            raise InvalidInputError(
                f"{name} of a {type(given).__name__} is for a custom loop; fit uses the loss and "
                "the model that it is given: leave it out"
            )
    return {name: value for name, value in found.items() if value is not None}


def measured_blocks(updates: int) -> tuple[int, ...]:
    """The updates before each measurement."""
    count = min(METRICS_PER_RUN, updates)
    ends = [updates * number // count for number in range(count + 1)]
    return tuple(after - before for before, after in pairwise(ends))
