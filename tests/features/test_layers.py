"""Normalisation of features, and networks behind them."""

import json

import pytest
import torch
from torch import nn

from dpsur.errors import InvalidInputError
from dpsur.features.layers import ChannelNorm, WithFeatures, apply_layers, build_layers, group_norm
from dpsur.networks import build_network

SCATTERING = {"name": "scattering", "height": 28, "width": 28, "scales": 2, "angles": 8}
GROUPS = {"name": "group-norm", "groups": 27, "channels": 81}
CHANNELS = {"name": "channel-norm", "channels": 81}


def images(count):
    return torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(1))


def test_group_norm_sees_one_record_at_a_time():
    features = torch.rand(3, 81, 7, 7)
    normalised = group_norm(27, 81)(features)
    torch.testing.assert_close(group_norm(27, 81)(features[:1]), normalised[:1])
    groups = normalised.reshape(3, 27, -1)
    torch.testing.assert_close(groups.mean(2), torch.zeros(3, 27), atol=1e-5, rtol=0)
    torch.testing.assert_close(groups.var(2, correction=0), torch.ones(3, 27), atol=1e-3, rtol=0)
    assert not group_norm(27, 81).state_dict()


def test_channel_norm_uses_the_numbers_it_was_given():
    mean, deviation = torch.arange(4.0), torch.arange(1.0, 5.0)
    layer, features = ChannelNorm(4, mean, deviation), torch.rand(2, 4, 3, 5)
    expected = (features - mean.reshape(1, 4, 1, 1)) / deviation.reshape(1, 4, 1, 1)
    torch.testing.assert_close(layer(features), expected)
    torch.testing.assert_close(layer(features[..., 0, 0]), expected[..., 0, 0])
    assert set(layer.state_dict()) == {"mean", "deviation"}
    torch.testing.assert_close(ChannelNorm(4)(features), features)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: group_norm(10, 81), "choose one of 1, 3, 9, 27, 81"),
        (lambda: ChannelNorm(3, torch.zeros(4)), "mean must hold 3"),
        (lambda: ChannelNorm(2, None, torch.tensor([1.0, 0.0])), "deviation must be above 0"),
        (lambda: ChannelNorm(1, torch.tensor([float("nan")])), "mean must hold 1 finite"),
        (lambda: build_layers([{"name": "fourier"}]), "unknown feature layer 'fourier'"),
        (lambda: build_layers([{**CHANNELS, "mean": 1}]), "channel-norm.*mean"),
        (lambda: WithFeatures(nn.Sequential(nn.Linear(2, 2)), nn.Identity()), "0.weight"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(InvalidInputError, match=words):
        make()


@pytest.mark.parametrize("norm", [GROUPS, CHANNELS])
def test_a_released_network_takes_raw_images(norm):
    network = build_network({"name": "scattering-cnn"})
    layers = build_layers([SCATTERING, norm])
    outputs = WithFeatures(layers, network)(images(3))
    torch.testing.assert_close(outputs, network(apply_layers(layers, images(3))))
    assert outputs.shape == (3, 10)


def test_a_network_with_features_is_rebuilt_from_its_description():
    description = {
        "name": "with-features",
        "features": [SCATTERING, CHANNELS],
        "network": {
            "name": "linear-features",
            "channels": 81,
            "height": 7,
            "width": 7,
            "classes": 3,
        },
    }
    generator = torch.Generator().manual_seed(2)
    mean, deviation = torch.rand(2, 81, generator=generator) + 0.5
    network = build_network(description["network"])
    model = WithFeatures(
        nn.Sequential(*build_layers([SCATTERING]), ChannelNorm(81, mean, deviation)), network
    )
    names = {"features.1.mean", "features.1.deviation", "network.1.weight", "network.1.bias"}
    assert set(model.state_dict()) == names
    again = build_network(json.loads(json.dumps(description)))
    assert not torch.equal(again(images(2)), model(images(2)))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(images(2)), model(images(2)))


@pytest.mark.parametrize("threads", [1, 2])
def test_layers_are_applied_in_pieces_and_stay_as_they_are(monkeypatch, threads):
    layers = build_layers([{"name": "group-norm", "groups": 1, "channels": 2}])
    inputs = torch.rand(7, 2, 4, 4)
    monkeypatch.setattr("dpsur.features.layers._RECORDS_PER_THREAD", 2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.testing.assert_close(apply_layers(layers, inputs), layers(inputs))
        assert apply_layers(layers, inputs[:0]).shape == (0, 2, 4, 4)
        with pytest.raises(RuntimeError):  # from a thread
            apply_layers(nn.Sequential(FailsOnMany()), inputs)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


class FailsOnMany(nn.Module):
    def forward(self, inputs):
        if len(inputs) > 1:
            raise RuntimeError("too many")
        return inputs
