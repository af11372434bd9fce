"""The steps of a custom loop: what is due, what was used, what is charged, and what is kept."""

import os
from collections.abc import Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpsur.distributed import Reduction
from dpsur.engine.blocks import BlockRun
from dpsur.engine.criterion import Criterion
from dpsur.engine.gate import LossGate, Snapshot
from dpsur.engine.loader import Collate, Microbatch, PrivateLoader
from dpsur.engine.loss_graph import REMEDY
from dpsur.engine.private_step import (
    Function,
    PrivateBatch,
    PrivateStep,
    augmenting,
    means,
    modules_of,
    opened,
)
from dpsur.engine.watch import Watcher
from dpsur.errors import (
    BudgetError,
    CouplingError,
    InvalidInputError,
    NothingReleasedError,
    StepError,
    UnsupportedModelError,
)
from dpsur.functional.parameters import Params, elementwise
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.tree import map_tensors
from dpsur.mechanism.dp_gradient import add_gaussian
from dpsur.mechanism.sampling import poisson_sample
from dpsur.mechanism.streams import LAYERS, NOISE, VAL_BATCH, VAL_NOISE, Streams
from dpsur.per_example.clipping import ClippedSum
from dpsur.per_example.record_function import RecordFunction
from dpsur.privacy.account import Account
from dpsur.privacy.events import Step

COMPARED_EVERY = 50  # steps after which the weights of all ranks are compared


class PrivateLoop:
    """What an optimizer and a loader that were made private ask and report.

    The loader reports each batch that it yields (`yielded`), the watched model asks whether one is
    due (`expect`), and the optimizer's step takes the clipped sum of exactly that batch, once.
    """

    _event: Step
    _module: nn.Module
    _optimizer: Optimizer
    _dataset: Any
    _loader: PrivateLoader
    _test_collate: Collate
    _watcher: Watcher
    _streams: Streams
    _first: Snapshot
    _before: Tensor
    _size: int
    _step: int
    _rate: float
    _noise: float

    def __init__(self) -> None:
        self._process = os.getpid()
        self._ledger: Account | None = None
        self._due: Microbatch | None = None
        self._criterion: Criterion | None = None
        self._gate: LossGate | None = None
        self._blocks: BlockRun | None = None
        self._saved: Snapshot | None = None
        self._test_batch: list[tuple[int, Any]] = []
        self._content: Any = None  # of the batch at hand
        self._private_steps: list[PrivateStep] = []
        self._functions: dict[PrivateStep, RecordFunction] = {}
        self._refused = False  # for coupling
        self._yields_open = False  # whether the loader has yielded a batch that is not opaque
        self._from_function = False  # whether the sum at hand was made by a private step
        self._checked = False  # whether code of the loop has seen several records
        self._calls = 0  # of layers that draw, in the step at hand
        # Schedulers do nothing after a step that did nothing or was undone.
        self.scheduler_due = True
        self.verdicts: list[bool] = []
        self._accepted = 0

    @property
    def accountant(self) -> Account:
        """The ledger that every step is charged to."""
        if self._ledger is None:
            raise InvalidInputError("call make_private first")
        return self._ledger

    @property
    def sets_learning_rate(self) -> bool:
        """Whether the engine sets the learning rate, so that schedulers are refused."""
        return self._blocks is not None

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over `max_grad_norm`."""
        return self._noise

    @property
    def max_grad_norm(self) -> float:
        """The norm that each record's gradient is clipped to."""
        return self._watcher.max_grad_norm

    @property
    def expected_batch_size(self) -> float:
        """What the sum of clipped gradients is divided by."""
        return self._rate * self._size

    def _batch_streams(self) -> Streams:
        """Batches are drawn on the host."""
        if self._streams.device.type == "cpu":
            return self._streams
        host = Streams(0, torch.device("cpu"), self._streams.ranks)
        host.key = self._streams.key
        return host

    def begin_epoch(self, length: int) -> Sequence[int]:
        """The numbers of the steps whose batches an iteration of the loader may yield."""
        self._check_size()
        first = self.accountant.steps + 1
        self._due = None  # what was looked at and not used is drawn again
        self._watcher.forget()
        if self._blocks is not None:
            if self._blocks.done:
                raise self._spent()
            self._make_tests()
            return self._blocks.ledger.update_steps()
        if not self.accountant.affords(self._event):
            raise self._spent()
        if self.accountant.charges_accepted:  # ends after the last update
            assert self.accountant.plan is not None
            length = self.accountant.plan.trials
        return range(first, first + length)

    def finished(self) -> bool:
        """Whether no further batch is to be yielded: what was planned is done."""
        if self._blocks is not None:
            return self._due is None and self._blocks.done
        return self._due is None and not self.accountant.affords(self._event)

    def _make_tests(self) -> None:
        """Make the tests of blocks that are due, on all ranks."""
        if self._blocks is not None:
            self._follow_device()
            with self._streams.ranks.ends_together():
                self._blocks.make_tests()

    def _follow_device(self) -> None:
        """Draw noise where the model is: it may have been moved since."""
        self._streams.device = next(iter(self._watcher.trained.values())).device

    def _spent(self) -> BudgetError:
        if self._blocks is not None:
            return BudgetError(
                f"the plan of the BlockGate is done ({self.accountant.describe()}); one pass over "
                "the loader is the whole training: iterate over it once"
            )
        return BudgetError(
            f"the budget is spent after {self.accountant.steps} steps "
            f"({self.accountant.describe()}); stop here, or plan more steps in make_private"
        )

    def _check_size(self) -> None:
        now = len(cast(Sized, self._dataset))
        if now != self._size:
            raise StepError(
                f"the data set has {now} records, and had {self._size} in make_private: the sample "
                "rate was fixed for those; make a new engine for another data set"
            )

    def yielded(self, batch: Microbatch, content: Any) -> None:
        """The loader is about to yield a microbatch."""
        self._check_size()
        self._make_tests()  # where one was interrupted
        if batch.first and self._due is not None:
            raise StepError(
                "a private batch was drawn and optimizer.step() was not called for the one before; "
                "make one step for every batch of the loader (for larger batches, give the loader "
                "a larger batch_size and set max_physical_batch_size; to evaluate on the records, "
                "iterate under torch.no_grad(); read the next batch after the step)"
            )
        if batch.step != self.accountant.steps + 1:
            raise StepError(
                "this pass over the loader is not the latest one, and its batches belong to steps "
                "that were made meanwhile; iterate over the loader once at a time"
            )
        if self._watcher.sums.rows != batch.before:
            raise StepError(
                "a microbatch was drawn, and backward() was not called exactly once for each "
                "record of those before; call it for every microbatch"
            )
        if batch.first:
            self._calls = 0
        self._due, self._content = batch, content
        self._yields_open = self._yields_open or not isinstance(content, PrivateBatch)

    def expect(self, rows: int) -> Tensor | None:
        """Called before each watched forward pass: a private batch has to be there."""
        if self._due is None:
            raise StepError(
                "the model was called in training mode without a batch of the private loader; "
                "iterate over the loader that make_private returned, and evaluate with "
                "model.eval() or torch.no_grad()"
            )
        if self._due.empty:
            device = next(iter(self._watcher.trained.values())).device
            return torch.zeros(rows, dtype=torch.bool, device=device)
        return None

    def layer_randomness(self) -> AbstractContextManager[None]:
        """Secret random numbers for layers and augmentations, others in every call of a step."""
        self._calls += 1
        seed = self._streams.seed_for(LAYERS, self.accountant.steps) + self._calls
        return seeded_globally(seed, next(iter(self._watcher.trained.values())).device)

    @contextmanager
    def final_refusals(self) -> Iterator[None]:
        """Let a refusal be the end: code that was refused may have kept or changed something."""
        self.check_refusal()
        try:
            yield
        except (CouplingError, UnsupportedModelError):
            self._refused = True
            raise

    def check_refusal(self) -> None:
        """Refuse everything after a refusal for coupling."""
        if self._refused:
            raise StepError(
                "an earlier step of this engine was refused because records could depend on each "
                "other or change the model, which is final: no step, statement or release may "
                "follow; repair the program and train anew with a new PrivacyEngine"
            )

    # Private steps

    @property
    def opaque(self) -> bool:
        """Whether private steps alone open batches, so that calls of the loop see no record."""
        return bool(self._private_steps) and not self._yields_open

    def private_step(self, function: Function) -> PrivateStep:
        """Make a function of (model, batch) one private step, as a decorator or by a call.

            @engine.private_step
            def step(model, batch):
                x, y = batch
                return F.cross_entropy(model(x), y)

            for batch in loader:
                step(batch)

        The function returns a loss, one number, or a mapping with `loss`. It is called so that it
        sees one record at a time (all of them in one pass, where PyTorch can batch it), so that no
        record's gradient can depend on another record, whatever it computes. It may call the model
        several times, use other modules, and add penalties on weights. Further arguments of the
        step are passed on to it: what changes during training belongs there. The loader then yields
        batches that only a private step can open.
        """
        step = PrivateStep(function, self)
        if self._ledger is not None:
            if self._yields_open:
                raise StepError(
                    "the loader has yielded batches for backward() and optimizer.step() already; "
                    "declare private steps before the loop"
                )
            self._loader.collate_alone()
        self._private_steps.append(step)
        return step

    def clip_batch(
        self, step: PrivateStep, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Add up the clipped gradients of the records of the batch at hand, for `update`."""
        if self._watcher.sharding is not None:
            # its sums would stay those of this rank, while the update takes them as everybody's
            raise UnsupportedModelError(
                "private_step does not take a model that fully_shard has sharded; write "
                "loss.backward() and optimizer.step() in the loop, or train on one device"
            )
        due = self._due
        if due is None:
            raise StepError(
                "a private step was called without a new batch of the private loader; call it once "
                "for every batch that the loader from make_private yields"
            )
        if isinstance(batch, PrivateBatch):
            if batch is not self._content:
                raise StepError("a private step was given another batch than the latest one")
            found = batch
        else:
            found, self._checked = opened(batch), True
            if found.records != max(1, due.rows):
                raise StepError(
                    "a private step was given another number of records than its batch has; use "
                    "each record of the batch exactly once"
                )
            found = found if due.rows else PrivateBatch(())
        watcher = self._watcher
        watcher.check_parameters()
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        parts = []
        with (
            self.final_refusals(),
            watcher.paused(),
            augmenting(self._module, watcher.augment),
        ):
            for sums, losses, figures in self._gradients(step, found, args, kwargs):
                parts.append((losses, figures))
                watcher.sums.add(len(losses), sums)
            if rates != [float(group["lr"]) for group in self._optimizer.param_groups]:
                raise CouplingError(
                    "the function of a private step changes the learning rate, by which a record "
                    "would act on later steps without noise; change it in the loop, by public "
                    "values"
                )
        if not found.groups:
            watcher.sums.add(1, {})
        watcher.gradients.mark(
            "the loop has put it there, and a private step makes the whole gradient; call "
            "optimizer.zero_grad() before the step (as for a critic that a generator's loss went "
            "through), and write penalties into the function of the step"
        )
        self._from_function = True
        return means(parts)

    def update(self) -> None:
        """Add noise, charge, and update the weights."""
        self._optimizer.step()

    def _gradients(
        self, step: PrivateStep, batch: PrivateBatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Params, Tensor, dict[str, Tensor]]]:
        """Clipped sums of some records at a time, with their losses and other figures."""
        watcher, device = self._watcher, next(iter(self._watcher.trained.values())).device
        records = self._functions.setdefault(
            step, RecordFunction((self._module, *modules_of(step.function)), watcher.trained)
        )

        def function(one: Any) -> Any:
            return step.function(self._module, one, *args, **kwargs)

        for group in batch.to(device, non_blocking=True).groups:
            most = step.max_physical_batch_size or self._loader.poisson.most or group.records
            for start in range(0, group.records, most):
                some = slice(start, min(start + most, group.records))
                part = map_tensors(lambda v: v[some], group.batch, otherwise=lambda v: v)  # noqa: B023
                tape, losses, figures = records.tape(
                    function, part, some.stop - start, randomness=self.layer_randomness
                )
                yield watcher.clip(tape), losses, figures

    def begin_step(self) -> bool:
        """Charge a step, and put the private gradient in place. Called by `optimizer.step()`."""
        with self._streams.ranks.ends_together():
            return self._begin_step()

    def _begin_step(self) -> bool:
        if os.getpid() != self._process:
            raise StepError(
                "the engine was made in another process, from which this one was forked, so that "
                "both would draw the same noise; call make_private in the process that trains"
            )
        self.check_refusal()
        due, watcher = self._due, self._watcher
        if due is None:
            raise StepError(
                "optimizer.step() was called without a new batch of the private loader; make one "
                "step for every batch that the loader from make_private yields"
            )
        seen = watcher.sums.rows
        wanted = due.before + max(1, due.rows)
        if not due.last:
            self.scheduler_due = False
            return False
        if not seen:
            raise StepError(
                "optimizer.step() was called without a private backward pass: "
                + (
                    watcher.unwatched
                    or "call loss.backward() on what model(...) returns. A method or a part of the "
                    "model that is called by itself, such as model.loss(x), is not seen: "
                    + REMEDY
                )
            )
        if seen != wanted and not due.empty:
            raise StepError(
                "backward passes went through another number of records than the private batch "
                "has; use each record of the batch exactly once, and no others",
                private=f"{seen} records; the private batch has {wanted}",
            )
        watcher.check_parameters()
        watcher.gradients.check(watcher.unwatched)
        watcher.gradients.check_others(self._optimizer)
        if self._blocks is not None:
            self._blocks.check_rates()
        self.accountant.charge(self._event)
        self._checked = self._checked or not self._from_function
        self._from_function = False
        self._due = None
        self._follow_device()
        noise = self._streams.at(due.step)[NOISE]
        if watcher.sharding is not None:  # its sums are those of all ranks already
            total = ClippedSum(watcher.take(), watcher.max_grad_norm)
            noisy = watcher.sharding.add_gaussian(total, self._noise, noise)
        else:
            reduction = Reduction(self._streams.ranks)
            for name, value in watcher.take().items():
                reduction.add(name, value)
            total = ClippedSum(reduction.result(), watcher.max_grad_norm)
            noisy = add_gaussian(total, self._noise, noise)
        expected = self._rate * self._size
        gradient = elementwise(lambda value: value / expected, noisy)
        watcher.gradients.write(gradient, watcher.sharding)
        if self._gate is not None:
            self._saved = Snapshot(self._module, self._optimizer)
            self._test_batch = self._draw_test_batch(due.step)
            self._before = self._test_loss()
        if self._blocks is not None:
            self._blocks.set_rates()
        self._step = due.step
        return True

    def end_step(self) -> None:
        """The optimizer has made a candidate: keep it, or go back.

        Now and then the weights of all ranks are compared.
        """
        with self._streams.ranks.ends_together():
            self._end_step()
            steps = self.accountant.steps
            if steps % COMPARED_EVERY == 0 and self._watcher.sharding is None:
                trained = {name: value.detach() for name, value in self._watcher.trained.items()}
                self._streams.ranks.check_state(trained, f"after step {steps}")

    def undo_step(self) -> None:
        """Go back where a candidate was interrupted: nothing untested stays in the weights."""
        if self._saved is not None:
            self._saved.restore()
            self._saved, self._test_batch = None, []
        self.scheduler_due = False

    def _end_step(self) -> None:
        self.scheduler_due = True
        if self._gate is None or self._saved is None:
            self._accepted += 1
            self._make_tests()
            return
        after = self._test_loss()
        noise = self._streams.at(self._step)[VAL_NOISE]
        accepted = self._gate.accepts(after, self._before, noise)
        self._accepted += accepted
        if not accepted:
            self._saved.restore()
            self.scheduler_due = False
        self._saved, self._test_batch = None, []
        if self.accountant.charges_accepted:
            self._count(accepted, self.accountant)
        if self._gate.show_verdicts:
            self.verdicts.append(accepted)

    def _test_loss(self) -> Tensor:
        """The mean loss of the weights at hand on the test batch of all ranks."""
        assert self._gate is not None
        found = self._gate.mean_loss(self._module, self._test_batch, self._streams.ranks)
        if self._watcher.sharding is not None:
            self._watcher.sharding.reshard()  # or the next step would not reach gathered weights
        return found

    def _count(self, accepted: bool, ledger: Account) -> None:
        """Charge an accepted update; give up where the cap on trials is reached."""
        if accepted:
            ledger.accept()
        if ledger.given_up:
            self._first.restore()
            raise NothingReleasedError(
                "the cap on trials was reached before all updates were accepted, which is as "
                "improbable as delta demands; the first weights are back, and nothing that came of "
                "this training may be released"
            )

    def _draw_test_batch(self, step: int) -> list[tuple[int, Any]]:
        """A fresh Poisson batch, collated as the loader does, in microbatches."""
        assert self._gate is not None
        rate = self._gate.test(self._size).sample_rate
        drawn = poisson_sample(self._size, rate, self._batch_streams().at(step)[VAL_BATCH])
        rows, ranks = self._streams.ranks.own(drawn).tolist(), self._streams.ranks
        # all ranks make as many passes as the one with most records: some need each other's
        longest = -(-len(drawn) // ranks.size)
        most = self._loader.poisson.most or max(1, longest)
        parts = [rows[start : start + most] for start in range(0, longest, most)]
        collate, data = self._test_collate, cast(Any, self._dataset)
        return [(len(part), collate([data[row] for row in part])) for part in parts]
