"""What has happened so far, as counts of events."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpsur.errors import InvalidInputError
from dpsur.privacy.events import (
    Event,
    Gaussian,
    SampledGaussian,
    Step,
    Trial,
    event_from_json,
    event_to_json,
)


@dataclass(frozen=True)
class Entry:
    """How often one kind of step was made, and how often it was accepted.

    A step that is no trial, such as a noisy norm that later trials are steered by, is always kept.
    """

    step: Step
    trials: int
    updates: int

    def __post_init__(self) -> None:
        if not 0 <= self.updates <= self.trials:
            raise InvalidInputError(
                f"a ledger holds 0 <= updates <= trials, got {self.updates} and {self.trials}"
            )
        if not isinstance(self.step, Trial) and self.updates != self.trials:
            raise InvalidInputError(
                f"{self.step} is always kept, but {self.updates} of {self.trials} were noted so"
            )


@dataclass(frozen=True, repr=False)
class Ledger:
    """Setup events, each once, and the steps in the order they were made.

    A ledger is a value: recording returns a new one. The number of rejected trials in it is private
    unless every trial is charged.
    """

    setup: tuple[Event, ...] = ()
    entries: tuple[Entry, ...] = ()

    def __repr__(self) -> str:
        return f"Ledger({len(self.setup)} setup events, {len(self.entries)} kinds of steps)"

    @property
    def steps(self) -> int:
        """Steps of every kind."""
        return sum(entry.trials for entry in self.entries)

    @property
    def trials(self) -> int:
        """Candidates drawn, accepted or not."""
        return sum(entry.trials for entry in self.entries if isinstance(entry.step, Trial))

    @property
    def updates(self) -> int:
        """Candidates accepted."""
        return sum(entry.updates for entry in self.entries if isinstance(entry.step, Trial))

    def record(self, step: Step, *, updates: int, trials: int = 1) -> "Ledger":
        """Add a block of equal steps, of which `updates` were accepted."""
        new = Entry(step, trials=trials, updates=updates)
        if self.entries and self.entries[-1].step == step:
            last = self.entries[-1]
            new = Entry(step, last.trials + trials, last.updates + updates)
            return replace(self, entries=(*self.entries[:-1], new))
        return replace(self, entries=(*self.entries, new))

    def to_json(self) -> dict[str, Any]:
        """Write the ledger as plain values."""
        return {
            "setup": [event_to_json(event) for event in self.setup],
            "entries": [
                {"step": event_to_json(e.step), "trials": e.trials, "updates": e.updates}
                for e in self.entries
            ],
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Ledger":
        """Read what `to_json` wrote."""
        entries = []
        for row in values["entries"]:
            step = event_from_json(row["step"])
            if not isinstance(step, (Trial, SampledGaussian, Gaussian)):
                raise InvalidInputError(f"a ledger entry must be a step, got {row['step']!r}")
            entries.append(Entry(step, trials=row["trials"], updates=row["updates"]))
        setup = tuple(event_from_json(event) for event in values["setup"])
        return Ledger(setup=setup, entries=tuple(entries))
