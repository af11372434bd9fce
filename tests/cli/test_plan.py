"""Before spending: `dpsur plan`, `dpsur train --dry-run`, and `calibrate` with less to give."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

import dpsur
from dpsur.cli import main
from dpsur.privacy.budget import Budget
from dpsur.runs.planning import (
    PUBLIC_DATA,
    TEST_RECORDS,
    Prospect,
    Simulation,
    lost_on_public_data,
    made_up,
    with_records_needed,
)
from tests.cli.test_commands import dpsur as command


def test_a_dry_run_names_the_noise_of_the_run_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    x = draws.integers(0, 255, (60, 28, 28)).astype(np.uint8)
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(60) % 2, classes=2)
    words = ["train", "--task", "npz:own.npz", "--delta", "1e-3", "--seed", "0"]
    assert main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "nothing was trained and nothing is spent" in printed.out
    assert "is right in at most" in printed.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.npz"]
    assert main([*words, "--out", "run"]) == 0
    noise = re.search(r"noise multiplier [\d.]+", capsys.readouterr().err).group()
    assert noise in printed.out
    assert main([*words, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 60


def test_plans_of_a_table_charge_its_histograms(tmp_path, capsys):
    draws = np.random.default_rng(0)
    columns = {name: draws.uniform(-1, 1, 300) for name in ("a", "b")}
    columns["y"] = (columns["a"] > 0).astype(int)
    rows = zip(*(map(str, column) for column in columns.values()), strict=True)
    (tmp_path / "t.csv").write_text("\n".join([",".join(columns), *map(",".join, rows)]))
    schema = dpsur.Schema(
        {name: dpsur.Number(-1, 1) for name in ("a", "b")}, {"y": dpsur.Category([0, 1])}
    )
    schema.save(tmp_path / "s.json")
    budget = dpsur.Budget(3.0, 1e-5)
    csv = f"csv:{tmp_path / 't.csv'}"
    run = dpsur.fit(csv, schema=tmp_path / "s.json", budget=budget)
    assert len(run.plan.setup) == 1
    schema_file = str(tmp_path / "s.json")
    assert main(["train", "--task", csv, "--schema", schema_file, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == run.plan.describe()
    words = ["plan", "--records", "300", "--width", "2", "--epsilon", "3", "--no-simulation"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilons"][0]["run"] == run.plan.describe()
    assert found["seconds"] is None
    words = ["plan", "--records", "300", "--schema", schema_file, "--epsilon", "3"]
    assert main([*words, "--no-simulation", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    status, _, printed = command(*words, "--classes", "3", capsys=capsys)
    assert status == 2
    assert "the classes are those of --schema" in printed


PERSONS = ["plan", "--records", "5000", "--persons", "600", "--no-simulation", "--epsilon", "3"]


def test_a_plan_chooses_how_persons_are_drawn(capsys):
    assert main([*PERSONS, "--width", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = [(one["sampling"], one["records_per_person"]) for one in found["samplings"]]
    assert kinds[0] == ("person", 16)
    assert sorted(kinds) == sorted([*(("person", k) for k in (1, 4, 16)), ("record", 4), kinds[-1]])
    noise = found["samplings"][0]["noise_multiplier"]
    assert f"noise multiplier {noise:.3f}" in found["epsilons"][0]["run"]
    assert main([*PERSONS, "--width", "4"]) == 0
    printed = capsys.readouterr().out
    assert "600 persons of shape 4" in printed
    assert "take --sampling person --records-per-person 16\n" in printed
    assert "whether a given person was used" in printed


def test_a_plan_takes_the_way_to_draw_persons_as_given(tmp_path, capsys):
    given = ["--texts", "--sampling", "record", "--records-per-person", "4"]
    assert main([*PERSONS, *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (kind,) = found["samplings"]
    assert (kind["sampling"], kind["records_per_person"]) == ("record", 4)
    texts = {"text": [f"word{n} and" for n in range(80)], "y": [0, 1] * 40}
    run = dpsur.fit(
        *("auto", (texts["text"], texts["y"])),
        classes=2,
        budget=dpsur.Budget(3.0, 1e-5),
        groups=[n // 2 for n in range(80)],
        records_per_person=4,
        sampling="record",
        records=2400,  # of 5000, which 600 persons have at most 4 of
        max_updates=1,
        progress=False,
    )
    planned = re.search(r"noise multiplier ([\d.]+)", found["epsilons"][0]["run"])
    assert f"{run.plan.update.noise_multiplier:.3f}" == planned[1]
    assert main([*PERSONS, *given]) == 0
    printed = capsys.readouterr().out
    assert "take --sampling record --records-per-person 4, and a public --records\n" in printed


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--persons", "6000"], "6000 persons have at least as many records"),
        (["--persons", "0"], "persons"),
        (["--records-per-person", "0"], "records_per_person"),
        (["--sampling", "record", "--records-per-person", "1"], "are the same"),
    ],
)
def test_a_plan_refuses_persons_that_cannot_be(given, words, capsys):
    assert main([*PERSONS, "--width", "4", *given]) == 2
    assert words in capsys.readouterr().err


def test_a_dry_run_of_persons_counts_them_and_what_may_join(tmp_path, capsys):
    draws = np.random.default_rng(0)
    rows = [f"p{n // 3},{x:.3f},{int(x > 0)}" for n, x in enumerate(draws.uniform(-1, 1, 120))]
    (tmp_path / "t.csv").write_text("\n".join(["who,x,y", *rows]))
    schema = dpsur.Schema({"x": dpsur.Number(-1, 1)}, {"y": dpsur.Category([0, 1])})
    schema.save(tmp_path / "s.json")
    words = ["train", "--task", f"csv:{tmp_path / 't.csv'}", "--schema", str(tmp_path / "s.json")]
    words += ["--group-by", "who", "--delta", "1e-3", "--dry-run"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("40 persons, ")
    assert "whether a given person was used" in printed.out
    assert "40 persons of shape" in printed.err
    words += ["--method", "dpsgd", "--gate", "none", "--records", "120", "--json"]
    words += ["--batch-size", "12"]
    words += ["--updates", "20"]
    noise = []
    for most in ("1", "3"):
        assert main([*words, "--sampling", "record", "--records-per-person", most]) == 0
        run = json.loads(capsys.readouterr().out)["run"]
        noise.append(float(re.search(r"noise multiplier ([\d.]+)", run)[1]))
    assert noise[1] > 1.2 * noise[0]


def test_a_plan_of_images_and_texts_needs_no_data(capsys):
    words = ["plan", "--records", "2000", "--epsilon", "1,4", "--no-simulation", "--json"]
    assert main([*words, "--image-size", "64x64", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["epsilons"]
    assert first["right_guesses"] < second["right_guesses"] < 0.75
    least, most = found["memory_bytes"]
    assert least < 330e6 + 2000 * 4 * (8192 + 3 * 64 * 64) + 1 < most
    assert first["lost"][0] < first["lost"][1] <= 0.5
    assert second["lost"][1] < first["lost"][1]
    assert first["records_for_a_point"].startswith(("over", "at most")) or int(
        first["records_for_a_point"].replace(",", "")
    )
    assert main([*words[:-1], "--texts"]) == 0
    assert "an attacker is right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--width", "3", "--epsilon", "x"], "numbers separated by commas"),
        (["--width", "3", "--epsilon", "0"], "above 0 and below 1000"),
        (["--width", "0"], "width must be a whole number of at least 1"),
        (["--width", "3", "--classes", "1"], "classes must be a whole number of at least 2"),
        (["--width", "10000000", "--epsilon", "1"], "width must be at most 10000"),
        (["--image-size", "7"], "must be HxW or CxHxW"),
    ],
)
def test_bad_facts_are_refused_in_one_line(words, message, capsys):
    status, _, printed = command("plan", "--records", "500", *words, capsys=capsys)
    assert status == 2
    assert message in printed
    assert printed.count("\n") == 1


SCHEMA = dpsur.Schema(
    {"a": dpsur.Number(0, 10), "b": dpsur.Category(["x", "y", "z"]), "c": dpsur.Number(-1, 1)},
    {"y": dpsur.Category(["no", "yes"])},
)


def test_synthetic_tables_have_the_columns_and_are_as_hard_as_they_should_be():
    table, rows, labels = made_up(3000, SCHEMA, 0.85, seed=0)
    assert rows.shape == (3000, 1 + 3 + 1)
    assert set(table["b"]) == {"x", "y", "z"}
    assert min(table["a"]) >= 0 <= max(table["a"]) <= 10
    assert set(labels.tolist()) == {0, 1}
    simulation = Simulation.of(2000, SCHEMA)
    assert simulation.references == pytest.approx([0.85, 0.95], abs=0.03)
    assert len(simulation.tables[0]["y"]) == 2000 + TEST_RECORDS


def test_records_for_a_point_follow_from_the_product_with_epsilon():
    rows = [Prospect(e, "", None, (0.0, lost)) for e, lost in ((1, 0.04), (2, 0.02), (4, 0.009))]
    assert [row.records_for_a_point for row in with_records_needed(rows, 1000)] == [
        "4,000",
        "2,000",
        "1,000",
    ]
    worse = [replace(row, lost=(0.0, 0.5)) for row in rows]
    assert with_records_needed(worse, 1000)[0].records_for_a_point == "over 4,000"
    better = [replace(row, lost=(0.0, 0.0)) for row in rows]
    assert with_records_needed(better, 1000)[2].records_for_a_point == "at most 250"


def test_public_data_guide_plans_of_images_and_texts():
    least, most = lost_on_public_data(4000, 10, 1.0)
    assert 0 < least < most
    assert lost_on_public_data(16_000, 10, 1.0) == lost_on_public_data(4000, 10, 4.0)
    assert lost_on_public_data(10**7, 10, 8.0)[1] < 0.1
    assert lost_on_public_data(2, 10, 0.1)[1] == pytest.approx(0.9)
    names = set(PUBLIC_DATA)
    with_one = lost_on_public_data(4000, 10, 1.0, without=names - {"cifar10"})
    assert with_one[0] > least


@pytest.mark.slow
def test_a_plan_times_short_runs(capsys):
    words = ["plan", "--records", "2000", "--texts", "--epsilon", "1", "--device", "cpu", "--json"]
    assert main(words) == 0
    least, most = json.loads(capsys.readouterr().out)["seconds"]
    assert 0 < least < most


@pytest.mark.slow
def test_privacy_costs_more_at_a_smaller_epsilon():
    """With noise that drowns everything the loss is that of a guess."""
    simulation = Simulation.of(600, SCHEMA)
    little, _ = simulation.lost(Budget(0.01, 1e-5), "cpu")
    much, seconds = simulation.lost(Budget(50.0, 1e-5), "cpu")
    assert little > much
    assert little > 0.1
    assert seconds > 0


def test_calibrate_fills_in_what_auto_takes(capsys):
    words = ["calibrate", "--dataset-size", "20000", "--epsilon", "3", "--delta", "1e-5", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    _, plan = dpsur.Dpsgd(gate="block").resolve(20000, Budget(3.0, 1e-5), "proven")
    assert found["noise_multiplier"] == plan.update.noise_multiplier
    assert found["batch_size"] == 1024
    status, _, printed = command(*words, "--val-batch-size", "64", capsys=capsys)
    assert status == 2
    assert "needs --batch-size" in printed
