"""Planted frauds, and how often a replay of twenty steps finds them."""

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.config import RunConfig
from dpsur.functional.records import Examples
from dpsur.functional.tree import map_tensors
from dpsur.mechanism.cuda_graph_loop import Loop
from dpsur.mechanism.proposer import DpGradient, GradientProposer
from dpsur.mechanism.state import State, Verdict
from dpsur.mechanism.streams import BATCH
from dpsur.mechanism.trial import EagerLoop, Progress, Selective, trial
from dpsur.runs.checkpoint import STREAM, load_checkpoint
from dpsur.runs.files import RunFolder
from dpsur.runs.fit import execute
from dpsur.runs.replay import ELSEWHERE, replay
from dpsur.runs.session import Session, build_session
from dpsur.status import silenced
from dpsur.tasks import mnist_5k
from reproduction.artifacts import Artifact, Column, Table, table_page
from reproduction.base import Cell, OneByOne, Options, Row
from reproduction.training import device_name

STEPS, BATCH_SIZE, CHALLENGES = 100, 256, 20
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
RUNS, HONEST_RUNS = 2, 10  # of each cell
DRAWS = 10_000  # of twenty steps each
TOTALS = ("planted", "found", "false_alarms", "elsewhere", "exact")
MEANS = ("caught", "train_seconds", "replay_of_twenty_seconds")
HONEST: Final = "none"
METHOD = dpsur.Dpsgd(updates=STEPS, batch_size=BATCH_SIZE, learning_rate=1.0, momentum=0.5)
TITLE = "Planted frauds"
PAGE = """
DP-SGD on the embedded digits (`mnist-5k`, a linear model on pixels, 100 steps of about 256 records,
epsilon 3) by a trainer who cheats in a share f of the steps, chosen at random, and records
everything else honestly. Then every step of the run is recomputed. *Planted* and
*found* are steps of all runs together. *Caught* is the share of 10,000 draws of twenty steps that
hold one of the found ones, beside the stated 1 - (1-f)^20; drawing without repeats does better
where a run is short. *Elsewhere* counts the steps that differ from the recomputed ones by more than
a tenth of a clip norm, the tolerance of a replay on another device.

A record is replaced by its negative, in a batch that holds it; a rate is a quarter higher; an
uncharged step is made with random numbers that no address has; the last bit of one weight is
nowhere near a tenth of a clip norm.
"""


@dataclass(frozen=True, repr=False)
class Dishonest(Session):
    """A session that cheats in some of its steps, and keeps its books as if it did not."""

    fraud: str = HONEST
    planted: frozenset[int] = frozenset()

    def loop(self, progress: Progress) -> Loop:
        """One trial at a time, some of them dishonest."""
        return DishonestLoop(self, progress)


class DishonestLoop(EagerLoop):
    """An honest loop, but for the steps that were planted."""

    def __init__(self, session: Dishonest, progress: Progress) -> None:
        super().__init__(session.procedure, session.plan, session.streams, progress, owned=True)
        self._session = session

    def collect(self) -> list[Verdict]:
        """One step; a planted one ends in a state that an honest step would not have given."""
        before, session = self.progress, self._session
        if before.ledger.kept + 1 not in session.planted:
            return super().collect()
        begun = _copy(before.state)
        made = super().collect()  # charged as an honest step is
        self._state = FRAUDS[session.fraud](session, begun, self.progress)
        return made


def _copy(state: State) -> State:
    return map_tensors(torch.clone, state)


def _made_with(session: Session, begun: State, step: int, **changes: Any) -> State:
    """A step with another source of its gradient."""
    procedure = session.procedure
    assert isinstance(procedure, Selective)
    proposer = procedure.proposer
    assert isinstance(proposer, GradientProposer)
    changed = replace(proposer, source=replace(_source(session), **changes))
    position = torch.tensor(int(begun.updates))
    draws = session.streams.at(step)
    return trial(replace(procedure, proposer=changed), begun, draws, position)[0]


def _source(session: Session) -> DpGradient:
    source = session.procedure.proposer.source  # type: ignore[attr-defined]
    assert isinstance(source, DpGradient)
    return source


def _without_noise(session: Session, begun: State, after: Progress) -> State:
    update = replace(_source(session).update, noise_multiplier=1e-9)
    return _made_with(session, begun, after.ledger.steps, update=update)


def _another_record(session: Session, begun: State, after: Progress) -> State:
    source, step = _source(session), after.ledger.steps
    problem = source.sampler.problem
    record = session.streams.at(step)[BATCH].uniform(len(problem.train)).argmin()
    inputs = problem.train.inputs.clone()
    inputs[record] = -inputs[record]
    other = replace(problem, train=Examples(inputs, problem.train.targets))
    return _made_with(session, begun, step, sampler=replace(source.sampler, problem=other))


def _another_rate(session: Session, begun: State, after: Progress) -> State:
    update = _source(session).update
    update = replace(update, sample_rate=1.25 * update.sample_rate)
    return _made_with(session, begun, after.ledger.steps, update=update)


def _uncharged(session: Session, begun: State, after: Progress) -> State:
    del begun
    state = _copy(after.state)
    return _made_with(session, state, 10**6 + after.ledger.steps)


def _edited(session: Session, begun: State, after: Progress) -> State:
    del session, begun
    state = _copy(after.state)
    weight = next(iter(state.params.values())).view(-1)
    weight[0] = torch.nextafter(weight[0], torch.full_like(weight[0], math.inf))
    return state


FRAUDS: Mapping[str, Callable[[Session, State, Progress], State]] = {
    "skipped noise": _without_noise,
    "another record": _another_record,
    "another rate": _another_rate,
    "an uncharged step": _uncharged,
    "a weight's last bit": _edited,
}


class Frauds(OneByOne):
    """Fifty frauds and ten honest runs: a row per fraud and share of steps."""

    name = "replay"
    partial = True  # rows of a GPU come from one
    identity = ("fraud", "share", "device")

    def cells(self, options: Options) -> Iterator[Cell]:
        """Honest runs, and each fraud in each share of the steps."""
        devices = (options.device,) if options.device else ("cpu", "cuda")
        for device, (fraud, share) in product(devices, [(HONEST, 0.0), *product(FRAUDS, SHARES)]):
            yield {"fraud": fraud, "share": share, "device": device}

    def make(self, cells: Sequence[Cell], options: Options) -> Iterator[Row]:
        """Those of devices that are here."""
        here = [cell for cell in cells if cell["device"] == "cpu" or torch.cuda.is_available()]
        return super().make(here, options)

    def measure(self, cell: Cell, options: Options) -> Row:
        """Cheat, make every step again, and draw twenty steps many times."""
        del options
        numbers = range(HONEST_RUNS if cell["fraud"] == HONEST else RUNS)
        runs = [measure(cell["fraud"], cell["share"], number, cell["device"]) for number in numbers]
        totals = {name: sum(run[name] for run in runs) for name in TOTALS}
        means = {name: round(sum(run[name] for run in runs) / len(runs), 4) for name in MEANS}
        return {"runs": len(runs), **totals, **means, "device_name": runs[0]["device_name"]}

    def render(self, rows: Sequence[Row]) -> list[Artifact]:
        """One table."""
        return table_page(
            self.name,
            TITLE,
            PAGE,
            Table(COLUMNS, [{**row, "stated": stated(row["share"])} for row in rows]),
        )


def session_for(device: str) -> Session:
    """A replayable run on the embedded digits."""
    train, _ = mnist_5k.load()
    model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))
    for value in model.parameters():
        nn.init.zeros_(value)
    config = RunConfig(
        task=None,
        method=METHOD,
        budget=dpsur.Budget(3.0, 1e-5),
        intervals=dpsur.Intervals(replayable=True, checkpoint_every=STEPS),
        device=device,
    )
    return build_session(config, model, (train.inputs, train.targets), loss=F.cross_entropy)


def measure(fraud: str, share: float, number: int, device: str = "cpu") -> Row:
    """A run with planted steps, and what a replay finds of it."""
    random = Random(f"{fraud} {share} {number}")
    planted = frozenset(random.sample(range(1, STEPS + 1), round(share * STEPS)))
    with tempfile.TemporaryDirectory() as root, silenced():
        folder, honest = RunFolder(Path(root) / "run"), session_for(device)
        held = {field.name: getattr(honest, field.name) for field in fields(Session)}
        began = time.perf_counter()
        execute(Dishonest(**held, fraud=fraud, planted=planted), folder=folder)
        trained = time.perf_counter() - began
        again = again_from(folder, device)
        every = replay(again, folder, STEPS)
        some = replay(again, folder, CHALLENGES)
    wrong = {step for step, distance in every.distances.items() if distance}
    draws = (random.sample(range(1, STEPS + 1), CHALLENGES) for _ in range(DRAWS))
    return {
        "planted": len(planted),
        "found": len(wrong & planted),
        "false_alarms": len(wrong - planted) + len(every.faults) - len(wrong),
        "caught": sum(not wrong.isdisjoint(draw) for draw in draws) / DRAWS,
        "elsewhere": sum(distance > ELSEWHERE for distance in every.distances.values()),
        "exact": int(every.exact),
        "train_seconds": trained,
        "replay_of_twenty_seconds": some.seconds,
        "device_name": device_name(again.streams.device),
    }


def stated(share: float) -> float:
    """How likely twenty steps are said to hold a planted one."""
    return 1 - (1 - share) ** CHALLENGES


def again_from(folder: RunFolder, device: str) -> Session:
    """The session of an auditor, who has the records and the key."""
    honest = session_for(device)
    honest.streams.restore(load_checkpoint(folder.checkpoint, None).under(STREAM))
    return honest


EXPERIMENT = Frauds()
COLUMNS = (
    Column("fraud", "fraud"),
    Column("share of steps", "share", ".0%"),
    Column("runs", "runs"),
    Column("planted", "planted"),
    Column("found", "found"),
    Column("false alarms", "false_alarms"),
    Column("caught by 20 steps", "caught", ".3f"),
    Column("stated", "stated", ".3f"),
    Column("elsewhere", "elsewhere"),
    Column("device", "device"),
)
