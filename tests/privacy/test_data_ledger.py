"""A ledger of a data set: never above its total, and nothing lost, whatever happens to runs."""

import os
import random
import shutil
import signal
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from dpsur.cli import main
from dpsur.engine import procedure
from dpsur.errors import BudgetError, FileError, InvalidInputError
from dpsur.privacy import data_ledger
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.budget import Budget
from dpsur.privacy.data_ledger import (
    ADAPTIVE,
    FIXED,
    DataLedger,
    LedgerTotal,
    may_spend,
    spent,
    spent_adaptively,
)
from dpsur.privacy.events import LossTest, NonPrivate, SampledGaussian, Trial
from dpsur.privacy.planning import repeated_plan
from tests.mutants import Mutant, law_tests

DELTA = 1e-5
RULES = pytest.mark.parametrize("rule", [ADAPTIVE, FIXED])


def plan(noise=2.0, steps=100, rate=0.02):
    trial = Trial(SampledGaussian(rate, noise))
    return repeated_plan(Budget(100.0, DELTA), "every-trial", trial, steps)


def ledger(folder, rule=ADAPTIVE, epsilon=2.0, unit="record"):
    return DataLedger.create(folder / "data.ledger", unit, LedgerTotal(epsilon, DELTA, rule))


def fill(book, most=1000):
    """Book until one is refused; returns how many there are."""
    for count in range(most):
        try:
            book.book(plan(), "record", b"data", "dpsgd")
        except BudgetError:
            return count
    raise AssertionError("nothing was refused")


@RULES
def test_bookings_end_at_the_total(tmp_path, rule):
    book = ledger(tmp_path, rule)
    count = fill(book)
    assert len(book.bookings()) == count > 2
    whole = accounting_named("every-trial").epsilon([(plan().typical, 100 * count)], DELTA)
    more = accounting_named("every-trial").epsilon([(plan().typical, 100 * (count + 1))], DELTA)
    assert whole <= 2.0
    if rule == FIXED:
        assert more > 2.0
        assert spent(book.bookings(), DELTA) == pytest.approx(whole, rel=1e-6)
    else:
        assert spent_adaptively(book.bookings(), book.total) <= 2.0


def test_the_fixed_rule_affords_more(tmp_path):
    (tmp_path / "other").mkdir()
    assert fill(ledger(tmp_path, FIXED)) > fill(ledger(tmp_path / "other", ADAPTIVE))


def test_what_was_selected_counts_as_a_whole(tmp_path):
    trial = Trial(SampledGaussian(0.02, 3.0), LossTest(0.05, 4.0, 0.0))
    selective = dpsur.Account.for_updates(trial, 20, delta=1e-7).plan
    charges, epsilon, delta = may_spend(selective)
    assert (charges, delta) == ([], 1e-7)
    assert epsilon == selective.epsilon()
    book = ledger(tmp_path, FIXED, epsilon=20.0)
    book.book(selective, "record", b"data", "dpsur")
    assert epsilon <= spent(book.bookings(), DELTA) * (1 + 1e-9)
    assert epsilon <= spent_adaptively(book.bookings(), LedgerTotal(20.0, DELTA)) + 0.5
    book.book(plan(), "record", b"data", "dpsgd")
    alone = plan().epsilon(DELTA / 2)
    assert max(epsilon, alone) < spent(book.bookings(), DELTA) <= epsilon + alone


def test_pure_epsilon_has_at_least_its_divergence():
    """Randomised response, which the charge of a whole run has to dominate."""
    for epsilon in (0.1, 1.0, 3.0):
        p = 1 / (1 + torch.exp(torch.tensor(-epsilon, dtype=torch.float64)))
        whole = [data_ledger.Booking("", "", "", "", [], epsilon, 0.0)]
        for order in (1.5, 2.0, 8.0, 64.0):
            exact = torch.log(
                p**order * (1 - p) ** (1 - order) + (1 - p) ** order * p ** (1 - order)
            )
            found, _ = data_ledger._at_order(whole, order)
            assert float(exact) / (order - 1) <= found * (1 + 1e-12)


def test_a_run_without_privacy_is_refused_by_a_total(tmp_path):
    free = repeated_plan(Budget(float("inf"), DELTA), "every-trial", Trial(NonPrivate()), 3)
    with pytest.raises(BudgetError, match="epsilon inf"):
        ledger(tmp_path).book(free, "record", b"data", "nonprivate")


@pytest.mark.parametrize("rule", [ADAPTIVE, pytest.param(FIXED, marks=pytest.mark.slow)])
def test_hundred_runs_at_once_some_of_them_killed(tmp_path, rule):
    """Whatever was confirmed to a process is there, and all of it fits the total."""
    book = ledger(tmp_path, rule)
    plan().epsilon()  # computed once, before the processes
    draw, children = random.Random(0), []
    for number in range(100):
        child = os.fork()
        if child == 0:
            try:
                found = book.book(plan(), "record", b"data", "dpsgd")
                (tmp_path / f"confirmed-{number}").write_text(found)
                os._exit(0)
            except BudgetError:
                os._exit(1)
            except BaseException:
                os._exit(2)
        children.append(child)
        if draw.random() < 0.4:
            time.sleep(draw.random() * 0.01)
            os.kill(child, signal.SIGKILL)
    ends = [os.waitpid(child, 0)[1] for child in children]
    killed = sum(os.WIFSIGNALED(end) for end in ends)
    assert not any(os.WIFEXITED(end) and os.WEXITSTATUS(end) == 2 for end in ends)
    confirmed = {path.read_text() for path in tmp_path.glob("confirmed-*")} - {""}
    held = [booking.id for booking in book.bookings()]
    assert len(held) == len(set(held))
    assert confirmed <= set(held)
    assert len(held) <= len(confirmed) + killed
    assert spent(book.bookings(), DELTA) <= 2.0
    assert killed > 10
    fill(book)
    (tmp_path / "alone").mkdir()
    assert len(book.bookings()) == fill(ledger(tmp_path / "alone", rule))


def test_a_copy_is_refused_until_it_is_adopted(tmp_path):
    book = ledger(tmp_path)
    book.book(plan(), "record", b"data", "dpsgd")
    shutil.copy(book.path, tmp_path / "copy.ledger")
    copy = DataLedger(tmp_path / "copy.ledger")
    with pytest.raises(InvalidInputError, match="copied, moved or restored"):
        copy.book(plan(), "record", b"data", "dpsgd")
    with pytest.raises(InvalidInputError, match="copied, moved or restored"):
        copy.bookings()
    copy.adopt()
    assert len(copy.bookings()) == 1
    book.path.rename(tmp_path / "renamed.ledger")  # the same file under another name
    assert len(DataLedger(tmp_path / "renamed.ledger").bookings()) == 1


def test_what_is_no_ledger_is_refused(tmp_path):
    (tmp_path / "text").write_text("not a ledger of anything, and long enough to be read as one")
    with pytest.raises(InvalidInputError, match="not a ledger"):
        DataLedger(tmp_path / "text").bookings()
    with pytest.raises(FileError, match="there is no ledger"):
        DataLedger(tmp_path / "nothing").bookings()
    book = ledger(tmp_path)
    with pytest.raises(InvalidInputError, match="never written over"):
        ledger(tmp_path)
    assert book.path.stat().st_mode & 0o077 == 0


def test_a_ledger_of_persons_refuses_runs_on_records(tmp_path):
    book = ledger(tmp_path, unit="person")
    with pytest.raises(InvalidInputError, match="protects a person"):
        book.book(plan(), "record", b"data", "dpsgd")
    book.book(plan(), "person", b"data", "dpsgd")


def test_data_are_named_by_a_keyed_digest(tmp_path):
    (tmp_path / "other").mkdir()
    books = [ledger(tmp_path), ledger(tmp_path / "other")]
    for data in (b"one", b"one", b"two"):
        for book in books:
            book.book(plan(steps=5), "record", data, "dpsgd")
    first, second = ([row.data for row in book.bookings()] for book in books)
    assert first[0] == first[1] != first[2]
    assert not set(first) & set(second)


# --- runs -----------------------------------------------------------------------------------------


def fitted(book, out=None, **more):
    data = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    return dpsur.fit(
        nn.Linear(6, 3),
        data,
        budget=dpsur.Budget(1.0, 1e-6),
        method=dpsur.Dpsgd(updates=4, batch_size=8),
        ledger=book.path,
        progress=False,
        out=out,
        **more,
    )


def test_fit_books_before_it_starts_and_a_resumed_run_once(tmp_path):
    book = ledger(tmp_path)
    fitted(book, tmp_path / "run")
    assert [row.what for row in book.bookings()] == ["dpsgd"]
    shutil.rmtree(tmp_path / "run" / "release")
    fitted(book, tmp_path / "run", resume=True)
    assert len(book.bookings()) == 1
    (tmp_path / "run" / "private" / "booking").unlink()
    shutil.rmtree(tmp_path / "run" / "release")
    fitted(book, tmp_path / "run", resume=True)
    assert len(book.bookings()) == 2  # nothing says that it was booked


def test_a_run_that_is_refused_draws_nothing(tmp_path, monkeypatch):
    book = ledger(tmp_path, epsilon=0.01)

    def started(*_, **__):
        raise AssertionError("statistics were drawn")

    monkeypatch.setattr("dpsur.runs.session.compute_inputs", started)
    with pytest.raises(BudgetError, match="above its total of 0.01"):
        fitted(book)
    assert book.bookings() == []


def engine(data, **options):
    model, private = nn.Linear(6, 3), dpsur.PrivacyEngine()
    _, _, loader = private.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        **options,
    )
    return private, loader


def test_an_engine_books_before_its_first_batch(tmp_path):
    data = TensorDataset(torch.randn(60, 6), torch.arange(60) % 3)
    book = ledger(tmp_path)
    private, loader = engine(data, steps=20, ledger=book.path)
    assert book.bookings() == []
    next(iter(loader))
    next(iter(loader))
    assert [row.what for row in book.bookings()] == ["custom-loop"]
    resumed, loader = engine(data, steps=20, ledger=book.path)
    resumed.load_state_dict(private.state_dict())
    next(iter(loader))
    assert len(book.bookings()) == 1
    with pytest.raises(InvalidInputError, match="a ledger books what was planned"):
        engine(data, ledger=book.path)


def test_two_engines_on_one_data_set_are_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(procedure, "_warned", [])
    data = TensorDataset(torch.randn(60, 6), torch.arange(60) % 3)
    for _ in range(3):
        engine(data, steps=2)
    assert caplog.text.count("another engine has trained on this data set") == 1


def test_the_command_shows_what_is_booked(tmp_path, capsys):
    path = str(tmp_path / "digits.ledger")
    assert main(["ledger", "create", path, "--epsilon", "3", "--delta", "1e-5"]) == 0
    train = [
        "train",
        "--task",
        "mnist-5k",
        "--method",
        "dpsgd",
        "--epsilon",
        "1",
        "--delta",
        "1e-6",
    ]
    train += ["--max-updates", "1", "--quiet", "--device", "cpu", "--ledger", path]
    assert main([*train, "--out", str(tmp_path / "run")]) == 0
    assert main(["ledger", "show", path]) == 0
    shown = capsys.readouterr().out
    assert "dpsgd" in shown
    assert "1 run on 1 version of the data, unit: one record" in shown
    assert main(["ledger", "report", path, "--json"]) == 0
    assert main(["ledger", "total", path, "--epsilon", "0.001", "--delta", "1e-5"]) == 2
    assert "what is booked already" in capsys.readouterr().err


# --- mutants --------------------------------------------------------------------------------------


def bookings_of_many_processes_fit():
    """Each process waits between its check and its entry, until another has checked too."""
    check = data_ledger._check_fits

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        book = ledger(folder, FIXED)

        def check_then_wait(*given):
            check(*given)
            (folder / f"{os.getpid()}.checked").touch()
            last = time.monotonic() + 3.0  # nobody comes while one of them holds the ledger
            while time.monotonic() < last and len(list(folder.glob("*.checked"))) < 2:
                time.sleep(0.02)

        children = []
        for _ in range(3):
            child = os.fork()
            if child == 0:
                try:
                    data_ledger._check_fits = check_then_wait
                    book.book(plan(steps=2000), "record", b"data", "dpsgd")
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        assert book.bookings()
        assert spent(book.bookings(), DELTA) <= 2.0


def reads_before_others_write(monkeypatch):
    monkeypatch.setattr(data_ledger, "_transaction", nullcontext)


def does_not_look_at_the_total(monkeypatch):
    monkeypatch.setattr(data_ledger, "_check_fits", lambda *_: None)


MUTANTS = [
    Mutant(bookings_of_many_processes_fit, reads_before_others_write),
    Mutant(bookings_of_many_processes_fit, does_not_look_at_the_total),
]
test_law_holds, test_mutant_is_killed = law_tests(MUTANTS)
