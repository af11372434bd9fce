"""What has happened so far, as counts of events."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpsur.errors import InvalidInputError
from dpsur.privacy.events import Event, Trial, event_from_json, event_to_json


@dataclass(frozen=True)
class Entry:
    """How often one kind of trial was made, and how often it was accepted."""

    trial: Trial
    trials: int
    updates: int

    def __post_init__(self) -> None:
        if not 0 <= self.updates <= self.trials:
            raise InvalidInputError(
                f"a ledger holds 0 <= updates <= trials, got {self.updates} and {self.trials}"
            )


@dataclass(frozen=True)
class Ledger:
    """Setup events, each once, and the trials in the order they were made.

    A ledger is a value: recording returns a new one. The number of rejected trials in it is private
    unless every trial is charged.
    """

    setup: tuple[Event, ...] = ()
    entries: tuple[Entry, ...] = ()

    @property
    def trials(self) -> int:
        """Candidates drawn, accepted or not."""
        return sum(entry.trials for entry in self.entries)

    @property
    def updates(self) -> int:
        """Candidates accepted."""
        return sum(entry.updates for entry in self.entries)

    def record(self, trial: Trial, *, updates: int, trials: int = 1) -> "Ledger":
        """Add a block of equal trials, of which `updates` were accepted."""
        new = Entry(trial, trials=trials, updates=updates)
        if self.entries and self.entries[-1].trial == trial:
            last = self.entries[-1]
            new = Entry(trial, last.trials + trials, last.updates + updates)
            return replace(self, entries=(*self.entries[:-1], new))
        return replace(self, entries=(*self.entries, new))

    def to_json(self) -> dict[str, Any]:
        """Write the ledger as plain values."""
        return {
            "setup": [event_to_json(event) for event in self.setup],
            "entries": [
                {"trial": event_to_json(e.trial), "trials": e.trials, "updates": e.updates}
                for e in self.entries
            ],
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Ledger":
        """Read what `to_json` wrote."""
        entries = []
        for row in values["entries"]:
            trial = event_from_json(row["trial"])
            if not isinstance(trial, Trial):
                raise InvalidInputError(f"a ledger entry must be a Trial, got {row['trial']!r}")
            entries.append(Entry(trial, trials=row["trials"], updates=row["updates"]))
        setup = tuple(event_from_json(event) for event in values["setup"])
        return Ledger(setup=setup, entries=tuple(entries))
