"""The command as a person meets it: help, lists, training, evaluation and bad input."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpsur.cli import main
from dpsur.cli.run_options import UnnamedFolder
from dpsur.errors import InvalidInputError
from dpsur.privacy.statement import format_epsilon
from dpsur.tasks import mnist_5k

QUICK = ["--updates", "4", "--batch-size", "64", "--noise-multiplier", "20"]


def dpsur(*arguments, capsys):
    try:
        status = main(list(arguments))
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_is_readable(capsys):
    status, out, _ = dpsur("train", "--help-all", capsys=capsys)
    assert status == 0
    for option in ("--task", "--method", "--epsilon", "--delta", "--accounting", "--resume",
                   "--accept-threshold", "--show-private", "--seed"):  # fmt: skip
        assert option in out
    assert "None" not in out
    assert max(map(len, out.splitlines())) <= 110
    assert "(default: dpsgd; dpsur with --preset paper" in " ".join(out.split())


def test_lists(capsys):
    assert "mnist-5k" in dpsur("tasks", capsys=capsys)[1]
    out = dpsur("methods", capsys=capsys)[1]
    assert out.startswith("dpsur ")
    assert "\ndpsgd " in out
    assert "None" not in out


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "--out", str(folder), "--seed", "3", *QUICK]) == 0
    return folder


def test_train_then_evaluate_agree(finished, capsys):
    status, out, _ = dpsur("evaluate", str(finished), "--json", capsys=capsys)
    assert status == 0
    result = json.loads(out)
    assert result["task"] == "mnist-5k"
    assert 0 <= result["scores"]["accuracy"] <= 1
    rows = [
        json.loads(r) for r in (finished / "private" / "metrics.jsonl").read_text().splitlines()
    ]
    last = [row for row in rows if row["kind"] == "evaluation"][-1]
    assert last["accuracy"] == result["scores"]["accuracy"]
    status, out, _ = dpsur("evaluate", str(finished / "release"), capsys=capsys)
    assert status == 0
    assert re.search(r"test accuracy \d+\.\d\d%", out)
    assert "accounting proven (proved)" in out


def test_the_seed_is_in_no_released_file(finished):
    assert '"seed": 3' in (finished / "private" / "config.json").read_text()
    statement = (finished / "release" / "privacy.json").read_text()
    assert '"seed"' not in statement
    assert '"seeded": true' in statement


def test_default_progress_tells_nothing_private(tmp_path, capsys):
    status, out, err = dpsur(
        "train", "--out", str(tmp_path / "r"), "--accounting", "published", "--updates", "4",
        "--batch-size", "64", "--noise-multiplier", "20", capsys=capsys,
    )  # fmt: skip
    assert status == 0
    assert "epsilon" in err
    assert "test accuracy" in err
    public = "on about 64 fresh records: one that is better by C_v = 0.001 or more passes with"
    assert f"{public} probability 0.50, a worse one with 0.16" in err
    assert re.search(r"up to \d+ trials; how many are rejected stays private", err)
    progress = err[err.index("4 updates at noise") :]
    shown = (progress + out).replace("log loss", "")  # of public test records
    for word in ("reject", "loss", "accepted", "trial", "seconds"):
        assert word not in shown
    assert re.search(r"privacy: proven epsilon \d+\.\d+ .*claimed by the paper.*not proved", out)
    assert "warning: the published accounting is not proved" in err


def test_show_private_warns_and_shows(tmp_path, capsys):
    _, out, err = dpsur(
        "train", "--out", str(tmp_path / "r"), "--show-private", "--gate", "coin", *QUICK,
        capsys=capsys,
    )  # fmt: skip
    assert "do not share" in err
    assert re.search(r"trial 4: (accepted|rejected)", err)
    assert "loss_difference" in err
    trials, accepted, rejected = map(int, re.search(COUNTS, out).groups())
    assert (accepted, rejected) == (4, err.count(": rejected"))
    assert trials == accepted + rejected
    assert "(private: do not share)" in out


COUNTS = r"(\d+) trials: (\d+) accepted, (\d+) rejected"


def test_counts_are_shown_where_every_trial_is_charged(tmp_path, capsys):
    _, out, err = dpsur(
        "train", "--out", str(tmp_path / "r"), "--method", "dpsur", "--accounting", "every-trial",
        "--trials", "5", "--noise-multiplier", "20", capsys=capsys,
    )  # fmt: skip
    assert "how many are rejected is public" in err
    trials, accepted, rejected = map(int, re.search(COUNTS, out).groups())
    assert trials == accepted + rejected == 5
    statement = json.loads((tmp_path / "r" / "release" / "privacy.json").read_text())
    assert statement["accepted_updates"] == accepted


def test_a_selective_run_and_its_plain_twin_are_compared(tmp_path, capsys):
    """Both epsilons on the terminal; a table that says what the test did to the accuracy."""
    folders = {}
    for method in ("dpsur", "dpsgd"):
        folders[method] = str(tmp_path / method)
        _, out, err = dpsur(
            "train", "--out", folders[method], "--method", method, "--learning-rate", "2",
            "--schedule", "constant", "--batch-size", "64", "--updates", "4", "--seed", "1",
            "--noise-multiplier", "20", capsys=capsys,
        )  # fmt: skip
        assert ("every candidate is tested" in err) == (method == "dpsur")
        assert ("the paper's analysis says" in out) == (method == "dpsur")
        assert "rejected" not in out
    status, out, _ = dpsur("evaluate", *folders.values(), capsys=capsys)
    assert status == 0
    head, selective, plain, _, sentence = out.splitlines()
    assert head.split()[:4] == ["run", "method", "test", "score"]
    statement = json.loads((tmp_path / "dpsur" / "release" / "privacy.json").read_text())
    for figure in (statement["epsilon"]["published"], statement["guarantee"]["epsilon"]):
        assert format_epsilon(figure) in selective.split()
    accuracies = [float(re.search(r"accuracy (\d+\.\d+)%", row)[1]) for row in (selective, plain)]
    gain = accuracies[0] - accuracies[1]
    assert f"{'gained' if gain > 0 else 'cost'} {abs(gain):.1f} points" in sentence
    status, out, _ = dpsur("evaluate", *folders.values(), "--json", capsys=capsys)
    assert [found["task"] for found in json.loads(out)] == ["mnist-5k"] * 2


def test_a_default_run_is_called_dpsgd(finished):
    release = finished / "release"
    assert json.loads((release / "privacy.json").read_text())["method"] == "dpsgd"
    for name in ("PRIVACY.md", "README.md"):
        text = (release / name).read_text()
        assert "| Method | `dpsgd` |" in text
        assert "- dpsur\n" not in text  # no tag of a method that did not run


def test_json_result(tmp_path, capsys):
    _, out, err = dpsur(
        "train", "--out", str(tmp_path / "r"), "--json", "--method", "dpsgd", "--updates", "3",
        capsys=capsys,
    )  # fmt: skip
    result = json.loads(out)
    assert err == ""
    assert result["guarantee"]["epsilon"] <= 3.0
    assert result["guarantee"]["accounting"] == "proven"


BAD = [
    (["--task", "mnist-6k"], "unknown task 'mnist-6k'; choose one of mnist-5k"),
    (["--method", "sgd"], "sgd|[unknown-name]"),
    (["--accounting", "gdp"], "gdp|[unknown-name]"),
    (["--epsilon", "-1"], "epsilon|got -1|[out-of-range]"),
    (["--epsilon", "nan"], "argument --epsilon: 'nan' is not a finite number"),
    (["--epsilon", "three"], "invalid float value: 'three'"),
    (["--delta", "2"], "delta|got 2.0|[out-of-range]"),
    (["--method", "dpsgd-ts", "--features", "scattering"], "choose --features pixels"),
    (["--learning-rate", "-2"], "learning_rate|got -2.0|[out-of-range]"),
    (["--learning-rate", "inf"], "argument --learning-rate: 'inf' is not a finite number"),
    (["--batch-size", "4001"], "batch_size 4001|4000|[batch-too-large]"),
    (["--batch-size", "0"], "batch_size|got 0|[out-of-range]"),
    (["--val-batch-size", "5000"], "val_batch_size 5000|[batch-too-large]"),
    (
        ["--epsilon", "0.001", "--noise-multiplier", "1", "--batch-size", "2000"],
        "[budget-too-small]",
    ),
    (["--noise-multiplier", "1", "--updates", "5000"], "budget of 3|[over-budget]"),
    (["--trials", "5"], "trials 5 cannot be fixed under the proven-pld accounting"),
    (
        ["--accounting", "every-trial", "--gate", "loss", "--updates", "5"],
        "updates 5 cannot be fixed",
    ),
    (["--accounting", "every-trial", "--gate", "coin"], "coin|every-trial|[not-covered]"),
    (["--on-reject", "keep-momentum"], "keep-momentum|proven|[not-covered]"),
    (["--accept-ratio", "0.5"], "accept_ratio|got 0.5"),
    (["--gate", "coin", "--accept-threshold", "-1"], "belongs to the gate loss"),
    (["--method", "dpsgd", "--accept-threshold", "0"], "belongs to the gate loss"),
    (["--optimizer", "lion"], "invalid choice: 'lion'"),
    (["--learning", "1"], "unrecognized arguments: --learning 1"),
    (["--epsilom", "1"], "did you mean --epsilon? (see: dpsur train --help)"),
    (["--gate", "coins"], "invalid choice: 'coins'; did you mean coin?"),
    (["--data-dir", ""], "argument --data-dir: expected a value, got ''"),
    (["--task", "csv:nowhere.csv"], "there is no file nowhere.csv"),
    (["--epsilon", "1e-9"], "[budget-too-small]"),
    (["--checkpoint-every", "0"], "checkpoint_every must be"),
    (["--evaluate-every", "-1"], "evaluate_every must be"),
    (["--device", "tpu9"], "unknown device 'tpu9'"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD, ids=lambda v: " ".join(v[:2]) if isinstance(v, list) else ""
)
def test_bad_input_is_one_line_status_two_and_writes_nothing(arguments, message, tmp_path, capsys):
    out_folder = tmp_path / "deep" / "run"
    status, out, err = dpsur("train", "--out", str(out_folder), *arguments, capsys=capsys)
    assert status == 2
    assert out == ""
    assert all(part in err for part in message.split("|"))
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_cuda_absent(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    status, _, err = dpsur("train", "--out", str(tmp_path / "r"), "--device", "cuda", capsys=capsys)
    assert status == 2
    assert "no usable CUDA device" in err
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_folder_gets_a_new_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/mnist-5k-dpsgd", "runs/mnist-5k-dpsgd-2", "runs/mnist-5k-dpsgd-3"):
        status, out, err = dpsur("train", "--method", "dpsgd", *QUICK, capsys=capsys)
        assert status == 0
        assert f"writing the run to {folder}\n" in err
        assert f"release: {folder}/release " in out
        assert (tmp_path / folder / "release" / "privacy.json").is_file()
    np.savez(tmp_path / "secret.npz", x=np.zeros((200, 3)), y=np.arange(200) % 2)
    options = [
        "--task",
        f"npz:{tmp_path}/secret.npz",
        "--classes",
        "2",
        "--method",
        "dpsgd",
        *QUICK,
        "--quiet",
    ]
    status, out, err = dpsur("train", *options, capsys=capsys)
    assert (status, err) == (0, "")
    assert "release: runs/secret-dpsgd/release " in out


def test_runs_that_begin_together_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [UnnamedFolder("mnist", "dpsgd") for _ in range(3)]
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mnist-dpsgd-2").symlink_to("nowhere")
    for folder in folders:
        folder.check_new()
    for folder, name in zip(folders, ("", "-3", "-4"), strict=True):
        for _ in range(2):
            folder.create()
            assert folder.root == Path("runs") / f"mnist-dpsgd{name}"
        assert folder.private.is_dir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Path("runs").write_text("")
    for attempt in ("check_new", "create"):
        with pytest.raises(InvalidInputError, match="runs/mnist-dpsgd.* --out"):
            getattr(UnnamedFolder("mnist", "dpsgd"), attempt)()


def test_unwritable_output(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        status, _, err = dpsur("train", "--out", str(path), capsys=capsys)
        assert status == 2
        assert str(path) in err
        assert len(err.splitlines()) == 1


def test_a_used_folder_is_refused(finished, capsys):
    status, _, err = dpsur("train", "--out", str(finished), capsys=capsys)
    assert status == 2
    assert "not empty" in err
    status, _, err = dpsur("train", "--resume", str(finished), capsys=capsys)
    assert status == 2
    assert "has finished" in err


def test_resume_takes_no_settings(finished, capsys):
    _, _, err = dpsur("train", "--resume", str(finished), "--epsilon", "9", capsys=capsys)
    assert "leave out --epsilon" in err
    _, _, err = dpsur("train", "--resume", str(finished / "nowhere"), capsys=capsys)
    assert "holds no run to resume" in err


@pytest.mark.parametrize("command", ["evaluate", "report", "verify", "plot"])
@pytest.mark.parametrize("name", ["", "nowhere", "file"])
def test_a_folder_without_a_release(command, name, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    status, _, err = dpsur(command, str(tmp_path / name), capsys=capsys)
    assert status == 2
    assert "holds no release" in err
    assert err.endswith("give the folder of a run that has finished\n")


@pytest.mark.parametrize("command", [["attack", "--roc"], ["plot", ".", "--out"]])
def test_files_of_figures_are_checked_first(command, tmp_path, capsys):
    status, _, err = dpsur(*command, str(tmp_path / "figure.foo"), capsys=capsys)
    assert (status, "must end in .svg, .png or .pdf" in err) == (2, True)
    status, _, err = dpsur(*command, str(tmp_path / "nowhere" / "figure.png"), capsys=capsys)
    assert (status, "there is no folder" in err, len(err.splitlines())) == (2, True, 1)


def test_a_command_with_a_typo(capsys):
    status, _, err = dpsur("trian", capsys=capsys)
    assert (status, "invalid choice: 'trian'; did you mean train?" in err) == (2, True)


def test_evaluate_of_a_damaged_release(finished, tmp_path, capsys):
    copy = tmp_path / "release"
    copy.mkdir()
    for file in (finished / "release").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    status, _, err = dpsur("evaluate", str(copy), capsys=capsys)
    assert status == 2
    assert "damaged release" in err


def test_evaluate_prints_no_guarantee_that_does_not_follow(finished, tmp_path, capsys):
    copy = tmp_path / "release"
    shutil.copytree(finished / "release", copy)
    path = copy / "privacy.json"
    statement = json.loads(path.read_text())
    statement["guarantee"]["epsilon"] /= 2
    path.write_text(json.dumps(statement))
    status, out, err = dpsur("evaluate", str(copy), capsys=capsys)
    assert (status, out) == (2, "")
    assert "does not follow from its own parameters" in err
    assert f"dpsur verify {copy}" in err


def test_the_embedded_task_without_its_package(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mnist_5k, "find_spec", lambda name: None)
    status, _, err = dpsur("train", "--out", str(tmp_path / "r"), capsys=capsys)
    assert status == 2
    assert "pip install 'dpsur[demo]'" in err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_key_in_stored_settings_is_refused(tmp_path, capsys):
    private = tmp_path / "run" / "private"
    private.mkdir(parents=True)
    (private / "config.json").write_text('{"task": "mnist-5k", "surprise": 1}')
    status, _, err = dpsur("train", "--resume", str(tmp_path / "run"), capsys=capsys)
    assert status == 2
    assert "damaged" in err


def test_module_entry_point():
    result = subprocess.run(
        [sys.executable, "-m", "dpsur", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("dpsur 0.")


def test_the_help_says_which_defaults_are_the_tasks(capsys):
    shown = " ".join(dpsur("train", "--help-all", capsys=capsys)[1].split())
    assert "learning rate at the start (default: the task's, else 4; the gate block" in shown
    assert "momentum (sgd) (default: 0.9)" in shown  # of which no task has one of its own
    assert "(default: the task's, else linear)" in shown
