"""Replay: what a run commits to in its release, and updates that are computed again from it.

A replayable run keeps its state before the first step and after each one that was not rejected, in
`private/updates`. Its release holds four commitments, in the statement under `replay`:

    chain    link n is the hash of link n - 1 and of state n, for weights, optimizer and averages
    records  the root of a Merkle tree of the records, in their order
    key      of the random numbers
    device   in words; versions are in the statement anyway

Who may read the records recomputes some of the steps, chosen after the release was made. Of a
trainer who cheated on a share f of them, n steps see nothing with probability at most (1-f)^n.

What the commitments tell: every state and record is hashed with a salt of 256 bits that follows
from the key, so without the key they tell nothing that can be computed. Also, no state is hashed
that a guarantee does not cover: under every accounting each kept update is charged as if it were
released on its own (docs/proof.md), and weights, buffers and averages follow from those. A rejected
trial leaves the state as it was, and is in no hash: neither it nor its number.
"""

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from random import SystemRandom
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from dpsur.environment import versions
from dpsur.errors import CheckpointError, DpsurError, InvalidInputError
from dpsur.functional.process_settings import device_name
from dpsur.functional.tree import flatten, tensors_of
from dpsur.mechanism.streams import Key
from dpsur.mechanism.trial import Progress, start
from dpsur.privacy.events import SampledGaussian
from dpsur.runs.checkpoint import digest_of, load_checkpoint
from dpsur.runs.files import WEIGHTS, RunFolder, finite, sha256
from dpsur.runs.result import Run, finish_run
from dpsur.runs.session import Session
from dpsur.runs.verification import TOLERANCE, differences, read_statement

# On another device or with other versions: how far a recomputed sum may be from the one that was
# made, in clip norms. A record that is replaced moves it by up to two.
ELSEWHERE: Final = 0.1
# Parts of a statement that a replay makes again; `dpsur verify` derives the others from them.
MADE_AGAIN = (
    *("method", "settings", "mechanism", "budget", "dataset_size", "public", "random"),
    *("accepted_updates", "hide_rejections", "replay"),
)
FIGURES = ("metrics", "holdout", "test")  # the same where bits are


def stated_commitments(folder: RunFolder) -> dict[str, Any]:
    """The statement of a finished run; refuses one that commits to nothing."""
    if not folder.finished:
        raise InvalidInputError(
            f"{folder.root} holds no whole release to replay; finish the run first",
            code="no-release",
        )
    stated = read_statement(folder.release)
    if "replay" not in stated:
        raise InvalidInputError(
            f"the release in {folder.root} commits to no steps; train with --replayable, or "
            "dpsur.Intervals(replayable=True) in fit: a loop of your own cannot be replayed",
            code="not-replayable",
        )
    return stated


@dataclass(frozen=True)
class Replayed:
    """What a replay has found. `exact`: bits were compared, on the same device and versions.

    `run` is the result as it was made again, without training. `distances` are those of recomputed
    steps from the kept ones, in clip norms of a sum.
    """

    run: Run
    faults: list[str]
    distances: Mapping[int, float]
    steps: int
    exact: bool
    seconds: float

    def describe(self) -> str:
        how = "the same bits" if self.exact else f"within {ELSEWHERE:g} of a clip norm"
        return (
            f"{len(self.distances)} of {self.steps} steps recomputed from the records, {how}; "
            f"{self.seconds:.1f} s"
        )


def _kept(session: Session, folder: RunFolder, numbers: Sequence[int]) -> Iterator[Progress]:
    """The states that a run has kept under these numbers.

    The key is that of the run. A key of their own could be chosen for the noise it gives.
    """
    initial = start(session.procedure)
    for number in numbers:
        yield load_checkpoint(folder.update(number), None).progress(initial)


def commitments(
    session: Session, folder: RunFolder, last: Progress
) -> tuple[dict[str, str], list[int]]:
    """What a release commits to, and how many steps had been made at each kept state."""
    key, chain, steps = session.streams.key, "", []
    for number, progress in enumerate(_kept(session, folder, range(last.ledger.kept + 1))):
        leaf = digest_of(flatten(progress.state), _salt(key, "state", number))
        chain = sha256((chain + leaf).encode())
        steps.append(progress.ledger.steps)
    if digest_of(flatten(progress.state)) != digest_of(flatten(last.state)):
        raise CheckpointError(
            f"{folder.update(number)} is not the state that the run ended in; restore the file"
        )
    assert session.records is not None
    leaves: list[str] = []
    for part in session.records.parts(1024):
        rows = [value.detach().cpu() for value in tensors_of((part.inputs, part.targets))]
        for record in zip(*rows, strict=True):
            named = {str(place): value for place, value in enumerate(record)}
            leaves.append(digest_of(named, _salt(key, "record", len(leaves))))
    made = {
        "chain": chain,
        "records": merkle_root(leaves),
        "key": _salt(key, "key"),
        "device": _device(session),
    }
    return made, steps


def _salt(key: Key, *words: object) -> str:
    text = " ".join(["replay", *map(str, words)]).encode()
    return hashlib.blake2b(text, key=key.content, digest_size=32).hexdigest()


def merkle_root(leaves: Sequence[str]) -> str:
    """The root of a binary tree of hashes; of an odd level the last goes up as it is.

    Leaves and inner nodes are hashed from texts of different lengths.
    """
    while len(leaves) > 1:
        pairs = zip_longest(leaves[::2], leaves[1::2])
        leaves = [one if two is None else sha256((one + two).encode()) for one, two in pairs]
    return leaves[0]


def _device(session: Session) -> str:
    device, more = session.streams.device, ""
    if device.type == "cpu":
        more = f", {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return f"{device.type}: {device_name(device)}{more}"


def replay(session: Session, folder: RunFolder, count: int) -> Replayed:
    """Hold a finished run against its release: its ends, and this many steps chosen at random.

    `session` is built anew from the records, with the key of the run. What is checked always:
    commitments, the statement, statistics of features, the weights before the first step and those
    of the release.
    """
    began = time.perf_counter()
    stated = stated_commitments(folder)
    committed = stated["replay"]
    exact = committed["device"] == _device(session) and stated["versions"] == versions()
    last = load_checkpoint(folder.checkpoint, None).progress(start(session.procedure))
    with session.arithmetic():
        made, steps = commitments(session, folder, last)
        made["device"] = committed["device"]
        run = finish_run(session, last, (), made)
        names = {*MADE_AGAIN, *(FIGURES if exact else ())}
        again, there = ({n: one[n] for n in names & one.keys()} for one in (run.statement, stated))
        faults = [*differences(there, finite(again), TOLERANCE)]
        if not _alike(load_file(folder.release / WEIGHTS), run.model.state_dict(), exact):
            faults.append(f"{WEIGHTS} holds other weights than those after the last step")
        (first,) = _kept(session, folder, [0])
        begun = flatten(start(session.procedure).state)
        if first.ledger.steps or not _alike(flatten(first.state), begun, exact):
            faults.append("the state before the first step is not that of the untrained network")
        if steps != sorted(set(steps)):
            faults.append("two steps were made with the same random numbers")
        numbers = range(1, len(steps))
        chosen = sorted(SystemRandom().sample(numbers, min(count, len(numbers))))
        distances = {number: _distance(session, folder, number) for number in chosen}
    for number, distance in distances.items():
        if math.isinf(distance):
            faults.append(f"step {number} cannot be recomputed from the state before it")
        elif distance > (0 if exact else ELSEWHERE):
            shown = f"{distance:.2g} clip norms"
            faults.append(f"step {number} is {shown} from what the records and the key give")
    seconds = time.perf_counter() - began
    return Replayed(run, faults, distances, len(numbers), exact, seconds)


def _alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor], exact: bool) -> bool:
    """Whether tensors are the same; elsewhere but for their last digits."""
    if exact or one.keys() != other.keys():
        return digest_of(one) == digest_of(other)
    return all(torch.allclose(one[name].double(), other[name].double(), 1e-4, 1e-6) for name in one)


def _distance(session: Session, folder: RunFolder, number: int) -> float:
    """How far a step made again ends from the kept one, in clip norms of its sum; 0: in its bits.

    The largest over weights, buffers and averages of the part of the step that differs, times the
    norm of the noise, which is nearly all of a sum.
    """
    before, after = _kept(session, folder, [number - 1, number])
    begun, wanted = (
        {n: v.clone() for n, v in flatten(one.state).items()} for one in (before, after)
    )
    try:
        loop = session.loop(before)
        while loop.progress.ledger.steps < after.ledger.steps and not loop.finished:
            loop.launch()
            loop.collect()
    except DpsurError:  # such as a step that the plan does not have
        return math.inf
    found = flatten(loop.progress.state)
    if loop.progress.ledger != after.ledger:  # in another trial than was kept
        return math.inf
    if digest_of(found) == digest_of(wanted):
        return 0.0
    update = session.plan.typical.update
    noise = update.noise_multiplier if isinstance(update, SampledGaussian) else 0.0
    weights = sum(value.numel() for value in before.state.params.values())
    share = max(
        _share(begun, wanted, found, group) for group in {n.rpartition("/")[0] for n in found}
    )
    return max(share * max(1.0, noise * math.sqrt(weights)), math.ulp(0.0))  # other bits are not 0


def _share(
    begun: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    group: str,
) -> float:
    """The part of a step that differs, of the tensors of one group."""
    names = [name for name in found if name.rpartition("/")[0] == group]

    def norm(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
        squares = [(one[name].double() - other[name].double()).square().sum() for name in names]
        return math.sqrt(float(torch.stack(squares).sum()))

    off, way = norm(found, wanted), norm(wanted, begun)
    if not math.isfinite(off) or (off and not way):
        return math.inf
    return off / way if off else 0.0
