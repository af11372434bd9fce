"""The parts of DP-SGD for a custom loop, by their public names."""

import pytest
import torch
import torch.nn.functional as F

import dpsur
from dpsur.mechanism.gaussian import poisson_sample
from dpsur.mechanism.streams import BATCH, Streams
from tests.conftest import blobs, small_model
from tests.statistics import assert_frequency, assert_standard_deviation


def test_batches_are_poisson_samples_of_any_tree():
    records = {"x": torch.arange(40), "more": (torch.arange(40) * 2,)}
    drawn = torch.zeros(2000, 40)
    with pytest.warns(dpsur.PrivacyWarning, match="these batches are seeded"):
        batches = dpsur.poisson_batches(records, 0.25, 2000, seed=1)
    for row, batch in zip(drawn, batches, strict=True):
        assert torch.equal(batch["x"] * 2, batch["more"][0])
        row[batch["x"]] = 1
    assert_frequency(int(drawn.sum()), drawn.numel(), 0.25)
    together = int((drawn[:, 0] * drawn[:, 1]).sum())
    assert_frequency(together, 2000, 0.25**2)  # independent of each other


def test_unseeded_batches_differ_and_empty_ones_are_there():
    one, two = (list(dpsur.poisson_batches(torch.arange(50), 0.5, 3)) for _ in range(2))
    assert any(len(a) != len(b) or not torch.equal(a, b) for a, b in zip(one, two, strict=True))
    sizes = [len(batch) for batch in dpsur.poisson_batches(torch.arange(3), 0.01, 50)]
    assert len(sizes) == 50
    assert 0 in sizes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(3), 1.5, 2), "sample_rate must be"),
        ((torch.zeros(3), 0.5, 0), "steps must be"),
        (((torch.zeros(3), torch.zeros(4)), 0.5, 1), "rows|records"),
        (([torch.zeros(3), torch.zeros(3)], 0.5, 1), "must not be a list"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(dpsur.InvalidInputError, match=message):
        dpsur.poisson_batches(*arguments)  # before a batch is drawn


@pytest.mark.filterwarnings("ignore:these batches are seeded")
def test_steps_of_one_seed_can_be_drawn_in_parts_and_are_never_those_of_fit():
    data = torch.arange(200)
    whole = list(dpsur.poisson_batches(data, 0.3, 6, seed=4))
    parts = [
        *dpsur.poisson_batches(data, 0.3, 2, seed=4),
        *dpsur.poisson_batches(data, 0.3, 4, seed=4, first_step=3),
    ]
    assert all(torch.equal(one, two) for one, two in zip(whole, parts, strict=True))
    run = poisson_sample(200, 0.3, Streams(4, torch.device("cpu")).at(1)[BATCH])
    assert not torch.equal(whole[0], run)


def gradient(noise_multiplier, size=60, expected=60.0):
    data = blobs(size)
    return dpsur.dp_gradient(
        small_model(), F.cross_entropy, data.inputs, data.targets, max_grad_norm=1e-3,
        noise_multiplier=noise_multiplier, expected_batch_size=expected,
    )  # fmt: skip


def test_the_gradient_is_clipped_noisy_and_over_the_expected_size():
    clean = gradient(1e-12)
    total = torch.cat([value.flatten() for value in clean.values()])
    assert float(total.norm()) <= 1e-3 * (1 + 1e-5)
    half = gradient(1e-12, expected=120.0)
    for name, value in clean.items():
        torch.testing.assert_close(half[name] * 2, value)
    noise = torch.cat(
        [(gradient(2.0)[name] - clean[name]).flatten() for _ in range(20) for name in clean]
    )
    assert_standard_deviation(noise.double().numpy(), 2.0 * 1e-3 / 60)


def test_noise_is_fresh_in_every_call():
    one, two = gradient(2.0), gradient(2.0)
    assert not torch.equal(one["0.weight"], two["0.weight"])


def test_an_empty_batch_is_noise_alone():
    data = blobs(9)
    found = dpsur.dp_gradient(
        small_model(), F.cross_entropy, data.inputs[:0], data.targets[:0], max_grad_norm=1.0,
        noise_multiplier=1.0, expected_batch_size=4.0,
    )  # fmt: skip
    assert all(bool((value != 0).all()) for value in found.values())
