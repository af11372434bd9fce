"""Selective release in a custom loop: a step is a trial, and a rejected one leaves no trace.

The step of the optimizer makes a candidate. It is tested on a fresh Poisson batch and kept, or the
weights, the buffers and the optimizer's state are put back as they were. Every trial is charged
with its test, accepted or not, unless the loader itself ends after a number of accepted updates
that was fixed in advance (`proven`). Verdicts are not shown unless `show_verdicts` is set.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpsur import checks
from dpsur.distributed import ALONE, Ranks
from dpsur.errors import CheckpointError, InvalidInputError
from dpsur.functional.problem import mode
from dpsur.mechanism.gate import LossRule
from dpsur.mechanism.optim import SHAPES
from dpsur.mechanism.rate_search import search_blocks
from dpsur.mechanism.streams import Stream
from dpsur.privacy.account import ACCOUNTING as EVERY_TRIAL
from dpsur.privacy.account import PROVEN
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.events import LossTest, SampledGaussian, Trial
from dpsur.privacy.plan import Plan
from dpsur.privacy.planning import TESTS_COST, plan_blocks

# Of the loss function of a gate: the model and a batch of the loader, to a number.
BatchLoss = Callable[[nn.Module, Any], Tensor]
# Of the model and a batch of the loader: outputs and targets, or the loss of each record.
Outputs = Callable[[nn.Module, Any], tuple[Any, Any]]
Losses = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class LossGate:
    """Keep a candidate if its noisy loss difference on a fresh batch is below a threshold.

    `loss(model, batch)` gives the mean loss of a batch as the loader yields it; how it adds up
    records does not matter, since the difference of two such means is clipped. It is called in
    evaluation mode, without gradients.

    Formal guarantee: with the update of the step, a trial of `dpsur.LossTest(val_batch_size / N,
    val_noise_multiplier, accept_threshold)`. With the accounting "every-trial" the ledger is
    charged with each of them. With "proven" it is charged with the accepted ones only; then `steps`
    counts accepted updates, the loader ends after the last of them, and a loop that reaches the cap
    on trials gets its first weights back and releases nothing. The number of batches that the loop
    saw is then private.
    """

    loss: BatchLoss
    val_batch_size: int
    val_noise_multiplier: float = 1.0
    accept_threshold: float = 0.0
    loss_clip: float = 0.01
    show_verdicts: bool = False
    accounting: str = EVERY_TRIAL

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise InvalidInputError("the loss of a gate must be a function of (model, batch)")
        checks.at_least_one("val_batch_size", self.val_batch_size)
        checks.positive("val_noise_multiplier", self.val_noise_multiplier)
        checks.positive("loss_clip", self.loss_clip)
        checks.finite("accept_threshold", self.accept_threshold)
        checks.one_of("accounting", self.accounting, (EVERY_TRIAL, PROVEN))
        if self.show_verdicts and self.accounting == PROVEN:
            raise InvalidInputError(
                "show_verdicts=True would show what 'proven' does not pay for; use the accounting "
                "'every-trial'"
            )

    def test(self, records: int) -> LossTest:
        """What a verdict is charged with."""
        if self.val_batch_size > records:
            raise InvalidInputError(
                f"val_batch_size {self.val_batch_size} is larger than the {records} records"
            )
        return LossTest(
            self.val_batch_size / records, self.val_noise_multiplier, self.accept_threshold
        )

    def mean_loss(
        self, model: nn.Module, batches: list[tuple[int, Any]], ranks: Ranks = ALONE
    ) -> Tensor:
        """The mean over microbatches, each given with its number of records; zero for none.

        Those of all ranks count. A microbatch of none is a placeholder.
        """
        device = next(model.parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        with torch.no_grad(), mode(model, training=False):
            for count, batch in batches:
                found = self.loss(model, batch)
                if not isinstance(found, Tensor) or found.numel() != 1:
                    raise InvalidInputError(
                        "the loss of a gate must return a tensor of one number, the mean of a batch"
                    )
                if count:
                    total += count * found.double().reshape(())
        records = torch.full_like(total, sum(count for count, _ in batches))
        total, records = ranks.sum(torch.stack([total, records])).unbind()
        return total / records.clamp(min=1)

    def accepts(self, after: Tensor, before: Tensor, noise: Stream) -> bool:
        """The verdict on a candidate, by the rule of Algorithm 1."""
        rule = LossRule(self.loss_clip, self.val_noise_multiplier, self.accept_threshold)
        return bool(rule.decide(after - before, noise))


@dataclass(frozen=True)
class BlockGate:
    """Find the learning rate by rare, precise tests of blocks of updates; all are charged.

    Short blocks that start from the first weights try learning rates. A test on all records after
    each of them says how well it did. The last block trains with the best rate, which decays to
    zero. The rule is that of the option `gate="block"` of methods (docs/selection.md). `steps` or
    `epochs` of `make_private` is the length of the last block; the search comes on top. One pass
    over the loader is the whole training. The learning rate of the optimizer is set by the gate:
    only the ratios between its parameter groups are kept. Leave `max_grad_norm` out, and the
    clipping norm is measured as well.

    Args:
        outputs: `outputs(model, batch)` gives the outputs of the model and the targets, for a batch
            as the loader yields it. The loss of each record comes from `make_private(criterion=)`.
            By default a batch is a pair, and the model is called on its first part.
        losses: instead of `outputs` and a criterion, `losses(model, batch)` gives the loss of each
            record of a batch, a tensor with a row per record.
        learning_rate: is tried as well; it is used if it is better.
        schedule: how the rate decays within a block: "linear", "cosine" or "constant".
        blocks: the number of short blocks.
        block_updates: the updates in each of them.
        val_batch_size: test on Poisson samples of this expected size, instead of all records.
        val_noise_multiplier: the noise of a test; by default such that all tests together raise
            the noise of the updates by 1.5%.
        averages: modules that follow the weights, such as a `torch.optim.swa_utils.AveragedModel`.
            They are saved and restored with the model.

    Formal guarantee: that of a `Plan` with a phase for each block. Every update is a sampled
    Gaussian, every test a (sampled) Gaussian on a sum of per-record values of L2 norm at most 1,
    all charged, whatever they decide. Every record's value depends on that record alone: `outputs`
    and `losses` must not mix records, which is tried with the first records of each test.
    """

    outputs: Outputs | None = None
    losses: Losses | None = None
    learning_rate: float | None = None
    schedule: str = "linear"
    blocks: int | None = None
    block_updates: int | None = None
    val_batch_size: int | None = None
    val_noise_multiplier: float | None = None
    averages: tuple[nn.Module, ...] = ()

    def __post_init__(self) -> None:
        for name in ("outputs", "losses"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise InvalidInputError(f"{name} of a gate must be a function of (model, batch)")
        if self.outputs is not None and self.losses is not None:
            raise InvalidInputError("give a gate outputs or losses, not both")
        for name in ("blocks", "block_updates", "val_batch_size"):
            if getattr(self, name) is not None:
                checks.at_least_one(name, getattr(self, name))
        for name in ("learning_rate", "val_noise_multiplier"):
            if getattr(self, name) is not None:
                checks.positive(name, getattr(self, name))
        checks.one_of("schedule", self.schedule, tuple(SHAPES))
        object.__setattr__(self, "averages", tuple(self.averages))
        if not all(isinstance(one, nn.Module) for one in self.averages):
            raise InvalidInputError("averages of a gate must be modules")

    def plan(
        self,
        updates: int | None,
        records: int,
        *,
        sample_rate: float,
        clip_by_median: bool,
        noise_multiplier: float | None,
        epsilon: float | None,
        delta: float,
    ) -> Plan:
        """Updates, tests and noise, fixed before the run; `updates` are those of the last block."""
        if updates is None:
            raise InvalidInputError(
                "a BlockGate needs steps=... or epochs=..., the length of the last block: the plan "
                "is fixed in advance"
            )
        if self.val_batch_size is not None and self.val_batch_size > records:
            raise InvalidInputError(
                f"val_batch_size {self.val_batch_size} is larger than the {records} records"
            )
        sizes = search_blocks(
            updates,
            1 if self.learning_rate is None else 2,
            clip_by_median=clip_by_median,
            blocks=self.blocks,
            block_updates=self.block_updates,
        )
        budget = Budget(math.inf if epsilon is None else epsilon, delta)
        if epsilon is None and self.val_noise_multiplier is None:
            assert noise_multiplier is not None
            alone = Trial(SampledGaussian(sample_rate, noise_multiplier / (1 + TESTS_COST)))
            figure = accounting_named(EVERY_TRIAL).epsilon([(alone, sum(sizes))], delta)
            budget = Budget(figure, delta)
        found = plan_blocks(
            budget,
            EVERY_TRIAL,
            sizes,
            sample_rate=sample_rate,
            test_rate=None if self.val_batch_size is None else self.val_batch_size / records,
            noise_multiplier=noise_multiplier,
            test_noise=self.val_noise_multiplier,
        )
        if math.isinf(budget.epsilon):  # what is planned is the budget
            found = replace(found, budget=Budget(found.epsilon(), delta))
        return found


class Snapshot:
    """Weights, buffers and the optimizer's state, to go back to; of other modules as well."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        others: Sequence[nn.Module] = (),
        at_rest: "Snapshot | None" = None,
    ) -> None:
        """With `at_rest` the optimizer's state is that of another snapshot, and is not copied."""
        self._module, self._optimizer, self._others = module, optimizer, others
        self._tensors = {name: value.detach().clone() for name, value in self._live().items()}
        self._at_rest = at_rest
        if at_rest is not None:
            return
        self._state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()}
        self._groups = [_settings(group) for group in optimizer.param_groups]

    def _live(self) -> dict[str, Tensor]:
        found = _tensors_of(self._module)
        for place, other in enumerate(self._others):
            found |= {f"{place} {name}": value for name, value in _tensors_of(other).items()}
        return found

    @property
    def weights(self) -> dict[str, Tensor]:
        """The parameters of the module, by name."""
        return {name: self._tensors[f"parameter {name}"] for name, _ in _named(self._module)}

    def restore(self, *, keep: bool = False) -> None:
        """Put everything back, and forget the gradient; `keep`: it will be restored again."""
        with torch.no_grad():
            for name, value in self._live().items():
                value.copy_(self._tensors[name])
        rest = self._at_rest or self
        state = copy.deepcopy(list(rest._state.values())) if keep else list(rest._state.values())
        self._optimizer.state.clear()
        self._optimizer.state.update(zip(rest._state, state, strict=True))
        for group, settings in zip(self._optimizer.param_groups, rest._groups, strict=True):
            group.update({name: copy.copy(value) for name, value in settings.items()})
        for value in self._module.parameters():
            value.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors; parameters of the optimizer by their number."""
        if self._at_rest is not None:
            return {"tensors": dict(self._tensors)}
        numbers = _numbers(self._optimizer)
        return {
            "tensors": dict(self._tensors),
            "optimizer": {numbers[key]: dict(value) for key, value in self._state.items()},
            "groups": copy.deepcopy(self._groups),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold what another snapshot of the same modules has held."""
        live, given = self._live(), state["tensors"]
        if live.keys() != given.keys():
            raise CheckpointError("the checkpoint holds other weights or buffers than the model")
        with torch.no_grad():
            for name, value in self._tensors.items():
                value.copy_(given[name])
        if self._at_rest is not None:
            return
        keys = {number: key for key, number in _numbers(self._optimizer).items()}
        self._state = {
            keys[number]: {
                name: value.to(keys[number].device)
                if isinstance(value, Tensor) and value.dim()  # counts stay where they are
                else copy.deepcopy(value)
                for name, value in values.items()
            }
            for number, values in state["optimizer"].items()
        }
        self._groups = copy.deepcopy(list(state["groups"]))


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters())


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {
        **{f"parameter {name}": value for name, value in _named(module)},
        **{f"buffer {name}": value for name, value in module.named_buffers()},
    }


def _numbers(optimizer: Optimizer) -> dict[Any, int]:
    """The numbers of an optimizer's parameters, in the order of its groups."""
    found = [value for group in optimizer.param_groups for value in group["params"]]
    return {value: number for number, value in enumerate(found)}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.copy(value) for name, value in group.items() if name != "params"}
