"""Folders of images, JSON Lines, text columns, and records of other libraries."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import dpsur
from dpsur.cli import main
from dpsur.features import words
from dpsur.runs.tasks import own_task
from dpsur.tasks import Declared, task_named
from tests.runs.test_predictor import SHARED, folder_of_images, notes, picture


def write_notes(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_folder_of_images_is_a_task(tmp_path):
    folder = folder_of_images(tmp_path / "a", 3)
    (folder / "flat" / "readme.txt").write_text("no image")
    (folder / "flat" / "more").mkdir()
    Image.new("RGB", (50, 20), (255, 0, 0)).save(folder / "flat" / "more" / "red.jpg")
    (folder / "empty").mkdir()
    task = task_named(f"images:{folder}")
    train, test = task.load(None)
    assert test is None
    assert train.inputs.shape == (7, 3, 32, 32)
    assert task.public["labels"] == ["empty", "flat", "tall"]  # an empty folder is a class
    assert train.targets.tolist() == [1] * 4 + [2] * 3
    assert train.inputs.min() >= 0
    assert train.inputs.max() <= 1
    assert train.inputs[3].mean((1, 2)).round().tolist() == [1, 0, 0]  # the red one
    grey = task_named(f"images:{folder}", declared=Declared(image_size="1x28x28"))
    first = torch.from_numpy(np.asarray(picture(0, 0), np.float32)) / 255
    assert torch.equal(grey.load(None)[0].inputs[0, 0], first)


def test_each_image_becomes_numbers_by_itself(tmp_path):
    """One image more or less changes no other row, nor the classes."""
    folder = folder_of_images(tmp_path / "a", 3)
    before = task_named(f"images:{folder}").load(None)[0].inputs
    (folder / "flat" / "000.png").unlink()
    task = task_named(f"images:{folder}")
    assert torch.equal(task.load(None)[0].inputs, before[1:])
    for number in (1, 2):
        (folder / "flat" / f"00{number}.png").unlink()
    assert task_named(f"images:{folder}").public == task.public


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda f: f, {"labels": "a,b"}, "holds a folder 'flat' that is no class"),
        (lambda f: f, {"labels": "a,a"}, "two or more different names"),
        (lambda f: f, {"image_size": "big"}, "must be HxW or CxHxW, such as 64x64"),
        (lambda f: f, {"image_size": "5x9x9"}, "1 or 3 channels"),
        (lambda f: f, {"columns": "a,b"}, "has no such option"),
        (lambda f: f, {"test": "nowhere"}, "there is no nowhere to test on"),
        (lambda f: f / "flat", {}, "holds no folders; write a folder of images for each class"),
        (lambda f: f / "nothing", {}, "there is no folder"),
        (lambda f: f.rename(f.parent / "train").parent, {}, "which seems to be a part"),
    ],
)
def test_wrong_folders_are_refused_in_one_line(change, options, message, tmp_path):
    folder = change(folder_of_images(tmp_path / "a" / "images", 2))
    with pytest.raises(dpsur.InvalidInputError, match=message) as error:
        task_named(f"images:{folder}", declared=Declared(**options))
    assert "\n" not in str(error.value)


def test_a_damaged_image_is_named_in_private_only(tmp_path):
    folder = folder_of_images(tmp_path / "a", 2)
    (folder / "flat" / "secret.png").write_bytes(b"no image")
    with pytest.raises(dpsur.InvalidInputError, match="an image cannot be read") as error:
        task_named(f"images:{folder}")
    assert "secret" not in str(error.value)
    assert "secret.png" in error.value.private


def test_texts_of_json_lines_csv_and_parquet_become_the_same_rows(tmp_path):
    texts, labels = notes(6)
    frame = pd.DataFrame({"note": texts, "where": labels})
    write_notes(tmp_path / "a.jsonl", frame.to_dict("records"))
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    declared = Declared(labels="home,ward", columns="note,where")
    for prefix in ("jsonl", "csv", "parquet"):
        task = task_named(f"{prefix}:{tmp_path / 'a'}.{prefix}", declared=declared)
        train, _ = task.load(None)
        assert torch.equal(train.inputs, words(texts))
        assert train.targets.tolist() == [["home", "ward"].index(label) for label in labels]
        assert task.kind == "words"
        assert task.networks["vectors"]["name"] == "linear-head"


def test_a_line_that_is_no_object_is_a_record_without_values(tmp_path):
    texts, labels = notes(4)
    rows = [{"text": t, "label": one} for t, one in zip(texts, labels, strict=True)]
    write_notes(tmp_path / "a.jsonl", [*rows[:2], "no object", {"text": 3, "label": "home"}])
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("{broken\n\n")
    declared = Declared(labels="home,ward")
    train, _ = task_named(f"jsonl:{tmp_path / 'a.jsonl'}", declared=declared).load(None)
    assert len(train) == 3  # those with a declared label
    assert not train.inputs[2].any()


def test_a_schema_takes_texts_beside_numbers(tmp_path):
    texts, labels = notes(60)
    frame = pd.DataFrame({"note": texts, "age": range(60), "where": labels})
    schema = dpsur.Schema(
        {"note": dpsur.Text(64), "age": dpsur.Number(0, 100)},
        {"where": dpsur.Category(["home", "ward"])},
    )
    assert schema.width == 65
    assert dpsur.Schema.from_json(schema.to_json()) == schema
    rows = schema.inputs(frame)
    assert torch.equal(rows[:, :64], words(texts, 64))
    run = dpsur.fit("auto", frame, schema=schema, **SHARED)
    loaded = dpsur.load(run.save(tmp_path / "out"))
    assert (loaded.predict(frame) == run.predict(frame)).all()
    with pytest.raises(dpsur.InvalidInputError, match="dimension of a text must be at most"):
        dpsur.Text(2**30)
    with pytest.raises(dpsur.InvalidInputError, match="target of a schema must map names to Num"):
        dpsur.Schema({"age": dpsur.Number(0, 1)}, {"note": dpsur.Text()})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("jsonl:a.jsonl", {}, "for texts with classes, --labels A,B,... is enough"),
        ("jsonl:a.jsonl", {"labels": "home,ward", "columns": "note"}, "columns must name the"),
        ("jsonl:a.jsonl", {"labels": "home,ward", "columns": "x,label"}, "object with 'x'"),
        ("jsonl:a.jsonl", {"labels": "left,right"}, "no record of a.jsonl has a target"),
        ("jsonl:b.jsonl", {"labels": "home,ward"}, "there is no file b.jsonl"),
        ("a.jsonl", {}, "did you mean --task jsonl:a.jsonl?"),
        (".", {}, "did you mean --task images:.?"),
        ("mnist-5k", {"labels": "a,b"}, "task mnist-5k has no such option"),
    ],
)
def test_wrong_files_are_refused_in_one_line(name, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts, labels = notes(4)
    rows = [{"text": t, "label": one} for t, one in zip(texts, labels, strict=True)]
    write_notes(tmp_path / "a.jsonl", rows)
    with pytest.raises(dpsur.InvalidInputError) as error:
        task_named(name, declared=Declared(**options))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_no_schema_is_started_from_json_lines(tmp_path, capsys):
    write_notes(tmp_path / "a.jsonl", [{"text": "a secret note", "label": "home"}])
    assert main(["data", "schema", str(tmp_path / "a.jsonl")]) == 2
    printed = capsys.readouterr()
    assert "secret" not in printed.out + printed.err
    assert "has no header" in printed.err


class FakeHuggingFace:
    """What is used of `datasets.Dataset`: columns by name, and the names of a class label."""

    def __init__(self, columns, names):
        self._columns = columns
        self.column_names = list(columns)
        kind = type("ClassLabel", (), {"names": names})
        self.features = {name: kind() if name == "label" else None for name in columns}

    def __getitem__(self, name):
        return self._columns[name]

    def __len__(self):
        return len(self._columns["label"])


class Pictures(torch.utils.data.Dataset):
    classes = ("flat", "tall")  # as torchvision's ImageFolder has them

    def __len__(self):
        return 40

    def __getitem__(self, place):
        return picture(place % 2, place), place % 2


def test_records_of_other_libraries(tmp_path):
    texts, labels = notes(60)
    places = [["home", "ward"].index(label) for label in labels]
    hugging = FakeHuggingFace({"text": texts, "label": places}, ["home", "ward"])
    frame = pd.DataFrame({"text": texts, "label": labels})
    schema = dpsur.Schema({"text": dpsur.Text()}, {"label": dpsur.Category(["home", "ward"])})
    expected = None
    for data, options in (
        ((texts, labels), {"classes": ["home", "ward"]}),
        ((frame["text"], frame["label"]), {"classes": ["home", "ward"]}),
        (hugging, {}),
        (frame, {"schema": schema}),
    ):
        run = dpsur.fit("auto", data, **options, **SHARED)
        found = run.predict(texts)
        assert set(found) <= {"home", "ward"}
        expected = found if expected is None else expected
        assert (found == expected).all()
    run = dpsur.fit("auto", Pictures(), image_size=(1, 28, 28), **SHARED)
    loaded = dpsur.load(run.save(tmp_path / "out"))
    assert loaded.classes == ("flat", "tall")
    assert loaded.predict([picture(1, 7)]) == run.predict([picture(1, 7)])
    assert dpsur.verify(tmp_path / "out")[0] == []


def test_labels_that_were_not_declared_are_refused(tmp_path):
    texts, labels = notes(4)
    with pytest.raises(dpsur.InvalidInputError, match="number of classes must be declared"):
        dpsur.fit("auto", (texts, labels), **SHARED)
    with pytest.raises(dpsur.InvalidInputError, match="none of the 2 declared classes") as error:
        dpsur.fit("auto", (texts, ["rare", *labels[1:]]), classes=["home", "ward"], **SHARED)
    assert "rare" not in str(error.value)
    with pytest.raises(dpsur.InvalidInputError, match="unknown model 'cnn' for these records"):
        dpsur.fit("cnn", (texts, [0, 1, 0, 1]), classes=2, **SHARED)


def test_arrays_get_a_model_too():
    inputs = torch.rand(60, 1, 12, 12)
    task = own_task("auto", (inputs, torch.arange(60) % 2), classes=2)
    assert task.networks["pixels"]["name"] == "small-cnn"
    assert task.public == {"classes": 2, "inputs": {"kind": "images", "shape": [1, 12, 12]}}
    run = dpsur.fit("auto", (inputs.flatten(1), torch.arange(60) % 2), classes=2, **SHARED)
    assert run.predict(inputs.flatten(1)).shape == (60,)


def test_small_images_with_a_network_of_ones_own_get_a_hint(capsys):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 2))
    records = torch.rand(60, 1, 12, 12), torch.arange(60) % 2
    dpsur.fit(model, records, budget=SHARED["budget"], seed=0, max_updates=1)
    assert 'model="auto", classes=K' in capsys.readouterr().err
    dpsur.fit(model, records, **SHARED)
    assert 'model="auto"' not in capsys.readouterr().err
