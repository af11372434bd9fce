import itertools

import numpy as np
import pytest
import torch

from dpsur.errors import CheckpointError
from dpsur.mechanism.streams import BATCH, LAYERS, NOISE, PURPOSES, VAL_BATCH, Streams
from tests.statistics import assert_frequency, assert_normal

CPU = torch.device("cpu")


def draw(streams, purpose, count=5):
    return torch.rand(count, generator=streams[purpose], dtype=torch.float64)


def test_a_seed_repeats_every_stream():
    one, two = Streams(7, CPU), Streams(7, CPU)
    for purpose in PURPOSES:
        assert torch.equal(draw(one, purpose), draw(two, purpose))


def test_purposes_seeds_and_ranks_give_different_streams():
    draws = [draw(Streams(7, CPU), purpose) for purpose in PURPOSES]
    draws += [draw(Streams(8, CPU), BATCH), draw(Streams(7, CPU, rank=1), BATCH)]
    for one, two in itertools.combinations(draws, 2):
        assert not torch.isclose(one, two).any()


def test_without_a_seed_every_run_differs():
    assert not torch.isclose(draw(Streams(None, CPU), NOISE), draw(Streams(None, CPU), NOISE)).any()


def test_purposes_do_not_disturb_each_other():
    alone, busy = Streams(3, CPU), Streams(3, CPU)
    draw(busy, VAL_BATCH, 1000)
    with busy.global_randomness(LAYERS):
        torch.rand(100)
    assert torch.equal(draw(alone, NOISE), draw(busy, NOISE))


def test_more_than_32_bits_of_entropy_reach_a_cpu_stream():
    # torch.Generator.manual_seed keeps 32 bits: with it, these two seeds give one stream.
    short_one, short_two = (
        torch.Generator().manual_seed(5),
        torch.Generator().manual_seed(5 + 2**32),
    )
    assert torch.equal(torch.rand(4, generator=short_one), torch.rand(4, generator=short_two))
    assert not torch.isclose(
        draw(Streams(5, CPU), NOISE), draw(Streams(5 + 2**32, CPU), NOISE)
    ).any()
    words = Streams(None, CPU)[NOISE].get_state().numpy()[24 : 24 + 8 * 624].reshape(-1, 8)[:, :4]
    assert len({bytes(word) for word in words}) > 600


def test_streams_are_uniform_and_normal():
    streams = Streams(11, CPU)
    uniform = draw(streams, BATCH, 100_000)
    assert_frequency(int((uniform < 0.25).sum()), 100_000, 0.25)
    normal = torch.randn(100_000, generator=streams[NOISE])
    assert_normal(normal.numpy().astype(np.float64), 1.0)


def test_positions_continue_exactly():
    streams = Streams(None, CPU)
    torch.randn(7, generator=streams[NOISE])  # an odd count: normals are drawn in pairs
    positions = {name: state.clone() for name, state in streams.positions().items()}
    expected = [torch.randn(9, generator=streams[NOISE]), draw(streams, BATCH)]
    other = Streams(None, CPU)
    other.restore(positions)
    assert torch.equal(torch.randn(9, generator=other[NOISE]), expected[0])
    assert torch.equal(draw(other, BATCH), expected[1])


def test_foreign_positions_are_refused():
    streams = Streams(0, CPU)
    with pytest.raises(CheckpointError, match="expected the streams"):
        streams.restore({BATCH: streams[BATCH].get_state()})
    broken = {**streams.positions(), NOISE: torch.zeros(3, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match="cannot continue"):
        streams.restore(broken)


def test_global_randomness_is_put_back():
    before = torch.get_rng_state()
    with Streams(0, CPU).global_randomness(LAYERS):
        torch.rand(10)
    assert torch.equal(before, torch.get_rng_state())
