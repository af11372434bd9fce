"""Two pieces of work beside each other: on the CPU in turn, on CUDA at the same time."""

import gc

import pytest
import torch

from dpsur.mechanism.cuda_graphs import capture_graph, run_concurrently
from dpsur.mechanism.streams import Streams
from dpsur.methods import Dpsur
from tests.mechanism.test_cuda_graph_loop import bound

CPU = torch.device("cpu")


def test_on_a_cpu_one_comes_after_the_other():
    order = []

    def one():
        order.append("one")
        return 1

    def other():
        order.append("other")
        return 2

    assert run_concurrently(CPU, one, other) == (1, 2)
    assert order == ["one", "other"]


def test_captured_trials_begin_their_tests_early_and_others_do_not():
    procedure, _ = bound(Dpsur(updates=6, noise_multiplier=20.0, batch_size=20, accept_ratio=1.5))
    state, draws = procedure.initial_state(), Streams(0, torch.device("cpu")).at(1)
    assert procedure.propose(state, draws, torch.tensor(0)).test is None
    test = procedure.padded().propose(state, draws, torch.tensor(0)).test
    assert test[1] is not None
    assert test[0].mask is not None


@pytest.mark.gpu
def test_what_runs_at_the_same_time_is_joined_before_it_is_used():
    device = torch.device("cuda")
    values, sums = torch.zeros(2**20, device=device), torch.zeros(3, device=device)

    def slow():
        found = values
        for _ in range(200):
            found = found + 1
        return found

    def both():
        values.add_(1)
        one, other = run_concurrently(device, slow, lambda: values * 2)
        sums.copy_(torch.stack([values[0], one.amin(), other.amax()]))
        values.copy_(one)  # which the companion of the next replay must wait for

    both()
    assert sums.tolist() == [1, 201, 2]
    replay = capture_graph(both, device, before_capture=lambda: values.zero_())
    for _ in range(3):
        replay()
    assert sums.tolist() == [403, 603, 806]


@pytest.mark.gpu
def test_streams_have_companions_of_their_own():
    device = torch.device("cuda")
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    seen = []
    for stream in streams:
        with torch.cuda.stream(stream):
            run_concurrently(device, lambda: seen.append(torch.cuda.current_stream()), lambda: None)
    assert len({*streams, *seen}) == 6


@pytest.mark.gpu
def test_a_graph_that_nobody_needs_any_more_does_not_end_the_capture_of_another():
    device, values = torch.device("cuda"), torch.zeros(3, device="cuda")

    class Holder:
        pass

    def work():
        for _ in range(100):
            [Holder()]  # enough new objects for a collection
        values.add_(1)

    capture_graph(work, device)
    thresholds = gc.get_threshold()
    try:
        gc.collect()
        one = Holder()
        one.replay, one.itself = capture_graph(work, device), one  # only a collection frees it
        del one
        gc.set_threshold(1)
        replay = capture_graph(work, device)
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    values.zero_()
    replay()
    assert values.tolist() == [1, 1, 1]
