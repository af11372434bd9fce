"""The rooms of the house and the one-way arrows between them, read from the imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dpsur

SOURCE = Path(dpsur.__file__).parent
LEAVES = {"errors", "checks", "cache_folder", "descriptions", "versions", "_version", "status"}
# room -> the rooms it may import from
ARROWS = {
    "privacy": set(),
    "core": {"privacy"},
    "methods": {"core", "privacy"},
    "features": {"core"},
    "tasks": {"core", "features"},
    "runs": {"tasks", "features", "methods", "core", "privacy"},
    "attacks": {"core"},
    "audits": {"runs", "methods", "core", "privacy"},
    "experiments": {"audits", "attacks", "runs", "tasks", "features", "methods", "core", "privacy"},
    "bench": {"experiments", "tasks", "methods", "core", "privacy"},
    "cli": {
        "bench",
        "experiments",
        "audits",
        "attacks",
        "runs",
        "tasks",
        "features",
        "methods",
        "core",
        "privacy",
    },
}
# what tasks, features and attacks may know of the core, and the benchmark of the experiments
KNOWN_OF_CORE = {
    "tasks": {"dpsur.core.types", "dpsur.core.activations"},
    "features": {"dpsur.core.types"},
    "attacks": {"dpsur.core.types", "dpsur.core.graphs", "dpsur.core.precision"},
}
ROWS_AND_STYLE = ("dpsur.experiments.rows", "dpsur.experiments.style")


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


@pytest.mark.parametrize("room", KNOWN_OF_CORE)
def test_some_rooms_know_little_of_the_core(room):
    for path in modules(room):
        for name in imported(path):
            if name.startswith("dpsur.core"):
                assert name in KNOWN_OF_CORE[room], f"{path} imports {name}"


def test_the_benchmark_knows_only_rows_and_style_of_the_experiments():
    for path in modules("bench"):
        for name in imported(path):
            if name.startswith("dpsur.experiments"):
                assert name.startswith(ROWS_AND_STYLE), f"{path} imports {name}"


def test_every_room_is_on_the_map():
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(ARROWS)


@pytest.mark.parametrize(
    "heavy", ["matplotlib", "mlxtend", "rich", "pandas", "sklearn", "dp_accounting", "opacus"]
)
def test_heavy_packages_are_not_imported_up_front(heavy):
    code = f"import sys, dpsur, dpsur.cli; sys.exit('{heavy}' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
        assert "torch.load" not in text
        assert "torch.save" not in text


def test_files_stay_short():
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 420, path
