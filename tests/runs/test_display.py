"""What notebooks and terminals show of runs: public figures, and nothing private."""

import sys
from types import SimpleNamespace

import pandas as pd
import pytest
from torch import nn

import dpsur
from dpsur import status as display
from dpsur.cli import main
from dpsur.runs import observers as progress
from dpsur.status import silenced
from tests.conftest import blobs, small_model

METHOD = dpsur.Dpsgd(batch_size=20, updates=6, learning_rate=1.0)
SHARED = {"budget": dpsur.Budget(3.0, 1e-3), "seed": 0}


class Notebook:
    """A stand-in for IPython: what is displayed below a cell."""

    def __init__(self):
        self.shown = []
        self.display = SimpleNamespace(HTML=str, display=lambda *_, **__: self)

    def update(self, text):
        self.shown.append(text)


def test_a_notebook_gets_a_bar_with_public_figures_alone(monkeypatch):
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    notebook = Notebook()
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    gate = dpsur.Dpsur(batch_size=20, noise_multiplier=20.0, accept_ratio=2.0, updates=6)
    dpsur.fit(small_model(), blobs(), test_set=blobs(30, seed=3), method=gate, **SHARED)
    assert "6/6 updates" in notebook.shown[-1]
    assert "test accuracy" in notebook.shown[-1]
    assert not any("reject" in text or "loss" in text for text in notebook.shown)
    notebook.shown = []
    dpsur.fit(small_model(), blobs(), method=METHOD, progress=False, **SHARED)
    with silenced():
        dpsur.fit(small_model(), blobs(), method=METHOD, **SHARED)
    assert notebook.shown == []


def test_a_bar_is_shown_on_a_terminal_and_not_elsewhere(monkeypatch, capsys):
    assert progress.default_progress(()) is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(progress.default_progress(()), dpsur.ProgressBar)
    assert progress.default_progress((dpsur.ProgressBar(),)) is None
    dpsur.fit(small_model(), blobs(), method=METHOD, **SHARED)
    assert "6/6" in capsys.readouterr().err


def test_a_kernel_is_told_from_a_terminal(monkeypatch):
    assert not display.in_notebook()
    kernel = type("Shell", (), {"kernel": object()})
    fake = type("IPython", (), {"get_ipython": staticmethod(kernel)})
    monkeypatch.setitem(sys.modules, "IPython", fake)
    assert display.in_notebook()
    monkeypatch.setattr(fake, "get_ipython", staticmethod(lambda: object()))
    assert not display.in_notebook()


def test_runs_statements_schemas_and_plots_have_a_picture():
    frame = pd.DataFrame({"age": range(60), "ill": ["no", "yes"] * 30})
    schema = dpsur.Schema(
        {"age": dpsur.Number(0, 60)}, {"ill": dpsur.Category(["no", "yes", "<b>"])}
    )
    run = dpsur.fit("linear", frame, schema=schema, test_set=frame, method=METHOD, **SHARED)
    shown = run._repr_html_()
    assert "test accuracy" in shown
    assert "at delta 0.001" in shown
    assert "loss_difference" not in shown
    assert "epsilon" in run.statement._repr_html_()
    assert "number from 0 to 60" in schema._repr_html_()
    assert "&lt;b&gt;" in schema._repr_html_()  # names are escaped
    assert run.plot()._repr_png_().startswith(b"\x89PNG")


def test_a_run_without_privacy_does_not_look_private():
    run = dpsur.fit(
        nn.Linear(2, 3), blobs(), budget=dpsur.Budget(float("inf"), 1e-3), method=dpsur.Nonprivate()
    )
    assert "no guarantee of any kind" in run._repr_html_()


def test_runs_side_by_side(tmp_path, capsys):
    for name, rate in (("a", 1.0), ("b", 0.5)):
        method = dpsur.Dpsgd(batch_size=20, updates=6, learning_rate=rate)
        records = {"test_set": blobs(30, seed=3), "out": tmp_path / name}
        dpsur.fit(small_model(), blobs(), method=method, **records, **SHARED)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out
    lines = {line.split("  ")[0]: line.split()[-2:] for line in printed.splitlines()}
    assert lines["learning rate"] == ["1", "0.5"]
    assert lines["updates"] == ["6", "6"]
    assert "test accuracy" in lines
    assert "batch size" not in lines  # both have the same
    assert "trial" not in printed
    assert main(["compare", str(tmp_path / "a"), str(tmp_path)]) == 2


def test_a_misspelt_argument_names_the_right_one():
    with pytest.raises(dpsur.InvalidInputError, match="progress"):
        dpsur.fit(small_model(), blobs(), method=METHOD, progres=True, **SHARED)
