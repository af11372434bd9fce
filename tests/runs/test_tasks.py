"""Runs on tasks by name: records, features, networks and methods put together."""

import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import dpsur
from dpsur.config import RunConfig
from dpsur.errors import InvalidInputError
from dpsur.features import compute, features_named
from dpsur.functional.records import Examples
from dpsur.runs.fit import execute
from dpsur.runs.tasks import build_task_session, features_of, load_records, subset
from dpsur.tasks import TASKS
from reproduction import methods
from reproduction.networks import TemperedSigmoid
from reproduction.training import held_out, with_features
from tests.conftest import blobs
from tests.methods.problems import BUDGET, CPU, NOISE, tiny_images
from tests.statistics import assert_frequency

METHOD = dpsur.Dpsgd(**NOISE, updates=3)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def points(tmp_path):
    data, test = blobs(90), blobs(20, seed=9)
    path = tmp_path / "points.npz"
    tests = {"x_test": test.inputs, "y_test": test.targets}
    np.savez(path, x=data.inputs, y=data.targets, **tests, classes=3)
    return f"npz:{path}"


@pytest.fixture
def images(monkeypatch):
    """The task fmnist with a few made-up images in place of its records."""
    inputs = torch.zeros(60, 1, 28, 28)
    inputs[:, :, 10:18, 10:18] = tiny_images().inputs
    records = Examples(inputs, tiny_images().targets)
    task = replace(TASKS["fmnist"], load=lambda _: (records, records.select(torch.arange(20))))
    monkeypatch.setitem(TASKS, "fmnist", task)
    return "fmnist"


def run_on(task, **more):
    usual = {"method": METHOD, "accounting": "proven", "seed": 0, "device": "cpu"}
    return RunConfig(task=task, budget=BUDGET, **{**usual, **more})


def trained(*arguments, **more):
    return execute(build_task_session(run_on(*arguments, **more)))


def test_a_run_by_name_is_repeated_by_its_seed(points):
    one, two, other = (trained(points, seed=seed) for seed in (1, 1, 2))
    first, second, third = (next(run.model.parameters()) for run in (one, two, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert one.scores["accuracy"] >= 0


def test_a_known_task_is_named_in_the_release_and_a_users_file_is_not(points, images):
    assert trained(images).origin.task == images
    assert trained(points).origin.task is None


def test_the_release_is_rebuilt_by_name(points, images, tmp_path):
    for number, more in enumerate(({"task": points}, {"task": images, "features": "scattering"})):
        run = trained(more.pop("task"), **more)
        run.save(tmp_path / str(number))
        loaded = dpsur.load(tmp_path / str(number)).module
        inputs = blobs(5).inputs if number == 0 else torch.rand(5, 1, 28, 28)
        torch.testing.assert_close(loaded(inputs), run.model(inputs))


def rows_of(examples):
    """Records as a set that can be compared, whatever their order."""
    return {(*x.tolist(), int(y)) for x, y in zip(examples.inputs, examples.targets, strict=True)}


def without(examples, index):
    return examples.select(torch.tensor([i for i in range(len(examples)) if i != index]))


def one_record_changes_a_subset_by_itself_at_most(draw):
    """The law of a subset, for a record that is removed from the front, the middle or the end."""
    train = blobs(90)
    for index in (0, 41, 89):
        gone = rows_of(train) - rows_of(without(train, index))
        assert rows_of(draw(train)) - rows_of(draw(without(train, index))) <= gone, index
        assert rows_of(draw(without(train, index))) <= rows_of(draw(train)), index


def shuffled(train):
    """As subsets were drawn once: the first of all records in a shuffled order."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(2024))
    return train.select(order[:40])


def by_position(train):
    """A draw of its own for every place: a record that is removed moves those behind it."""
    draws = torch.rand(len(train), generator=torch.Generator().manual_seed(2024))
    return train.select((draws < 0.45).nonzero().flatten())


@pytest.mark.parametrize("fraction", [0.05, 0.45, 0.99, 1.0])
def test_a_record_is_kept_or_left_out_by_itself(fraction):
    one_record_changes_a_subset_by_itself_at_most(lambda train: subset(train, fraction))


@pytest.mark.parametrize("mutant", [shuffled, by_position])
def test_draws_that_depend_on_other_records_are_found(mutant):
    with pytest.raises(AssertionError):
        one_record_changes_a_subset_by_itself_at_most(mutant)


def test_a_threshold_that_follows_from_the_number_of_records_is_found():
    """Among many records one stands at the threshold, and another one's removal moves that."""
    train = blobs(20_000)
    less = without(train, 7)
    sizes = range(2_000, 20_000, 2_000)
    fixed = [rows_of(subset(less, m / 20_000)) <= rows_of(subset(train, m / 20_000)) for m in sizes]
    moved = [rows_of(subset(less, m / 19_999)) <= rows_of(subset(train, m / 20_000)) for m in sizes]
    assert all(fixed)
    assert not all(moved)


def test_subsets_are_the_same_everywhere_and_change_the_size(points):
    train = blobs(20_000)
    for fraction in (0.1, 0.5, 0.9):
        some = subset(train, fraction)
        assert_frequency(len(some), 20_000, fraction)
        assert torch.equal(some.inputs, subset(train, fraction).inputs)
    assert rows_of(subset(train, 0.1)) <= rows_of(subset(train, 0.5))
    assert subset(train, None) is subset(train, 1.0) is train
    numbered = Examples(torch.arange(12.0)[:, None], torch.arange(12))
    assert subset(numbered, 0.5).targets.tolist() == [2, 4, 7, 11]
    run = trained(points, keep_fraction=0.6)
    size = len(load_records(run_on(points, keep_fraction=0.6)).train)
    assert 30 < size < 75
    assert run.statement["dataset_size"] == size
    assert run.statement["public"] == {"classes": 3, "keep_fraction": 0.6}
    assert run.plan.typical.update.sample_rate == 20 / size
    for wrong in (0, -3, 1.5, float("nan")):
        with pytest.raises(InvalidInputError, match="keep_fraction must be in"):
            subset(train, wrong)


def test_held_out_records_are_tested_on_instead():
    train = blobs(90)
    rest, kept = held_out(train, 30)
    assert (len(rest), len(kept)) == (60, 30)
    together = torch.cat([rest.inputs, kept.inputs])
    assert torch.equal(together.sort(0).values, train.inputs.sort(0).values)
    for count in (90, 91, -1):
        with pytest.raises(InvalidInputError, match="hold_out must be above 0 and below the 90"):
            held_out(train, count)


def test_features_are_those_asked_for_else_the_methods_else_the_tasks(points, images):
    hand = dpsur.DpsgdHf(**NOISE, updates=3)
    assert features_of(run_on(images)) == TASKS[images].default_features == "scattering"
    assert features_of(run_on(images, method=hand)) == "scattering"
    assert features_of(run_on(images, method=hand, features="pixels")) == "pixels"
    assert features_of(run_on(points)) == "vectors"


def test_features_can_be_computed_beforehand_and_shared(images):
    run = run_on(images, features="scattering", normalisation="group")
    records = with_features(run, load_records(run), CPU)
    assert records.featured
    assert records.train.inputs.shape == (60, 81, 7, 7)
    shared = execute(build_task_session(run, records))
    alone = execute(build_task_session(run))
    one, two = (list(run.model.parameters()) for run in (shared, alone))
    for first, second in zip(one, two, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)
    raw = load_records(run).train.inputs
    assert torch.equal(records.train.inputs, compute(features_named("scattering"), raw))


def test_a_method_changes_the_network_of_a_task(images):
    method = methods.DpsgdTs(**NOISE, updates=1, activation_scale=1.5)
    run = trained(images, method=method, features="pixels")
    found = [layer for layer in run.model.modules() if isinstance(layer, TemperedSigmoid)]
    assert len(found) == 3
    assert run.origin.network["activation"]["scale"] == 1.5
    plain = trained(images, network={"activation": "relu"}, features="pixels")
    assert any(isinstance(layer, nn.ReLU) for layer in plain.model.modules())


def test_a_network_of_ones_own(points, monkeypatch):
    module = types.ModuleType("own_networks")
    module.narrow = lambda: nn.Linear(2, 3)
    module.odd = lambda: "a network"
    module.number = 7
    monkeypatch.setitem(sys.modules, "own_networks", module)
    run = trained(points, model="own_networks:narrow")
    assert run.model.weight.shape == (3, 2)
    assert run.origin.network is None
    for name, message in (
        ("own_networks", "must have the form module:function"),
        (":narrow", "must have the form module:function"),
        ("own_networks:", "must have the form module:function"),
        ("own_networks:wide", "own_networks:wide cannot be imported.*PYTHONPATH"),
        ("no_such_module:narrow", "no_such_module:narrow cannot be imported"),
        ("own_networks:number", "own_networks:number is not a function"),
        ("own_networks:odd", "must return a torch.nn.Module, it returned str"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            trained(points, model=name)


def test_a_task_without_a_network_for_the_features(points):
    with pytest.raises(InvalidInputError, match="has no network for the features scattering, only"):
        trained(points, features="scattering")
    hand = dpsur.DpsgdHf(**NOISE, updates=3)
    with pytest.raises(InvalidInputError, match="imdb has no network for the features scattering"):
        trained("imdb", method=hand)


def test_a_limit_of_updates(points):
    assert trained(points, max_updates=2).private.ledger.updates == 2


@pytest.mark.parametrize("method", [methods.Dpagd(batch_size=20, updates=3), METHOD])
def test_normalisation_needs_channels(points, method):
    with pytest.raises(InvalidInputError, match="normalisation private needs channels"):
        trained(points, method=method, normalisation="private")
