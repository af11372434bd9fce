"""The shipped encoder, its whitening, and the procedural images that it was trained on."""

import hashlib

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import dpsur
from dpsur.errors import CheckpointError, InvalidInputError
from dpsur.features import Encoder, cache, compute, encoder, features_named
from dpsur.features.encoder import ScatteringEncoder, WhitenedScattering, haar
from dpsur.features.layers import WithFeatures, build_layers
from dpsur.networks import linear_head
from dpsur.runs.verification import verify
from dpsur.tasks.base import linear_heads
from reproduction import procedural
from tests.conftest import StopAt

DIMENSION = 8192


@pytest.fixture(scope="module")
def shipped():
    return Encoder()


@pytest.fixture(scope="module", autouse=True)
def shared_cache(tmp_path_factory):
    """One cache for all tests here: encoding takes most of their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPSUR_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def striped(count=60, size=12, seed=0):
    """Noisy images with wide or narrow stripes."""
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    places = torch.arange(size)
    stripes = torch.stack([(places // 4) % 2, (places // 2) % 2]).float()[labels]
    images = stripes[:, None, None, :].expand(-1, 1, size, -1)
    return 0.2 + 0.4 * images + 0.4 * torch.rand(count, 1, size, size, generator=drawn), labels


# --- procedural images


def test_images_follow_from_the_seed():
    one, two, other = (procedural.generate(9, seed=seed, size=16) for seed in (3, 3, 4))
    assert one.dtype == torch.uint8
    assert one.shape == (9, 3, 16, 16)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert one.float().flatten(1).std(1).max() > 10  # not blank


def test_the_corpus_is_version_1():
    """Weights and whitening were made from it; other images need another version."""
    images = procedural.generate(8, seed=0, size=16, channels=1, shares={"noise": 1, "strokes": 1})
    assert procedural.CORPUS_VERSION == 1
    rows = images.double().mean((1, 2, 3))
    assert rows.tolist() == pytest.approx(
        [41.2, 70.3, 135.3, 33.4, 18.4, 27.3, 121.0, 122.6], abs=1.0
    )


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_any_number_of_channels(channels):
    images = procedural.generate(3, size=16, channels=channels, shares={"noise": 1})
    assert images.shape == (3, channels, 16, 16)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count must be at least 1"),
        ({"size": 8}, "size must be at least 16"),
        ({"channels": 0}, "channels must be at least 1"),
        ({"shares": {"cats": 1.0}}, "unknown family 'cats'; choose from leaves"),
    ],
)
def test_bad_images_are_refused(values, message):
    with pytest.raises(InvalidInputError, match=message):
        procedural.generate(**{"count": 1, **values})


# --- the encoder


@pytest.mark.parametrize(
    ("shape", "dimension"),
    [
        ((1, 28, 28), DIMENSION),
        ((3, 32, 32), DIMENSION),
        ((3, 9, 14), DIMENSION),
        ((1, 50, 40), DIMENSION),
        ((2, 16, 16), 2 * DIMENSION),
    ],
)
def test_images_of_any_size_and_channel_count(shipped, shape, dimension):
    images = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    rows = shipped(images)
    assert rows.shape == (2, dimension)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(2), atol=1e-3, rtol=0)
    expected = features_named("encoder").output_shape(shape)
    assert expected == (dimension,)


def test_features_do_not_depend_on_the_batch(shipped):
    images, _ = striped(5)
    together = shipped(images)
    alone = torch.cat([shipped(one[None]) for one in images])
    torch.testing.assert_close(together, alone, atol=5e-5, rtol=0)
    assert (together[0] - together[1]).norm() > 0.1
    shipped.train()
    torch.testing.assert_close(shipped(images), together)


def test_bytes_and_standardised_images_are_the_same_images(shipped):
    images = procedural.generate(3, size=16, seed=1)
    scaled = images.float() / 255
    mean, deviation = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    shift, spread = (torch.tensor(values)[:, None, None] for values in (mean, deviation))
    standardised = Encoder(mean=mean, deviation=deviation)
    expected = shipped(scaled)
    torch.testing.assert_close(shipped(images), expected, atol=5e-5, rtol=0)
    found = standardised((scaled - shift) / spread)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)


def test_nothing_in_it_is_trained_and_only_its_digest_is_released(shipped):
    assert not list(shipped.parameters())
    assert list(shipped.state_dict()) == ["asset.digest"]
    assert bytes(shipped.asset.digest.tolist()).hex() == encoder.ENCODER_DIGEST
    both = ScatteringEncoder()
    assert sorted(both.state_dict()) == ["encoder.asset.digest", "scattering.asset.digest"]


def test_the_files_are_small_and_those_that_were_measured():
    sizes = 0
    for name, digest in (
        (encoder.ENCODER, encoder.ENCODER_DIGEST),
        (encoder.SCATTERING_WHITENING, encoder.SCATTERING_DIGEST),
    ):
        content = encoder._shipped(name).read_bytes()
        sizes += len(content)
        assert hashlib.sha256(content).hexdigest() == digest
    assert sizes <= 15_000_000
    recipe = encoder.described(encoder._shipped(encoder.ENCODER))["recipe"]
    assert recipe["corpus"] == procedural.CORPUS_VERSION


def test_another_file_is_refused_by_name(tmp_path, monkeypatch):
    with pytest.raises(
        InvalidInputError, match=f"has the SHA-256 {encoder.ENCODER_DIGEST}, and 00"
    ):
        Encoder(digest="00" * 32)
    damaged = tmp_path / encoder.ENCODER
    damaged.write_bytes(encoder._shipped(encoder.ENCODER).read_bytes()[:-1] + b"\0")
    monkeypatch.setattr(encoder, "_shipped", lambda name: tmp_path / name)
    with pytest.raises(InvalidInputError, match="install dpsur again if the file is damaged"):
        Encoder()


def test_weights_that_belong_to_another_encoder_are_refused(shipped):
    other = shipped.state_dict()
    other["asset.digest"] = torch.zeros(32, dtype=torch.uint8)
    with pytest.raises(InvalidInputError, match="trained on features of an encoder file.*0000"):
        Encoder().load_state_dict(other)


def test_scattering_and_encoder_weigh_the_same(shipped):
    images = procedural.generate(3, size=28, channels=1, shares={"strokes": 1})
    rows = ScatteringEncoder()(images)
    assert rows.shape == (3, 3969 + DIMENSION)
    half = torch.full((3,), 0.5**0.5)
    torch.testing.assert_close(rows[:, :3969].norm(dim=1), half, atol=1e-3, rtol=0)
    torch.testing.assert_close(rows[:, 3969:], shipped(images) * 0.5**0.5, atol=5e-5, rtol=0)
    alone = WhitenedScattering()(images)
    torch.testing.assert_close(rows[:, :3969], alone * 0.5**0.5, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("shape", "images"), [((1, 28, 28), 1), ((1, 8, 8), 1), ((3, 20, 31), 1), ((2, 40, 9), 2)]
)
def test_scattering_takes_images_of_any_size(shape, images):
    features = features_named("whitened-scattering")
    assert features.output_shape(shape) == (3969 * images,)
    assert linear_heads(shape, 5)["whitened-scattering"]["inputs"] == 3969 * images
    rows = compute(features, torch.rand(2, *shape), cached=False)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(2), atol=1e-3, rtol=0)


def test_scattering_undoes_the_standardisation_of_images():
    images = torch.rand(2, 3, 28, 28)
    scaled = (images - 0.4) / 0.2
    found = WhitenedScattering(mean=[0.4] * 3, deviation=[0.2] * 3)(scaled)
    torch.testing.assert_close(found, WhitenedScattering()(images), atol=1e-3, rtol=0)


def test_the_zoomed_encoder_is_known_by_name(shipped):
    (layer,) = features_named("encoder-zoom").layers((1, 28, 28))
    images = procedural.generate(2, size=28, channels=1)
    rows = build_layers([layer])(images)
    torch.testing.assert_close(rows, Encoder(zoom=True)(images), atol=5e-5, rtol=0)
    assert (rows - shipped(images)).abs().max() > 1e-3


@pytest.mark.parametrize(("shape", "message"), [((80,), "need images of shape"), ((4, 4), "need")])
def test_records_that_are_no_images_are_refused(shape, message):
    with pytest.raises(InvalidInputError, match=message):
        features_named("encoder").layers(shape)


def test_features_say_more_than_pixels():
    """Half of the images are negatives: a linear model on pixels cannot tell their stripes."""
    images, labels = striped(60)
    images[torch.rand(60, generator=torch.Generator().manual_seed(1)) < 0.5] *= -1
    images = images % 1
    rows = compute(features_named("encoder"), images)
    pixels = F.normalize(images.flatten(1) - images.mean())
    assert ridge_accuracy(rows - rows[:40].mean(0), labels) > 0.9
    assert ridge_accuracy(pixels, labels) < 0.85


def ridge_accuracy(rows, labels, train=40, penalty=0.01):
    x, y = rows[:train], 2.0 * labels[:train] - 1
    weights = x.T @ torch.linalg.solve(x @ x.T + penalty * torch.eye(train), y)
    return float(((rows[train:] @ weights > 0) == (labels[train:] == 1)).float().mean())


def test_the_cache_holds_sixteen_bits_without_loss(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSUR_CACHE", str(tmp_path))
    images, _ = striped(2)
    first = compute(features_named("encoder"), images)
    (path,) = (tmp_path / "features").glob("*.safetensors")
    assert load_file(path)["features"].dtype == torch.float16
    assert torch.equal(compute(features_named("encoder"), images), first)
    assert first.dtype == torch.float32
    cache.write(path, first + 1e-5)
    assert load_file(path)["features"].dtype == torch.float32


def test_haar_is_a_change_of_coordinates():
    block = torch.randn(2, 3, 16)
    scales = haar(block)
    assert [part.shape[2] for part in scales] == [1, 3, 12]
    joined = torch.cat(scales, 2)
    torch.testing.assert_close(joined.square().sum(2), block.square().sum(2))


# --- runs

BUDGET = dpsur.Budget(8.0, 1e-3)


def fit(**changes):
    options = {
        "model": linear_head(DIMENSION, 2),
        "train_set": striped(),
        "budget": BUDGET,
        "method": dpsur.Dpsgd(
            batch_size=40, updates=12, learning_rate="linear-head", max_grad_norm=0.2
        ),
        "features": "encoder",
        "normalisation": "mean",
        "seed": 1,
        "device": "cpu",
        **changes,
    }
    return dpsur.fit(**options)


def test_a_run_resumes_and_its_release_takes_images(tmp_path, monkeypatch):
    straight = fit(out=tmp_path / "straight")
    pace = dpsur.Intervals(checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        fit(out=tmp_path / "cut", intervals=pace, observers=[StopAt(4)])
    resumed = fit(out=tmp_path / "cut", intervals=pace, resume=True)
    for a, b in zip(
        straight.model.state_dict().values(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)
    assert verify(tmp_path / "cut")[0] == []
    weights = tmp_path / "cut" / "release" / "model.safetensors"
    assert weights.stat().st_size < 200_000  # of the encoder, its digest alone
    loaded = dpsur.load(tmp_path / "cut", linear_head(DIMENSION, 2)).module
    images, _ = striped(3)
    torch.testing.assert_close(loaded(images), resumed.model(images), atol=1e-4, rtol=1e-3)
    assert isinstance(loaded, WithFeatures)
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "read_asset", swapped)
        with pytest.raises(CheckpointError, match="has the SHA-256 ab"):
            dpsur.load(tmp_path / "cut", linear_head(DIMENSION, 2))


def swapped(name, digest):
    """Reading files as another version of the package would."""
    raise InvalidInputError(f"{name} has the SHA-256 {'ab' * 32}, and {digest} is")


def test_the_rate_of_a_run_follows_the_rule():
    run = fit(seed=3)
    method = run.method
    expected = 0.2 * 40 / (method.noise_multiplier * 0.2 * 12**0.5)
    assert method.learning_rate == pytest.approx(expected)


def test_images_out_of_range_are_refused_before_training():
    images, labels = striped()
    with pytest.raises(InvalidInputError, match=r"encoder need images in \[0, 1\].*train_set has"):
        fit(train_set=(images * 255, labels))


def test_layers_by_name_are_the_encoder():
    (layer,) = features_named("encoder").layers((1, 8, 8))
    assert layer == {"name": "encoder", "digest": encoder.ENCODER_DIGEST}
    assert isinstance(build_layers([layer])[0], Encoder)
