"""The page of a run that is under way: it reloads itself, holds public figures, and ends."""

import re

import numpy as np
import pytest

import dpsur
from dpsur.cli import main
from dpsur.reports import html as live
from dpsur.reports.html import LivePage
from tests.conftest import blobs


@pytest.fixture
def every_page(monkeypatch):
    """All pages that are written, in their order."""
    pages = []
    usual = live.write_atomically

    def write(path, content, mode):
        pages.append((content.decode(), mode))
        usual(path, content, mode=mode)

    monkeypatch.setattr(live, "SECONDS", 0.0)
    monkeypatch.setattr(live, "write_atomically", write)
    return pages


def train(page, **given):
    found = blobs(60)
    dpsur.fit(
        "auto",
        (found.inputs, found.targets),
        classes=3,
        test_set=(found.inputs, found.targets),
        budget=dpsur.Budget(8.0, 1e-3),
        intervals=dpsur.Intervals(evaluate_every=2),
        observers=[page],
        seed=0,
        **given,
    )


def test_the_page_follows_the_run_and_ends(tmp_path, every_page):
    method = dpsur.Dpsgd(batch_size=20, updates=6, learning_rate=1.0)
    with LivePage(tmp_path / "report.html", "own") as page:
        train(page, method=method)
        assert 'http-equiv="refresh"' in (tmp_path / "report.html").read_text()
    last = (tmp_path / "report.html").read_text()
    assert "http-equiv" not in last
    assert "The run has finished." in last
    assert "6 of 6 updates" in last
    assert "<svg" in last
    assert len(every_page) > 4
    assert {mode for _, mode in every_page} == {0o600}
    shown = [re.search(r"(\d+) of 6 updates", text).group(1) for text, _ in every_page]
    assert shown == sorted(shown)


def test_a_page_of_a_run_that_fails_says_so(tmp_path):
    def stop():
        raise KeyboardInterrupt

    class Stop(LivePage):
        def trials(self, progress, verdicts):
            super().trials(progress, verdicts)
            stop()

    with pytest.raises(KeyboardInterrupt), Stop(tmp_path / "report.html", "own") as page:
        train(page, method=dpsur.Dpsgd(batch_size=20, updates=6, learning_rate=1.0))
    text = (tmp_path / "report.html").read_text()
    assert "stopped before its end" in text
    assert "http-equiv" not in text


def test_where_rejections_are_hidden_nothing_tells_of_them(tmp_path, every_page):
    method = dpsur.Dpsur(gate="loss", updates=4, batch_size=20, val_batch_size=10)
    with LivePage(tmp_path / "report.html", "own") as page:
        train(page, method=method, hide_rejections="constant")
    for text, _ in every_page:
        assert "Public test records" not in text
        assert "updates</td>" not in text


def test_train_ends_with_the_report(tmp_path, capsys, every_page):
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(60) % 2, classes=2)
    words = ["train", "--task", f"npz:{tmp_path / 'own.npz'}", "--delta", "1e-3", "--quiet"]
    run = tmp_path / "run"
    assert main([*words, "--max-updates", "3", "--out", str(run), "--report"]) == 0
    text = (run / "report.html").read_text()
    assert "The guarantee" in text
    assert "http-equiv" not in text
    assert any('http-equiv="refresh"' in page for page, _ in every_page)
    capsys.readouterr()
