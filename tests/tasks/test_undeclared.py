"""Mistakes in a schema: said where records are public, noted privately where they are not."""

import json

import numpy as np
import pytest

import dpsur
from dpsur.cli import main
from dpsur.errors import InvalidInputError
from dpsur.tasks.tables import Undeclared, header

BUDGET = dpsur.Budget(3.0, 1e-5)


def table(count=400):
    random = np.random.default_rng(0)
    back = np.where(random.random(count) < 0.2, "yes", "no")
    ward = random.choice(["north", "south"], count)
    age = random.uniform(20, 90, count).astype(object)
    age[:3] = [None, "", float("nan")]
    return {"age": age, "ward": ward, "back": back}


def schema(classes=("no", "yes"), wards=("north", "south"), test=None):
    return dpsur.Schema(
        {"age": dpsur.Number(0, 100), "ward": dpsur.Category(list(wards))},
        {"back": dpsur.Category(list(classes))},
        test,
    )


def test_a_right_schema_has_no_warnings_and_missing_values_are_none():
    found = Undeclared.of(schema(), table())
    assert found.warnings() == []
    assert found.to_json()["not_declared"] == {"age": 0, "ward": 0, "back": 0}


@pytest.mark.parametrize(
    ("declared", "data", "said"),
    [
        (schema(classes=("no", "Yes")), table(), ["of the test records have values of 'back'"]),
        (schema(classes=("no", "Yes")), table(), ["class 'Yes' of 'back' has none of the 400"]),
        (schema(wards=("North", "South")), table(), ["100% of the test", "'ward'", "'other'"]),
        (schema(), {**table(), "age": np.full(400, "old")}, ["'age'", "no numbers"]),
    ],
)
def test_mistakes_are_warned_of_on_public_records(declared, data, said):
    text = "\n".join(Undeclared.of(declared, data).warnings())
    assert all(part in text for part in said), text


@pytest.mark.filterwarnings("ignore:.*were left out")
def test_fit_warns_by_its_public_test_set():
    train = table()
    with pytest.warns(UserWarning, match="class 'Yes' of 'back' has none"):
        dpsur.fit(
            "auto",
            train,
            schema=schema(classes=("no", "Yes")),
            budget=BUDGET,
            test_set=train,
            max_updates=1,
        )


def test_fit_notes_private_records_in_the_folder_of_the_run(tmp_path):
    declared = schema(classes=("no", "Yes"))
    run = dpsur.fit(
        "auto", table(), schema=declared, budget=BUDGET, max_updates=1, out=tmp_path / "run"
    )
    counts = json.loads((tmp_path / "run" / "private" / "schema.json").read_text())
    assert counts["classes"]["Yes"] == 0
    assert counts["not_declared"]["back"] == sum(table()["back"] == "yes")
    assert not list(run.saved.rglob("schema.json"))


def test_what_is_no_text_is_counted_and_what_is_missing_is_not():
    declared = dpsur.Schema({"note": dpsur.Text(16)}, {"back": dpsur.Category(["no", "yes"])})
    data = {"note": ["fell", 3, None, ""], "back": ["no", "yes", "no", "yes"]}
    found = Undeclared.of(declared, data)
    assert found.to_json()["not_declared"] == {"note": 1, "back": 0}
    assert "25% of the test records have values of 'note' that are no texts" in found.warnings()[0]


def write(folder, declared, data):
    rows = zip(*([*map(str, column)] for column in data.values()), strict=True)
    lines = [",".join(data), *(",".join(row) for row in rows)]
    (folder / "t.csv").write_text("\n".join(lines))
    declared.save(folder / "s.json")
    return ["train", "--task", f"csv:{folder / 't.csv'}", "--schema", str(folder / "s.json")]


def test_the_command_warns_by_the_test_share_and_notes_the_rest_privately(tmp_path, capsys):
    declared = schema(classes=("no", "Yes"), test=dpsur.tasks.schema.TestPart(share=0.5))
    arguments = write(tmp_path, declared, table(800))
    assert main([*arguments, "--max-updates", "1", "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    assert "class 'Yes' of 'back' has none of the" in shown.err
    path = tmp_path / "run" / "private" / "schema.json"
    assert str(path) in shown.out
    counts = json.loads(path.read_text())
    assert counts["classes"]["Yes"] == 0
    assert 20 < counts["not_declared"]["back"] < 160


def test_without_public_records_nothing_is_said_of_the_private_ones(tmp_path, capsys):
    seen = []
    for place, classes in enumerate([("no", "Yes"), ("no", "yes")]):
        folder = tmp_path / str(place)
        folder.mkdir()
        arguments = write(folder, schema(classes), table())
        assert main([*arguments, "--max-updates", "1", "--quiet", "--out", str(folder / "r")]) == 0
        shown = capsys.readouterr()
        seen.append((shown.out + shown.err).replace(str(folder), ""))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "line", ["54,M,yes", "Dear colleague, " + "x" * 200, '{"note": "fell"}', "M,1e3,no"]
)
def test_a_first_record_never_becomes_a_column_name(line, tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text(f"{line}\n{line}\n")
    with pytest.raises(InvalidInputError, match="looks like a record") as found:
        header(path)
    assert line[:8] not in str(found.value)
    assert main(["data", "schema", str(path)]) == 2
    shown = capsys.readouterr()
    assert line[:8] not in shown.out + shown.err


def test_names_that_count_are_names(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("0,1,2\n5,6,7\n")
    assert header(path) == ["0", "1", "2"]
