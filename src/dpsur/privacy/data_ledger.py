"""A ledger of a data set: what all private runs on it together may reveal.

Every run books what it may spend before it draws its first batch. A booking is never taken back:
anyone who kills a run has perhaps seen something of it. What does not fit the total is refused.

A ledger is one SQLite file with a write-ahead log, which several processes of one machine may use
at once. All of its bookings are composed, whatever data they name: a person may be in several
versions of a data set. The data are named by a keyed digest, whose key stays in the file, so that
nobody can tell from a report which data they were. The file is private all the same.

Two rules for a total, both of them proved:

    adaptive   the next run may be chosen by what earlier runs have released. A Rényi filter of one
               order, fixed with the total (Feldman and Zrnic 2021).
    fixed      the settings of all runs follow from nothing that a run has released. Composition by
               privacy loss distributions, which is tighter.

A run whose plan composes of single mechanisms is composed by them. Any other, (epsilon, delta)-DP
by its own analysis, counts as the worst mechanism of this epsilon, and its delta is subtracted.
"""

import hashlib
import json
import math
import os
import secrets
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from dpsur import checks
from dpsur.errors import BudgetError, FileError, InvalidInputError
from dpsur.privacy.accountants.noise_tail import noise_tail
from dpsur.privacy.accountants.proven import event_divergence
from dpsur.privacy.accountants.rdp import RenyiFilter, epsilon_at
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.conversion import composes
from dpsur.privacy.events import Event, NoisyChoice, NonPrivate, event_from_json, event_to_json
from dpsur.privacy.plan import Plan

FORMAT: Final = "dpsur-data-ledger/1"
ADAPTIVE, FIXED = "adaptive", "fixed"
# The share of delta that an adaptive total keeps for noise tails and the deltas of whole runs.
KEPT: Final = 0.5
_WAIT = 600.0  # seconds for other processes, which may be composing distributions
_TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE totals (at TEXT NOT NULL, epsilon REAL NOT NULL, delta REAL NOT NULL,
                     rule TEXT NOT NULL);
CREATE TABLE bookings (id TEXT PRIMARY KEY, at TEXT NOT NULL, data TEXT NOT NULL,
                       what TEXT NOT NULL, charges TEXT NOT NULL, epsilon REAL NOT NULL,
                       delta REAL NOT NULL);
"""

Charges = list[tuple[Event, int]]


@dataclass(frozen=True)
class LedgerTotal:
    """What all runs together may spend, and by which rule they are composed."""

    epsilon: float
    delta: float
    rule: str = ADAPTIVE

    def __post_init__(self) -> None:
        checks.positive("the epsilon of a total", self.epsilon)
        checks.probability("the delta of a total", self.delta)
        checks.one_of("rule", self.rule, (ADAPTIVE, FIXED))

    def filter(self) -> RenyiFilter:
        """The filter of an adaptive total. Its order suits Gaussian noise, whose charge is it."""
        budget = Budget(self.epsilon, (1 - KEPT) * self.delta)
        return RenyiFilter.best_for(budget, lambda order: order)


@dataclass(frozen=True)
class Booking:
    """What one run may spend: mechanisms or, known as a whole only, an (epsilon, delta)."""

    id: str  # of the run, for resuming it
    at: str
    data: str  # the digest of its data
    what: str  # the method
    charges: Charges
    epsilon: float = 0.0
    delta: float = 0.0


class DataLedger:
    """The ledger in a file.

    Guarantee: at any time, whatever processes were killed, all bookings that were confirmed are in
    the file, and they fit the total that was in force when each was made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @staticmethod
    def create(path: str | os.PathLike[str], unit: str, total: LedgerTotal | None) -> "DataLedger":
        """A new ledger, without bookings. `unit` is whom it protects: record or person."""
        checks.one_of("unit", unit, ("record", "person"))
        ledger = DataLedger(path)
        try:
            os.close(os.open(ledger.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            raise InvalidInputError(f"{path} exists; a ledger is never written over") from None
        except OSError as error:
            raise FileError(f"{path} cannot be created ({error.strerror})") from error
        facts = {"format": FORMAT, "unit": unit, "key": secrets.token_hex(32)}
        facts["place"] = _place(ledger.path)
        with closing(ledger._open()) as database:
            database.execute("PRAGMA journal_mode=WAL")
            database.executescript(_TABLES)
            with _transaction(database):
                database.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
                if total is not None:
                    _set(database, total)
        return ledger

    # What it holds

    @property
    def unit(self) -> str:
        with self._connected() as database:
            return _facts(database)["unit"]

    @property
    def total(self) -> LedgerTotal | None:
        with self._connected() as database:
            return _total(database)

    def totals(self) -> list[tuple[str, LedgerTotal]]:
        """All totals that were ever set, with their dates."""
        with self._connected() as database:
            return _totals(database)

    def bookings(self) -> list[Booking]:
        with self._connected() as database:
            return _bookings(database)

    # What changes it

    def set_total(self, total: LedgerTotal) -> None:
        """From now on; what is booked already must fit."""
        with self._connected(writes=True) as database:
            _check_fits(_bookings(database), total, "what is booked already")
            _set(database, total)

    def book(self, plan: Plan, unit: str, data: bytes, what: str, *, whole: bool = False) -> str:
        """Book a run before it starts, or refuse it; returns the id of the booking.

        `whole` says that it does more than its plan, within the plan's epsilon and delta.
        """
        if not accounting_named(plan.accounting).proved:
            raise InvalidInputError(
                f"the accounting {plan.accounting} proves nothing that a ledger could book; use "
                "proven or every-trial"
            )
        charges, epsilon, delta = may_spend(plan, whole=whole)
        with self._connected(writes=True) as database:
            facts = _facts(database)
            if facts["unit"] != unit:
                remedy = "groups=..." if facts["unit"] == "person" else "a ledger of persons"
                raise InvalidInputError(
                    f"the ledger protects a {facts['unit']}, and the unit of this run is a {unit}; "
                    f"train with {remedy}"
                )
            digest = hashlib.blake2b(data, key=bytes.fromhex(facts["key"]), digest_size=8)
            digest.update(unit.encode())
            named = (secrets.token_hex(8), _now(), digest.hexdigest(), what)
            total = _total(database)
            if total is not None:
                new = Booking(*named, charges, epsilon, delta)
                _check_fits([*_bookings(database), new], total, "this run")
            written = json.dumps([[event_to_json(event), count] for event, count in charges])
            row = (*named, written, epsilon, delta)
            database.execute("INSERT INTO bookings VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return named[0]

    def holds(self, booking: str) -> bool:
        with self._connected() as database:
            row = database.execute("SELECT 1 FROM bookings WHERE id = ?", (booking,)).fetchone()
        return row is not None

    def adopt(self) -> None:
        """Say that this file, which was moved or restored, is the one ledger of its data."""
        with closing(self._open()) as database, _transaction(database):
            _facts(database)
            database.execute(
                "UPDATE facts SET value = ? WHERE name = 'place'", (_place(self.path),)
            )

    # The file

    def _open(self) -> sqlite3.Connection:
        file = f"file:{self.path.absolute()}?mode=rw"
        try:
            database = sqlite3.connect(file, uri=True, timeout=_WAIT, isolation_level=None)
            database.execute("PRAGMA synchronous=FULL")
        except sqlite3.OperationalError:
            raise FileError(
                f"there is no ledger {self.path}; make one with `dpsur ledger create`"
            ) from None
        except sqlite3.DatabaseError:
            raise _no_ledger() from None
        return database

    @contextmanager
    def _connected(self, *, writes: bool = False) -> Iterator[sqlite3.Connection]:
        """What is not committed was never there; what is, survives a power cut."""
        one = _transaction if writes else nullcontext  # those that write come one at a time
        with closing(self._open()) as database, one(database):
            if _facts(database)["place"] != _place(self.path):
                raise InvalidInputError(
                    f"the ledger {self.path} was copied, moved or restored, so that runs may be "
                    "booked elsewhere that it does not know; if it is the one ledger of its data, "
                    f"say so with `dpsur ledger adopt {self.path}`"
                )
            yield database


# --- what runs together may spend -----------------------------------------------------------------


def may_spend(plan: Plan, *, whole: bool = False) -> tuple[Charges, float, float]:
    if not math.isfinite(plan.epsilon()):
        return [(NonPrivate(), 1)], 0.0, 0.0
    if composes(plan) and not whole:
        return list(plan.charges()), 0.0, 0.0
    return [], plan.epsilon(), plan.budget.delta


def spent(bookings: Iterable[Booking], delta: float) -> float:
    """Epsilon of all bookings, whose settings follow from nothing that a run has released."""
    bookings = list(bookings)
    left = delta - math.fsum(each.delta for each in bookings)
    # A choice without sampling is composed as randomised response, which dominates a whole run.
    wholes = [(NoisyChoice(1.0, each.epsilon), 1) for each in bookings if each.epsilon]
    charges = [*_joined(bookings), *wholes]
    return accounting_named("every-trial").epsilon(charges, left) if left > 0 else math.inf


def spent_adaptively(bookings: Iterable[Booking], total: LedgerTotal) -> float:
    """Epsilon of all bookings at the order of a total, whatever their settings follow from."""
    order = total.filter().order
    divergence, kept = _at_order(list(bookings), order)
    fits = kept <= KEPT * total.delta
    return epsilon_at(order, divergence, (1 - KEPT) * total.delta) if fits else math.inf


def share_used(bookings: Iterable[Booking], total: LedgerTotal) -> float:
    """How much of the allowance of an adaptive total is used: its epsilon is reached at 1."""
    allowed = total.filter()
    return _at_order(list(bookings), allowed.order)[0] / allowed.allowance


def _at_order(bookings: Sequence[Booking], order: float) -> tuple[float, float]:
    """The Rényi divergence of all bookings at an order, and the deltas beside it."""
    charges = _joined(bookings)
    deltas = math.fsum(each.delta for each in bookings) + noise_tail(charges, verdicts_charged=True)
    if any(isinstance(event, NonPrivate) for event, _ in charges):
        return math.inf, deltas
    parts = [count * event_divergence(event, order) for event, count in charges]
    # What is epsilon-DP has a divergence of at most epsilon, and of order times epsilon^2 / 2.
    parts += [min(each.epsilon, order * each.epsilon**2 / 2) for each in bookings]
    return math.fsum(parts), deltas


def _joined(bookings: Iterable[Booking]) -> Charges:
    made: Counter[Event] = Counter()
    for booking in bookings:
        for event, count in booking.charges:
            made[event] += count
    return list(made.items())


def _check_fits(bookings: list[Booking], total: LedgerTotal, what: str) -> None:
    if total.rule == FIXED:
        found = spent(bookings, total.delta)
        fits = found <= total.epsilon
    else:
        allowed = total.filter()
        divergence, kept = _at_order(bookings, allowed.order)
        if kept > KEPT * total.delta:
            raise BudgetError(
                f"{what} would bring the deltas of single runs in the ledger to {kept:.3g}, above "
                f"{KEPT:g} of its total delta {total.delta:g}; plan the run with a smaller delta"
            )
        found = epsilon_at(allowed.order, divergence, (1 - KEPT) * total.delta)
        fits = divergence <= allowed.allowance
    if not fits:
        raise BudgetError(
            f"{what} would bring the ledger to epsilon {found:.4g} at delta {total.delta:g}, above "
            f"its total of {total.epsilon:g}; plan a smaller run, or none"
        )


# --- rows -----------------------------------------------------------------------------------------


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _facts(database: sqlite3.Connection) -> dict[str, str]:
    try:
        facts = dict(database.execute("SELECT name, value FROM facts").fetchall())
    except sqlite3.DatabaseError:
        facts = {}
    if facts.get("format") != FORMAT:
        raise _no_ledger()
    return facts


def _no_ledger() -> InvalidInputError:
    return InvalidInputError("this file is not a ledger of dpsur", code="unknown-format")


def _totals(database: sqlite3.Connection) -> list[tuple[str, LedgerTotal]]:
    rows = database.execute("SELECT * FROM totals ORDER BY rowid").fetchall()
    return [(row[0], LedgerTotal(*row[1:])) for row in rows]


def _total(database: sqlite3.Connection) -> LedgerTotal | None:
    return next((total for _, total in reversed(_totals(database))), None)


def _set(database: sqlite3.Connection, total: LedgerTotal) -> None:
    row = (_now(), total.epsilon, total.delta, total.rule)
    database.execute("INSERT INTO totals VALUES (?, ?, ?, ?)", row)


def _bookings(database: sqlite3.Connection) -> list[Booking]:
    rows = database.execute("SELECT * FROM bookings ORDER BY rowid").fetchall()
    found = []
    for number, at, data, what, written, epsilon, delta in rows:
        charges = [(event_from_json(event), count) for event, count in json.loads(written)]
        found.append(Booking(number, at, data, what, charges, epsilon, delta))
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _place(path: Path) -> str:
    """Which file this is, whatever it is called: a copy is another one."""
    found = path.stat()
    return f"{found.st_dev}:{found.st_ino}"
