"""What happens with a wrong schema or a wrong file: one line that says so, or a warning."""

import json
from pathlib import Path
from typing import Any

import pytest

from dpsur.errors import InvalidInputError
from dpsur.tasks import Declared, Task, task_named

NUMBER = {"kind": "number", "low": 0, "high": 100}
GROUP = {"kind": "category", "values": ["x", "y"]}
ANSWER = {"kind": "category", "values": ["no", "yes"]}
HEAD = "age,group,answer"
LINES = [f"{place % 90},{'xy'[place % 2]},{('no', 'yes')[place % 3 == 0]}" for place in range(300)]


def _task(
    folder: Path,
    columns: dict[str, Any] | None = None,
    answer: dict[str, Any] | None = None,
    text: str | None = None,
) -> Task:
    usual = "\n".join([HEAD, *LINES]) + "\n"
    (folder / "train.csv").write_text(usual if text is None else text)
    (folder / "test.csv").write_text(usual)
    schema = {
        "columns": {"age": NUMBER, "group": GROUP} | (columns or {}),
        "target": {"answer": ANSWER | (answer or {})},
    }
    (folder / "schema.json").write_text(json.dumps(schema))
    declared = Declared(schema=folder / "schema.json", test=folder / "test.csv")
    return task_named(f"csv:{folder / 'train.csv'}", declared=declared)


def test_a_right_table_has_no_warning(tmp_path: Path) -> None:
    assert _task(tmp_path).warnings == ()


@pytest.mark.parametrize(
    ("columns", "answer", "said"),
    [
        ({}, {"values": ["no", "Yes"]}, "'answer' that are not among the declared values"),
        ({}, {"values": ["no", "yes", "unsure"]}, "class 'unsure' of 'answer' has none of the"),
        ({"group": {"kind": "category", "values": ["X", "Y"]}}, {}, "were made 'other'"),
        ({"group": NUMBER}, {}, "'group' that are no numbers"),
    ],
    ids=["misspelt class", "class without records", "misspelt category", "no numbers"],
)
def test_a_schema_that_fits_few_records_is_warned_about(
    tmp_path: Path, columns: dict[str, Any], answer: dict[str, Any], said: str
) -> None:
    assert any(said in text for text in _task(tmp_path, columns, answer).warnings)


@pytest.mark.parametrize(
    ("columns", "answer", "said"),
    [
        ({}, {"values": ["NO", "YES"]}, "has a target .answer. that the schema declares"),
        ({"zz": NUMBER}, {}, "has no column 'zz'"),
        ({"age": {**NUMBER, "high": 0}}, {}, "low of a number must be below its high"),
        ({"age": {"kind": "number"}}, {}, "a number needs low and high"),
        ({"age": {"kind": "numeric"}}, {}, "kind must be number, category, text or ignore"),
        ({"group": {"kind": "category", "values": ["x", "x"]}}, {}, "the value 'x' twice"),
    ],
)
def test_a_wrong_schema_is_refused(
    tmp_path: Path, columns: dict[str, Any], answer: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInputError, match=said):
        _task(tmp_path, columns, answer)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no header line"),
        (HEAD + "\n", "holds no record"),
        ("\n".join(LINES), "looks like a record"),
        ("\n".join([HEAD, *LINES]).replace(",", ";"), "must be separated by commas"),
        ("age,age,answer\n1,2,no\n", "names the column 'age' twice"),
    ],
    ids=["empty", "only a header", "no header", "semicolons", "a name twice"],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        _task(tmp_path, text=text)
