"""Exported programs give the predictions of the model, in a process that has no dpsur."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import dpsur
from dpsur.cli import main
from dpsur.errors import DpsurError
from dpsur.features.hashing import hashed_counts
from dpsur.runs import release as exporting
from tests.runs.test_predictor import BUDGET, METHOD, SHARED, made, people, points

__all__ = ["made"]  # the fixture

WITHOUT_DPSUR = """
import sys, json
sys.modules["dpsur"] = None  # an import of it would fail
import numpy as np, torch
torch.set_num_threads(1)
folder, records = sys.argv[1], sys.argv[2]
described = json.load(open(f"{folder}/signature.json"))
if records.endswith(".json"):
    sys.path.insert(0, folder)
    from words import hashed_counts
    rows = hashed_counts(json.load(open(records)), described["takes"]["shape"][1])
else:
    rows = np.load(records)
program = torch.export.load(f"{folder}/model.pt2").module()
print(json.dumps(program(torch.from_numpy(rows)).tolist()))
assert not [name for name in sys.modules if name.startswith("dpsur.")]
"""


def run_without_dpsur(folder, records):
    command = [sys.executable, "-c", WITHOUT_DPSUR, str(folder), str(records)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return np.array(json.loads(done.stdout))


def signature(folder):
    return json.loads((folder / "signature.json").read_text())


def test_a_table(made, tmp_path):
    root, found = made
    run, _ = found["table"]
    assert main(["export", str(root / "table"), "--out", str(tmp_path / "out")]) == 0
    takes = signature(tmp_path / "out")["takes"]
    assert takes["columns"] == {
        "age": {"number_from": 0, "to": 100},
        "job": {"place_of": ["clerk", "pilot"]},
    }
    frame = people()
    frame.loc[0, "job"] = "astronaut"
    frame["age"] = frame["age"].astype(float)
    frame.loc[1, "age"], frame.loc[2, "age"] = np.nan, 1000.0
    jobs = takes["columns"]["job"]["place_of"]
    places = [jobs.index(job) if job in jobs else -1 for job in frame["job"]]
    np.save(tmp_path / "rows.npy", np.stack([frame["age"], places], 1))
    shares = run_without_dpsur(tmp_path / "out", tmp_path / "rows.npy")
    np.testing.assert_allclose(shares, run.predict_proba(frame), atol=1e-6)
    classes = np.array(signature(tmp_path / "out")["classes"])
    assert (classes[shares.argmax(1)] == run.predict(frame)).all()


@pytest.mark.slow
def test_texts_images_and_arrays(made, tmp_path):
    root, found = made
    run, file = found["texts"]
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    folder = dpsur.load(root / "texts").export(tmp_path / "texts")
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    shares = run_without_dpsur(folder, tmp_path / "texts.json")
    np.testing.assert_allclose(shares, run.predict_proba(texts), atol=1e-6)
    run, pictures = found["images"]
    folder = dpsur.load(root / "images").export(tmp_path / "images")
    assert signature(folder)["takes"]["shape"] == ["records", 1, 28, 28]
    np.save(tmp_path / "images.npy", run.predictor.inputs.read(pictures).rows.numpy())
    shares = run_without_dpsur(folder, tmp_path / "images.npy")
    np.testing.assert_allclose(shares, run.predict_proba(pictures), atol=1e-5)
    run, _ = found["arrays"]
    folder = run.predictor.export(tmp_path / "arrays")
    np.save(tmp_path / "arrays.npy", points()[0].numpy())
    shares = run_without_dpsur(folder, tmp_path / "arrays.npy")
    np.testing.assert_allclose(shares, run.predict_proba(points()[0]), atol=1e-6)


def test_numbers_come_in_their_units(tmp_path):
    frame = people()
    frame["pay"] = frame["age"] * 10.0
    schema = dpsur.Schema({"age": dpsur.Number(0, 100)}, {"pay": dpsur.Number(0, 1000)})
    run = dpsur.fit("linear", frame, schema=schema, **SHARED)
    folder = run.predictor.export(tmp_path / "out")
    program = torch.export.load(folder / "model.pt2").module()
    values = torch.tensor(frame[["age"]].to_numpy(np.float64))
    np.testing.assert_allclose(program(values).detach(), run.predict(frame), rtol=1e-6)
    assert signature(folder)["returns"] == "numbers"


def test_a_program_that_differs_is_not_written(made, tmp_path, monkeypatch):
    _, found = made

    class Wrong(exporting.SchemaRows):
        def forward(self, values):
            shift = 0.01 if torch.compiler.is_exporting() else 0.0
            return super().forward(values) + shift

    monkeypatch.setattr(exporting, "SchemaRows", Wrong)
    with pytest.raises(DpsurError, match="differs from the model"):
        found["table"][0].predictor.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exported_is_refused_in_one_line(made, tmp_path, monkeypatch):
    _, found = made
    model = found["table"][0].predictor
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(dpsur.InvalidInputError, match="is not empty; choose another folder"):
        model.export(tmp_path / "full")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(dpsur.InvalidInputError, match=r"pip install 'dpsur\[onnx\]'"):
        model.export(tmp_path / "out", onnx=True)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, inputs):
            return self.layer(inputs)

    run = dpsur.fit(Odd(), points(), **SHARED)
    with pytest.raises(dpsur.InvalidInputError, match="export\\(DIR, example=x\\)"):
        run.predictor.export(tmp_path / "out")
    run.predictor.export(tmp_path / "out", example=points()[0])


def run_onnx(folder, rows):
    """In a process without dpsur and without torch."""
    code = (
        "import sys; sys.modules['dpsur'] = sys.modules['torch'] = None\n"
        "import json, numpy as np, onnxruntime\n"
        "session = onnxruntime.InferenceSession(sys.argv[1])\n"
        "(name,) = (one.name for one in session.get_inputs())\n"
        "print(json.dumps(session.run(None, {name: np.load(sys.argv[2])})[0].tolist()))\n"
    )
    file = folder.parent / f"{folder.name}.npy"
    np.save(file, rows)
    command = [sys.executable, "-c", code, str(folder / "model.onnx"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return np.array(json.loads(done.stdout))


def needs_onnx():
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"needs {package}: pip install 'dpsur[onnx]'")


def columns_as_numbers(schema, frame):
    """What the signature asks for: numbers, places of categories, and counts of words."""
    parts = []
    for name, column in schema.columns.items():
        values = frame[name]
        if isinstance(column, dpsur.Number):
            parts.append(pd.to_numeric(values).to_numpy(np.float64)[:, None])
        elif isinstance(column, dpsur.Category):
            known = {value: place for place, value in enumerate(column.values)}
            parts.append(np.array([[known.get(value, -1)] for value in values], np.float64))
        else:
            parts.append(hashed_counts(list(values), column.dimension).astype(np.float64))
    return np.concatenate(parts, axis=1)


def other_tables():
    """Tables with other targets, columns and networks than the fixture's."""
    frame = people()
    frame["age"] = frame["age"].astype(float)
    frame["pay"] = frame["age"] * 10
    frame["note"] = np.where(frame["ill"] == "yes", "severe pain", "walks well")
    frame["old"] = np.where(frame["age"] > 60, "yes", "no")
    age, job = dpsur.Number(0, 100, missing=40), dpsur.Category(["clerk"], other="clerk")
    ill = dpsur.Category(["no", "yes"])
    yield "mlp", "mlp", frame, dpsur.Schema({"age": age, "job": job}, {"ill": ill})
    yield "labels", "auto", frame, dpsur.Schema({"age": age, "job": job}, {"ill": ill, "old": ill})
    yield "numbers", "auto", frame, dpsur.Schema({"age": age}, {"pay": dpsur.Number(0, 1000)})
    yield (
        "categories",
        "auto",
        frame,
        dpsur.Schema({"job": dpsur.Category(["clerk"])}, {"ill": ill}),
    )
    mixed = {"age": age, "note": dpsur.Text(64), "job": job}
    yield "mixed", "auto", frame, dpsur.Schema(mixed, {"ill": ill})


@pytest.mark.slow
@pytest.mark.parametrize("onnx", [False, True], ids=["torch", "onnx"])
def test_every_kind_of_table(tmp_path, onnx):
    if onnx:
        needs_onnx()
    for name, model, frame, schema in other_tables():
        method = {"method": METHOD} if model == "mlp" else {}
        run = dpsur.fit(model, frame, schema=schema, budget=BUDGET, seed=0, **method)
        folder = run.predictor.export(tmp_path / name, onnx=onnx)
        new = frame[:9].copy()
        new.loc[1, "age"], new.loc[2, "age"], new.loc[3, "job"] = np.nan, 1000.0, "astronaut"
        rows = columns_as_numbers(schema, new)
        np.save(tmp_path / "rows.npy", rows)
        found = run_onnx(folder, rows) if onnx else run_without_dpsur(folder, tmp_path / "rows.npy")
        numbers = signature(folder)["returns"] == "numbers"
        expected = run.predict(new) if numbers else run.predict_proba(new)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)
        assert (folder / "words.py").exists() == (name == "mixed")


@pytest.mark.slow
def test_colour_images_on_the_encoder(tmp_path):
    needs_onnx()
    images, labels = torch.rand(40, 3, 32, 32), torch.arange(40) % 2
    run = dpsur.fit("auto", (images, labels), classes=2, budget=BUDGET, seed=0)
    folder = run.predictor.export(tmp_path / "out", onnx=True)
    np.save(tmp_path / "rows.npy", images[:5].numpy())
    expected = run.predict_proba(images[:5])
    for found in (
        run_without_dpsur(folder, tmp_path / "rows.npy"),
        run_onnx(folder, images[:5].numpy()),
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["table", "texts", "images"])
def test_onnx(made, tmp_path, kind):
    needs_onnx()
    run, given = made[1][kind]
    folder = run.predictor.export(tmp_path / kind, onnx=True)
    if kind == "table":
        given = people()
        given["age"] = given["age"].astype(float)
        given.loc[1, "age"], given.loc[2, "age"] = np.nan, 1000.0
        places = [["clerk", "pilot"].index(job) for job in given["job"]]
        rows = np.stack([given["age"], places], 1).astype(np.float64)
    elif kind == "texts":
        given = [json.loads(line)["text"] for line in given.read_text().splitlines()]
        rows = hashed_counts(given, signature(folder)["takes"]["shape"][1])
    else:
        rows = run.predictor.inputs.read(given).rows.numpy()
    np.testing.assert_allclose(run_onnx(folder, rows), run.predict_proba(given), atol=1e-5)
