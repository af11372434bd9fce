"""Tables with a declared schema: every record becomes a row by itself, whatever it holds."""

import csv
import json
import random

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dpsur
from dpsur.cli import main
from dpsur.errors import InvalidInputError
from dpsur.runs.evaluation import score
from dpsur.tasks import Declared, task_named
from dpsur.tasks.tables import drawn_to_test, header, read_table
from tests.conftest import blobs
from tests.robustness.mutations import mutate_bytes, mutate_json

AGE, JOB = dpsur.Number(0, 100, missing=40), dpsur.Category(["clerk", "nurse"])
INCOME = {"income": dpsur.Category(["low", "high"])}
SCHEMA = dpsur.Schema({"age": AGE, "job": JOB}, INCOME)
BUDGET = dpsur.Budget(epsilon=3.0, delta=1e-4)
METHOD = dpsur.Dpsgd(updates=30, batch_size=64, learning_rate=2.0, noise_multiplier=2.0)


def people(count=300, seed=0):
    generator = np.random.default_rng(seed)
    age = generator.uniform(0, 100, count)
    job = generator.choice(["clerk", "nurse", "pilot"], count)
    score = age / 50 - 1 + (job == "nurse")
    income = np.where(score > 0.3, "high", "low")
    return pd.DataFrame({"age": age, "job": job, "income": income, "wealth": 1000 * score})


def test_a_record_becomes_numbers_by_the_schema_alone():
    frame = pd.DataFrame(
        {
            "age": [0, 100, 50, 1e9, np.nan],
            "job": ["clerk", "nurse", "pilot", None, " clerk "],
            "income": ["low", "high", "high", "low", "high"],
            "name": list("abcde"),
        }
    )
    records = SCHEMA.records(frame)
    assert records.inputs.tolist() == [
        [-1, 1, 0, 0],
        [1, 0, 1, 0],
        [0, 0, 0, 1],
        [1, 0, 0, 1],
        [pytest.approx(-0.2), 1, 0, 0],
    ]
    assert records.targets.tolist() == [0, 1, 1, 0, 1]
    assert SCHEMA.width == 4


def test_a_target_that_was_not_declared_leaves_its_record_out_or_counts_as_the_one_named():
    frame = pd.DataFrame({"age": [1, 2, 3], "job": "clerk", "income": ["low", "?", None]})
    assert SCHEMA.records(frame).targets.tolist() == [0]
    counted = dpsur.Category(["low", "high"], other="high")
    schema = dpsur.Schema({"age": AGE}, {"income": counted})
    assert schema.records(frame).targets.tolist() == [0, 1, 1]
    number = pd.DataFrame({"age": [1, 2, 3], "y": [5, "x", 1e12]})
    schema = dpsur.Schema({"age": AGE}, {"y": dpsur.Number(0, 10)})
    assert schema.records(number).targets.tolist() == [[0.0], [1.0]]
    schema = dpsur.Schema({"age": AGE}, {"y": dpsur.Number(0, 10, missing=0)})
    assert schema.records(number).targets.tolist() == [[0.0], [-1.0], [1.0]]


def test_one_record_changes_no_other_whatever_it_holds():
    """Frames change the type of a column for one odd value; rows must not follow."""
    frame = pd.DataFrame({"age": [1, 2], "job": [1, 2], "income": [0, 1]})
    schema = dpsur.Schema(
        {"age": AGE, "job": dpsur.Category([1, 2])}, {"income": dpsur.Category([0, 1])}
    )
    alone = schema.records(frame)
    assert alone.targets.tolist() == [0, 1]
    for odd in (np.nan, None, "text", 1.5, -np.inf, 10**400, [1], True, b"\xff", pd.NaT):
        for name in ("age", "job", "income"):
            values = {"age": 5, "job": 1, "income": 1, name: odd}
            more = pd.concat([frame, pd.DataFrame({k: [v] for k, v in values.items()})])
            found = schema.records(more)
            assert torch.equal(found.inputs[:2], alone.inputs), (name, odd)
            assert torch.equal(found.targets[:2], alone.targets), (name, odd)
            assert found.inputs.isfinite().all()
            assert found.inputs.abs().max() <= 1


ANY_TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\n\r"))


@settings(max_examples=60, deadline=None)
@given(line=ANY_TEXT)
def test_one_line_of_a_csv_file_changes_no_other(tmp_path_factory, line):
    """Not even with a quote that is never closed."""
    path = tmp_path_factory.mktemp("lines") / "people.csv"
    before, after = ["age,job,income", "10,clerk,low"], ["90,nurse,high", "95,clerk,high"]
    path.write_text("\n".join([*before, *after]), encoding="utf-8")
    alone = read_table(path, SCHEMA)
    path.write_text("\n".join([*before, line, *after]), encoding="utf-8")
    found = read_table(path, SCHEMA)
    assert len(found) in (3, 4)
    kept = torch.tensor([0, len(found) - 2, len(found) - 1])
    assert torch.equal(found.inputs[kept], alone.inputs)
    assert torch.equal(found.targets[kept], alone.targets)


def test_a_reader_of_whole_files_would_let_one_record_swallow_others():
    """The negative control: what `csv` makes of all lines together."""
    lines = ["age,job,income", "10,clerk,low", '20,"clerk,low', "90,nurse,high", "95,clerk,high"]
    assert len(list(csv.reader(lines))) == 3


def write(tmp_path, frame, schema=SCHEMA, name="people.csv"):
    path = tmp_path / name
    frame.to_csv(path, index=False) if name.endswith("csv") else frame.to_parquet(path)
    schema.save(tmp_path / "schema.json")
    return path, tmp_path / "schema.json"


def test_files_and_frames_give_the_same_records(tmp_path):
    frame = people()
    frame.loc[3, "age"] = np.nan
    expected = SCHEMA.records(frame)
    for name, prefix in (("people.csv", "csv:"), ("people.parquet", "parquet:")):
        path, schema = write(tmp_path, frame, name=name)
        task = task_named(f"{prefix}{path}", Declared(schema=schema))
        train, test = task.load(None)
        assert test is None
        torch.testing.assert_close(train.inputs, expected.inputs)
        assert torch.equal(train.targets, expected.targets)
        assert task.networks["vectors"] == {"name": "mlp", "inputs": 4, "hidden": 32, "classes": 2}
        assert task.models["linear"] == {"name": "linear", "inputs": 4, "classes": 2}


def test_the_test_share_is_drawn_from_each_record_by_itself():
    records = SCHEMA.records(people(2000))
    drawn = drawn_to_test(records, 0.3)
    assert abs(int(drawn.sum()) - 600) < 5 * np.sqrt(2000 * 0.3 * 0.7)
    assert torch.equal(drawn_to_test(records.part(slice(1, None)), 0.3), drawn[1:])


def test_test_records_are_declared_public(tmp_path):
    path, schema = write(tmp_path, people())
    stored = json.loads(schema.read_text())
    for part in ({"share": 0.2}, {"share": 0.2, "public": "yes"}):
        schema.write_text(json.dumps({**stored, "test": part}))
        with pytest.raises(InvalidInputError, match="published without noise: declare"):
            task_named(f"csv:{path}", Declared(schema=schema))
    people(50, seed=1).to_csv(tmp_path / "test.csv", index=False)
    for part, count in (({"share": 0.2}, None), ({"file": "test.csv"}, 50)):
        schema.write_text(json.dumps({**stored, "test": {**part, "public": True}}))
        task = task_named(f"csv:{path}", Declared(schema=schema))
        _, test = task.load(None)
        assert count in (None, len(test))
        assert "file" not in str(task.public)
    schema.write_text(json.dumps({**stored, "test": {"file": "no.csv", "public": True}}))
    with pytest.raises(InvalidInputError, match="names the test file no.csv"):
        task_named(f"csv:{path}", Declared(schema=schema))


WRONG = [
    ({"columns": {}}, "columns of a schema must name at least one column"),
    ({"columns": {"age": {"kind": "number"}}}, "column 'age': a number needs low and high"),
    (
        {"columns": {"age": {"kind": "number", "low": 1, "high": 1}}},
        "low of a number must be below",
    ),
    ({"columns": {"age": {"kind": "number", "low": "1", "high": 2}}}, "low of a number must be a"),
    (
        {"columns": {"age": {"kind": "number", "low": 0, "high": 2, "missing": 3}}},
        "missing must be",
    ),
    ({"columns": {"age": {"kind": "category"}}}, "a category needs values"),
    ({"columns": {"age": {"kind": "category", "values": ["a", "a"]}}}, "the value 'a' twice"),
    (
        {"columns": {"age": {"kind": "category", "values": ["a"], "other": "b"}}},
        "other must be one",
    ),
    ({"columns": {"age": {"kind": "date"}}}, "kind must be number, category, text or ignore"),
    ({"columns": {"age": {"kind": "number", "low": 0, "high": 1, "min": 0}}}, "has no 'min'"),
    ({"columns": {"income": {"kind": "category", "values": [1]}}}, "is an input and a target"),
    ({"target": {"income": {"kind": "category", "values": ["x"]}}}, "needs at least two values"),
    ({"format": "other/9"}, "this version reads dpsur-schema/1"),
    ({"more": 1}, "a schema has no 'more'"),
    ({"test": {"public": True}}, "either a file or a share"),
    ({"test": {"share": 2, "public": True}}, "share of test must be above 0"),
    ({"columns": {"weight": {"kind": "number", "low": 0, "high": 1}}}, "has no column 'weight'"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_schema_is_refused_in_one_line(tmp_path, change, message):
    path, schema = write(tmp_path, people(5))
    schema.write_text(json.dumps({**json.loads(schema.read_text()), **change}))
    with pytest.raises(InvalidInputError, match=message) as found:
        task_named(f"csv:{path}", Declared(schema=schema))
    assert "\n" not in str(found.value)


def test_files_that_are_no_tables_are_refused(tmp_path):
    schema = write(tmp_path, people(5))[1]
    path = tmp_path / "odd"
    for content, message in (
        (b"", "no header line"),
        (b"age,job,age\n", "names the column 'age' twice"),
        (b"age,job,income\n", "holds no record"),
        (b"age,job,income\n1,clerk,?\n", "no record of .* has a target"),
        (b"PAR1 and nothing else", "is damaged, or no Parquet file"),
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidInputError, match=message):
            task_named(f"csv:{path}", Declared(schema=schema))
    path.write_bytes(b"age,job,income\n1,clerk\n\xff\xfe,\x00,low\n2,nurse,high,4,5\n,,,\n3,,low\n")
    assert len(read_table(path, SCHEMA)) == 3
    with pytest.raises(InvalidInputError, match="needs a schema"):
        task_named(f"csv:{path}")
    with pytest.raises(InvalidInputError, match="there is no file"):
        task_named("csv:nothing.csv", Declared(schema=schema))
    with pytest.raises(InvalidInputError, match="schema .* is for csv:FILE"):
        task_named("mnist-5k", Declared(schema=schema))
    with pytest.raises(InvalidInputError, match="classes 3 is for npz:FILE"):
        task_named(f"csv:{path}", Declared(classes=3, schema=schema))


# --- training -------------------------------------------------------------------------------------

TARGETS = {
    "classes": (INCOME, "accuracy", 0.8),
    "number": ({"wealth": dpsur.Number(-1000, 2000)}, "r2", 0.5),
    "labels": (
        {"income": dpsur.Category(["low", "high"]), "rich": dpsur.Category([False, True])},
        "micro_f1",
        0.7,
    ),
}


@pytest.mark.filterwarnings("ignore:37% of the test records have values of 'job'")
@pytest.mark.parametrize(
    ("kind", "name"), [("classes", "mlp"), ("number", "linear"), ("labels", "linear")]
)
def test_fit_on_a_frame(kind, name, tmp_path):
    target, metric, least = TARGETS[kind]
    frame = people(600).assign(rich=lambda table: table["wealth"] > 0)
    schema = dpsur.Schema({"age": AGE, "job": JOB}, target)
    assert schema.kind == kind
    run = dpsur.fit(
        name,
        frame[:500],
        schema=schema,
        test_set=frame[500:],
        budget=dpsur.Budget(8.0, 1e-4),
        method=METHOD,
        seed=0,
    )
    assert run.scores[metric] > least
    assert run.statement["public"]["schema"] == schema.to_json()
    release = run.save(tmp_path / "out")
    if kind == "number":  # it takes seconds
        assert dpsur.verify(release)[0] == []
    assert "Schema (public" in (release / "PRIVACY.md").read_text()
    loaded = dpsur.load(tmp_path / "out")
    inputs = schema.inputs(frame[500:])
    assert torch.equal(loaded.outputs(inputs), run.predictor.outputs(inputs))
    assert (loaded.predict(frame[500:]) == run.predict(inputs)).all()
    predicted = run.predict(frame[500:].drop(columns=list(target)))
    assert len(predicted) == 100
    if kind == "classes":
        right = (predicted == frame["income"][500:]).mean()
        assert right == pytest.approx(run.scores["accuracy"])
    if kind == "number":
        error = np.abs(predicted - frame["wealth"][500:]).mean()
        assert error == pytest.approx(run.scores["mae"], rel=1e-4)
    if kind == "labels":
        assert set(predicted[:, 0]) <= {"low", "high"}
        assert set(predicted[:, 1]) <= {"False", "True"}


@pytest.mark.parametrize("kind", ["number", "labels"])
def test_gates_test_candidates_of_any_loss(kind):
    frame = people(600).assign(rich=lambda table: table["wealth"] > 0)
    schema = dpsur.Schema({"age": AGE, "job": JOB}, TARGETS[kind][0])
    method = dpsur.Dpsur(noise_multiplier=20.0, accept_ratio=1.5, updates=5)
    run = dpsur.fit("linear", frame, schema=schema, budget=BUDGET, method=method, seed=0)
    assert run.statement["accepted_updates"] == 5
    assert all(np.isfinite(row["loss_difference"]) for row in run.private.rows)
    if kind == "labels":
        return
    blocks = dpsur.Dpsgd(gate="block", updates=60, batch_size=64)
    run = dpsur.fit("linear", frame, schema=schema, budget=BUDGET, method=blocks, seed=0)
    quantities = {row["quantity"] for row in run.statement["metrics"]}
    assert {"median loss", "clipped loss decrease"} < quantities


def test_models_and_losses_of_the_user_and_names_without_a_schema():
    schema = dpsur.Schema({"age": AGE}, {"wealth": dpsur.Number(-1000, 2000)})
    run = dpsur.fit(
        torch.nn.Linear(1, 1),
        people(),
        schema=schema,
        loss=torch.nn.functional.l1_loss,
        test_set=people(),
        budget=BUDGET,
        method=METHOD,
    )
    assert {"r2", "mae"} < set(run.scores)
    with pytest.raises(InvalidInputError, match="model 'mlp' is the name of a network for a table"):
        dpsur.fit("mlp", blobs(), budget=BUDGET)
    with pytest.raises(InvalidInputError, match="unknown model 'cnn' for these records"):
        dpsur.fit("cnn", people(), schema=schema, budget=BUDGET)
    with pytest.raises(InvalidInputError, match="schema must be a dpsur.Schema"):
        dpsur.fit("mlp", people(), schema={}, budget=BUDGET)
    with pytest.raises(InvalidInputError, match="has no column 'age'"):
        dpsur.fit("mlp", people().drop(columns="age"), schema=schema, budget=BUDGET)


def test_the_commands_train_evaluate_and_resume(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    schema = dpsur.Schema({"age": AGE, "job": JOB}, {"wealth": dpsur.Number(-1000, 2000)})
    path, schema_path = write(tmp_path, people(400), schema)
    stored = json.loads(schema_path.read_text())
    schema_path.write_text(json.dumps({**stored, "test": {"share": 0.25, "public": True}}))
    task = ["--task", f"csv:{path}", "--schema", str(schema_path)]
    train = ["train", *task, "--model", "linear", "--method", "dpsgd", "--updates", "20"]
    assert main([*train, "--batch-size", "64", "--delta", "1e-4", "--quiet", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"r2", "mae", "loss"} == set(result["scores"])
    assert "runs/people-dpsgd" in result["release"]
    assert main(["evaluate", "runs/people-dpsgd", *task, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["scores"]
    assert found == pytest.approx(result["scores"], rel=1e-5)
    assert main(["evaluate", "runs/people-dpsgd", *task]) == 0
    assert "test R2 " in capsys.readouterr().out
    statement = (tmp_path / "runs/people-dpsgd/release/privacy.json").read_text()
    assert str(path) not in statement


def test_a_schema_is_started_from_the_header_alone(tmp_path, capsys):
    path, _ = write(tmp_path, people(3))
    secret = "31.4159"
    path.write_text(f"age,job,income\n{secret},clerk,low\n")
    assert header(path) == ["age", "job", "income"]
    assert main(["data", "schema", str(path), "--out", str(tmp_path / "new.json")]) == 0
    text = (tmp_path / "new.json").read_text()
    stored = json.loads(text)
    assert list(stored["columns"]) == ["age", "job"]
    assert list(stored["target"]) == ["income"]
    assert secret not in text
    assert "clerk" not in text
    assert main(["data", "schema", str(path), "--out", str(tmp_path / "new.json")]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["data", "schema", str(path), "--target", "nothing"]) == 2
    # filled in, with what is left of the template, it is a schema
    stored["columns"]["age"] |= {"kind": "number", "low": 0, "high": 100}
    stored["columns"]["job"]["kind"] = "ignore"
    stored["target"]["income"] |= {"kind": "category", "values": ["low", "high"]}
    stored["test"]["public"] = True
    schema = dpsur.Schema.from_json(stored)
    assert list(schema.columns) == ["age"]


# --- scores ---------------------------------------------------------------------------------------


def test_scores_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics", reason="the scores of scikit-learn")
    generator = torch.Generator().manual_seed(0)
    outputs = (torch.randn(200, 3, generator=generator) * 4).round() / 4  # with ties
    labels = (torch.randn(200, 3, generator=generator) + outputs > 0).float()
    bce, mse = torch.nn.BCEWithLogitsLoss(), torch.nn.MSELoss()
    found = score(outputs, labels, bce)
    assert found["micro_f1"] == pytest.approx(
        metrics.f1_score(labels, outputs > 0, average="micro")
    )
    assert found["subset_accuracy"] == metrics.accuracy_score(labels, outputs > 0)
    for one, wanted in (
        (score(outputs[:, :1], labels[:, :1], bce), labels[:, 0]),
        (score(outputs[:, 0], labels[:, 0], bce), labels[:, 0]),
        (
            score(
                torch.stack([0 * outputs[:, 0], outputs[:, 0]], 1),
                labels[:, 0].long(),
                torch.nn.functional.cross_entropy,
            ),
            labels[:, 0],
        ),
    ):
        assert one["auc"] == pytest.approx(metrics.roc_auc_score(wanted, outputs[:, 0]))
        assert one["accuracy"] == metrics.accuracy_score(wanted, outputs[:, 0] > 0)
    found = score(outputs, labels, mse)
    assert found["r2"] == pytest.approx(metrics.r2_score(labels, outputs))
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(labels, outputs))
    assert score(outputs, labels, lambda one, other: (one - other).abs().mean()) == {}
    assert "auc" not in score(outputs[:, :1], torch.ones(200, 1), bce)


# --- hostile files --------------------------------------------------------------------------------


def test_damaged_files_and_schemas_are_read_or_refused_in_one_line(tmp_path):
    rng, ends = random.Random(0), {"read": 0, "refused": 0}
    for number in range(90):
        name = rng.choice(["people.csv", "people.parquet"])
        path, schema = write(tmp_path, people(8), name=name)
        file = rng.choice([path, schema])
        if file is schema and rng.random() < 0.7:
            stored, what = mutate_json(json.loads(schema.read_text()), rng)
            schema.write_text(json.dumps(stored))
        else:
            content, what = mutate_bytes(file.read_bytes(), rng)
            file.write_bytes(content)
        text = None
        try:
            train, _ = task_named(f"csv:{path}", Declared(schema=schema)).load(None)
        except InvalidInputError as error:
            text = str(error)
        if text is not None:
            assert len(text.splitlines()) == 1, (number, what)
            ends["refused"] += 1
            continue
        assert train.inputs.isfinite().all(), (number, what)
        assert train.inputs.abs().max() <= 1.0 + 1e-6, (number, what)
        ends["read"] += 1
    assert min(ends.values()) > 10


def test_text_of_a_parquet_file_that_is_no_text_counts_as_undeclared(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="Parquet files")
    from pyarrow import parquet

    job = pa.array([b"clerk", b"\xff\xfe", None]).cast(pa.string(), safe=False)
    table = pa.table({"age": [1, 2, 3], "job": job, "income": ["low", "high", "low"]})
    parquet.write_table(table, tmp_path / "odd.parquet")
    found = read_table(tmp_path / "odd.parquet", SCHEMA)
    assert found.inputs[:, 1:].tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1]]
    days = pd.DataFrame({"age": pd.to_datetime(["2020-01-01"]), "job": "clerk", "income": "low"})
    days.to_parquet(tmp_path / "days.parquet")
    with pytest.raises(InvalidInputError, match="column 'age' .* is of type timestamp"):
        read_table(tmp_path / "days.parquet", SCHEMA)
