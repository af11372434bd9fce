"""`dpsur evaluate` on releases and records that do not go together: one line, and no guarantee."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import dpsur
from dpsur.cli import main
from dpsur.errors import CheckpointError
from dpsur.runs.files import from_json, sha256
from tests.conftest import blobs

SHORT = ["--method", "dpsgd", "--updates", "3", "--batch-size", "20", "--noise-multiplier", "20",
         "--device", "cpu", "--delta", "1e-3", "--quiet", "--seed", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A release of a small network, and the file of its records."""
    folder = tmp_path_factory.mktemp("finished")
    data, test = blobs(200), blobs(30, seed=4)
    path = folder / "points.npz"
    np.savez(path, x=data.inputs, y=data.targets, x_test=test.inputs, y_test=test.targets)
    arguments = ["--task", f"npz:{path}", "--classes", "3", "--out", str(folder / "run")]
    assert main(["train", *arguments, *SHORT]) == 0
    return folder / "run" / "release", f"npz:{path}"


@pytest.fixture
def release(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "release")


@pytest.fixture
def refused(release, finished, capsys):
    """What the command says: one line, and nothing of a guarantee."""

    def refuse(task=finished[1]):
        capsys.readouterr()
        status = main(["evaluate", str(release), "--task", task, "--device", "cpu"])
        out, err = capsys.readouterr()
        assert (status, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert "epsilon" not in err
        return err

    return refuse


def change_statement(release, change):
    path = release / "privacy.json"
    statement = json.loads(path.read_text())
    change(statement)
    path.write_text(json.dumps(statement))


def write_weights(release, tensors, **described):
    """Weights with a description of another network, and the statement made to match them."""
    path = release / "model.safetensors"
    with safe_open(path, "pt") as file:
        known = json.loads(file.metadata()["dpsur"])
    save_file(tensors, path, {"dpsur": json.dumps({**known, **described})})
    digest = sha256(path.read_bytes())
    change_statement(release, lambda statement: statement["weights"].update(sha256=digest))


def test_a_release_that_is_whole(release, finished, capsys):
    assert main(["evaluate", str(release), "--task", finished[1]]) == 0
    assert "privacy: epsilon" in capsys.readouterr().out


def test_weights_that_do_not_belong_to_the_statement(release, refused):
    path = release / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "are not the weights that privacy.json was written for" in refused()
    with pytest.raises(CheckpointError, match="its guarantee does not hold"):
        dpsur.load(release)


def test_without_that_check_the_guarantee_would_be_printed(release, finished, capsys):
    """The control: with its hash made to match, the same change passes."""
    tensors = load_file(release / "model.safetensors")
    name = next(iter(tensors))
    write_weights(release, {**tensors, name: tensors[name] + 1})
    assert main(["evaluate", str(release), "--task", finished[1]]) == 0
    assert "privacy: epsilon" in capsys.readouterr().out


def test_records_of_another_shape(release, refused, tmp_path):
    path = tmp_path / "wide.npz"
    x, y = np.zeros((4, 7)), np.arange(4) % 3
    np.savez(path, x=x, y=y, x_test=x, y_test=y)
    assert "cannot be applied to records of npz:" in refused(f"npz:{path}")
    x = np.zeros((4, 2))
    np.savez(path, x=x, y=y, x_test=x, y_test=y + 1)
    assert "has no output for" in refused(f"npz:{path}")
    assert "cannot be applied to records of mnist-5k" in refused("mnist-5k")


NESTED = "[" * 100_000 + "]" * 100_000
STATEMENTS = {
    "empty": "",
    "bytes": "\x00\xff",
    "list": "[]",
    "deep": NESTED,
    "deep inside": '{"format": "dpsur-privacy/5", "guarantee": ' + "[" * 500 + "]" * 500 + "}",
    "digits": '{"format": ' + "9" * 5000 + "}",
    "no guarantee": '{"format": "dpsur-privacy/5"}',
}


@pytest.mark.parametrize("text", STATEMENTS.values(), ids=STATEMENTS)
def test_damaged_statements(text, release, refused):
    (release / "privacy.json").write_text(text, encoding="latin-1")
    assert "damaged release" in refused()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epsilon", "3"), ("epsilon", float("nan")), ("epsilon", -1), ("epsilon", [3]),
        ("epsilon", True), ("epsilon", 10**400), ("delta", None), ("delta", "x"),
        ("proved", "yes"), ("accounting", 7), ("accounting", "mine"), ("accounting", [[]]),
    ],
    ids=lambda value: str(value)[:8],
)  # fmt: skip
def test_guarantees_of_another_form(key, value, release, refused):
    change_statement(release, lambda statement: statement["guarantee"].update({key: value}))
    assert "damaged release" in refused()


@pytest.mark.parametrize("key", ["guarantee", "epsilon", "weights", "public", "format"])
@pytest.mark.parametrize("value", [None, 3, "x", [], {}])
def test_parts_of_another_form(key, value, release, refused):
    if (key, value) == ("public", {}):
        return
    change_statement(release, lambda statement: statement.update({key: value}))
    assert "damaged release" in refused()


NETWORKS = {
    "10^18": {"name": "linear", "inputs": 10**9, "classes": 10**9},
    "2^48": {"name": "linear", "inputs": 2**24, "classes": 2**24},
    "twice": {"name": "mlp", "inputs": 2, "hidden": 64, "classes": 3},
    "many": {"name": "mlp", "inputs": 2, "hidden": [1] * 100_000, "classes": 3},
    "text": {"name": "mlp", "inputs": "2", "hidden": 32, "classes": 3},
    "none": {"name": "mlp", "inputs": None, "hidden": 32, "classes": 3},
    "unknown": {"name": "os.system"},
    "nameless": {},
    "list": [],
    "images": {
        "name": "with-features",
        "features": [{"name": "scattering", "height": 2**20, "width": 2**20}],
        "network": {"name": "linear", "inputs": 2, "classes": 3},
    },
    "scales": {
        "name": "with-features",
        "features": [{"name": "scattering", "height": 8, "width": 8, "scales": 2**23}],
        "network": {"name": "linear", "inputs": 2, "classes": 3},
    },
    "groups": {
        "name": "with-features",
        "features": [{"name": "group-norm", "groups": 3, "channels": 2**24}],
        "network": {"name": "linear", "inputs": 2, "classes": 3},
    },
    "inside": {
        "name": "with-features",
        "features": [],
        "network": {"name": "with-features", "features": [], "network": {}},
    },
    "no layers": {"name": "with-features", "features": 3, "network": {"name": "linear"}},
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_headers_that_name_another_network(network, release, refused):
    write_weights(release, load_file(release / "model.safetensors"), network=network)
    err = refused()
    assert "cannot be built" in err or "damaged release" in err or "do not fit the model" in err
    assert len(err) < 2000


@pytest.mark.parametrize(
    "described", [{"format": "x"}, {"task": 7}, {"network": "mlp"}, {"task": ["mnist"]}]
)
def test_headers_of_another_form(described, release, refused):
    write_weights(release, load_file(release / "model.safetensors"), **described)
    assert "damaged release" in refused()


def test_a_task_in_a_header_opens_no_file(release, finished, capsys):
    write_weights(release, load_file(release / "model.safetensors"), task=finished[1])
    assert main(["evaluate", str(release)]) == 2
    assert "names no task to test on" in capsys.readouterr().err


def test_mutated_releases_give_one_line_or_the_same_figures(release, finished, capsys):
    """Single bytes of every file changed, cut off or repeated."""
    rng = np.random.default_rng(0)
    assert main(["evaluate", str(release), "--task", finished[1]]) == 0
    figures = capsys.readouterr().out
    for name in ("privacy.json", "model.safetensors"):
        whole = (release / name).read_bytes()
        for _ in range(60):
            content = bytearray(whole)
            place = int(rng.integers(len(content)))
            kind = rng.integers(3)
            if kind == 0:
                content[place] ^= 1 << int(rng.integers(8))
            else:
                content = content[:place] + (content[place - 9 :] if kind == 1 else b"")
            (release / name).write_bytes(content)
            status = main(["evaluate", str(release), "--task", finished[1]])
            out, err = capsys.readouterr()
            assert status in (0, 2)
            assert len(err.splitlines()) == (1 if status else 0)
            assert name == "privacy.json" or status == 2
            assert status or out.splitlines()[0] == figures.splitlines()[0]
        (release / name).write_bytes(whole)


def test_from_json_reads_plain_values_only():
    assert from_json(b'{"a": [1, 2.5, null, "\xc3\xa9"]}') == {"a": [1, 2.5, None, "é"]}
    assert from_json(b"3") == 3
    for wrong in (b"NaN", b'{"a": Infinity}', b"\xff", b"[" * 40 + b"]" * 40, NESTED.encode()):
        with pytest.raises(ValueError, match=r"JSON|deep|decode"):
            from_json(wrong)


def test_weights_that_are_not_finite_are_shown_without_a_figure(release, finished, capsys):
    tensors = {
        name: value * torch.nan for name, value in load_file(release / "model.safetensors").items()
    }
    write_weights(release, tensors)
    assert main(["evaluate", str(release), "--task", finished[1], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["loss"] is None


def test_a_table_is_tested_by_the_schema_of_its_release(tmp_path, capsys):
    """All records of a new file, without naming the schema again; with it, its test part."""
    lines = ["x,y", *(f"{n % 7},{'no' if n % 7 < 5 else 'yes'}" for n in range(300))]
    data, schema, out = (tmp_path / name for name in ("data.csv", "schema.json", "run"))
    data.write_text("\n".join(lines))
    declared = {
        "columns": {"x": {"kind": "number", "low": 0, "high": 7}},
        "target": {"y": {"kind": "category", "values": ["no", "yes"]}},
    }
    schema.write_text(json.dumps(declared))
    arguments = ["train", "--task", f"csv:{data}", "--schema", str(schema), "--max-updates", "2"]
    assert main([*arguments, "--out", str(out), "--quiet"]) == 0
    assert main(["evaluate", str(out), "--task", f"csv:{data}"]) == 0
    found = capsys.readouterr().out
    assert "(300 records)" in found
    assert "share of the most frequent class 71." in found
    assert main(["evaluate", str(out), "--task", f"csv:{data}", "--schema", str(schema)]) == 2
    assert "names no test records" in capsys.readouterr().err
