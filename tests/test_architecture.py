"""The packages and the one-way arrows between them, read from the imports."""

import ast
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

import dpsur
from reproduction import architecture

SOURCE = Path(dpsur.__file__).parent
ROOT = SOURCE.parent.parent
REPRODUCTION = ROOT / "reproduction"
LEAVES = {
    "errors",
    "checks",
    "environment",
    "options",
    "registry",
    "figure_style",
    "status",
    "config",
    "_version",
}
# package -> the packages it may import from
ARROWS = {
    "privacy": set(),
    "distributed": set(),
    "functional": set(),
    "per_example": {"distributed", "functional"},
    "mechanism": {"distributed", "per_example", "functional", "privacy"},
    "features": {"mechanism", "per_example", "functional", "privacy"},
    "networks": {"features"},
    "tasks": {"networks", "features", "functional", "privacy"},
    "methods": {"distributed", "networks", "mechanism", "per_example", "functional", "privacy"},
    "runs": {
        "distributed",
        "presets",
        "tasks",
        "networks",
        "features",
        "methods",
        "mechanism",
        "per_example",
        "functional",
        "privacy",
    },
    "engine": {"distributed", "runs", "mechanism", "per_example", "functional", "privacy"},
    "opacus": {"engine", "per_example", "privacy"},
    "integrations": {"engine", "mechanism", "functional", "privacy"},
    "presets": {"features", "privacy"},
    "attacks": {"runs", "tasks", "features", "networks", "methods", "mechanism", "functional"},
    "audits": {"runs", "methods", "mechanism", "per_example", "functional", "privacy"},
    "reports": {"mechanism", "runs", "tasks", "per_example", "functional", "privacy"},
    "cli": {
        "engine",
        "distributed",
        "reports",
        "presets",
        "audits",
        "attacks",
        "runs",
        "tasks",
        "networks",
        "features",
        "methods",
        "mechanism",
        "per_example",
        "functional",
        "privacy",
    },
}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""}
            if node.module in {"dpsur", *(f"dpsur.{room}" for room in ARROWS)}:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules(room: str):
    return sorted((SOURCE / room).rglob("*.py"))


@pytest.mark.parametrize("room", ARROWS)
def test_arrows_point_one_way(room):
    for path in modules(room):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] != "dpsur" or len(parts) < 2 or parts[1] in LEAVES:
                continue
            allowed = ARROWS[room] | {room}
            assert parts[1] in allowed, f"{path.relative_to(SOURCE)} imports {name}"


def test_the_accountants_know_no_tensors():
    for path in modules("privacy"):
        assert not any(name.split(".")[0] == "torch" for name in imported(path)), path


def test_the_table_of_the_packages_is_that_of_the_imports():
    """docs/architecture.md is rendered by `python -m reproduction.architecture --write`."""
    assert architecture.levels() in architecture.PAGE.read_text(encoding="utf-8")


def test_the_library_knows_nothing_of_the_reproduction():
    """Neither by import nor by name, and it reads no stored rows and no history.

    Only the command's entry looks for it, in a checkout, so that `dpsur` has all names there.
    """
    for path in set(SOURCE.rglob("*.py")) - {SOURCE / "__main__.py"}:
        assert not any(name.split(".")[0] == "reproduction" for name in imported(path)), path
        constants = strings(path)
        assert not any(text.startswith("reproduction.") for text in constants), path
        assert not any(text == "git" or is_of_results(text) for text in constants), path


def strings(path: Path) -> set[str]:
    return {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def is_of_results(text: str) -> bool:
    return text == "results" or text.startswith("results/")


def test_what_the_library_must_not_have_would_be_found():
    """The reproduction has all of it."""
    assert "git" in strings(REPRODUCTION / "rows.py")
    assert any(map(is_of_results, strings(REPRODUCTION / "command.py")))
    assert any(name.startswith("reproduction") for name in imported(REPRODUCTION / "command.py"))


def test_the_wheel_holds_the_library_only():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["packages"]["find"] == {"where": ["src"]}
    found = find_packages(str(ROOT / "src"))
    assert {name.split(".")[0] for name in found} == {"dpsur"}
    assert set(settings["package-data"]) == {"dpsur"}
    for pattern in settings["package-data"]["dpsur"]:
        assert list(SOURCE.glob(pattern)), pattern
    data = {path.name for path in SOURCE.rglob("*.csv")}
    assert data == {"paper.csv", "tramer-boneh.csv", "tuned.csv"}


def test_every_room_is_on_the_map():
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(ARROWS)


def modules_after(code: str) -> set[str]:
    """The modules that a fresh process has after some code, without what torch brings itself."""
    lines = ["import sys", "import torch", "before = set(sys.modules)", code]
    lines.append("print(*sorted(set(sys.modules) - before))")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(lines)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return set(result.stdout.split())


HEAVY = {
    *("matplotlib", "mlxtend", "rich", "pandas", "sklearn", "dp_accounting", "opacus", "mpmath"),
    *("scipy.stats", "scipy.signal", "scipy.optimize", "scipy.interpolate", "setuptools"),
    *("torch._dynamo", "torch._inductor", "triton", "sympy", "transformers", "lightning"),
}
FIRST_UPDATE = """
from dpsur import Budget, Dpsgd, fit
from dpsur.functional.process_settings import repeatable
records = torch.randn(64, 3), torch.arange(64) % 2
with repeatable(torch.device("cuda"), seeded=True):  # what a seeded run on a GPU sets
    fit(torch.nn.Linear(3, 2), records, budget=Budget(3.0, 1e-3), seed=0, device="cpu",
        method=Dpsgd(batch_size=16), max_updates=1)
"""


def test_the_import_alone_is_light():
    code = "import sys, dpsur; sys.exit(bool({'torch', 'numpy', 'scipy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_heavy_is_imported_up_to_the_first_update():
    """By what is imported, not by a clock: each of these takes a tenth of a second or seconds."""
    found = modules_after(FIRST_UPDATE)
    assert "dpsur.runs.fit" in found
    assert not found & HEAVY
    assert "scipy.stats" in modules_after(FIRST_UPDATE + "import scipy.stats")  # the control


def test_the_command_imports_nothing_heavy():
    assert not modules_after("import dpsur.cli") & HEAVY


def test_a_second_opinion_is_imported_when_it_is_asked_for():
    """Neither `verify` nor `account` makes their import or their help wait for dp-accounting."""
    code = "import dpsur.runs.verification, dpsur.cli.verify, dpsur.cli.account"
    assert "dp_accounting" not in modules_after(code)
    asked = (
        "from dpsur.privacy.events import Gaussian\n"
        "from dpsur.privacy.second_opinion import opinions\n"
        "opinions({'proven': (1.0, [(Gaussian(8.0), 1)])}, 1e-5)"
    )
    assert "dp_accounting" in modules_after(asked)


def test_one_module_imports_the_second_opinion():
    found = {p for p in SOURCE.rglob("*.py") if any("dp_accounting" in n for n in imported(p))}
    assert found == {SOURCE / "privacy" / "second_opinion.py"}


@pytest.mark.parametrize("command", ["account", "calibrate", "verify"])
def test_accounting_does_not_wait_for_torch(command):
    code = (
        "import sys, dpsur.cli\n"
        f"try: dpsur.cli.main(['{command}', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert result.returncode == 0


def test_nothing_is_unpickled():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert not any(
            name.split(".")[0] in {"pickle", "cloudpickle", "dill"} for name in imported(path)
        )
        if path.parent == SOURCE / "opacus":  # whose files are of torch.save, read as weights only
            lines = [line for line in text.splitlines() if "torch.load" in line]
            assert all("weights_only=True" in line for line in lines)
            continue
        assert "torch.load" not in text
        assert "torch.save" not in text


def test_files_stay_short():
    for path in (*SOURCE.rglob("*.py"), *REPRODUCTION.rglob("*.py")):
        assert len(path.read_text().splitlines()) <= 900, path


def test_public_names_are_explained():
    """Other names need no docstring that only repeats them."""
    missing = []
    for name in dpsur.__all__:
        value = getattr(dpsur, name)
        members = {name: value}
        if inspect.isclass(value):
            members |= {f"{name}.{key}": one for key, one in vars(value).items() if key[0] != "_"}
        for where, one in members.items():
            plain = getattr(one, "fget", None) or getattr(one, "__func__", one)
            explained = inspect.isfunction(plain) or inspect.isclass(plain)
            if explained and not (plain.__doc__ or "").strip():
                missing.append(where)
    assert missing == []
