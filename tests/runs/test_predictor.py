"""Predictions for records as users have them, in the process of the training and in a new one."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import dpsur
from dpsur.cli import main
from tests.conftest import blobs

BUDGET = dpsur.Budget(8.0, 1e-4)
METHOD = dpsur.Dpsgd(batch_size=32, updates=20, learning_rate=1.0)
SHARED = {"budget": BUDGET, "method": METHOD, "seed": 0}
SCHEMA = dpsur.Schema(
    {"age": dpsur.Number(0, 100), "job": dpsur.Category(["clerk", "pilot"])},
    {"ill": dpsur.Category(["no", "yes"])},
)


def people(count=120):
    generator = np.random.default_rng(0)
    age = generator.integers(0, 100, count)
    return pd.DataFrame(
        {
            "age": age,
            "job": generator.choice(["clerk", "pilot"], count),
            "ill": np.where(age > 50, "yes", "no"),
        }
    )


def notes(count=120):
    generator = np.random.default_rng(1)
    wards = generator.integers(2, size=count)
    texts = [
        " ".join(generator.choice(["pain fever", "calm well"][ward].split(), 4)) for ward in wards
    ]
    return texts, [["ward", "home"][ward] for ward in wards]


def points():
    found = blobs(60)
    return found.inputs, found.targets


def picture(tall, seed, size=(28, 28)):
    pixels = np.random.default_rng(seed).integers(0, 60, size[::-1]).astype(np.uint8)
    part = (slice(6, 22), slice(12, 16)) if tall else (slice(12, 16), slice(6, 22))
    pixels[part] = 255
    return Image.fromarray(pixels)


def folder_of_images(root, count=30):
    for tall, name in enumerate(("flat", "tall")):
        (root / name).mkdir(parents=True)
        for number in range(count):
            picture(tall, 2 * number + tall).save(root / name / f"{number:03}.png")
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A release of each kind of input, a file of new records for it, and what training predicts."""
    root = tmp_path_factory.mktemp("predictions")
    found = {}
    people().to_csv(root / "people.csv", index=False)
    SCHEMA.save(root / "schema.json")
    csv = f"csv:{root / 'people.csv'}"
    found["table"] = dpsur.fit(csv, schema=root / "schema.json", **SHARED), root / "people.csv"
    texts, labels = notes()
    with (root / "notes.jsonl").open("w") as file:
        for text, label in zip(texts, labels, strict=True):
            file.write(json.dumps({"text": text, "label": label}) + "\n")
    jsonl = f"jsonl:{root / 'notes.jsonl'}"
    found["texts"] = dpsur.fit(jsonl, classes=["home", "ward"], **SHARED), root / "notes.jsonl"
    images = folder_of_images(root / "pictures")
    found["images"] = dpsur.fit(f"images:{images}", image_size=(1, 28, 28), **SHARED), images
    inputs, targets = points()
    np.savez(root / "new.npz", x=inputs.numpy())
    model = nn.Sequential(nn.Linear(2, 3))
    found["arrays"] = dpsur.fit(model, (inputs, targets), **SHARED), root / "new.npz"
    for name, (run, _) in found.items():
        run.save(root / name)
    return root, found


NEW_PROCESS = """
import sys, json, torch, dpsur
root, files = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
for name, file in files.items():
    own = torch.nn.Sequential(torch.nn.Linear(2, 3)) if name == "arrays" else None
    model = dpsur.load(f"{root}/{name}", own)
    print(json.dumps([model.predict(file).tolist(), model.predict_proba(file).tolist()]))
"""


def test_a_new_process_predicts_what_the_training_process_does(made):
    root, found = made
    files = {name: str(file) for name, (_, file) in found.items()}
    command = [sys.executable, "-c", NEW_PROCESS, str(root), json.dumps(files)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for (name, (run, file)), line in zip(found.items(), lines, strict=True):
        classes, shares = json.loads(line)
        assert classes == run.predict(file).tolist(), name
        assert shares == run.predict_proba(file).tolist(), name
        assert len(set(classes)) > 1, name


def test_records_in_memory_and_in_files_are_predicted_alike(made):
    root, found = made
    run, file = found["table"]
    frame = people()
    rows = frame.drop(columns="ill").to_dict("records")
    for records in (frame, dict(frame), rows, SCHEMA.inputs(frame), str(file)):
        assert (run.predict(records) == run.predict(file)).all()
    frame.drop(columns="ill").to_parquet(root / "new.parquet")
    assert (run.predict(root / "new.parquet") == run.predict(file)).all()
    assert run.predictor.schema == SCHEMA
    assert run.predictor.classes == ("no", "yes")
    run, file = found["texts"]
    texts, labels = notes()
    assert (run.predict(texts) == run.predict(file)).all()
    assert (run.predict(np.array(texts)) == run.predict(file)).all()
    (root / "new.txt").write_text("\n".join(texts))
    assert (run.predict(root / "new.txt") == run.predict(file)).all()
    assert (run.predict(texts) == labels).mean() > 0.9
    run, folder = found["images"]
    files = sorted(folder.rglob("*.png"))
    opened = [Image.open(path) for path in files]
    pixels = np.stack([np.asarray(image) for image in opened])
    for images in (files, opened, pixels, torch.from_numpy(pixels)[:, None]):
        assert (run.predict(images) == run.predict(folder)).all()
    assert run.predict(files[0]).tolist() == ["flat"]
    assert set(run.predict(folder)) <= {"flat", "tall"}


def test_the_command_writes_a_line_for_each_record(made, capsys, tmp_path):
    root, found = made
    run, file = found["table"]
    assert main(["predict", str(root / "table"), str(file), "--proba"]) == 0
    table = pd.read_csv(__import__("io").StringIO(capsys.readouterr().out))
    assert list(table) == ["record", "prediction", "p_no", "p_yes"]
    assert (table["prediction"] == run.predict(file)).all()
    np.testing.assert_allclose(table["p_yes"], run.predict_proba(file)[:, 1], rtol=1e-5)
    run, folder = found["images"]
    out = tmp_path / "found.jsonl"
    assert main(["predict", str(root / "images"), str(folder), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows[0] == {"file": "flat/000.png", "prediction": run.predict(folder)[0]}
    assert len(rows) == 60


def test_numbers_and_labels(tmp_path):
    frame = people()
    schema = dpsur.Schema({"age": dpsur.Number(0, 100)}, {"pay": dpsur.Number(0, 1000)})
    frame["pay"] = frame["age"] * 10.0
    run = dpsur.fit("linear", frame, schema=schema, **SHARED)
    loaded = dpsur.load(run.save(tmp_path / "pay"))
    assert loaded.classes is None
    assert (loaded.predict(frame) == run.predict(frame)).all()
    assert np.corrcoef(run.predict(frame), frame["pay"])[0, 1] > 0.99
    with pytest.raises(dpsur.InvalidInputError, match="predicts numbers, which have no prob"):
        loaded.predict_proba(frame)
    inputs, targets = points()
    wanted = F.one_hot(targets, 3).float()
    run = dpsur.fit(
        nn.Linear(2, 3), (inputs, wanted), loss=F.binary_cross_entropy_with_logits, **SHARED
    )
    assert run.predict(inputs).dtype == bool
    assert ((run.predict_proba(inputs) > 0.5) == run.predict(inputs)).all()
    run = dpsur.fit(nn.Linear(2, 3), (inputs, wanted), loss=F.mse_loss, **SHARED)
    np.testing.assert_array_equal(run.predict(inputs), run.predictor.outputs(inputs).numpy())


def test_classes_of_a_model_without_names_are_numbers(made):
    _, found = made
    run, _ = found["arrays"]
    inputs, targets = points()
    assert run.predictor.classes == (0, 1, 2)
    assert run.predict(inputs).dtype == np.int64
    assert (run.predict(inputs) == targets.numpy()).mean() > 0.6
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    assert (run.predict(dataset) == run.predict(inputs)).all()
    assert (run.predict(inputs.tolist()) == run.predict(inputs)).all()


@pytest.mark.parametrize(
    ("kind", "records", "message"),
    [
        ("table", "nowhere.csv", "there is no file nowhere.csv to predict for"),
        (
            "table",
            np.zeros((3, 7)),
            r"must have the shape \(n, 4\), got \(3, 7\); pass a data frame",
        ),
        ("table", {"age": [1]}, "no column 'job'"),
        ("images", np.zeros((2, 3, 28, 28)), r"this model takes \(1, 28, 28\); resize them"),
        ("images", ["nowhere.png"], "there is no file nowhere.png"),
        ("images", [], "there is no image to predict for"),
        ("arrays", ["a text"], "takes numbers, as it was trained on, and got texts"),
        ("arrays", np.zeros((2, 5), np.float32), "cannot be applied to these records"),
        ("texts", np.zeros((2, 5)), r"must have the shape \(n, 8192\)"),
    ],
)
def test_records_of_another_kind_are_refused_in_one_line(made, kind, records, message):
    _, found = made
    with pytest.raises(dpsur.InvalidInputError, match=message) as error:
        found[kind][0].predict(records)
    assert "\n" not in str(error.value)


def test_a_channels_last_array_is_named(made, tmp_path):
    images = folder_of_images(tmp_path / "rgb", 20)
    run = dpsur.fit(f"images:{images}", **SHARED, features="whitened-scattering")
    with pytest.raises(dpsur.InvalidInputError, match=r"channels last; pass images.transpose"):
        run.predict(np.zeros((2, 32, 32, 3), np.uint8))


def test_a_release_of_a_public_task_takes_images_as_they_are(tmp_path):
    run = dpsur.fit("mnist-5k", features="pixels", **SHARED)
    assert run.origin.task == "mnist-5k"
    digit = picture(True, 0)
    expected = run.predict(np.asarray(digit, np.float32)[None, None] / 255)
    assert run.predict([digit]) == run.predict(np.asarray(digit)[None]) == expected


def test_a_run_that_was_paid_for_is_not_lost_to_a_folder_in_use(tmp_path, capsys):
    run = dpsur.fit(nn.Sequential(nn.Linear(2, 3)), points(), **SHARED)
    paths = [run.save(tmp_path / "out") for _ in range(3)]
    assert [path.parent.name for path in paths] == ["out", "out-2", "out-3"]
    assert "is in use; the release is written to" in capsys.readouterr().err
    (tmp_path / "file").touch()
    with pytest.raises(dpsur.InvalidInputError, match="is not a folder"):
        run.save(tmp_path / "file")


def test_a_column_of_a_data_frame_is_a_list_of_texts(made):
    run, file = made[1]["texts"]
    frame = pd.read_json(file, lines=True)
    assert (run.predict(frame["text"]) == run.predict(list(frame["text"]))).all()
    assert (run.predict(frame) == run.predict(frame["text"])).all()


class Columns:
    """Stands for a data set of Hugging Face."""

    def __init__(self, columns, names=None):
        self._columns, self.column_names = columns, list(columns)
        self.features = {name: SimpleNamespace(names=names) for name in columns}

    def __len__(self):
        return len(self._columns[self.column_names[0]])

    def __getitem__(self, key):
        return self._columns[key]


def test_data_sets_of_hugging_face_are_trained_on_and_predicted_for():
    texts, labels = notes()
    numbers = [["home", "ward"].index(label) for label in labels]
    run = dpsur.fit("auto", Columns({"text": texts, "label": numbers}, ["home", "ward"]), **SHARED)
    assert set(run.predict(Columns({"text": texts[:5]}))) <= {"home", "ward"}
    frame = pd.DataFrame({"text": texts, "label": labels})
    same = dpsur.fit("auto", frame, classes=["home", "ward"], **SHARED)
    assert (same.predict(frame) == run.predict(texts)).all()
    with pytest.raises(dpsur.InvalidInputError, match="has the columns age, job; a table must be"):
        dpsur.fit("auto", Columns({"age": [1, 2], "job": ["a", "b"]}), **SHARED)


def test_one_record_as_a_dictionary(made):
    run, _ = made[1]["table"]
    one = {"age": 70, "job": "clerk"}
    assert run.predict(one) == run.predict([one])


def test_channels_that_come_last_are_named():
    images = np.zeros((20, 32, 32, 3), np.uint8)
    with pytest.raises(dpsur.InvalidInputError, match=r"pass x.transpose\(0, 3, 1, 2\)"):
        dpsur.fit("auto", (images, np.arange(20) % 2), classes=2, **SHARED)


class Ragged(torch.utils.data.Dataset):
    """Records of several lengths, which `padded` brings to eight."""

    def __len__(self):
        return 40

    def __getitem__(self, place):
        return torch.full((3 + place % 4,), float(place % 2)), place % 2


def padded(records):
    inputs = torch.zeros(len(records), 8)
    for row, (values, _) in zip(inputs, records, strict=True):
        row[: len(values)] = values
    return inputs, torch.tensor([label for _, label in records])


def test_a_collate_function_sees_each_record_alone():
    seen = []

    def collate(records):
        seen.append(len(records))
        return padded(records)

    run = dpsur.fit(nn.Linear(8, 2), Ragged(), collate=collate, test_set=Ragged(), **SHARED)
    assert set(seen) == {1}
    assert run.scores["accuracy"] > 0.9
    loader = torch.utils.data.DataLoader(Ragged(), collate_fn=padded)
    with pytest.raises(dpsur.InvalidInputError, match="collate=loader.collate_fn"):
        dpsur.fit(nn.Linear(8, 2), loader, **SHARED)
    with pytest.raises(dpsur.InvalidInputError, match="pad or crop them"):
        dpsur.fit(nn.Linear(8, 2), Ragged(), **SHARED)
