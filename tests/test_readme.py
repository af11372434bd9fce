"""The commands, code blocks and figures of the README and the overview are right."""

import ast
import csv
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from dpsur.cli import main
from dpsur.methods import METHODS
from dpsur.methods.gradient_method import GradientMethod
from dpsur.options import flag
from dpsur.tasks import TASKS
from reproduction.differences import difference
from reproduction.experiments.accuracy import paper_accuracy, summary
from reproduction.experiments.best import summary as best_summary
from reproduction.experiments.demo import PAPER, TWIN, scores
from reproduction.experiments.membership import summary as attacks
from reproduction.experiments.robustness import records as rate_records
from reproduction.experiments.sixteen import coins, compared, counts, grouped

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
OVERVIEW = (ROOT / "docs" / "overview.md").read_text()
MOST_WORDS = 800
PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))


def rows_of(name: str) -> list[dict]:
    lines = (ROOT / "results" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), {})
    assert ("run.save" in code) == (tmp_path / "out" / "release" / "PRIVACY.md").exists()
    assert 2.9 < float(capsys.readouterr().out.splitlines()[-1]) <= 3.0


def test_own_model_and_own_loop_take_ten_statements():
    codes = blocks("python")
    assert len(codes) == 2
    for code in codes:
        statements = [
            node
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.stmt) and not isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        assert len(statements) <= 10


def commands(prefix: str) -> list[str]:
    text = TEXT if prefix == "make " else TEXT + OVERVIEW
    found = [line for block in blocks("sh", text) for line in block.splitlines()]
    lines = [line.split("#")[0].strip() for line in found]
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


def make_demo(folder: Path, command: str, *given: str) -> str:
    """Run `make demo`, with another command in place of the installed one; what it printed."""
    shutil.copy(ROOT / "Makefile", folder)
    stub = folder / ".venv" / "bin" / "dpsur"
    stub.parent.mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", ".venv/.installed"):
        (folder / name).touch()
    stub.write_text(f'#!/bin/sh\n{command} "$@"\n')
    stub.chmod(0o755)
    return subprocess.run(
        ["make", "demo", *given], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def test_make_demo_tests_the_release_that_it_trained(tmp_path):
    lines = [line for line in make_demo(tmp_path, "echo asked").splitlines() if "asked" in line]
    *trainings, evaluate = (line.removeprefix("asked ") for line in lines)
    folders = [train.split(" --out ")[1] for train in trainings]
    assert evaluate == f"evaluate {' '.join(folders)}"
    assert all(Path(folder).is_absolute() for folder in folders)
    # the paper's algorithm, its twin with the same settings and no test, and the default
    paper, twin, auto = trainings
    assert "--method dpsur" in paper
    assert "--method" not in auto
    given = dict(zip(*[iter(twin.split()[1:])] * 2, strict=True))
    assert given["--method"] == "dpsgd"
    settings = TASKS["mnist-5k"].settings["dpsur"]
    assert {name: type(value)(given[flag(name)]) for name, value in settings.items()} == settings


def test_the_demo_ends_above_92_percent(tmp_path):
    """Epsilon 3 at delta 1e-5, proven; its last lines are the table that the README shows."""
    command = f"{shlex.quote(sys.executable)} -m dpsur"
    printed = make_demo(tmp_path, command, f"DEMO_OUT={tmp_path}/demo")
    for run in ("algorithm-1", "no-test", "auto"):
        assert (tmp_path / "demo" / run / "release" / "PRIVACY.md").is_file()
        (row,) = re.findall(rf"^{run} .*$", printed, flags=re.MULTILINE)
        assert float(re.search(r"accuracy (\d+\.\d+)%", row)[1]) > 92.0
        published, proven, _ = map(float, row.split()[-3:])
        assert 2.9 < proven <= 3.0
        assert (published < proven) == (run == "algorithm-1")
        (shown,) = re.findall(rf"^{run} .*$", TEXT, flags=re.MULTILINE)
        assert shown.split()[-3:] == row.split()[-3:]
    assert re.search(r"Testing candidates (gained|cost) \d+\.\d points here", printed)


def test_the_stated_range_of_proven_figures_is_that_of_the_rows():
    rows = rows_of("accounting")
    at_three = [row["epsilon"]["proven_pld"] for row in rows if row["config"]["epsilon"] == 3]
    low, high = re.search(
        r"its epsilon 3 is (\d\.\d+) to (\d\.\d+) when it is proved", OVERVIEW
    ).groups()
    assert float(low) == math.ceil(100 * min(at_three)) / 100  # rounded up, as bounds are
    assert float(high) == math.ceil(100 * max(at_three)) / 100
    attained = [row["attained"] for row in rows if row["config"]["epsilon"] == 3]
    for page in ("accounting", "proof"):  # a lower bound, rounded down
        text = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
        assert f"{math.floor(100 * min(attained)) / 100}" in text


def test_the_stated_accuracy_is_that_of_the_rows():
    rows = rows_of("demo")
    demo = [row["accuracy"] for row in rows if row["arm"] == "auto (make demo)"]
    assert len(demo) == 5
    text = " ".join(TEXT.split())
    stated = int(re.search(r"the default reaches about (\d+)%", text)[1])
    assert stated == round(100 * sum(demo) / 5)
    cost = -difference(scores(rows, PAPER), scores(rows, TWIN)).value
    assert f"Over five seeds the test costs {cost:.2f} points" in text
    page = " ".join((ROOT / "docs" / "algorithm_1.md").read_text().split())
    assert f"the test costs {cost:.2f} points at the same proven epsilon" in page


def test_the_stated_speed_is_that_of_the_rows():
    cells = {}
    for row in rows_of("bench_gpu"):
        cell = cells.setdefault((row["network"], row["batch_size"]), {})
        cell[row["arm"]] = row["time_over_plain"]
    stated = re.findall(r"^\| `([a-z0-9-]+)` \| (\d+) \| (.*) \|$", OVERVIEW, flags=re.MULTILINE)
    assert len(stated) == 6
    for network, batch, figures in stated:
        times = cells[network, int(batch)]
        arms = ("dpsgd-captured", "dpsur-captured", "opacus-hooks")
        assert figures == " | ".join(f"{times[arm]:.1f}" for arm in arms)
    faster = [r["time_over_plain"] for r in rows_of("bench_gpu_faster_host") if _small_trial(r)]
    first, second, third = (f"{ratio:.2f}" for ratio in faster)
    (reviews,) = (
        r["time_over_plain"]
        for r in rows_of("bench_gpu_faster_host")
        if (r["network"], r["arm"]) == ("lstm-imdb", "dpsur-captured")
    )
    said = f"three took {first}, {second} and {third}, and {reviews:.2f} on `l"
    assert said in " ".join(OVERVIEW.split())


def _small_trial(row):
    return row["arm"] == "dpsur-captured" and row["network"].endswith("-28")


def test_what_is_said_of_the_experiments_is_what_rows_say():
    distance = {}
    with (ROOT / "docs" / "tables" / "trajectory.csv").open() as file:
        for row in csv.DictReader(file):
            distance[row["arm"]] = float(row["last_half"])
    assert distance["DPSGD, same epsilon"] < distance["DPSUR"] < distance["DPSGD"]
    assert {abs(row["best_beta"]) < 0.01 for row in rows_of("acceptance")} == {True}


def test_what_is_said_of_the_accuracies_is_what_rows_say():
    groups = {(r["task"], r["arm"], r["epsilon"]): r for r in summary(rows_of("accuracy"))}
    released = [r for (_, arm, _), r in groups.items() if arm == "released-code"]
    near = sum(abs(record["difference"]) <= 0.7 for record in released)
    assert f"reaches {near} of its 16 figures for DPSUR to 0.7 points" in " ".join(OVERVIEW.split())
    for (task, arm, _), printed in groups.items():
        if arm == "published" and task != "imdb":
            assert printed["seeds"] == 5
            assert printed["difference"] < 0
            assert task != "fmnist" or -2.75 < printed["difference"] < -0.75
    # "with it, a coin in place of the test comes within about a point"
    tossed = [cell for cell in coins(grouped(rows_of("accuracy"))) if cell["data"] != "IMDb"]
    assert max(max(-cell["low"], cell["high"]) for cell in tossed) < 1.2
    as_printed = [r for (_, arm, _), r in groups.items() if arm == "published"]
    met = sum(abs(record["difference"]) <= 0.7 for record in as_printed)
    assert f"Algorithm 1 as printed meets {met}," in " ".join(OVERVIEW.split())
    cells = compared(grouped(rows_of("accuracy")), paper_accuracy())
    ahead, _, behind = counts(cells)
    said = f"ahead of Algorithm 1 in {ahead} of {len(cells)} cells and behind in {behind}"
    assert f"significantly {said}" in " ".join(OVERVIEW.split())


def test_what_is_said_of_learning_rates_is_what_rows_say():
    records = rate_records(rows_of("robustness"))
    for epsilon in (1, 3):
        found = {r["what"]: r for r in records if r["epsilon"] == epsilon}
        plain, selective = found["DP-SGD, constant rate"], found["selective, every trial charged"]
        assert plain["best"] >= max(selective["best"], found["selective, proven"]["best"])


def test_what_is_said_of_attacks_is_what_rows_say():
    found = {(r["task"], r["target"], r["attack"]): r for r in attacks(rows_of("membership"))}
    for attack in ("shadow", "white-box"):
        assert found["fmnist", "nonprivate", attack]["accuracy"] >= 0.58
        assert f"{found['cifar10', 'nonprivate', attack]['accuracy']:.2f}" == "0.75"
    private = [r for (_, target, attack), r in found.items() if target != "nonprivate"]
    learned = [r for r in private if r["attack"] in ("shadow", "white-box")]
    assert max(record["accuracy"] for record in learned) < 0.51
    # "where a better one finds a little"
    better = found["fmnist", "dpsur, ε 4", "rmia-online"]
    assert 0.5 < better["low"] < better["accuracy"] < 0.55


def test_every_method_and_task_is_there():
    listed = re.findall(r"^\| `([a-z-]+)` \|[^|]*\|$", OVERVIEW, flags=re.MULTILINE)
    assert listed == list(METHODS)
    assert all(f"`{task}`" in OVERVIEW for task in TASKS)
    # the gate works with every method except the last two
    selective = [issubclass(METHODS[name], GradientMethod) for name in listed]
    assert selective == [True] * 5 + [False] * 2


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "#")):
            assert ((ROOT / page).parent / target.split("#")[0]).exists(), target


def test_the_map_of_the_paper_names_what_there_is():
    text = (ROOT / "docs" / "paper_map.md").read_text()
    for row in re.findall(r"^\| (?!-)(.*) \|$", text, flags=re.MULTILINE):
        cells = row.split(" | ")
        for path in re.findall(r"`([a-z_/0-9]+(?:\.py|\.csv|/))`", " ".join(cells[2:])):
            roots = (ROOT / "src" / "dpsur", ROOT / "tests", ROOT)
            assert any((root / path).exists() for root in roots), path


def test_every_package_is_explained():
    text = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "dpsur"
    rooms = {p.name for p in source.iterdir() if p.is_dir() and p.name != "__pycache__"}
    table = " ".join(re.findall(r"^\| (`[a-z_]+/`.*?) \|", text, flags=re.MULTILINE))
    assert set(re.findall(r"`([a-z_]+)/`", table)) == rooms


def test_the_stated_versions_are_those_of_the_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = re.search(r"needs\s+Python (\S+) or newer and PyTorch (\S+) or newer", OVERVIEW)
    assert project["requires-python"] == f">={needs[1]}"
    assert f"torch>={needs[2]}" in project["dependencies"]
    tested = re.search(r"tested are Python ([\d., and]+), PyTorch ([\d.]+)\s", OVERVIEW)
    named = [text.split(" :: ")[-1] for text in project["classifiers"] if "3." in text]
    assert re.findall(r"3\.\d+", tested[1]) == named
    assert tested[2] == needs[2]


def test_it_is_short():
    assert len(TEXT.split()) <= MOST_WORDS


def test_the_two_findings_are_on_the_first_page():
    text = " ".join(TEXT.split())
    pattern = r"epsilon 3 is (\d\.\d+) to (\d\.\d+) when it is proved"
    low, high = re.search(pattern, text).groups()
    assert f"is {low} to {high} when it is proved" in " ".join(OVERVIEW.split())
    assert "rejected gradients that leak through the momentum" in text


def test_the_accuracy_on_reviews_is_that_of_the_rows():
    cell = {"task": "imdb-words", "epsilon": 1, "method": "dpsgd"}
    (found,) = (one for one in best_summary(rows_of("best")) if cell.items() <= one.items())
    pattern = r"reach ([\d.]+)% at a proven epsilon of 1, where the paper's DPSUR has ([\d.]+)%"
    (said,) = re.findall(pattern, " ".join(OVERVIEW.split()))
    assert said == (f"{found['mean']:.1f}", f"{found['paper']:.1f}")
