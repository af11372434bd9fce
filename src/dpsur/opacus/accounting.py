"""Accountants with the interface of Opacus: figures come from privacy loss distributions."""

from collections.abc import Mapping, Sequence
from typing import Any

from dpsur.errors import InvalidInputError
from dpsur.privacy.account import ACCOUNTING, Account
from dpsur.privacy.events import Entry, NonPrivate, SampledGaussian, Trial
from dpsur.privacy.planning import calibrate

History = list[tuple[float, float, int]]


class IAccountant:
    """A history of (noise multiplier, sample rate, number of steps), and what it spends."""

    DEFAULT_ALPHAS = (*(1 + x / 10.0 for x in range(1, 100)), *range(12, 64))

    def __init__(self, history: History | None = None) -> None:
        self.history: History = history or []

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        kind = (noise_multiplier, sample_rate)
        if self.history and self.history[-1][:2] == kind:
            self.history[-1] = (*kind, self.history[-1][2] + 1)
        else:
            self.history.append((*kind, 1))

    def get_epsilon(self, delta: float, **_: Any) -> float:
        return spent(self.history, delta)

    def get_privacy_spent(self, *, delta: float, alphas: Any = None) -> tuple[float, float]:
        """Epsilon, and the first of `alphas`: no Rényi order is chosen here."""
        return self.get_epsilon(delta), (alphas or self.DEFAULT_ALPHAS)[0]

    def __len__(self) -> int:
        return sum(count for *_, count in self.history)

    @classmethod
    def mechanism(cls) -> str:
        return "prv"

    def state_dict(self, destination: dict[str, Any] | None = None) -> dict[str, Any]:
        found = {} if destination is None else destination
        return found | {"history": list(self.history), "mechanism": self.mechanism()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if not state_dict or "history" not in state_dict or "mechanism" not in state_dict:
            raise InvalidInputError(
                "the state of an accountant has the keys 'history' and 'mechanism'; use state_dict"
            )
        if state_dict["mechanism"] != self.mechanism():
            raise InvalidInputError(
                f"the state is that of mechanism {state_dict['mechanism']!r}, this accountant's is "
                f"{self.mechanism()!r}; create one of the same kind"
            )
        self.history = [(float(noise), float(q), int(n)) for noise, q, n in state_dict["history"]]


class PRVAccountant(IAccountant):
    """Privacy loss distributions, rounded up."""


class RDPAccountant(IAccountant):
    """The same figures under the name of the Rényi accountant, which are below its own."""

    @classmethod
    def mechanism(cls) -> str:
        return "rdp"


class LedgerView(IAccountant):
    """The ledger of an engine with the names of an accountant. Only the engine charges steps."""

    def __init__(self, ledger: Account | None, earlier: History) -> None:
        self._ledger, self._earlier = ledger, earlier

    def __getattr__(self, name: str) -> Any:
        ledger = self.__dict__.get("_ledger")
        if name.startswith("__") or ledger is None:
            raise InvalidInputError("call make_private first") if ledger is None else AttributeError
        return getattr(ledger, name)

    def __reduce__(self) -> Any:
        """A file holds the history, as an accountant of its own."""
        return PRVAccountant, (self.history,)

    @property
    def history(self) -> History:  # type: ignore[override]
        entries = () if self._ledger is None else self._ledger.charged.entries
        return [*self._earlier, *map(_plain_step, entries)]

    def get_epsilon(self, delta: float, **_: Any) -> float:
        if self._earlier or self._ledger is None:
            return spent(self.history, delta)
        return self._ledger.get_epsilon(delta)

    def guarantee(self, delta: float | None = None) -> float:
        """Epsilon that holds whenever the loop stops, with the steps of earlier trainings."""
        assert self._ledger is not None
        if not self._earlier:
            return self._ledger.guarantee(delta)
        half = (self._ledger.delta if delta is None else delta) / 2
        return spent(self._earlier, half) + self._ledger.guarantee(half)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Refused: a step is charged by `optimizer.step()`."""
        raise InvalidInputError(
            f"a step of noise multiplier {noise_multiplier:g} and sample rate {sample_rate:g} was "
            "to be added to the ledger of an engine, which charges each optimizer.step() by "
            "itself; leave it out"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refused: a ledger is restored with the weights that it belongs to."""
        raise InvalidInputError(
            f"the ledger of an engine cannot take over a history ({len(state_dict)} entries); "
            "resume with PrivacyEngine.load_checkpoint"
        )


def _plain_step(entry: Entry) -> tuple[float, float, int]:
    update = entry.step.update if isinstance(entry.step, Trial) else None
    if isinstance(update, SampledGaussian) and entry.step == Trial(update):
        return update.noise_multiplier, update.sample_rate, entry.trials
    if isinstance(update, NonPrivate):
        return 0.0, 1.0, entry.trials
    raise InvalidInputError(
        "a history of Opacus has no place for the tests of a gate, which are paid for; read "
        "get_epsilon, or leave the gate out"
    )


def spent(history: Sequence[tuple[float, float, int]], delta: float) -> float:
    if any(not noise for noise, _, count in history if count):
        return float("inf")
    ledger = Account.without_limit(delta)
    for noise, rate, count in history:
        for _ in range(count):
            ledger.charge(Trial(SampledGaussian(rate, noise)))
    return ledger.get_epsilon(delta) if history else 0.0


_KINDS: dict[str, type[IAccountant]] = {"prv": PRVAccountant, "rdp": RDPAccountant}


def create_accountant(mechanism: str) -> IAccountant:
    if mechanism not in _KINDS:
        raise InvalidInputError(
            f"there is no accountant {mechanism!r}; known are {', '.join(sorted(_KINDS))}"
        )
    return _KINDS[mechanism]()


def register_accountant(
    mechanism: str, accountant: type[IAccountant], *, force: bool = False
) -> None:
    if mechanism in _KINDS and not force:
        raise InvalidInputError(f"accountant {mechanism!r} exists; pass force=True to replace it")
    _KINDS[mechanism] = accountant


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: int | None = None,
    steps: int | None = None,
    accountant: str = "prv",
    **_: Any,
) -> float:
    """The least noise multiplier for a budget, by privacy loss distributions.

    `epsilon_tolerance` and `alphas` of Opacus have no effect.
    """
    if accountant == "gdp":
        raise InvalidInputError(
            "accountant 'gdp' can report too low an epsilon; leave it out or use 'prv'"
        )
    if (epochs is None) == (steps is None):
        raise InvalidInputError("give epochs or steps, and not both")
    updates = steps if steps is not None else int((epochs or 0) / sample_rate)
    return calibrate(
        epsilon=target_epsilon,
        delta=target_delta,
        sample_rate=sample_rate,
        updates=updates,
        accounting=ACCOUNTING,
    )
