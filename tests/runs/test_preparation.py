"""Features and their normalisation: what is computed, what is charged, what is released."""

import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.config import Intervals
from dpsur.errors import BudgetError, InvalidInputError
from dpsur.features import compute, features_named
from dpsur.features.layers import WithFeatures
from dpsur.functional.records import Examples
from dpsur.mechanism import gaussian
from dpsur.mechanism.streams import Streams
from dpsur.privacy.events import Gaussian, feature_mean_noise
from dpsur.runs.checkpoint import FILE_NAME, load_statistics
from dpsur.runs.input_features import InputFeatures, compute_inputs, like_features
from dpsur.runs.verification import _setup_faults, verify
from reproduction import methods
from tests.conftest import StopAt
from tests.methods.problems import BUDGET, CPU, NOISE, SIZE, linear_on_scattering, tiny_images

SCATTERING = features_named("scattering")
CHARGED = (Gaussian(40.0), Gaussian(40.0), Gaussian(8.0), Gaussian(8.0))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path / "cache"))


def fit(**changes):
    options = {"features": "scattering", "seed": 0, "device": "cpu", **changes}
    model = options.pop("model", None) or linear_on_scattering()
    method = options.pop("method", dpsur.Dpsgd(**NOISE, updates=3))
    return dpsur.fit(
        model, options.pop("train_set", tiny_images()), budget=BUDGET, method=method, **options
    )


def prepared(preparation, seed=0, test=None, train=None):
    train = tiny_images() if train is None else train
    return compute_inputs(preparation, train, test, Streams(seed, CPU))


def test_without_anything_inputs_stay_as_they_are():
    found = prepared(InputFeatures())
    assert torch.equal(found.train.inputs, tiny_images().inputs)
    assert len(found.layers) == len(found.descriptions) == 0
    assert InputFeatures().setup == InputFeatures("scattering").setup == ()


def test_groups_of_channels_are_normalised_record_by_record():
    found = prepared(InputFeatures("scattering"), test=tiny_images(7, seed=9))
    assert InputFeatures("scattering").kind == "group"
    assert found.train.inputs.shape == (SIZE, 81, 2, 2)
    raw = compute(SCATTERING, tiny_images().inputs)
    groups = raw.reshape(SIZE, 27, -1)
    centred = groups - groups.mean(2, keepdim=True)
    expected = centred / (groups.var(2, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(found.train.inputs, expected.reshape(raw.shape), atol=1e-4, rtol=0)
    alone = compute_inputs(
        InputFeatures("scattering"), tiny_images().select(torch.tensor([5])), None, Streams(1, CPU)
    )
    torch.testing.assert_close(alone.train.inputs[0], found.train.inputs[5])
    assert len(found.test) == 7


def test_private_statistics_normalise_channels(monkeypatch):
    monkeypatch.setattr("dpsur.privacy.events.CLIP_BOUND_NOISE", 1e-3)
    quiet = InputFeatures("scattering", "private", noise=1e-6)
    train = tiny_images(61)  # an odd number has one median, whatever the noise
    found = prepared(quiet, train=train)
    raw = compute(SCATTERING, train.inputs).double()
    mean, deviation = (found.layers[-1].get_buffer(name) for name in ("mean", "deviation"))
    expected = (raw.float() - mean.view(-1, 1, 1)) / deviation.view(-1, 1, 1)
    torch.testing.assert_close(found.train.inputs, expected)
    # With hardly any noise they are those of vectors that are clipped at their median norm.
    moments = raw.mean((2, 3))
    norms = moments.norm(dim=1, keepdim=True)
    clipped = moments * (norms.median() / norms).clamp(max=1.0)
    torch.testing.assert_close(mean.double(), clipped.mean(0), rtol=0.1, atol=1e-3)
    noisy = prepared(InputFeatures("scattering", "private"), seed=1)
    assert not torch.equal(noisy.layers[-1].get_buffer("mean"), mean)


def test_the_charge_is_what_is_drawn(monkeypatch):
    """Every Gaussian mechanism on the records is an event of the setup, and the reverse."""
    drawn = []
    real = gaussian.add_noise

    def spy(total, noise_multiplier, generator):
        drawn.append(Gaussian(noise_multiplier))
        return real(total, noise_multiplier, generator)

    monkeypatch.setattr(gaussian, "add_noise", spy)
    for preparation in (
        InputFeatures("scattering", "private"),
        InputFeatures("scattering", "private", noise=5.0),
        InputFeatures("scattering", "group"),
        InputFeatures("scattering", "none"),
        InputFeatures(None, "private"),
    ):
        drawn.clear()
        prepared(preparation)
        assert tuple(drawn) == preparation.setup
    assert InputFeatures("scattering", "private").setup == CHARGED


def test_private_statistics_are_paid_for(tmp_path):
    free, paid = fit(), fit(normalisation="private", out=tmp_path / "run")
    assert free.plan.setup == ()
    assert paid.plan.setup == paid.private.ledger.setup == CHARGED
    assert paid.epsilon["proven"] > free.epsilon["proven"]
    assert verify(tmp_path / "run")[0] == []
    page = (tmp_path / "run" / "release" / "PRIVACY.md").read_text()
    assert page.count("| Before training | Gaussian, noise multiplier") == 4
    method = dpsur.Dpsgd(batch_size=20, noise_multiplier=3.0)
    counts = [method.resolve(SIZE, BUDGET, "proven", setup)[1].length for setup in ((), CHARGED)]
    assert counts[0] > counts[1] > 0  # updates that fit


def test_an_adaptive_method_pays_from_its_allowance():
    method = methods.Dpagd(batch_size=20, updates=3)
    run = fit(normalisation="private", method=method)
    assert run.plan.setup == CHARGED
    assert run.plan.left_after_setup() < run.plan.filter.allowance
    assert run.plan.divergence(run.private.ledger) <= run.plan.filter.allowance


@pytest.mark.parametrize("normalisation", ["group", "private", "none"])
def test_the_released_model_takes_raw_inputs(normalisation, tmp_path):
    run = fit(normalisation=normalisation, out=tmp_path / "run", test_set=tiny_images(20, seed=8))
    assert isinstance(run.model, WithFeatures)
    fresh = tiny_images(20, seed=8)
    features = compute(SCATTERING, fresh.inputs)
    layers = run.model.features[1:]
    outputs = run.model.network(layers(features))
    torch.testing.assert_close(run.model(fresh.inputs), outputs, atol=1e-4, rtol=1e-4)
    accuracy = float((run.model(fresh.inputs).argmax(1) == fresh.targets).double().mean())
    assert accuracy == pytest.approx(run.scores["accuracy"])
    if normalisation == "private":  # the statistics are a part of the release
        state = run.model.state_dict()
        assert state["features.1.mean"].shape == state["features.1.deviation"].shape == (81,)


def test_what_a_model_was_trained_on_is_what_it_sees_afterwards():
    found = prepared(InputFeatures("scattering", "private"))
    inputs = tiny_images().inputs
    torch.testing.assert_close(found.layers(inputs), found.train.inputs, atol=1e-4, rtol=1e-4)
    names = [description["name"] for description in found.descriptions]
    assert names == ["scattering", "channel-norm"]


def test_handcrafted_features_come_with_their_method():
    run = fit(method=dpsur.DpsgdHf(**NOISE, updates=3), features=None)
    assert isinstance(run.model, WithFeatures)
    same = fit(method=dpsur.Dpsgd(**NOISE, updates=3))
    assert torch.equal(run.model.network[1].weight, same.model.network[1].weight)
    pixels = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    plain = fit(method=dpsur.DpsgdHf(**NOISE, updates=3), features="pixels", model=pixels)
    assert not isinstance(plain.model, WithFeatures)


def test_seeds_repeat_statistics_and_nothing_else_does():
    one, two = (fit(normalisation="private", seed=4) for _ in range(2))
    assert torch.equal(one.model.features[1].mean, two.model.features[1].mean)
    three = fit(normalisation="private", seed=None)
    assert not torch.equal(one.model.features[1].mean, three.model.features[1].mean)


@pytest.mark.parametrize(
    ("preparation", "shape", "message"),
    [
        (InputFeatures("scattering"), (5,), "scattering needs images of shape"),
        (InputFeatures("scattering"), (1, 6, 8), "a height that is a multiple of 4"),
        (
            InputFeatures(None, "private"),
            (5,),
            "normalisation private needs channels.*use norm",
        ),
        (InputFeatures("vectors", "group"), (5,), "normalisation group needs channels"),
        (
            InputFeatures("pixels", "mean"),
            (1, 8, 8),
            "normalisation mean needs one row",
        ),
        (InputFeatures("pixels", "group"), (3, 8, 8), "groups must divide the 3 channels, got 27"),
    ],
)
def test_shapes_that_do_not_suit_are_refused(preparation, shape, message):
    with pytest.raises(InvalidInputError, match=message):
        preparation.check(shape)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"features": "wavelets"}, "unknown features 'wavelets'"),
        ({"normalisation": "batch"}, "normalisation must be one of none, group, private, mean"),
        ({"noise": 0.0}, "noise must be a finite number above 0"),
        ({"noise": math.nan}, "noise must be a finite number above 0"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(InvalidInputError, match=message):
        InputFeatures(**values)


def test_shapes_are_known_before_features_are_computed(monkeypatch):
    assert InputFeatures("scattering").check((3, 12, 8)) == (243, 3, 2)
    assert InputFeatures().check((5,)) == (5,)
    monkeypatch.setattr(
        "dpsur.runs.input_features.compute", lambda *_, **__: pytest.fail("computed before checks")
    )
    with pytest.raises(dpsur.DpsurError):
        fit(model=nn.Sequential(nn.Flatten(), nn.Linear(7, 2)))
    with pytest.raises(InvalidInputError, match="the model has one output"):
        fit(model=nn.Sequential(nn.Flatten(), nn.Linear(324, 1)))
    with pytest.raises(BudgetError):
        fit(method=dpsur.Dpsgd(batch_size=60, noise_multiplier=0.3))


def test_made_up_records_have_the_shape_of_features():
    train = tiny_images()
    assert like_features(train, (1, 8, 8)) is train
    made = like_features(train, (81, 2, 2))
    assert made.inputs.shape == (SIZE, 81, 2, 2)
    assert float(made.inputs.abs().max()) == 0
    assert torch.equal(made.targets, train.targets)


def test_a_loss_of_ones_own_on_features():
    images = tiny_images()
    train = Examples(images.inputs, images.inputs.mean((1, 2, 3)).unsqueeze(1))
    run = fit(
        model=nn.Sequential(nn.Flatten(), nn.Linear(324, 1)),
        train_set=train,
        loss=lambda out, target: F.mse_loss(out, target, reduction="sum"),
    )
    assert run.model(images.inputs).shape == (SIZE, 1)


def cut_and_copied(folder, copied, **options):
    with pytest.raises(KeyboardInterrupt):
        fit(out=folder, seed=None, observers=[StopAt(2)], **options)
    shutil.copytree(folder, copied)


def no_noise_of_statistics(monkeypatch):
    """From now on noise is for updates alone."""
    real = gaussian.add_noise

    def spy(total, *rest):
        if "sum" in total.params:
            pytest.fail("drew statistics a second time")
        return real(total, *rest)

    monkeypatch.setattr(gaussian, "add_noise", spy)


def test_an_unseeded_run_goes_on_with_the_statistics_it_has_released(tmp_path, monkeypatch):
    options = {"normalisation": "private", "intervals": Intervals(checkpoint_every=1)}
    cut_and_copied(tmp_path / "one", tmp_path / "two", **options)
    no_noise_of_statistics(monkeypatch)
    one, two = (
        fit(out=tmp_path / name, seed=None, resume=True, **options) for name in ("one", "two")
    )
    saved = load_statistics(tmp_path / "one" / "private" / FILE_NAME)
    assert torch.equal(one.model.features[1].mean, saved["mean"].float())
    assert torch.equal(one.model.features[1].deviation, saved["deviation"].float())
    for a, b in zip(one.model.state_dict().values(), two.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)  # nothing is drawn anew
    assert one.private.ledger.setup == CHARGED
    assert verify(tmp_path / "one")[0] == []


@pytest.mark.parametrize(
    ("started", "resumed", "message"),
    [
        ("private", "group", "belongs to another run"),
        ("group", "private", "holds no private statistics.*not started with normalisation private"),
    ],
)
def test_another_normalisation_does_not_go_on(tmp_path, started, resumed, message):
    cut_and_copied(tmp_path / "one", tmp_path / "two", normalisation=started)
    with pytest.raises(dpsur.CheckpointError, match=message):
        fit(out=tmp_path / "one", seed=None, resume=True, normalisation=resumed)


def test_statistics_of_other_records_do_not_go_on(tmp_path):
    cut_and_copied(tmp_path / "one", tmp_path / "two", normalisation="private")
    others = tiny_images(seed=5)
    with pytest.raises(dpsur.CheckpointError, match="belongs to another run"):
        fit(out=tmp_path / "one", seed=None, resume=True, normalisation="private", train_set=others)


def rows(count=60, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    x = F.normalize(torch.randn(count, 6, generator=drawn) + 0.5)
    return Examples(x, (x.sum(1) > 1.2).long())


def fit_on_rows(**changes):
    options = {"normalisation": "mean", "train_set": rows(), "model": nn.Linear(6, 2), **changes}
    return fit(features="vectors", **options)


def test_a_mean_is_one_gaussian_of_the_budget():
    run = fit_on_rows()
    noise = feature_mean_noise(BUDGET.epsilon, BUDGET.delta)
    assert run.private.ledger.setup == (Gaussian(noise),)
    assert run.statement["mechanism"]["setup"] == [{"kind": "Gaussian", "noise_multiplier": noise}]
    free = fit_on_rows(normalisation="none", method=dpsur.Dpsgd(batch_size=30, updates=3))
    paid = fit_on_rows(method=dpsur.Dpsgd(batch_size=30, updates=3))
    assert paid.method.noise_multiplier > free.method.noise_multiplier
    assert paid.epsilon["proven"] <= BUDGET.epsilon


@pytest.mark.parametrize(
    ("epsilon", "expected"), [(1.0, 48.4), (3.0, 16.2), (8.0, 6.1), (math.inf, 1.0)]
)
def test_the_noise_of_a_mean_is_ten_times_that_of_a_release(epsilon, expected):
    assert feature_mean_noise(epsilon, 1e-5) == pytest.approx(expected, abs=0.1)


def test_rows_are_centred_and_have_norm_one_again():
    found = prepared(InputFeatures("vectors", "mean", noise=1e-9), train=rows(), test=rows(5))
    expected = F.normalize(rows().inputs - rows().inputs.mean(0))
    torch.testing.assert_close(found.train.inputs, expected)
    public = F.normalize(rows(5).inputs - rows().inputs.mean(0))
    torch.testing.assert_close(found.test.inputs, public)
    torch.testing.assert_close(found.layers(rows().inputs), expected)
    assert [layer["name"] for layer in found.descriptions] == ["centre"]


def test_a_resumed_run_keeps_its_mean(tmp_path, monkeypatch):
    pace = Intervals(checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        fit_on_rows(out=tmp_path / "one", seed=None, observers=[StopAt(2)], intervals=pace)
    no_noise_of_statistics(monkeypatch)
    run = fit_on_rows(out=tmp_path / "one", seed=None, resume=True, intervals=pace)
    saved = load_statistics(tmp_path / "one" / "private" / FILE_NAME)
    assert torch.equal(run.model.features[0].centre, saved["centre"].float())
    assert verify(tmp_path / "one")[0] == []


@pytest.mark.parametrize(
    ("setup", "fault"),
    [
        ([], "the weights hold statistics of features, which no event"),
        ([8.0, 8.0], "mechanism.setup is not what private feature statistics are charged"),
    ],
)
def test_a_release_that_does_not_charge_its_mean_is_a_fault(tmp_path, setup, fault):
    folder = fit_on_rows().save(tmp_path / "run")
    assert _setup_faults(folder, stated(FIRST)) == []
    charged = [{"kind": "Gaussian", "noise_multiplier": noise} for noise in setup]
    assert any(text.startswith(fault) for text in _setup_faults(folder, stated(charged)))


def stated(setup):
    """What of a statement says how training was prepared."""
    return {"mechanism": {"setup": setup}, "public": {}}


FIRST = [{"kind": "Gaussian", "noise_multiplier": 16.0}]
