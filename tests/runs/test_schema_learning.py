"""Schemas that are learned from private records: laws, each broken by a mutant, and runs."""

import json
import math
from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest

import dpsur
from dpsur.cli import main
from dpsur.mechanism import gaussian
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.events import Gaussian, ThresholdedGaussian
from dpsur.runs import schema_learning
from dpsur.runs.input_features import InputFeatures
from dpsur.runs.schema_learning import learn_schema, threshold
from dpsur.tasks.schema import Category, Number, Schema
from tests.mutants import Mutant, law_tests

RECORDS, BUDGET = 3000, dpsur.Budget(3.0, 1e-5)


def table(records=RECORDS, seed=0):
    """Names, ages, codes and incomes; whoever is old comes back."""
    random = np.random.default_rng(seed)
    age = random.integers(18, 90, records)
    return {
        "name": [f"patient {n}" for n in range(records)],
        "age": age,
        "ward": random.choice(["east", "west", "north"], records),
        "code": random.integers(1, 4, records),
        "income": np.exp(random.normal(10, 1, records)).round(2),
        "empty": [None] * records,
        "back": np.where(age + random.normal(0, 20, records) > 60, "yes", "no"),
    }


def learned(seed=0, epsilon=1.0, **changes):
    return learn_schema({**table(), **changes}, "back", epsilon, seed=seed)


def what_is_drawn_is_what_runs_are_charged():
    """Every count has the noise of the event, at the sensitivity of all columns together."""
    drawn = []

    def spy(total, noise, stream, real=gaussian.add_noise):
        drawn.append((total.sensitivity, noise))
        return real(total, noise, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "add_noise", spy)
        schema = learned()
    assert schema.learned is not None
    event = schema.learned.event
    assert set(drawn) == {(math.sqrt(2 * 7), event.noise_multiplier)}
    assert accounting_named("every-trial").epsilon([(event, 1)], 1e-5) <= 1.0
    records = table(200)
    run = dpsur.fit("linear", records, schema=schema, budget=BUDGET, progress=False, max_updates=3)
    assert run.plan.setup == (event,)
    assert run.statement["mechanism"]["setup"][0]["kind"] == "ThresholdedGaussian"
    assert run.statement["guarantee"]["epsilon"] <= BUDGET.epsilon


def a_record_adds_two_for_a_column():
    """Exact counts of two tables, one of which has a record more, differ by at most sqrt(2 m)."""
    sums = []
    whole = table(50)
    for records in (50, 49):
        counts = []

        def spy(found, *_, counts=counts):
            counts.append(list(found))
            return [0.0] * len(found)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(schema_learning, "_noisy", spy)
            with pytest.raises(dpsur.InvalidInputError, match="too few of its values"):
                learn_schema({n: v[:records] for n, v in whole.items()}, "back", 1.0)
        sums.append(counts)
    squares = sum(
        (sum(one) - sum(other)) ** 2
        if len(one) != len(other)
        else sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
        for one, other in zip(*sums, strict=True)
    )
    assert 0 < squares <= 2 * len(whole)


def what_one_record_has_is_not_listed():
    """The chance that any of its values is listed is the delta of the event."""
    event = ThresholdedGaussian(3.0, 1e-6)
    for columns in (1, 20):
        deviation = 3.0 * math.sqrt(2 * columns)
        passed = 1 - NormalDist().cdf((threshold(event, columns) - 1) / deviation)
        assert columns * passed == pytest.approx(event.delta, rel=1e-3)
    for seed in range(3):
        schema = learned(seed)
        assert "name" not in schema.columns
        odd = Counter(["east"] * (RECORDS - 1) + ["the only one"])
        found = learned(seed, ward=list(odd.elements())).columns["ward"]
        assert isinstance(found, Category)
        assert "the only one" not in found.values


def a_threshold_comes_on_top_of_its_noise():
    """Epsilon at delta is that of a Gaussian at what the threshold leaves of delta."""
    for name in ("proven", "every-trial"):
        accounting = accounting_named(name)
        whole = accounting.epsilon([(ThresholdedGaussian(4.0, 4e-6), 1)], 1e-5)
        assert whole == pytest.approx(accounting.epsilon([(Gaussian(4.0), 1)], 6e-6), rel=1e-9)
        assert whole > accounting.epsilon([(Gaussian(4.0), 1)], 1e-5)
        assert accounting.epsilon([(ThresholdedGaussian(4.0, 1e-5), 1)], 1e-5) == math.inf


def noise_for_a_single_column(patch):
    real = schema_learning._noisy
    patch.setattr(
        schema_learning, "_noisy", lambda found, event, _, rest: real(found, event, 1, rest)
    )


def uncharged(patch):
    patch.setattr(InputFeatures, "charges", InputFeatures.setup)


def counted_twice(patch):
    patch.setattr(schema_learning, "Counter", lambda names: Counter([*names, *names]))


def every_value_listed(patch):
    patch.setattr(schema_learning, "threshold", lambda *_: -math.inf)


def no_delta_for_the_threshold(patch):
    from dpsur.privacy.accountants import noise_tail

    patch.setattr(noise_tail, "ThresholdedGaussian", type("Other", (Gaussian,), {"delta": 0.0}))
    noise_tail._lost.cache_clear()


def the_threshold_of_a_single_column(patch):
    real = schema_learning.threshold
    patch.setattr(f"{__name__}.threshold", lambda event, _: real(event, 1))


MUTANTS = [
    Mutant(what_is_drawn_is_what_runs_are_charged, noise_for_a_single_column),
    Mutant(what_is_drawn_is_what_runs_are_charged, uncharged),
    Mutant(a_record_adds_two_for_a_column, counted_twice),
    Mutant(what_one_record_has_is_not_listed, every_value_listed),
    Mutant(what_one_record_has_is_not_listed, the_threshold_of_a_single_column),
    Mutant(a_threshold_comes_on_top_of_its_noise, no_delta_for_the_threshold),
]
test_law_holds, test_mutant_is_killed = law_tests(MUTANTS)


def test_kinds_ranges_and_values():
    schema = learned()
    assert list(schema.columns) == ["age", "ward", "code", "income"]
    age, income = schema.columns["age"], schema.columns["income"]
    assert isinstance(age, Number)
    assert isinstance(income, Number)
    assert 10 <= age.low <= 20
    assert 85 <= age.high <= 95
    assert income.low < 5000 < 60_000 < income.high
    assert schema.columns["ward"].values == ("east", "north", "west")
    assert schema.columns["code"].values == ("1", "2", "3")
    assert schema.target["back"].values == ("no", "yes")
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    number = learn_schema(table(), "income", 1.0, seed=0)
    assert number.kind == "number"


@pytest.mark.parametrize(
    ("value", "low", "high"), [(-37.5, -46, -32), (0.013, 0.011, 0.016), (3e6, 2.9e6, 4.2e6)]
)
def test_ranges_hold_numbers_of_any_size(value, low, high):
    found = learned(size=np.full(RECORDS, value) * np.linspace(0.99, 1.01, RECORDS)).columns["size"]
    assert isinstance(found, Number)
    assert low <= found.low < value < found.high <= high


def test_a_release_states_it_and_verifies(tmp_path):
    run = dpsur.fit(
        "auto",
        table(),
        schema=learned(),
        budget=BUDGET,
        out=tmp_path / "run",
        seed=0,
        progress=False,
    )
    assert run.statement["public"]["schema"]["learned"]["epsilon"] == 1.0
    assert dpsur.verify(tmp_path / "run")[0] == []
    page = (tmp_path / "run" / "release" / "PRIVACY.md").read_text()
    assert "learned from the records" in page
    assert list(dpsur.load(tmp_path / "run").predict(table(5))) != []
    file = tmp_path / "run" / "release" / "privacy.json"
    statement = json.loads(file.read_text())
    del statement["public"]["schema"]["learned"]
    file.write_text(json.dumps(statement))
    assert dpsur.verify(tmp_path / "run")[0] != []


def test_what_is_not_covered_is_refused():
    records, schema = table(400), learned()
    for options in ({"holdout": 0.2}, {"groups": list(range(400))}):
        with pytest.raises(dpsur.InvalidInputError, match="learned"):
            dpsur.fit("auto", records, schema=schema, budget=BUDGET, progress=False, **options)
    with pytest.raises(dpsur.InvalidInputError, match="no column 'came'"):
        learn_schema(records, "came", 1.0)
    with pytest.raises(dpsur.InvalidInputError, match="too few of its values"):
        learn_schema(table(20), "back", 0.1)


def test_from_a_raw_file_to_a_release(tmp_path, capsys):
    lines = [",".join(table(1))]
    for row in zip(*table(1500).values(), strict=True):
        lines.append(",".join("" if value is None else str(value) for value in row))
    file = tmp_path / "people.csv"
    file.write_text("\n".join(lines) + "\n")
    command = ["train", "--task", f"csv:{file}", "--schema-epsilon", "1", "--quiet"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    assert "--target" in capsys.readouterr().err
    command += ["--target", "back"]
    assert main([*command, "--dry-run"]) == 2
    assert main([*command, "--epsilon", "1"]) == 2  # nothing would be left to train with
    assert main([*command, "--holdout", "0.1"]) == 2
    assert not (tmp_path / "people.csv.schema.json").exists()
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    kept = (tmp_path / "people.csv.schema.json").read_bytes()
    assert main([*command, "--out", str(tmp_path / "again")]) == 0  # and nothing is learned again
    assert (tmp_path / "people.csv.schema.json").read_bytes() == kept
    assert main([*command[:3], "--target", "back", "--schema-epsilon", "0.5", "--dry-run"]) == 2
    assert dpsur.verify(tmp_path / "run")[0] == []
