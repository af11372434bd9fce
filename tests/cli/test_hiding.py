"""`dpsur train --hide-rejections`: what can be seen of a run from outside."""

import json

import numpy as np
import pytest

from dpsur.cli import main
from dpsur.mechanism import trial as loop
from dpsur.runs.observers import ProgressBar
from tests.cli.test_commands import dpsur as command
from tests.conftest import blobs

COMMON = ["--updates", "12", "--batch-size", "10", "--val-batch-size", "8", "--delta", "1e-3",
          "--epsilon", "8", "--noise-multiplier", "20", "--accept-ratio", "2",
          "--learning-rate", "3", "--device", "cpu"]  # fmt: skip


@pytest.fixture
def points(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "cache"))
    data, test = blobs(200), blobs(30, seed=4)
    np.savez(
        tmp_path / "points.npz", x=data.inputs.numpy(), y=data.targets.numpy(),
        x_test=test.inputs.numpy(), y_test=test.targets.numpy(), classes=3,
    )  # fmt: skip
    return ["--task", f"npz:{tmp_path / 'points.npz'}", *COMMON]


@pytest.fixture
def watch(monkeypatch, tmp_path, capsys, points):
    """Run, and tell what was shown after how many trials, and what was printed at the end."""
    made = []
    take_step = loop.take_step
    monkeypatch.setattr(
        loop, "take_step", lambda *run, **more: made.append(run) or take_step(*run, **more)
    )

    def watched(seed, *more):
        made.clear()
        shown = []
        monkeypatch.setattr(ProgressBar, "_say", lambda _, text: shown.append((len(made), text)))
        folder = tmp_path / f"run-{seed}-{'-'.join(more)}"
        status, out, _ = command(
            "train", "--out", str(folder), "--seed", str(seed), *points, *more, capsys=capsys
        )
        assert status == 0
        lines = [
            line.replace(folder.name, "run")
            for line in out.splitlines()
            # these follow from the weights
            if not line.startswith(("test accuracy", "  share of the most", "warning: "))
        ]
        return shown, lines, len(made), folder

    return watched


def test_nothing_that_is_shown_depends_on_rejections(watch):
    first, *others = (watch(seed, "--hide-rejections", "constant") for seed in range(3))
    shown, lines, made, _ = first
    assert len(shown) > 10
    assert shown[-1] == (made, f"{made}/{made} trials")
    assert shown[0] == (
        0,
        f"12 updates in {made} trials, whatever is rejected, at noise multiplier 20.000, "
        "proven-pld",
    )
    for other in others:
        assert other[:3] == first[:3]
    rows = [(path / "private" / "metrics.jsonl").read_text() for *_, path in (first, *others)]
    searches = {text.count('"accepted"', 0, text.rfind('"accepted": true')) for text in rows}
    assert len(searches) > 1  # so it is not for want of rejections
    assert not any("accuracy" in text or "epsilon" in text for _, text in shown[1:])
    assert any("epsilon" in line for line in lines)
    # the control: without the option the same look tells the runs apart
    plain = [watch(seed) for seed in range(3)]
    assert len({made for _, _, made, _ in plain}) > 1
    assert any(shown != plain[0][0] for shown, *_ in plain)


def test_the_weights_are_the_same(watch):
    folders = [watch(0, *way)[-1] for way in ([], ["--hide-rejections", "constant"])]
    one, other = (folder / "release" / "model.safetensors" for folder in folders)
    assert one.read_bytes() == other.read_bytes()


def test_a_stopped_run_resumes_hidden(points, tmp_path, monkeypatch, capsys, watch):
    *_, made, whole = watch(0, "--hide-rejections", "constant")
    broken = tmp_path / "broken"
    trials = ProgressBar.trials

    def stop(self, progress, verdicts):
        trials(self, progress, verdicts)
        if progress.ledger.trials == made - 20:  # long after the last update
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressBar, "trials", stop)
    arguments = ["--out", str(broken), "--seed", "0", "--hide-rejections", "constant", *points]
    command("train", *arguments, "--checkpoint-every", "7", capsys=capsys)
    monkeypatch.setattr(ProgressBar, "trials", trials)
    assert not (broken / "release").exists()
    config = json.loads((broken / "private" / "config.json").read_text())
    assert config["hide_rejections"] == "constant"
    status, _, error = command(
        "train", "--resume", str(broken), "--hide-rejections", "no", capsys=capsys
    )
    assert status == 2
    assert "leave out --hide-rejections" in error
    assert main(["train", "--resume", str(broken)]) == 0
    for name in ("model.safetensors", "privacy.json", "PRIVACY.md"):
        assert (broken / "release" / name).read_bytes() == (whole / "release" / name).read_bytes()
    rows = (broken / "private" / "metrics.jsonl").read_text()
    assert rows.count('"kind": "trial"') == made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hide-rejections", "often"], "must be one of no, delay, constant; got 'often'"),
        (["--hide-rejections", "delay", "--show-private"], "shows what --hide-rejections delay"),
        (["--hide-rejections", "constant", "--method", "dpsgd"], "no candidate is rejected"),
    ],
)
def test_bad_input(arguments, message, points, tmp_path, capsys):
    if "dpsgd" in arguments:
        points = [*points[:4], "--batch-size", "10", "--noise-multiplier", "20"]
    status, _, error = command(
        "train", "--out", str(tmp_path / "run"), *points, *arguments, capsys=capsys
    )
    assert status == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
