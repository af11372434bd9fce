"""What takes long says so, once, and only to people."""

import io
import time

import pytest

from dpsur import status
from dpsur.status import silenced


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(status, "PATIENCE", 0.05)


def waited(seconds=0.3):
    with status.status("choosing noise"):
        time.sleep(seconds)


def test_one_line_where_it_takes_long(impatient, capsys):
    waited()
    shown = capsys.readouterr()
    assert shown.err == "dpsur: choosing noise ...\n"
    assert shown.out == ""


def test_no_line_where_it_does_not(capsys):
    waited(0.0)
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_no_line_where_it_is_to_be_quiet(impatient, capsys):
    with silenced():
        waited()
    assert capsys.readouterr().err == ""
    with silenced(quiet=False):
        waited()
    assert capsys.readouterr().err != ""


def test_a_terminal_has_it_at_once(monkeypatch):
    pytest.importorskip("rich")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    waited()
    assert "choosing noise" in terminal.getvalue()


def test_a_closed_stream_is_no_error(impatient, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with status.status("choosing noise"):
        stream.close()
        time.sleep(0.2)
    waited()


def test_how_far_the_work_is(capsys, monkeypatch):
    monkeypatch.setattr(status, "BETWEEN", -1.0)
    status.advance(1, 4)  # no work is shown
    with status.status("fitting"):
        for done in range(4):
            status.advance(done, 4)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", about")[0] for line in lines] == [
        f"dpsur: fitting: {done} of 4" for done in (1, 2, 3)
    ]
    with silenced(), status.status("fitting"):
        status.advance(1, 4)
    assert not capsys.readouterr().err
