"""The law of the number of rejections, and what it tells."""

import numpy as np
import pytest
import torch

from dpsur.errors import InvalidInputError
from dpsur.mechanism.streams import NOISE, SETUP, Streams
from dpsur.privacy.events import CoinTest, LossTest
from reproduction.audits.exact import Setting
from reproduction.audits.rejection_leak import count_leak
from reproduction.audits.repetitions import epsilon_lower_bound
from reproduction.audits.sampler import draw_trials
from reproduction.audits.worst_case_problems import gate_alone

TEST = LossTest(0.05, 0.5, -1.0)


def counted(accept: float, updates: int, runs: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).negative_binomial(updates, accept, runs).astype(float)


def test_counts_show_no_more_than_is_computed_and_not_much_less():
    leak = count_leak(TEST, TEST.accept_min, 3, delta=0.01)
    assert leak.swayed == pytest.approx(0.95 * TEST.accept_min + 0.05 * TEST.accept_max)
    without, swayed = (
        counted(a, 3, 60_000, seed) for seed, a in enumerate((leak.accept, leak.swayed))
    )
    seen = epsilon_lower_bound(-swayed, -without, 0.01, confidence=1 - 1e-6).epsilon
    assert 0.5 * leak.epsilon < seen < leak.epsilon
    # the control: a record that sways four times as many batches shows more than is computed
    more = counted(0.8 * TEST.accept_min + 0.2 * TEST.accept_max, 3, 60_000, 5)
    assert epsilon_lower_bound(-more, -without, 0.01, confidence=1 - 1e-6).epsilon > leak.epsilon


def test_the_count_of_trials_has_this_law():
    """Acceptance of trials with a record that sways them is what the computation takes it to be."""
    setting = Setting(40, 40, 500.0, 8, 0.5, 1, -1.0)
    unit = gate_alone(setting, reach=1e-9)  # every move is beyond its reach: x always accepts
    stream = Streams(0, torch.device("cpu")).at(SETUP)[NOISE]
    rates = [
        float(draw_trials(unit, 200_000, stream, present=present).accept.double().mean())
        for present in (False, True)
    ]
    accept = setting.test.acceptance(0.0)
    swayed = 0.8 * accept + 0.2 * setting.test.accept_max
    assert rates == pytest.approx([accept, swayed], abs=5 * 0.5 / np.sqrt(200_000))


def test_blocks_hide_it():
    leaks = [count_leak(TEST, 0.1, 20, 1e-5, block).epsilon for block in (1, 50, 400, 100_000)]
    assert leaks == sorted(leaks, reverse=True)
    assert leaks[0] > 1
    assert leaks[-1] == 0.0


def test_delays_blur_it_as_much_as_is_computed():
    """Counts with drawn delays show less than the count alone, and no more than is computed."""
    plain = count_leak(TEST, TEST.accept_min, 3, delta=0.01)
    delayed = count_leak(TEST, TEST.accept_min, 3, delta=0.01, delayed=True)
    assert 0 < delayed.epsilon < plain.epsilon
    without, swayed = (
        counted(a, 3, 60_000, seed) for seed, a in enumerate((delayed.accept, delayed.swayed))
    )
    waits = [counted(TEST.accept_min, 3, 60_000, seed) for seed in (2, 3)]
    seen = epsilon_lower_bound(
        -swayed - waits[0], -without - waits[1], 0.01, confidence=1 - 1e-6
    ).epsilon
    assert 0.5 * delayed.epsilon < seen < delayed.epsilon
    # the control: without the delays the same counts show more than that
    bare = epsilon_lower_bound(-swayed, -without, 0.01, confidence=1 - 1e-6).epsilon
    assert bare > delayed.epsilon


def test_a_coin_and_bad_input():
    assert count_leak(CoinTest(0.01, 2.0), 0.75, 100, 1e-5).epsilon > 0
    with pytest.raises(InvalidInputError, match="acceptance probability"):
        count_leak(TEST, 0.9, 10, 1e-5)
    with pytest.raises(InvalidInputError, match="updates"):
        count_leak(TEST, 0.1, 0, 1e-5)
    with pytest.raises(InvalidInputError, match="delayed or rounded to 7"):
        count_leak(TEST, 0.1, 5, 1e-5, 7, delayed=True)
