"""State machine behind a custom loop: loader, model, optimizer, in this order for every batch.

    yielded     the loader announces the next microbatch of a Poisson batch
    expect      the watched model asks for it before a forward pass; `clip_batch`: a private step
    make_step   the optimizer's step: check what was used, then `take_step`, the step of `fit`

What a step consists of (`mechanism/trial.py`) and when it is charged is no business of this file.
Tests of blocks need no batch: they are made as soon as they are due.
"""

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpsur.engine import captured
from dpsur.engine.captured import GradientGraphs
from dpsur.engine.criterion import Criterion
from dpsur.engine.loader import (
    Microbatch,
    PrivateBatch,
    PrivateLoader,
    groups_of,
    is_same_batch,
    opened,
    records_in,
    settings_of,
)
from dpsur.engine.loss_graph import REMEDY
from dpsur.engine.procedure import Units
from dpsur.engine.watch import NO_BATCH, Watcher
from dpsur.engine.weights import ModuleWeights, trace_of
from dpsur.errors import (
    BudgetError,
    CouplingError,
    Fixed,
    InvalidInputError,
    NothingReleasedError,
    StepError,
    UnsupportedModelError,
)
from dpsur.functional.problem import same_bits
from dpsur.functional.process_settings import seeded_globally
from dpsur.functional.tree import Params, keep, map_tensors, row_count, tensors_of
from dpsur.mechanism.blocks import MeasuredTraining, memory_of
from dpsur.mechanism.state import Procedure, State, Verdict
from dpsur.mechanism.streams import LAYERS, Streams
from dpsur.mechanism.trial import take_step
from dpsur.per_example.record_function import RecordFunction
from dpsur.privacy.account import Account
from dpsur.privacy.data_ledger import DataLedger
from dpsur.privacy.events import NonPrivate, SampledGaussian
from dpsur.privacy.statement import PERSON, RECORD

RECORDS_OF_A_DIGEST = 1000  # at most, evenly spaced: reading all of them may take long
Function = Callable[..., Any]  # of (model, batch, ...)
COMPARED_EVERY = 50  # steps after which the weights of all ranks are compared


@dataclass(eq=False)
class PrivateStep:
    """A function of (model, batch, ...) that makes one private step each time it is called.

    Calling it with a batch of the private loader clips each record's gradient, charges the step,
    adds noise and updates the weights. Further arguments are passed on to the function: numbers
    that change during training, such as the weight of a KL term, belong there. It returns the loss
    and other numbers of the function as means over the records of the batch. They are private: do
    not publish them, and decide nothing by them.
    """

    function: Function
    engine: "PrivateLoop" = field(repr=False)
    # the most records that are worked on at once, where memory is short
    max_physical_batch_size: int | None = None
    capture: bool = True  # as CUDA graphs, on a GPU
    _records: RecordFunction | None = field(default=None, init=False, repr=False)
    _graphs: GradientGraphs | None = field(default=None, init=False, repr=False)
    _settings: object = field(default=None, init=False, repr=False)  # `settings_of` its batches

    def __post_init__(self) -> None:
        function = self.function
        called = function.forward if isinstance(function, nn.Module) else function
        try:
            inspect.signature(called).bind_partial(None, None)
        except TypeError:
            raise InvalidInputError(
                "private_step takes a function of (model, batch) and perhaps more, such as "
                "lambda model, batch: cross_entropy(model(batch[0]), batch[1])"
            ) from None
        except ValueError:  # of what has no signature
            pass
        update_wrapper(self, self.function)

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        figures = self.accumulate(batch, *args, **kwargs)
        self.engine._optimizer.step()
        return figures

    @property
    def module(self) -> nn.Module | None:
        """The model, for `dpsur.check`; None before `make_private`."""
        return getattr(self.engine, "_module", None)

    def accumulate(self, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """All of a step but the update, for a trainer that calls `optimizer.step()` itself."""
        return self.engine.clip_batch(self, batch, args, kwargs)


def modules_of(function: Function) -> list[nn.Module]:
    """Other modules that a function uses by name (a teacher, a generator), or is a part of."""
    found = [getattr(function, "__self__", function)]
    with suppress(TypeError):  # of no Python function
        seen = inspect.getclosurevars(inspect.unwrap(function))
        found += [*seen.globals.values(), *seen.nonlocals.values()]
    return [value for value in found if isinstance(value, nn.Module)]


def means(parts: list[tuple[Tensor, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Means over records of what a function returned for some of them at a time."""
    if not parts:
        return {"loss": torch.tensor(torch.nan)}
    found = {"loss": torch.cat([losses for losses, _ in parts]).mean()}
    for name in parts[0][1]:
        values = [figures[name] for _, figures in parts if name in figures]
        numbers = all(value.is_floating_point() and value[0].numel() == 1 for value in values)
        if len(values) == len(parts) and numbers:
            found[name] = torch.cat([value.reshape(len(value)) for value in values]).mean()
    return found


class PrivateLoop:
    """What an optimizer and a loader that were made private ask and report."""

    _module: nn.Module
    _optimizer: Optimizer
    _dataset: Any
    _loader: PrivateLoader
    _watcher: Watcher
    _streams: Streams
    _weights: ModuleWeights
    _procedure: Procedure
    _update: SampledGaussian | NonPrivate
    _units: Units
    _records: int

    def __init__(self) -> None:
        self._process = os.getpid()
        self._data_ledger: DataLedger | None = None
        self._booking: str | None = None  # in that ledger
        self._ledger: Account | None = None
        self.due: Microbatch | None = None  # which is to be stepped on
        self._criterion: Criterion | None = None
        self._state: State | None = None  # None before the first batch
        self._first: Callable[[], None] | None = None  # puts the first weights back
        self._shows_verdicts = False
        self._content: Any = None  # of the batch at hand
        self._versions: list[int] = []  # of its tensors, which in-place changes count up
        self._private_steps: list[PrivateStep] = []
        self._refused = False  # for coupling
        self._yields_open = False  # whether the loader has yielded a batch that is not opaque
        self._from_function = False  # whether the sum at hand was made by a private step
        self._checked = False  # whether code of the loop has seen several records
        self._calls = 0  # of layers that draw, in the step at hand
        # Schedulers do nothing after a step that did nothing or was undone.
        self.scheduler_due = True
        self.verdicts: list[bool] = []

    def __deepcopy__(self, _: Any) -> Self:
        """There is one engine of a training: two would draw the same noise for other sums."""
        return self

    def __reduce_ex__(self, _: Any) -> Any:
        raise StepError(
            "an engine cannot be pickled: two of them would draw the same noise; save "
            "engine.state_dict(), and load it into a new engine after make_private"
        )

    @property
    def accountant(self) -> Account:
        """The ledger that every step is charged to."""
        if self._ledger is None:
            raise InvalidInputError("call make_private first")
        return self._ledger

    @property
    def sets_learning_rate(self) -> bool:
        """Whether the engine sets the learning rate, so that schedulers are refused."""
        return self._weights.rates is not None

    @Fixed
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise over `max_grad_norm`."""
        return self._update.noise_multiplier if isinstance(self._update, SampledGaussian) else 0.0

    @Fixed
    def max_grad_norm(self) -> float:
        """The norm that each record's gradient is clipped to."""
        return self._watcher.max_grad_norm

    @Fixed
    def expected_batch_size(self) -> float:
        """What the sum of clipped gradients is divided by."""
        return self._units.rate * self._units.size

    @property
    def _sample(self) -> tuple[int, float]:
        return -(-self._units.size // self._streams.ranks.size), self._units.rate

    def begin_epoch(self, length: int) -> Sequence[int]:
        """The numbers of the steps whose batches an iteration of the loader may yield."""
        self._check_size()
        first = self.accountant.steps + 1
        self.due = None  # what was looked at and not used is drawn again
        self._watcher.forget()
        if self.finished():
            if self.sets_learning_rate:
                raise BudgetError(
                    f"the plan of the BlockGate is done ({self.accountant.describe()}); one pass "
                    "over the loader is the whole training: iterate over it once"
                )
            if self._stopped:
                raise BudgetError(
                    "the training has ended: the loss that was paid for has stopped improving; "
                    "state and save"
                )
            raise BudgetError(
                f"the budget is spent after {self.accountant.steps} steps "
                f"({self.accountant.describe()}); stop here, or plan more steps in make_private"
            )
        self._book()
        self._make_tests()
        plan = self.accountant.plan
        if plan is not None and plan.tests:
            return self.accountant.update_steps()[:length]
        if plan is not None and self.accountant.charges_accepted:  # ends after the last update
            length = plan.trials
        return range(first, first + length)

    def _book(self) -> None:
        """Book the training in the ledger of its data, once, before anything is drawn."""
        ledger, plan, data = self._data_ledger, self.accountant.plan, self._dataset
        if ledger is None or plan is None or self._booking is not None:
            return

        def book() -> bytes:
            digest = hashlib.blake2b(str(self._records).encode())
            for row in range(0, self._records, -(-self._records // RECORDS_OF_A_DIGEST)):
                parts = [value.detach().cpu().numpy().tobytes() for value in tensors_of(data[row])]
                digest.update(b"".join(parts))
            unit = RECORD if self._units.persons is None else PERSON
            return ledger.book(plan, unit, digest.digest(), "custom-loop").encode()

        self._booking = self._streams.ranks.from_main(book).decode()

    def finished(self) -> bool:
        """Whether no further batch is to be yielded: what was planned is done."""
        if self.due is not None:
            return False
        if self._stopped:
            return True
        plan, state = self.accountant.plan, self._at_hand()
        if plan is not None and plan.tests:
            return not self.accountant.due and not self._test_was_interrupted
        return not self.accountant.affords(self._procedure.step(state))

    @property
    def _stopped(self) -> bool:
        """Whether paid metrics have ended the training before its plan."""
        procedure = self._procedure
        return isinstance(procedure, MeasuredTraining) and procedure.stopped(self._at_hand())

    @property
    def _test_was_interrupted(self) -> bool:
        return self.accountant.tests > int(memory_of(self._at_hand())["tests"])

    def _check_size(self) -> None:
        now = len(cast(Sized, self._dataset))
        if now != self._records:
            raise StepError(
                "the data set has another number of records than in make_private, for which the "
                "sample rate was fixed; make a new engine for another data set",
                private=f"{now} records, before {self._records}",
            )

    def yielded(self, batch: Microbatch, content: Any) -> None:
        self._check_size()
        self._make_tests()  # where one was interrupted
        if not batch.before and self.due is not None:
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
        if not batch.before:
            self._calls = 0
        self.due, self._content = batch, content
        self._versions = [value._version for value in tensors_of(content)]
        self._yields_open = self._yields_open or not isinstance(content, PrivateBatch)

    def expect(self, rows: int) -> Tensor | None:
        """Called before each watched forward pass: a private batch has to be there."""
        if self.due is None:
            raise StepError(NO_BATCH)
        if not self.due.rows:  # a record of zeros stands in
            return torch.zeros(rows, dtype=torch.bool, device=self._watcher.device)
        return None

    def has_yielded(self, value: Tensor) -> bool:
        """Whether a tensor holds what one of the loader does, with the records in their order."""
        return any(
            same_bits(known.to(value.device, value.dtype), value)  # NaN included
            for known, version in zip(tensors_of(self._content), self._versions, strict=True)
            if known._version == version
        )

    def layer_randomness(self) -> AbstractContextManager[None]:
        """Secret random numbers for code that draws some, others in every call of a step."""
        self._calls += 1
        seed = self._streams.seed_for(LAYERS, self.accountant.steps) + self._calls
        return seeded_globally(seed, self._watcher.device)

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

    def private_step(
        self, function: Function | None = None, *, capture: bool = True
    ) -> PrivateStep:
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

        On a GPU its gradients are captured as CUDA graphs, from the second batch of a shape on,
        unless `capture` is False. Python that has effects elsewhere is then not run in every step.
        """
        if function is None:  # `@engine.private_step(capture=False)`
            return partial(self.private_step, capture=capture)  # type: ignore[return-value]
        step = PrivateStep(function, self, capture=capture)
        if self._ledger is not None:
            if self._yields_open:
                raise StepError(
                    "the loader has yielded batches for backward() and optimizer.step() already; "
                    "declare private steps before the loop"
                )
            self._loader.collate_alone()
            self._watcher.detach()  # which sees no more records
        self._private_steps.append(step)
        return step

    def clip_batch(
        self, step: PrivateStep, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Add up the clipped gradients of the records of the batch at hand, for a step."""
        _ = self.accountant  # which there is after make_private
        if self._watcher.sharding is not None:
            # its sums would stay those of this rank, while the update takes them as everybody's
            raise UnsupportedModelError(
                "private_step does not take a model that fully_shard has sharded; write "
                "loss.backward() and optimizer.step() in the loop, or train on one device"
            )
        due = self.due
        if due is None:
            raise StepError(
                "a private step was called without a new batch of the private loader; call it once "
                "for every batch that the loader from make_private yields"
            )
        if isinstance(batch, PrivateBatch):
            if not is_same_batch(batch, self._content):
                raise StepError("a private step was given another batch than the latest one")
            found = batch
        elif self._loader.poisson.by_person:
            raise StepError(
                "with groups, a private step takes the batches of the private loader as they are: "
                "only they tell whose records are whose"
            )
        else:
            found, self._checked = opened(batch), True
            if records_in(found) != max(1, due.rows):
                raise StepError(
                    "a private step was given another number of records than its batch has; use "
                    "each record of the batch exactly once"
                )
            found = found if due.rows else PrivateBatch(())
        watcher = self._watcher
        watcher.check_parameters()
        watcher.check_interrupted()
        watcher.gradients.give_back(ours=True)
        before = trace_of(self._optimizer)
        parts = []
        with self.final_refusals():
            for sums, losses, figures in self._gradients(step, found, args, kwargs):
                parts.append((losses, figures))
                watcher.sums.add(len(losses), sums)
            if before != (now := trace_of(self._optimizer)):
                changed = {str(name) for name, *_ in set(before) ^ set(now)}
                raise CouplingError(
                    f"the function of a private step changes {', '.join(sorted(changed))} of the "
                    "optimizer, by which a record would act on later steps without noise; change "
                    "it in the loop, by public values"
                )
        if not parts:
            watcher.sums.add(1, {})
        watcher.gradients.mark(
            "the loop has put it there, and a private step makes the whole gradient; call "
            "optimizer.zero_grad() before the step (as for a critic that a generator's loss went "
            "through), and write penalties into the function of the step"
        )
        self._from_function = True
        return means(parts)

    def _gradients(
        self, step: PrivateStep, batch: PrivateBatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Params, Tensor, dict[str, Tensor]]]:
        """Clipped sums of some records at a time, with their losses and other figures."""
        watcher, device = self._watcher, self._watcher.device
        if step._records is None:
            models = self._module, *modules_of(step.function)
            step._records = RecordFunction(models, watcher.trained)
        records = step._records
        if step._graphs is None and step.capture and device.type == captured.DEVICE:
            step._graphs = GradientGraphs(watcher, records, self._sample, step.function)
        function = partial(step.function, self._module)
        limit = step.max_physical_batch_size or self._loader.poisson.most
        groups = groups_of(batch.to(device, non_blocking=True))
        for group in groups:
            settings, rows = settings_of(group), row_count(group)
            if step._settings not in (None, settings):
                raise CouplingError(
                    f"the {type(group).__name__} of a record holds something beside its tensors "
                    "that other records do not have, and a function could read it; turn it into a "
                    "tensor, or leave it out"
                )
            step._settings = settings
            split = limit if len(groups) == 1 else (limit or self._units.size)
            for start in range(0, rows, limit or rows):
                count = min(limit or rows, rows - start)
                some = slice(start, start + count)
                part = map_tensors(lambda v: v[some], group, otherwise=keep)  # noqa: B023
                if step._graphs is not None:
                    found = step._graphs.run(function, part, count, split, args, kwargs)
                    if found is not None:
                        yield {}, *found
                        continue
                tape, losses, figures = records.tape(
                    lambda one: function(one, *args, **kwargs),
                    part,
                    count,
                    randomness=self.layer_randomness,
                )
                yield watcher.clip(tape), losses, figures

    # The step

    def make_step(self) -> None:
        """Make the step of the batch at hand. Called by `optimizer.step()`."""
        with self._streams.ranks.ends_together():
            due = self._checked_batch()
            self.scheduler_due = False
            if not due.last:
                return
            try:
                self._state, verdict = self._take_step()
            finally:
                if self.accountant.steps == due.step:  # it is charged, and its batch is used
                    self.due = None
                    self._watcher.forget()
            accepted = bool(verdict.accept)
            self.scheduler_due = accepted
            if self._shows_verdicts:
                self.verdicts.append(accepted)
            if self.accountant.charges_accepted and self.accountant.given_up:
                assert self._first is not None
                self._first()
                raise NothingReleasedError(
                    "the cap on trials was reached before all updates were accepted, which is as "
                    "improbable as delta demands; the first weights are back, and nothing that "
                    "came of this training may be released"
                )
            self._make_tests()
            steps, ranks = self.accountant.steps, self._streams.ranks
            if steps % COMPARED_EVERY == 0 and self._watcher.sharding is None:
                trained = {name: value.detach() for name, value in self._watcher.trained.items()}
                ranks.check_state(trained, f"after step {steps}")

    def _take_step(self, *, charged: bool = False) -> tuple[State, Verdict]:
        self._streams.device = self._watcher.device
        return take_step(
            self._procedure, self.accountant, self._streams, self._at_hand(), charged=charged
        )

    def _at_hand(self) -> State:
        """Counts, what was released so far, and saved weights; the first time those at hand."""
        if self._state is None:
            self._state = self._procedure.initial_state()
        return self._state

    def _checked_batch(self) -> Microbatch:
        """The batch that the step is for, used as it has to be if no more of it follows."""
        if os.getpid() != self._process:
            raise StepError(
                "the engine was made in another process, from which this one was forked, so that "
                "both would draw the same noise; call make_private in the process that trains"
            )
        self.check_refusal()
        due, watcher = self.due, self._watcher
        if due is None:
            raise StepError(
                "optimizer.step() was called without a new batch of the private loader; make one "
                "step for every batch that the loader from make_private yields"
            )
        if not due.last:
            return due
        seen, wanted = watcher.sums.rows, due.before + max(1, due.rows)
        if not seen:
            raise StepError(
                "optimizer.step() was called without a private backward pass: "
                + (
                    watcher.unwatched
                    or "call loss.backward() on what model(...) returns. A part of the model that "
                    "is called by itself, such as model.encoder(x), is not seen: "
                    + REMEDY
                )
            )
        if seen != wanted and due.rows:
            raise StepError(
                "backward passes went through another number of records than the private batch "
                "has; use each record of the batch exactly once, and no others (of several calls, "
                "add the losses up and call backward() once)",
                private=f"{seen} records; the private batch has {wanted}",
            )
        if not self._from_function:  # which has been looked at just now
            watcher.check_parameters()
        watcher.gradients.check(watcher.unwatched)
        watcher.gradients.check_others(self._optimizer)
        if self._weights.rates is not None:
            self._weights.rates.check()
        self._checked = self._checked or not self._from_function
        self._from_function = False
        return due

    def _make_tests(self) -> None:
        """Make the tests of blocks that are due, on all ranks.

        One that was interrupted after its charge is repeated, with the noise of its own step.
        Nothing has been seen of it.
        """
        plan = self.accountant.plan
        if plan is None or not plan.tests:
            return
        with self._streams.ranks.ends_together():
            while True:
                charged = self._test_was_interrupted
                if not charged:
                    # an update that was charged and then interrupted has its place in its block
                    state = self._at_hand()
                    memory = memory_of(state)
                    made = torch.full_like(memory["made"], self.accountant.made)
                    self._state = replace(state, memory={**memory, "made": made})
                    if not self.accountant.test_is_due:
                        break
                self._state, _ = self._take_step(charged=charged)
            self._use_clip_norm()

    def _use_clip_norm(self) -> None:
        norm = (self._at_hand().memory or {}).get("max_grad_norm")
        if norm is not None:
            self._watcher.max_grad_norm = float(norm)
