"""How far one record moves what a training program releases.

A program runs in two worlds that differ by one record. Batches are scripted, and noise is replaced
by a record of the sum before it and a fixed release, so that the weights are the same in both
worlds. Then, with C the clipping norm:

    step that the record was drawn in   sums differ by at most C (added) or 2 C (replaced)
    every other step                    sums are equal: nothing is charged there for the record
    every test of a block gate          sums of values of norm 1 differ by at most 2 (replaced)
    after the last step                 weights, buffers, learning rates and other results are equal

`ADD` puts the record into a batch of one world only. `REPLACE` exchanges it: all batches have the
same size in both worlds, so that a tensor kept from an earlier step would fit into a later one.

Nothing of dpsur is changed but the names that `patched` lists. All imports of dpsur are here.
"""

import json
import logging
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, default_collate

import dpsur
from dpsur.errors import DpsurError
from dpsur.functional.tree import map_tensors
from dpsur.mechanism.streams import VAL_BATCH
from tests.oracle.records import COUNT, LAST, Kind, Record

FORMS = ("private_step", "opacus", "fit")
# Private steps of persons: the worlds differ by a person, with all of their records.
PERSONS = "persons"
BATCH_SIZE = 5
CLIP = 1.0
ABOVE = 1 + 1e-4  # rounding of sums
EQUAL = 1e-5
SEVERITY = ("refused", "bounded", "stopped", "leak", "above")
# To whom the records of `PERSONS` belong: two each, and some have a third, of which two are drawn.
OWNERS = [*range(COUNT), *range(COUNT), *range(10), LAST]
# Of programs that are examples of a limit, in all worlds: outcome, and the worst in bounds.
LIMITS_FILE = Path(__file__).parent / "limits.json"
LIMITS: dict[str, list[Any]] = json.loads(LIMITS_FILE.read_text())


# --- what a program is ----------------------------------------------------------------------------


class Listed(Dataset[Any]):
    """A data set of a list."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = list(records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Record:
        return self.records[index]


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


@dataclass
class Setup:
    """What a user's program consists of, made afresh for each world.

    `loss` is of (model, batch) and `criterion` of (outputs, targets); one of them is enough, and
    only programs with a criterion have the form `fit`. `loop`, if given, is the program's own loop
    over batches, in the form that it is written for.
    """

    model: nn.Module
    loss: Callable[..., Any] | None = None
    criterion: Callable[..., Any] | None = None
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    dataset: Callable[[list[Record]], Dataset[Any]] = Listed
    collate: Callable[[list[Record]], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of make_private
    loop: Callable[["Loop"], None] | None = None
    after_step: Callable[[], None] = lambda: None
    released: Callable[[], Sequence[Any]] = tuple  # besides the model

    def batch_loss(self, model: nn.Module, batch: Any, *args: Any) -> Any:
        if self.loss is not None:
            return self.loss(model, batch, *args)
        assert self.criterion is not None
        inputs, targets = batch
        return self.criterion(model(inputs), targets)


@dataclass
class Loop:
    """What a program's own loop gets: the results of `make_private` and the loss."""

    engine: Any
    model: nn.Module
    optimizer: Any
    loader: Any
    loss: Callable[..., Any]


@dataclass(frozen=True)
class Expected:
    """What a program should come to: trained within the bound, refused, or a limit by its name."""

    outcome: str
    words: str = ""  # of the refusal, or the name of the limit


BOUNDED = Expected("bounded")


def refused(words: str = "") -> Expected:
    return Expected("refused", words)


def limit(name: str) -> Expected:
    """What no engine beneath a free loop can see; the name is that of the limit.

    How far it goes is in `limits.json`: a limit that grows is found.
    """
    return Expected("limit", name)


# Refused today, and harmless if it is accepted one day.
REFUSED_OR_BOUNDED = Expected("refused or bounded")
# Remembers only some records: refused when one of them comes.
REFUSED_OR_STOPPED = Expected("refused or stopped")
# Code that raises for some records: alone in its batch such a record ends the training.
BOUNDED_OR_STOPPED = Expected("bounded or stopped")


def stops(words: str = "") -> Expected:
    """Trains without the record, and ends with an error when it is drawn."""
    return Expected("stopped", words)


@dataclass(frozen=True)
class Program:
    """A training program in the forms that it has, with what is expected of each.

    `legitimate` says that its records do not meet, so that a private step has to give each of them
    the gradient that it has alone. `draws` says that it draws random numbers, which in worlds of
    different batch sizes are others for the same record: only `REPLACE` compares it.
    """

    name: str
    family: str
    kind: Kind
    make: Callable[[], Setup]
    expected: dict[str, Expected]
    legitimate: bool
    draws: bool = False


# --- worlds ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Two scripts of batches; the record at hand is drawn in step `at` of the second."""

    name: str
    without: tuple[tuple[int, ...], ...]
    having: tuple[tuple[int, ...], ...]
    at: int
    bound: float


_SIX, _OTHERS, _SEVEN = (1, 3, 5, 7, 9, 11), (0, 2, 4, 6, 8, 10), (1, 2, 5, 9, 12, 14, 15)

# The batch after the record's has the size of the one with the record.
ADD = Pair("add", (_SIX, _OTHERS, _SEVEN, _SIX), (_SIX, (*_OTHERS, LAST), _SEVEN, _SIX), 1, CLIP)
# Checks that compare with earlier batches know nothing yet.
ADD_FIRST = Pair("add to batch 1", (_OTHERS,), ((*_OTHERS, LAST),), 0, CLIP)
_REPLACED = (_SIX, (*_OTHERS[1:], LAST), _SIX, _OTHERS)
REPLACE = Pair("replace", _REPLACED, _REPLACED, 1, 2 * CLIP)
# Alone in its batch.
ALONE = Pair("add to an empty batch", (_SIX, (), _SIX), (_SIX, (LAST,), _SIX), 1, CLIP)

PAIRS = (ADD, ADD_FIRST, REPLACE, ALONE)
# For the default suite, with one extreme record of each kind.
SHORT_PAIRS, SHORT_EXTREME = (ADD, REPLACE), ("huge", "longest")


@dataclass
class Run:
    """What a program did in one world."""

    status: str = "trained"  # or refused: by dpsur or by an error of PyTorch
    message: str = ""
    by_name: bool = True  # refused with an error of dpsur
    independence: str = ""  # as the engine states it
    sums: list[dict[str, Tensor]] = field(default_factory=list)  # in sensitivities
    tests: list[Tensor] = field(default_factory=list)  # the same, of the tests of a block gate
    released: list[Tensor] = field(default_factory=list)


class _Script:
    """Scripted batches, and the sums that noise would be added to."""

    def __init__(self, batches: Sequence[Sequence[int]], run: Run) -> None:
        self.batches, self.run, self._drawn = batches, run, 0

    @property
    def done(self) -> bool:
        return len(self.run.sums) >= len(self.batches)

    def _next(self) -> list[int]:
        self._drawn += 1
        return list(self.batches[self._drawn - 1]) if self._drawn <= len(self.batches) else []

    def sample(self, size: int, rate: float, stream: Any) -> Tensor:
        if stream.purpose == VAL_BATCH:
            return torch.tensor([0, 1, 2, 16, 17])
        return torch.tensor(sorted(self._next()), dtype=torch.int64)

    def joins(self, size: int, rate: float, stream: Any) -> Tensor:
        """The same for `fit`, as a mask."""
        mask = torch.zeros(size, dtype=torch.bool)
        mask[torch.tensor(self._next(), dtype=torch.int64)] = True
        return mask

    def release(self, total: Any, noise_multiplier: Any, stream: Any) -> dict[str, Tensor]:
        if "test" in total.params:
            return self.release_test(total)
        draws = torch.Generator().manual_seed(1000 + len(self.run.sums))
        bound = float(total.sensitivity) / CLIP
        self.run.sums.append({name: v.detach().cpu() / bound for name, v in total.params.items()})
        return {
            name: 0.3 * torch.randn(value.shape, generator=draws, device="cpu").to(value)
            for name, value in total.params.items()
        }

    def release_test(self, total: Any) -> dict[str, Tensor]:
        """Bounded values of all records, added up; what they decide is the same in both worlds."""
        (value,) = total.params.values()
        self.run.tests.append(value.detach().cpu() / float(total.sensitivity))
        return {name: torch.full_like(value, 10.0) for name in total.params}

    @contextmanager
    def patched(self, form: str) -> Iterator[None]:
        names = {
            "dpsur.engine.loader.poisson_sample": self.sample,
            "dpsur.mechanism.gaussian.add_noise": self.release,
        }
        if form == "fit":
            names["dpsur.mechanism.gaussian.poisson_mask"] = self.joins
        patches = [mock.patch(name, value) for name, value in names.items()]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


def run(
    program: Program,
    form: str,
    records: list[Record],
    batches: Sequence[Sequence[int]],
    *,
    device: str = "cpu",
) -> Run:
    """Run a program in one world."""
    found = Run()
    script = _Script(batches, found)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        with script.patched(form), _quiet():
            with torch.device(device):
                setup = program.make()
            rates = (_fit if form == "fit" else _loop)(setup, form, records, script, device)
        state = [value for value in setup.model.state_dict().values() if isinstance(value, Tensor)]
        others = [torch.as_tensor(value) for value in (*rates, *setup.released())]
        found.released = [value.detach().cpu().clone() for value in (*state, *others)]
    except Exception as error:  # whatever a user would see
        found.status, found.message = "refused", f"{type(error).__name__}: {error}"
        found.by_name = isinstance(error, DpsurError)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _loop(
    setup: Setup, form: str, records: list[Record], script: _Script, device: str
) -> list[float]:
    """A custom loop; returns the learning rates that it ends with."""
    setup.model.to(device)
    if form == PERSONS:
        records = [records[owner] for owner in OWNERS]
    loader = DataLoader(
        setup.dataset(records), batch_size=BATCH_SIZE, collate_fn=setup.collate, shuffle=False
    )
    engine = dpsur.PrivacyEngine()
    options = {"noise_multiplier": 1.0, "max_grad_norm": CLIP, "seed": 0, **setup.options}
    if form == PERSONS:
        options |= {"groups": OWNERS, "records_per_person": 2}
    model, optimizer, loader = engine.make_private(
        module=setup.model, optimizer=setup.optimizer(setup.model), data_loader=loader, **options
    )

    def batches() -> Iterator[Any]:
        while not script.done:
            made = len(script.run.sums)
            for batch in loader:
                yield batch
                if script.done:
                    return
            if len(script.run.sums) == made:
                return

    if setup.loop is not None:
        with torch.device(device):
            setup.loop(Loop(engine, model, optimizer, batches(), setup.batch_loss))
    elif form in ("private_step", PERSONS):
        step = engine.private_step(setup.loss or setup.batch_loss)
        for batch in batches():
            with torch.device(device):
                step(batch)
                setup.after_step()
    else:
        for batch in batches():
            optimizer.zero_grad()
            with torch.device(device):
                found = setup.batch_loss(model, _moved(batch, device))
            (found["loss"] if isinstance(found, dict) else found).backward()
            optimizer.step()
            with torch.device(device):
                setup.after_step()
    script.run.independence = engine.independence
    return [group["lr"] for group in optimizer.param_groups]


def _moved(batch: Any, device: str) -> Any:
    return map_tensors(lambda value: value.to(device), batch, otherwise=lambda value: value)


def _fit(
    setup: Setup, form: str, records: list[Record], script: _Script, device: str
) -> list[float]:
    inputs = torch.stack([record[0] for record in records])
    targets = torch.stack([record[1] for record in records])
    method = dpsur.Dpsgd(
        learning_rate=0.1,
        batch_size=BATCH_SIZE,
        max_grad_norm=CLIP,
        updates=len(script.batches),
        momentum=0.0,
    )
    dpsur.fit(
        setup.model,
        (inputs, targets),
        budget=dpsur.Budget(50.0, 1e-3),
        loss=setup.criterion,
        seed=0,
        device=device,
        method=method,
    )
    return []


# --- verdicts -------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What came of a program in one form.

    outcome: bounded, refused, above (more than the bound), leak (another step or the result moved),
        or stopped (one record ends the program)
    by_name: whether a refusal is an error of dpsur, not of PyTorch
    independence: what the engine says about records: kept apart by construction, or checked
    """

    program: Program
    form: str
    outcome: str = "bounded"
    message: str = ""
    by_name: bool = True
    independence: str = ""
    worst: float = 0.0  # in bounds
    worst_at: str = ""
    leak: float = 0.0
    leak_at: str = ""

    @property
    def as_expected(self) -> bool:
        if self.form == PERSONS:  # whose records may meet; the bound is what matters
            limited = self.program.expected["private_step"].outcome == "limit"
            return limited or self.outcome not in ("above", "leak")
        expected = self.program.expected[self.form]
        if expected.outcome in ("refused", "stopped"):
            return self.outcome == expected.outcome and expected.words in self.message
        if expected.outcome == "limit":
            known = LIMITS.get(self.key)
            return known is not None and not self.is_worse_than(*known)
        return self.outcome in expected.outcome.split(" or ")

    @property
    def key(self) -> str:
        return f"{self.form}: {self.program.family}: {self.program.name}"

    def is_worse_than(self, outcome: str, worst: float) -> bool:
        """Whether it went further than was measured before, in the same worlds or in more."""
        rank = SEVERITY.index
        grown = self.worst > ABOVE and self.worst > 1.05 * worst
        return rank(self.outcome) > rank(outcome) or grown

    def __str__(self) -> str:
        found = f"{self.outcome}, {self.worst:.4g} C"
        if self.worst > ABOVE:
            found += f" ({self.worst_at})"
        if self.leak > EQUAL:
            found += f", leak {self.leak:.3g} ({self.leak_at})"
        return f"{found} {self.message}".rstrip()


def judge(
    program: Program,
    form: str,
    *,
    pairs: Sequence[Pair] = PAIRS,
    extreme: tuple[str, ...] | None = None,
    device: str = "cpu",
) -> Verdict:
    """Run a program in all worlds, or with some of the extreme records only."""
    verdict = Verdict(program, form)
    ordinary = program.kind.ordinary()
    for pair in pairs:
        if program.draws and pair.without != pair.having:
            continue
        first = run(program, form, ordinary, pair.without, device=device)
        verdict.independence = first.independence
        if first.status != "trained":
            verdict.outcome = first.status
            verdict.message, verdict.by_name = first.message, first.by_name
        if not first.sums:
            return verdict
        for name, records in program.kind.worlds(extreme).items():
            if form == "fit" and not _finite(records):
                continue  # refused before training
            second = run(program, form, records, pair.having, device=device)
            _compare(verdict, pair, name, first, second)
    if verdict.worst > ABOVE:
        verdict.outcome = "above"
    elif verdict.leak > EQUAL:
        verdict.outcome = "leak"
    return verdict


def _compare(verdict: Verdict, pair: Pair, name: str, first: Run, second: Run) -> None:
    for step, (one, other) in enumerate(zip(first.sums, second.sums, strict=False)):
        apart = distance(list(one.values()), list(other.values()))
        where = f"{name}, {pair.name}, step {step + 1}"
        if step == pair.at and apart / pair.bound > verdict.worst:
            verdict.worst, verdict.worst_at = apart / pair.bound, where
        if step != pair.at and apart > verdict.leak:
            verdict.leak, verdict.leak_at = apart, where
    # a test is made of all records, of which one is another in the second world
    for test, (one, other) in enumerate(zip(first.tests, second.tests, strict=False)):
        apart = distance([one], [other])
        if apart / 2 > verdict.worst:
            verdict.worst, verdict.worst_at = apart / 2, f"{name}, {pair.name}, test {test + 1}"
    if first.status == "trained":
        if second.status != "trained":
            verdict.outcome = "stopped"
            verdict.message = f"{name}, {pair.name}: {second.message}"
            verdict.by_name = second.by_name
            return
        apart = distance(first.released, second.released)
        if apart > verdict.leak:
            verdict.leak, verdict.leak_at = apart, f"{name}, {pair.name}, released"


def distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The norm of a difference; what is not finite must be the same in both."""
    total = 0.0
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape:
            return math.inf
        same = (a == b) | (a.isnan() & b.isnan())
        apart = torch.where(same, 0.0, a.double() - b.double())
        if not apart.isfinite().all():
            return math.inf
        total += float(apart.square().sum())
    return math.sqrt(total)


def _finite(records: list[Record]) -> bool:
    return all(bool(value.isfinite().all()) for value in records[-1])


# --- right gradients ------------------------------------------------------------------------------


def gradient_error(program: Program, clip: float = 0.5) -> float:
    """How far a private step's sum is from that of one record at a time, by autograd in float64.

    The error is relative to the larger of 1 and the largest entry of the sum.
    """
    torch.set_default_dtype(torch.float64)
    try:
        with _quiet():
            wanted = _sum_of_single_records(program, clip)
        found = _sum_of_a_private_step(program, clip)
    finally:
        torch.set_default_dtype(torch.float32)
    largest = max([1.0, *(float(value.abs().max()) for value in wanted.values())])
    return max(float((wanted[name] - found[name]).abs().max()) for name in wanted) / largest


def _sum_of_single_records(program: Program, clip: float) -> dict[str, Tensor]:
    torch.manual_seed(0)
    setup = program.make()
    model = setup.model.double().train()
    dataset = setup.dataset(program.kind.ordinary())
    collate = setup.collate or default_collate
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(value) for name, value in trained.items()}
    for index in _SIX:
        model.zero_grad()
        loss = setup.batch_loss(model, collate([dataset[index]]))
        (loss["loss"] if isinstance(loss, dict) else loss).backward()
        grads = {name: p.grad for name, p in trained.items() if p.grad is not None}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        if not math.isfinite(norm):
            continue  # counts for nothing
        for name, grad in grads.items():
            total[name] += min(1.0, clip / norm if norm else 1.0) * grad
    return total


def _sum_of_a_private_step(program: Program, clip: float) -> dict[str, Tensor]:
    def make() -> Setup:
        setup = program.make()
        setup.model.double()
        setup.options = {**setup.options, "max_grad_norm": clip}
        return setup

    found = run(replace(program, make=make), "private_step", program.kind.ordinary(), (_SIX,))
    assert found.status == "trained", found.message
    return {name: clip * value for name, value in found.sums[0].items()}
