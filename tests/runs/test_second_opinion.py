"""`dpsur verify` asks a second library, so that a fault of our accountant cannot confirm itself."""

import json

import pytest
import torch
from torch import nn

import dpsur
from dpsur.cli import main
from dpsur.methods import METHODS
from dpsur.privacy.accountants import pld
from dpsur.runs.verification import verification

RECORDS = 200
KINDS = {
    "plain": ("dpsgd", "proven", {"updates": 30, "noise_multiplier": 2.0}),
    "trials": ("dpsur", "every-trial", {"trials": 12, "noise_multiplier": 2.0}),
}


def forget():
    for cached in (pld.sampled_gaussian, pld.dominating, pld._total):
        cached.cache_clear()


@pytest.fixture
def forgotten():
    """No distribution of a test is used by another one."""
    forget()
    yield
    forget()


def release_of(kind, folder):
    name, accounting, options = KINDS[kind]
    torch.manual_seed(0)
    x = torch.randn(RECORDS, 4)
    run = dpsur.fit(
        nn.Linear(4, 2), (x, (x.sum(1) > 0).long()), budget=dpsur.Budget(20.0, 1e-3),
        method=METHODS[name](batch_size=20, **options), accounting=accounting, seed=1, device="cpu",
    )  # fmt: skip
    return run.save(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_release_is_confirmed(kind, tmp_path, capsys, forgotten):
    folder = release_of(kind, tmp_path / "run")
    assert main(["verify", str(folder)]) == 0
    assert " confirmed by dp-accounting 0.6" in capsys.readouterr().out
    assert main(["verify", str(folder), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["independent"]
    assert found["independent"] == pytest.approx(found["epsilon"], rel=1e-6)
    assert found["library"].startswith("dp-accounting 0.6")


REAL = {name: getattr(pld, name) for name in ("connect", "repeat", "epsilon_at")}


def losses_rounded_down(monkeypatch):
    def lower(first, deltas, width):
        found = REAL["connect"](first, deltas, width)
        return found._replace(first=found.first - 1)

    monkeypatch.setattr(pld, "connect", lower)


def upper_end_dropped(monkeypatch):
    """What lies above is cut off, and does not become an infinite loss."""

    def without(found, count):
        whole = REAL["repeat"](found, count)
        return whole._replace(chances=whole.chances[: len(whole.chances) // 2], infinite=0.0)

    monkeypatch.setattr(pld, "repeat", without)


def one_repetition_too_few(monkeypatch):
    monkeypatch.setattr(pld, "repeat", lambda found, count: REAL["repeat"](found, count - 1))


def smallest_direction(monkeypatch):
    def smaller(self, delta):
        return min(REAL["epsilon_at"](one, self.width, delta) for one in (self.add, self.remove))

    monkeypatch.setattr(pld.LossDistribution, "epsilon", smaller)


MUTANTS = [losses_rounded_down, upper_end_dropped, one_repetition_too_few, smallest_direction]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_a_wrong_accountant_states_is_refused(mutant, tmp_path, monkeypatch, forgotten):
    """Its own recomputation confirms it: no other check of `verify` finds a fault."""
    mutant(monkeypatch)
    found = verification(release_of("plain", tmp_path / "run"))
    (opinion,) = found.opinions
    assert found.faults == [opinion.describe()]
    assert "is too low: dp-accounting 0.6" in opinion.describe()
