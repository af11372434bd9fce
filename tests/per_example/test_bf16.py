"""Layers in bfloat16: what is clipped is what is summed, and both keep float32."""

from dataclasses import replace

import pytest
import torch

from dpsur.mechanism.gaussian import Batch
from dpsur.mechanism.trial import mean_losses
from dpsur.per_example import clipped_norms, clipped_sum, clipping
from tests.per_example.test_gradient_rules import MODELS, ROWS, gradients, norm, shared

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same'", "ignore:LSTM with proj", "ignore:There is a performance drop"
)
BOUND = 1e-3  # far below every gradient, so that every record is clipped
ROUNDING = 1e-5  # of float32; that of bfloat16 is 400 times as much


def rounded(name):
    return replace(shared(name, torch.float32), bf16=True)


def passes_the_bound(problem):
    """By how much the worst single record passes the clip bound, relative to it."""
    params = problem.initial_params()
    parts = [
        clipped_sum(problem, params, problem.train, BOUND, mask=torch.arange(ROWS) == row).params
        for row in range(ROWS)
    ]
    assert all(value.dtype == torch.float32 for part in parts for value in part.values())
    return max(
        norm({key: value.double() for key, value in part.items()}) / BOUND - 1 for part in parts
    )


@pytest.mark.parametrize("name", list(MODELS))
def test_no_record_passes_the_clip_bound(name):
    assert passes_the_bound(rounded(name)) <= ROUNDING


def test_norms_in_bfloat16_would_pass_it(monkeypatch):
    """The same assertion, with norms that are not those of what is summed."""
    exact = clipping.clip_factors

    def coarse(norms, *others):
        return exact(norms.bfloat16().float(), *others)

    monkeypatch.setattr(clipping, "clip_factors", coarse)
    assert max(passes_the_bound(rounded(name)) for name in ("linear", "conv2d")) > ROUNDING


@pytest.mark.parametrize("name", list(MODELS))
def test_the_sum_is_that_of_float32_but_for_rounding(name):
    problem = rounded(name)
    params = problem.initial_params()
    exact, coarse = (
        clipped_sum(one, params, problem.train, BOUND).params
        for one in (replace(problem, bf16=False), problem)
    )
    gap = norm({key: coarse[key] - exact[key] for key in exact}) / norm(exact)
    assert 0 < gap < 0.05  # zero would mean that nothing was rounded


def test_norms_without_their_sums_are_rounded_alike():
    problem = rounded("conv2d")
    params = problem.initial_params()
    found = clipped_norms(problem, params, problem.train, 1e6)
    alone = [
        clipped_sum(problem, params, problem.train, 1e6, mask=torch.arange(ROWS) == row).params
        for row in range(ROWS)
    ]
    torch.testing.assert_close(found, torch.tensor([norm(p) for p in alone]).double())
    exact = [norm(row) for row in gradients(problem, params, problem.train)]
    assert not torch.allclose(found, torch.tensor(exact).double(), rtol=1e-5)


def test_tests_of_candidates_are_not_rounded():
    problem = rounded("conv2d")
    params = problem.initial_params()
    other = {name: 1.001 * value for name, value in params.items()}
    batch = Batch(problem.train)
    exact = mean_losses(replace(problem, bf16=False), other, params, batch)
    assert mean_losses(problem, other, params, batch) == exact
