"""Rows of a table, and the noisy histograms that they rest on."""

import json
import math

import numpy as np
import pytest
import torch

import dpsur
from dpsur.errors import InvalidInputError
from dpsur.features import statistics
from dpsur.features import table as table_features
from dpsur.features.statistics import private_levels
from dpsur.features.table import BINS, MOST_NUMBERS, TableLayout, TableRows, grid, levels_of
from dpsur.functional.records import Examples
from dpsur.mechanism import gaussian
from dpsur.mechanism.streams import Streams
from dpsur.privacy.events import Gaussian, feature_histograms_noise
from dpsur.runs import input_features
from dpsur.runs.input_features import InputFeatures, compute_inputs
from dpsur.runs.verification import verify
from tests.conftest import stream
from tests.mutants import Mutant, law_tests
from tests.statistics import assert_standard_deviation

LAYOUT = TableLayout(5, 3, (0, 1))
CPU = torch.device("cpu")
SCHEMA = dpsur.Schema(
    {"age": dpsur.Number(0, 1000), "days": dpsur.Number(0, 30), "ward": dpsur.Category(["a", "b"])},
    {"back": dpsur.Category(["no", "yes"])},
)


def inputs(count=200, seed=0):
    drawn = torch.rand(count, 5, generator=torch.Generator().manual_seed(seed))
    return 2 * drawn - 1


def patients(count, seed):
    """About a sixth returns, by age and ward; the range of ages is declared far too wide."""
    random = np.random.default_rng(seed)
    age, days = random.uniform(20, 90, count), random.exponential(4, count)
    ward = random.choice(["a", "b"], count)
    logit = -2.4 + (age - 55) / 15 + np.where(ward == "a", 0.7, -0.7)
    back = np.where(random.random(count) < 1 / (1 + np.exp(-logit)), "yes", "no")
    return {"age": age, "days": days, "ward": ward, "back": back}


# --- laws ---------------------------------------------------------------------------------------


def histograms_are_charged_for_what_a_record_moves():
    """One Gaussian event of the noise that was added, relative to what one record can move."""
    asked = InputFeatures("table", noise=40.0, table=LAYOUT)
    sums = []

    def spy(total, noise, drawn):
        sums.append((total.params["counts"].clone(), total.sensitivity))
        noisy = real(total, noise, drawn)
        sums[-1] += (noisy["counts"] - sums[-1][0],)
        return noisy

    real = gaussian.add_noise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "add_noise", spy)
        for count in (41, 40):
            train = Examples(inputs(41)[:count], torch.zeros(count))
            compute_inputs(asked, train, None, Streams(0, CPU))
    (event,) = asked.setup if asked.setup else (Gaussian(1e9),)
    moved = float((sums[0][0] - sums[1][0]).norm())
    assert moved == pytest.approx(math.sqrt(2))
    assert_standard_deviation(sums[0][2].numpy(), event.noise_multiplier * moved)


def sensitivity_of_one_column(patch):
    real = statistics.ClippedSum
    patch.setattr(statistics, "ClippedSum", lambda params, _: real(params, 1.0))


def charged_nothing(patch):
    patch.setattr(input_features, "feature_histograms", lambda _: (Gaussian(1e9),))
    patch.setattr(
        input_features,
        "private_levels",
        lambda *given: (private_levels(*given)[0], Gaussian(1e9)),
    )


test_law_holds, test_mutant_is_killed = law_tests(
    [
        Mutant(histograms_are_charged_for_what_a_record_moves, change)
        for change in (sensitivity_of_one_column, charged_nothing)
    ]
)


# --- rows ---------------------------------------------------------------------------------------


def test_rows_have_norm_one_and_follow_from_one_record():
    rows = TableRows(5, 3, [0, 1])
    found = rows(inputs())
    assert found.shape == (200, LAYOUT.features) == (200, 1 + 5 + 2 * BINS)
    assert torch.allclose(found.norm(dim=1), torch.ones(200), atol=1e-6)
    assert torch.allclose(rows(inputs()[7:8]), found[7:8], atol=1e-7)


def test_levels_spread_a_range_that_was_declared_too_wide():
    """Records in a hundredth of the range are told apart, each about by its rank."""
    values = -1 + 0.02 * torch.rand(20_000, 1, generator=torch.Generator().manual_seed(1))
    levels, event = private_levels(values, 5.0, stream())
    assert event == Gaussian(5.0)
    assert bool((levels.diff() >= 0).all())
    rows = TableRows(1, 1, [0], levels)
    quantiles = rows._quantiles(torch.tensor([[-0.999], [-0.99], [-0.981]])).flatten()
    assert quantiles.diff().min() > 0.5


def test_levels_without_records_are_even():
    counts = 10.0 * torch.randn(1, len(grid()) - 1, generator=torch.Generator().manual_seed(0))
    assert (levels_of(counts.double(), 10.0) - grid()).abs().max() < 0.3
    even = levels_of(torch.zeros(1, len(grid()) - 1, dtype=torch.float64), 10.0)
    assert torch.allclose(even[0], grid())


def test_many_numbers_get_no_histograms():
    wide = TableLayout(100, 100, tuple(range(100)))
    assert MOST_NUMBERS < 100
    asked = InputFeatures("table", table=wide)
    assert asked.setup == ()
    assert asked.check((100,)) == (101,)
    assert InputFeatures("table", "none", table=LAYOUT).setup == ()


@pytest.mark.parametrize(
    "asked",
    [
        InputFeatures("table"),
        InputFeatures("vectors", "quantiles", table=LAYOUT),
        InputFeatures("table", "mean", table=LAYOUT),
    ],
)
def test_features_of_a_table_need_one(asked):
    with pytest.raises(InvalidInputError, match=r"features table"):
        asked.check((5,))


def test_levels_are_drawn_once_for_one_run():
    asked = InputFeatures("table", table=LAYOUT)
    train = Examples(inputs(), torch.zeros(200))
    first = compute_inputs(asked, train, None, Streams(0, CPU))
    again = compute_inputs(asked, train, None, Streams(9, CPU), first.statistics)
    assert torch.equal(first.train.inputs, again.train.inputs)


# --- runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_the_default_beats_a_constant_on_an_imbalanced_table(seed):
    sklearn = pytest.importorskip("dpsur.sklearn")
    from sklearn.metrics import log_loss, roc_auc_score

    train, test = patients(4000, seed), patients(4000, 10 + seed)
    pandas = pytest.importorskip("pandas")
    model = sklearn.DPClassifier(epsilon=1.0, schema=SCHEMA, random_state=seed)
    model.fit(pandas.DataFrame(train), train["back"])
    found = model.predict_proba(pandas.DataFrame(test))[:, 1]
    positive = test["back"] == "yes"
    constant = log_loss(positive, np.full(4000, positive.mean()))
    assert log_loss(positive, found) < 0.95 * constant
    assert roc_auc_score(positive, found) > 0.75


def test_a_release_charges_the_histograms_and_loads(tmp_path):
    data = patients(600, 0)
    run = dpsur.fit(
        "auto", data, schema=SCHEMA, budget=dpsur.Budget(2.0, 1e-5), max_updates=3, seed=1
    )
    noise = feature_histograms_noise(2.0, 1e-5)
    assert run.statement["mechanism"]["setup"] == [{"kind": "Gaussian", "noise_multiplier": noise}]
    assert run.statement["settings"]["batch_size"] == 600
    folder = run.save(tmp_path / "run")
    assert not verify(folder)[0]
    rows = SCHEMA.inputs(data)
    assert torch.allclose(dpsur.load(folder).outputs(rows), run.model(rows))
    # a statement without the charge does not verify
    path = folder / "privacy.json"
    stated = json.loads(path.read_text())
    stated["mechanism"]["setup"] = []
    path.write_text(json.dumps(stated))
    assert verify(folder)[0]


def test_other_targets_are_learned():
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, 3000)
    schema = dpsur.Schema({"x": dpsur.Number(-1, 1)}, {"y": dpsur.Number(-2, 2)})
    data = {"x": x, "y": np.abs(x)}
    budget = dpsur.Budget(3.0, 1e-5)
    run = dpsur.fit("auto", data, schema=schema, budget=budget, test_set=data, seed=0)
    assert run.scores["r2"] > 0.9
    labels = {"a": x > 0, "b": np.abs(x) > 0.5}
    pair = dpsur.Category([False, True])
    schema = dpsur.Schema({"x": dpsur.Number(-1, 1)}, {"a": pair, "b": pair})
    data = {"x": x, **labels}
    run = dpsur.fit("auto", data, schema=schema, budget=budget, test_set=data, seed=0)
    assert run.scores["subset_accuracy"] > 0.8


def test_the_grid_covers_the_range():
    edges = table_features.grid()
    assert float(edges[0]) == -1
    assert float(edges[-1]) == 1
    assert bool((edges.diff() > 0).all())


def test_the_exported_form_gives_the_same_bits(monkeypatch):
    levels = torch.rand(2, len(grid())).cumsum(1)
    rows = TableRows(3, 3, [0, 2], levels / levels[:, -1:] * 2 - 1)
    edges = grid().float()
    values = torch.cat([edges, edges.nextafter(torch.tensor(9.0)), torch.linspace(-1.5, 1.5, 997)])
    inputs = torch.stack([values, torch.ones(len(values)), values.flip(0)], 1)
    usual = rows(inputs)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert torch.equal(rows(inputs), usual)
