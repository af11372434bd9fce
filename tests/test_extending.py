"""The page on extending: its files, listed as it says, do what it says."""

import json
import re
import sys
import types
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur.per_example.rules as rules
from dpsur.errors import InvalidInputError
from dpsur.features import features_named
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.methods import Dpsgd
from dpsur.networks import build_network
from dpsur.per_example import clipped_sum
from dpsur.privacy.budget import Budget
from dpsur.runs.fit import fit
from dpsur.tasks import task_named
from reproduction.networks import TemperedSigmoid
from tests.cli.test_commands import dpsur
from tests.conftest import blobs, small_model
from tests.per_example.test_gradient_rules import (
    ROWS,
    Through,
    assert_same,
    clipped,
    floats,
    gradients,
)
from tests.reproduction.test_command import run as reproduce
from tests.test_architecture import ARROWS, LEAVES, imported

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(
    re.findall(
        r"^`((?:src|reproduction)/\S+\.py)`:\n\n```python\n(.*?)^```$", PAGE, re.DOTALL | re.M
    )
)
# the list, the file that holds it, and the entry
ENTRIES = re.findall(
    r"in\s+`([A-Z]+)`\s+\(`((?:src|reproduction)/\S+\.py)`\)\s+as\s+`([^`]+)`", PAGE
)
BUDGET = Budget(1.0, 1e-4)


def module_name(path: str) -> str:
    plain = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__")
    return plain.replace("/", ".")


@pytest.fixture
def page(monkeypatch):
    """The page's files as modules, listed for the time of a test."""
    names = {}
    for path, code in FILES.items():
        module = types.ModuleType(module_name(path))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, path, "exec"), vars(module))
        names |= {name: value for name, value in vars(module).items() if name[:2] != "__"}
    for attribute, path, entry in ENTRIES:
        home = import_module(module_name(path))
        for key, value in eval(f"{{{entry}}}", {**names, **vars(home)}).items():
            assert key not in getattr(home, attribute), f"{key} exists by now: take another example"
            monkeypatch.setitem(getattr(home, attribute), key, value)
    return types.SimpleNamespace(**names)


def test_every_kind_is_shown_and_listed():
    assert len(FILES) == PAGE.count("```python") == 7
    lists = {attribute for attribute, _, _ in ENTRIES}
    assert lists == {"RULES", "LAYERS", "FEATURES", "NETWORKS", "TASKS", "METHODS", "EXPERIMENTS"}
    assert len(ENTRIES) == len(lists) + 1  # two methods


def test_every_file_that_the_page_names_exists():
    named = set(re.findall(r"`((?:src|reproduction|tests)/[^`\s]*)`", PAGE))
    assert set(FILES) < named
    for path in named - set(FILES):
        assert (ROOT / path).exists(), path
    for path in FILES:
        assert not (ROOT / path).exists(), f"{path} exists by now: take another example"


@pytest.mark.parametrize("path", FILES)
def test_files_keep_to_the_rooms_and_to_the_length_of_lines(path, tmp_path):
    file = tmp_path / "example.py"
    file.write_text(FILES[path])
    room = path.split("/")[2] if path.startswith("src/") else "reproduction"
    for name in imported(file):
        parts = name.split(".")
        if room == "reproduction" or parts[0] != "dpsur" or len(parts) < 2 or parts[1] in LEAVES:
            continue
        assert parts[1] in ARROWS[room] | {room}, f"{path} imports {name}"
    assert all(len(line) <= 100 for line in FILES[path].splitlines())


SHAPES = {
    "one slope": (lambda: nn.PReLU(), (4,)),
    "channels": (lambda: nn.PReLU(3), (3,)),
    "image": (lambda: nn.PReLU(3), (3, 4, 5)),
    "one slope, image": (lambda: nn.PReLU(), (3, 4, 5)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rule_agrees_with_one_example_at_a_time(shape, page, monkeypatch):
    layer, size = SHAPES[shape]
    torch.manual_seed(0)
    inputs = floats(*size).double()
    model = Through(layer().double(), inputs).double()
    assert rules.RULES[rules.kind_of(model.layer)] is page.prelu
    problem = Problem(model, F.cross_entropy, Examples(inputs, torch.arange(ROWS) % 3))
    params = problem.initial_params()
    rows = gradients(problem, params, problem.train)

    def check():
        # afresh each time, as rules are looked up when a model is first seen
        again = Problem(model, F.cross_entropy, problem.train)
        for bound in (0.01, 1e6):
            ours = clipped_sum(again, params, problem.train, bound).params
            assert_same(ours, clipped(rows, bound), 1e-9)

    check()
    code = FILES["src/dpsur/per_example/rules/prelu.py"]
    wrong = {}
    exec(code.replace("input.clamp(max=0)", "input"), wrong)
    monkeypatch.setitem(rules.RULES, nn.PReLU, wrong["prelu"])
    with pytest.raises(AssertionError):
        check()


def test_the_network_builds_by_name_and_takes_another_activation(page):
    description = {"name": "residual-mlp", "inputs": 2, "width": 8, "classes": 3}
    model = build_network(description)
    assert model(torch.zeros(5, 2)).shape == (5, 3)
    tempered = build_network({**description, "activation": "tempered-sigmoid"})
    assert sum(isinstance(part, TemperedSigmoid) for part in tempered.modules()) == 2
    with pytest.raises(InvalidInputError, match="width must be a whole number"):
        build_network({**description, "width": 0})


def test_the_features_are_those_of_single_records(page):
    features = features_named("squares")
    assert features.output_shape((3,)) == (6,)
    assert torch.equal(page.Squares()(torch.tensor([[2.0, -3.0]])), torch.tensor([[2, -3, 4, 9.0]]))
    with pytest.raises(InvalidInputError, match="squares needs vectors"):
        features.layers((1, 8, 8))


def test_the_task_keeps_its_promise(page):
    task = task_named("rings")
    (train, test), again = task.load(None), task.load(None)
    assert (len(train), len(test)) == (600, 400)
    assert torch.equal(train.inputs, again[0].inputs)
    assert train.targets.unique().tolist() == [0, 1]
    assert all(description["name"] for description in task.networks.values())


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "dpsgd-sign", "--updates", "30"),
        (
            "--method",
            "dpsgd-sign",
            "--gate",
            "coin",
            "--features",
            "squares",
            "--learning-rate",
            "0.1",
        ),
        ("--method", "dpsgd-ts", "--updates", "30"),
    ],
    ids=" ".join,
)
def test_what_is_listed_can_be_trained_released_and_read_back(options, page, tmp_path, capsys):
    out = str(tmp_path / "run")
    place = ("--out", out, "--device", "cpu", "--seed", "1", "--json")
    budget = ("--task", "rings", "--epsilon", "4", "--delta", "1e-4")
    status, printed, err = dpsur("train", *budget, *options, *place, capsys=capsys)
    assert status == 0, err
    trained = json.loads(printed)
    assert 0 < trained["guarantee"]["epsilon"] <= 4
    if "squares" in options:  # the rings as they are take more than a few steps
        assert trained["scores"]["accuracy"] > 0.7
    status, printed, _ = dpsur("evaluate", out, "--json", capsys=capsys)
    assert status == 0
    assert json.loads(printed)["scores"] == pytest.approx(trained["scores"])
    assert dpsur("verify", out, capsys=capsys)[0] == 0


def test_the_method_steps_by_signs_at_the_price_of_dpsgd(page):
    model, train = small_model(), blobs()
    settings = {"batch_size": 64, "updates": 1, "schedule": "constant", "momentum": 0.0}
    method = page.DpsgdSign(learning_rate=0.25, **settings)
    run = fit(model, (train.inputs, train.targets), budget=BUDGET, method=method, seed=1)
    for before, after in zip(model.parameters(), run.model.parameters(), strict=True):
        assert torch.allclose((after - before).abs(), torch.tensor(0.25))
    other = fit(model, (train.inputs, train.targets), budget=BUDGET, method=Dpsgd(**settings))
    assert run.plan.typical == other.plan.typical


def test_the_gate_keeps_every_other_candidate_and_all_are_charged(page):
    method = page.Alternating(batch_size=20, updates=8, learning_rate=0.5)
    run = fit(
        small_model(), blobs(60), method=method, budget=BUDGET, accounting="every-trial", seed=0
    )
    trials = [row for row in run.private.rows if row["kind"] == "trial"]
    assert [row["accepted"] for row in trials] == [True, False] * 4
    assert run.private.ledger.trials == 8
    plain = Dpsgd(batch_size=20, updates=8, learning_rate=0.5)
    other = fit(small_model(), blobs(60), method=plain, budget=BUDGET, accounting="every-trial")
    assert run.epsilon == other.epsilon


def test_the_gate_releases_what_can_be_verified_and_is_refused_elsewhere(page, tmp_path, capsys):
    out = str(tmp_path / "run")
    asked = ("--task", "rings", "--method", "alternating", "--updates", "6", "--seed", "1")
    rest = ("--epsilon", "4", "--delta", "1e-4", "--device", "cpu")
    status, _, err = dpsur("train", *asked, *rest, "--out", str(tmp_path / "no"), capsys=capsys)
    assert status == 2
    assert "use accounting every-trial" in err
    charged = ("--accounting", "every-trial", "--out", out)
    assert dpsur("train", *asked, *rest, *charged, capsys=capsys)[0] == 0
    assert dpsur("verify", out, capsys=capsys)[0] == 0
    assert dpsur("evaluate", out, capsys=capsys)[0] == 0


def test_the_experiment_makes_its_rows_once_and_its_table(page, tmp_path, capsys):
    places = ("--results", str(tmp_path / "results"), "--out", str(tmp_path / "docs"))
    status, out, err = reproduce("ring-features", *places, capsys=capsys)
    assert status == 0, err
    assert "6 rows, 6 of them new" in out
    assert "0 of them new" in reproduce("ring-features", *places, capsys=capsys)[1]
    lines = (tmp_path / "docs" / "tables" / "ring-features.csv").read_text().splitlines()
    table = {line.split(",")[0]: float(line.split(",")[1]) for line in lines[1:]}
    assert table["squares"] > 80
    assert table["squares"] > table["vectors"] > 50
    rows = (tmp_path / "results" / "ring-features.jsonl").read_text().splitlines()
    assert all(json.loads(row)["epsilon"]["proven"] <= 1 for row in rows)
