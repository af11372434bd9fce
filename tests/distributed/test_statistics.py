"""Batches are Poisson samples of all records, and noise is one draw, whatever the number of ranks.

Every assertion is shown to fail for a mechanism that is wrong in the way that others have been.
"""

import math

import pytest
import torch

from dpsur.distributed import Ranks
from dpsur.mechanism.gaussian import exact_batch, padded_batch
from dpsur.mechanism.streams import BATCH, Streams
from tests.conftest import blobs
from tests.distributed import jobs
from tests.distributed.test_runs import COUNT, KINDS, assert_same
from tests.methods.problems import settled
from tests.statistics import STANDARD_ERRORS

CPU = torch.device("cpu")
SIZE, RATE, STEPS = 24, 0.15, 3000


def shares(ranks, step, draw=exact_batch):
    """The rows of every rank in one step."""
    found = []
    for rank in range(ranks):
        streams = Streams(5, CPU, Ranks(rank, ranks))
        batch = draw(DATA, RATE, streams.at(step)[BATCH])
        rows = batch.rows if batch.mask is None else batch.rows[batch.mask]
        found.append(rows.tolist())
    return found


DATA = blobs(SIZE)


def by_itself(ranks, step):
    """Wrong: every rank draws from all records with numbers of its own."""
    return [
        (Streams(100 + rank, CPU).at(step)[BATCH].uniform(SIZE) < RATE).nonzero()[:, 0].tolist()
        for rank in range(ranks)
    ]


def same_numbers(ranks, step):
    """Wrong: every rank draws from its part of the records, all with the same numbers."""
    part = SIZE // ranks
    rows = (Streams(5, CPU).at(step)[BATCH].uniform(part) < RATE).nonzero()[:, 0]
    return [(rows + rank * part).tolist() for rank in range(ranks)]


def check_inclusion(draw, ranks):
    """Every record joins with probability RATE, and no two join together more or less often."""
    joined = torch.zeros(STEPS, SIZE, dtype=torch.float64)
    for step in range(STEPS):
        rows = [row for share in draw(ranks, step + 1) for row in share]
        for row in rows:
            joined[step, row] += 1
    spread = math.sqrt(RATE * (1 - RATE) / STEPS)
    assert joined.max() <= 1, "a record was taken by two ranks"
    assert ((joined.mean(0) - RATE).abs() < STANDARD_ERRORS * spread).all()
    centred = joined - RATE
    pairs = (centred.T @ centred / STEPS) / (RATE * (1 - RATE))
    pairs.fill_diagonal_(0.0)
    assert (pairs.abs() < STANDARD_ERRORS / math.sqrt(STEPS)).all()


@pytest.mark.parametrize("ranks", [1, 3])
def test_inclusion_is_bernoulli_and_independent(ranks):
    check_inclusion(shares, ranks)


@pytest.mark.parametrize("wrong", [by_itself, same_numbers])
def test_samples_by_rank_are_found_out(wrong):
    with pytest.raises(AssertionError):
        check_inclusion(wrong, 2)


@pytest.mark.parametrize("draw", [exact_batch, padded_batch])
def test_the_batch_does_not_depend_on_the_ranks_and_shares_are_even(draw):
    for step in range(1, 40):
        whole = sorted(shares(1, step, draw)[0])
        for ranks in (2, 3, 4):
            found = shares(ranks, step, draw)
            assert sorted(row for share in found for row in share) == whole
            sizes = [len(share) for share in found]
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("wrong", "variance"), [(None, 1.0), ("noise of each rank", 2.0), ("divided by ranks", 0.25)]
)
def test_the_noise_of_a_gradient_has_the_variance_of_one_draw(processes, wrong, variance):
    found = processes.run(2, jobs.pure_noise, wrong)
    alone = jobs.pure_noise()
    for one in found:
        assert isinstance(one, torch.Tensor), one
        error = STANDARD_ERRORS * math.sqrt(2 / one.numel())
        assert float(one.var()) == pytest.approx(variance, rel=error)
        assert torch.equal(one, alone) == (wrong is None)


@pytest.mark.parametrize("wrong", ["averaged", "local losses"])
def test_wrong_reductions_are_found_out(processes, wrong):
    """Dividing by the number of ranks, as DDP does, or testing on a rank's own share."""
    kind = {"averaged": "dpsgd", "local losses": "dpsur with noisy losses"}[wrong]
    method, plan = settled(*KINDS[kind][:1], COUNT, KINDS[kind][1])
    alone = jobs.make_run(method, plan)
    found = processes.run(3, jobs.make_wrong_run, wrong, method, plan)
    with pytest.raises(AssertionError):
        assert_same(alone, found[0])
