import itertools
import os

import numpy as np
import pytest
import torch

from dpsur.distributed import Ranks
from dpsur.errors import CheckpointError
from dpsur.mechanism import streams as random_numbers
from dpsur.mechanism.noise_table import DEVIATION
from dpsur.mechanism.streams import (
    BATCH,
    INIT,
    LAYERS,
    NOISE,
    PER_RANK,
    PURPOSES,
    SHARED,
    VAL_BATCH,
    Streams,
)
from tests.conftest import stream
from tests.statistics import STANDARD_ERRORS, assert_frequency, assert_normal

CPU = torch.device("cpu")


def draw(streams, purpose, count=5, step=1):
    return streams.at(step)[purpose].uniform(count)


def test_a_seed_repeats_every_stream():
    one, two = Streams(7, CPU), Streams(7, CPU)
    for purpose in PURPOSES:
        assert torch.equal(draw(one, purpose), draw(two, purpose))


@pytest.mark.parametrize("seed", [7, None])
def test_purposes_steps_seeds_and_runs_give_different_draws(seed):
    streams = Streams(seed, CPU)
    draws = [draw(streams, purpose, step=step) for purpose in PURPOSES for step in (1, 2)]
    draws += [draw(Streams(8, CPU), BATCH), draw(streams.spawn(0), BATCH)]
    other_rank = Streams(None, CPU, Ranks(1, 2), key=streams.key)
    draws += [draw(streams.spawn(1), BATCH), draw(other_rank, LAYERS)]
    for one, two in itertools.combinations(draws, 2):
        assert not torch.isclose(one, two).any()


def test_shared_purposes_are_the_same_on_all_ranks_and_others_are_not():
    first, second = Streams(7, CPU), Streams(7, CPU, Ranks(1, 2))
    for purpose in SHARED:
        assert torch.equal(draw(first, purpose), draw(second, purpose))
    for purpose in PER_RANK:
        assert not torch.isclose(draw(first, purpose), draw(second, purpose)).any()
        assert first.seed_for(purpose, 1) != second.seed_for(purpose, 1)


def test_without_a_seed_every_run_differs():
    assert not torch.isclose(draw(Streams(None, CPU), NOISE), draw(Streams(None, CPU), NOISE)).any()


@pytest.mark.parametrize(("seed", "secret"), [(None, True), (0, False)])
def test_only_a_seeded_run_draws_from_philox(seed, secret):
    streams = Streams(seed, CPU)
    for each in (streams, streams.spawn(0), streams.on(CPU)):
        assert each.key.secret is secret
        assert each.seeded is not secret


def test_purposes_do_not_disturb_each_other():
    alone, busy = Streams(3, CPU).at(4), Streams(3, CPU).at(4)
    busy[VAL_BATCH].uniform(1000)
    with busy.global_randomness(LAYERS):
        torch.rand(100)
    assert torch.equal(alone[NOISE].normal(9), busy[NOISE].normal(9))


@pytest.mark.parametrize("seed", [5, None])
def test_draws_of_one_stream_follow_one_another(seed):
    """No word is used twice."""
    one = Streams(seed, CPU).at(1)[NOISE]
    found = torch.cat([one.uniform(7), one.uniform(3), one.uniform(1), one.uniform(1001)])
    assert len(found.unique()) == len(found)
    other = Streams(seed, CPU).at(1)[NOISE]
    normal = torch.cat([other.normal(7), other.normal(3), other.normal(1), other.normal(1001)])
    assert len(normal.unique()) >= len(normal) - 3  # integers, which may be equal by chance


@pytest.mark.parametrize("seed", [2, None])
@pytest.mark.parametrize(("offset", "count"), [(0, 7), (3, 10), (501, 500), (999, 2), (4, 0)])
def test_any_part_of_a_normal_draw_can_be_made_by_itself(offset, count, seed):
    """Each process of a distributed run draws its own shard of one noise vector."""
    draws = Streams(seed, CPU)
    whole = draws.at(1)[NOISE].normal(1001)
    part = draws.at(1)[NOISE].normal(count, offset=offset)
    assert torch.equal(part, whole[offset : offset + count])


@pytest.mark.parametrize("seed", [11, None])
def test_streams_are_uniform_and_normal(seed):
    draws = Streams(seed, CPU).at(1)
    uniform = draws[BATCH].uniform(100_000)
    assert_frequency(int((uniform < 0.25).sum()), 100_000, 0.25)
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    normal = draws[NOISE].normal(100_000)
    assert_normal(normal.numpy().astype(np.float64), 1.0)


def test_steps_are_independent():
    """Neighbouring counters must not show."""
    streams = Streams(1, CPU)
    draws = torch.stack([streams.at(step)[NOISE].normal(4) for step in range(1, 20_001)])
    correlation = torch.corrcoef(torch.cat([draws[:-1], draws[1:]], 1).T)
    off_diagonal = correlation - torch.eye(8, dtype=torch.float64)
    assert float(off_diagonal.abs().max()) <= STANDARD_ERRORS / 20_000**0.5


def test_uniform_draws_have_53_bits():
    draws = stream(3).uniform(4000) * 2.0**53
    assert torch.equal(draws, draws.round())
    assert bool((draws % 2 == 1).any())


def on_grid(values, noise, scale):
    """Values rounded to the grid of the noise, plus whole steps of noise."""
    grid = scale / DEVIATION
    return ((values.double() / grid).round() + (noise * DEVIATION).round()) * grid


@pytest.mark.parametrize("count", [1, 7, 4096])
def test_noise_is_added_in_whole_steps(count, monkeypatch):
    """Also in parts, and in place."""
    one, other, values = stream(3), stream(3), torch.linspace(-1, 1, count)
    expected = on_grid(values, one.normal(count), 0.3).float()
    before = values.clone()
    assert torch.equal(other.add_normal(values, 0.3), expected)
    assert torch.equal(one.normal(5), other.normal(5))  # both have drawn as many
    assert torch.equal(values, before)
    monkeypatch.setattr(random_numbers, "_AT_ONCE", 12)
    assert stream(3).add_normal(values, 0.3, in_place=True) is values
    assert torch.equal(values, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("count", [1, 7, 4099])
def test_counts_are_those_of_the_draws(device, count, seed):
    streams = Streams(seed, torch.device(device))
    found = streams.counts_below(0.3, count, BATCH, range(5, 25))
    drawn = [streams.at(step)[BATCH].uniform(count) for step in range(5, 25)]
    assert found == [int((one < 0.3).sum()) for one in drawn]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("count", [1, 7, 4096])
def test_a_gpu_adds_the_noise_that_it_draws(count, seed):
    values, scale = torch.linspace(-1, 1, count).cuda(), torch.tensor(0.3, dtype=torch.float64)
    streams = Streams(seed, torch.device("cuda"))
    expected = on_grid(values, streams.at(3)[NOISE].normal(count), 0.3).float()
    assert torch.equal(streams.at(3)[NOISE].add_normal(values, 0.3), expected)
    assert torch.equal(streams.at(3)[NOISE].add_normal(values, scale.cuda()), expected)
    offset = streams.at(3)[NOISE]
    offset.normal(8)
    expected = on_grid(values, streams.at(3)[NOISE].normal(8 + count)[8:], 0.3).float()
    assert torch.equal(offset.add_normal(values, 0.3), expected)
    offset = streams.at(3)[NOISE]
    offset.normal(8)
    assert offset.add_normal(values, 0.3, in_place=True) is values
    assert torch.equal(values, expected)


def test_a_saved_key_continues_exactly():
    streams = Streams(None, CPU)
    saved = {name: state.clone() for name, state in streams.positions().items()}
    other = Streams(None, CPU)
    other.restore(saved)
    assert torch.equal(other.at(9)[NOISE].normal(9), streams.at(9)[NOISE].normal(9))
    assert other.seed_for(INIT, 0) == streams.seed_for(INIT, 0)


def test_foreign_positions_are_refused():
    streams = Streams(0, CPU)
    # a key of another length would be another generator than the statement names
    secret = Streams(None, CPU).positions()
    for wrong in ({}, {"noise": torch.zeros(16)}, {"key": torch.zeros(3).byte()}, secret):
        with pytest.raises(CheckpointError, match="no key of random numbers of 16 bytes"):
            streams.restore(wrong)


def test_global_randomness_is_put_back():
    before = torch.get_rng_state()
    with Streams(0, CPU).at(1).global_randomness(LAYERS):
        torch.rand(10)
    assert torch.equal(before, torch.get_rng_state())


def test_bits_do_not_depend_on_the_number_of_threads():
    """Nor on where a draw is cut into pieces."""
    count, before = 3 * random_numbers._LEAST_OF_A_WORKER + 1001, torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            draws = Streams(5, CPU).at(7)
            found.append((draws[NOISE].normal(count), draws[BATCH].uniform(count)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    for start, length in ((random_numbers._AT_ONCE - 500, 1000), (7, random_numbers._AT_ONCE + 1)):
        part = Streams(5, CPU).at(7)[NOISE].normal(length, offset=start)
        assert torch.equal(part, found[0][0][start:][:length])


@pytest.mark.parametrize("seed", [0, None])
def test_threads_draw_the_same_bits(seed):
    """Also where the caller's mode is not that of a new thread."""
    streams, count = Streams(seed, CPU), 2 * random_numbers._LEAST_OF_A_WORKER + 5
    alone = threads_for(1, lambda: streams.at(1)[NOISE].normal(count))
    together = threads_for(2, lambda: streams.at(1)[NOISE].normal(count))
    assert torch.equal(alone, together)
    values = torch.zeros(count)
    with torch.inference_mode():
        found = threads_for(2, lambda: streams.at(1)[NOISE].add_normal(values + 0, 1.0))
    assert torch.equal(found, alone.float())


def threads_for(count, draw):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        found = draw()
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    return found


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_workers_of_its_own():
    assert random_numbers._workers().submit(int).result() == 0
    child = os.fork()
    if not child:
        try:
            os._exit(random_numbers._workers().submit(int).result(20))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
