"""The README's commands and code blocks do what they say."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpsur.cli import main

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "out" / "release" / "PRIVACY.md").exists()


def test_own_model_takes_ten_lines():
    (code,) = blocks("python")
    lines = [line for line in code.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 10


def commands(prefix: str) -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith(prefix)]


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = [command.split()[1] for command in commands("make ")]
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize("command", commands("dpsur "))
def test_command_lines_are_understood(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*shlex.split(command)[1:], "--help"])
    assert stop.value.code == 0


@pytest.mark.slow
def test_the_demo_ends_above_92_percent(tmp_path):
    """Run what `make demo` runs: epsilon 3 at delta 1e-5, proven."""
    printed = subprocess.run(
        ["make", "--always-make", "--dry-run", "demo", f"DEMO_OUT={tmp_path}/demo"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    lines = [line for line in printed.splitlines() if line.startswith(".venv/bin/dpsur ")]
    assert [line.split()[1] for line in lines] == ["train", "evaluate"]
    for line in lines:
        result = subprocess.run(
            [sys.executable, "-m", "dpsur", *shlex.split(line)[1:]],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    accuracy = float(re.search(r"test accuracy (\d+\.\d+)%", result.stdout)[1])
    epsilon = float(re.search(r"epsilon (\d+\.\d+) at delta 1e-05", result.stdout)[1])
    assert accuracy > 92.0
    assert 2.9 < epsilon <= 3.0
    assert "accounting proven" in result.stdout


def test_the_stated_range_of_proven_figures_is_that_of_the_rows():
    lines = (ROOT / "results" / "accounting.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    at_three = [row["epsilon"]["proven"] for row in rows if row["config"]["epsilon"] == 3]
    low, high = re.search(r"its epsilon 3 is (\d\.\d) to (\d\.\d) when it is proved", TEXT).groups()
    assert float(low) == round(min(at_three), 1)
    assert float(high) == round(max(at_three), 1)


def test_the_stated_accuracy_is_that_of_the_rows():
    lines = (ROOT / "results" / "demo.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    demo = [row["accuracy"] for row in rows if row["arm"] == "dpsur, proven (make demo)"]
    plain = [row["accuracy"] for row in rows if row["arm"] == "dpsgd"]
    assert len(demo) == len(plain) == 5
    stated = int(re.search(r"test accuracy of about (\d+)%", TEXT)[1])
    assert stated == round(100 * sum(demo) / 5)
    assert sum(plain) > sum(demo)  # which the README says
