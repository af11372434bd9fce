"""How many copies of a model's size a step holds: what plain training holds, and what a gate needs.

Plain training holds weights, momentum and gradient. A gate adds a candidate: weights and momentum.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpsur.errors import NothingReleasedError
from dpsur.functional.problem import Problem, drop_weights
from dpsur.functional.records import Examples
from dpsur.functional.tree import empty_like, flatten, parts, to_vector
from dpsur.mechanism import cuda_graph_loop, proposer
from dpsur.mechanism.captured_batches import CapturedBatches
from dpsur.mechanism.cuda_graph_loop import CudaGraphLoop
from dpsur.mechanism.proposer import Sgd
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import EagerLoop, make_trial, own, start, updates_in_place
from dpsur.methods import Dpsgd, Dpsur
from dpsur.per_example import engine_report, record_level
from dpsur.privacy.budget import Budget
from reproduction.bench.basic_arms import Cell
from reproduction.loops import run_loop, train
from tests.conftest import blobs, small_model

CPU = torch.device("cpu")
BUDGET = Budget(3.0, 1e-4)
STATE, GRADIENT, CANDIDATE = 2, 1, 2
# Of a model's size, for what is worked on at once: parts of the noise, of the update, a batch.
SOME = 0.6


@pytest.fixture(autouse=True)
def _onlookers_are_trusted(monkeypatch):
    """`LiveBytes` sees all records at once, which code that is not of a library may not."""
    monkeypatch.setattr(record_level, "is_of_a_library", lambda _: True)


class LiveBytes(TorchDispatchMode):
    """The most bytes that the tensors which operations were given or made held at a time."""

    def __init__(self):
        super().__init__()
        self.held, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, found)):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {key: one for key, one in self.held.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.held.values()))
        return found


def wide_model():
    """Nearly all of its numbers are in one layer, as in a large perceptron."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.Linear(1536, 4))


def bound(method, model=None, size=64):
    model = wide_model() if model is None else model
    generator = torch.Generator().manual_seed(0)
    train = Examples(
        torch.randn(size, 8, generator=generator), torch.randint(4, (size,), generator=generator)
    )
    problem = Problem(model, F.cross_entropy, train)
    settled, plan = method.resolve(size, BUDGET, "proven")
    return settled.build(problem, plan), plan


def copies(step, procedure):
    """The peak of a step over the size of the model."""
    size = sum(v.numel() * v.element_size() for v in procedure.initial_state().params.values())
    with LiveBytes() as live:
        step()
    return live.peak / size


METHODS = {
    "dpsgd": (Dpsgd(updates=9, noise_multiplier=20.0, batch_size=8), STATE + GRADIENT),
    "dpsur": (
        Dpsur(updates=9, noise_multiplier=20.0, batch_size=8, accept_ratio=1.5),
        STATE + GRADIENT + CANDIDATE,
    ),
}


def eager(procedure, plan):
    return EagerLoop(procedure, plan, Streams(0, CPU), start(procedure), owned=True)


def in_blocks(procedure, plan, block=3):
    padded = procedure.padded()
    return CudaGraphLoop(
        procedure, padded, plan, Streams(0, CPU), start(procedure), block, owned=True
    )


def one_block(loop):
    loop.launch()
    loop.collect()


@pytest.mark.parametrize("make_loop", [eager, in_blocks])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_holds_few_copies_of_the_model(name, make_loop, monkeypatch):
    monkeypatch.setattr(cuda_graph_loop, "LEAST_WORK", 0.0)  # sizes are counted, as for large ones
    method, allowed = METHODS[name]
    procedure, plan = bound(method)
    loop = make_loop(procedure, plan)

    one_block(loop)  # chooses the engine
    held = copies(lambda: one_block(loop), procedure)
    assert STATE + GRADIENT <= held < allowed + SOME


def test_engines_are_tried_with_few_copies_of_the_model():
    """Weights and a copy, those that are tried, a gradient, and the largest layer of another."""
    procedure, _ = bound(METHODS["dpsgd"][0])
    problem = procedure.proposer.problem
    assert copies(lambda: engine_report(problem), procedure) < 5 + SOME


def test_a_model_without_its_weights_is_trained_all_the_same():
    method = METHODS["dpsgd"][0]
    ends = []
    for drop in (False, True):
        model = wide_model()
        original = wide_model() if drop else None
        records = Examples(torch.ones(64, 8), torch.zeros(64).long())
        problem = Problem(model, F.cross_entropy, records, original=original)
        settled, plan = method.resolve(64, BUDGET, "proven")
        procedure = settled.build(problem, plan)
        if drop:
            drop_weights(model)
            assert model(torch.ones(1, 8)).isnan().all()  # nobody gets a result from it unnoticed
            assert max(v.untyped_storage().nbytes() for v in model.parameters()) == 4
        ends.append(flatten(train(procedure, plan, Streams(0, CPU)).state))
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


@pytest.mark.parametrize("most", [1, 7, 2**18])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("average", [0.0, 0.9])
def test_updates_in_place_have_the_bits_of_candidates(optimizer, average, most, monkeypatch):
    monkeypatch.setitem(proposer._AT_ONCE, "cpu", most)
    method = Dpsgd(updates=5, noise_multiplier=20.0, batch_size=20, optimizer=optimizer,
                   average_decay=average, learning_rate=0.05)  # fmt: skip
    problem = Problem(small_model(), F.cross_entropy, blobs())
    settled, plan = method.resolve(200, BUDGET, "proven")
    procedure = settled.build(problem, plan)
    assert updates_in_place(procedure)
    one = start(procedure)
    two = own(one, owned=False)
    first = {name: value.clone() for name, value in flatten(one.state).items()}
    states = [one.state]
    for _ in range(5):
        one, _ = make_trial(procedure, plan, Streams(0, CPU), one)
        states.append(one.state)
        two, _ = make_trial(procedure, plan, Streams(0, CPU), two, True)
        assert one.ledger == two.ledger
        for name, value in flatten(one.state).items():
            assert torch.equal(value, flatten(two.state)[name]), name
    for name, value in first.items():
        assert torch.equal(flatten(states[0])[name], value), name  # a copy was changed, not it


def test_gates_keep_their_candidates_apart():
    procedure, _ = bound(METHODS["dpsur"][0])
    assert not updates_in_place(procedure)
    plain = bound(METHODS["dpsgd"][0])[0]
    assert updates_in_place(plain)

    class Custom(Sgd):
        """May look at all weights at once."""

    custom = replace(plain, proposer=replace(plain.proposer, optimizer=Custom()))
    assert not updates_in_place(custom)


def test_what_has_two_names_is_copied_before_it_changes_in_place():
    procedure, _ = bound(METHODS["dpsgd"][0])
    progress = start(procedure)
    state = progress.state
    shared = type(progress)(
        type(state)(state.params, state.optimizer, state.updates, average=state.params),
        progress.ledger,
    )
    made = own(shared, owned=True).state
    assert to_vector(made.params).data_ptr() != to_vector(made.average).data_ptr()
    same = own(progress, owned=True).state
    assert to_vector(same.params).data_ptr() == to_vector(state.params).data_ptr()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("make_loop", [eager, in_blocks])
def test_nothing_is_seen_of_an_update_that_failed_halfway(make_loop, error, monkeypatch):
    """Half of the weights would be new and the ledger would not know: only a checkpoint is left."""
    monkeypatch.setattr(cuda_graph_loop, "LEAST_WORK", 0.0)
    procedure, plan = bound(METHODS["dpsgd"][0], nn.Linear(8, 4))
    loop = make_loop(procedure, plan)
    loop.launch()
    loop.collect()
    trials = loop.progress.ledger.trials
    real, calls = proposer._write, []

    def failing(place, new, active):
        calls.append(place)
        if len(calls) == 2:
            raise error("in the middle")
        real(place, new, active)

    monkeypatch.setattr(proposer, "_write", failing)
    with pytest.raises(error, match="in the middle"):
        one_block(loop)
    assert trials
    with pytest.raises(NothingReleasedError, match="last checkpoint"):
        loop.progress  # noqa: B018
    monkeypatch.setattr(proposer, "_write", real)
    with pytest.raises(NothingReleasedError, match="last checkpoint"):
        one_block(loop)
    with pytest.raises(NothingReleasedError, match="last checkpoint"):
        run_loop(loop, plan)


@pytest.mark.parametrize("masked", [True, False])
def test_a_trial_that_does_not_count_changes_nothing_in_place(masked, monkeypatch):
    """As those before a capture. The control: updates that are written without a mask."""
    if not masked:
        monkeypatch.setattr(proposer, "_write", lambda place, new, active: place.copy_(new))
    procedure, plan = bound(METHODS["dpsgd"][0], nn.Linear(8, 4))
    before = start(procedure)
    loop = CudaGraphLoop(procedure, procedure.padded(), plan, Streams(0, CPU), before, 2)
    loop._live.fill_(False)
    loop.launch()
    after = flatten(loop._progress.state)
    same = [torch.equal(value, after[name]) for name, value in flatten(before.state).items()]
    assert all(same) == masked
    loop.collect()
    assert (loop.progress.ledger.trials, loop.progress.ledger.updates) == (0, 0)


def test_a_state_in_flight_is_not_shown(monkeypatch):
    monkeypatch.setattr(cuda_graph_loop, "LEAST_WORK", 0.0)
    procedure, plan = bound(METHODS["dpsgd"][0], nn.Linear(8, 4))
    loop = in_blocks(procedure, plan)
    loop.launch()
    assert not loop.finished
    with pytest.raises(NothingReleasedError):
        loop.progress  # noqa: B018
    loop.collect()
    assert loop.progress.ledger.trials == 3


def test_a_batch_larger_than_counted_ends_the_run(monkeypatch):
    """Its records were left out, and the state from before is gone."""
    monkeypatch.setattr(cuda_graph_loop, "LEAST_WORK", 0.0)
    procedure, plan = bound(METHODS["dpsgd"][0], nn.Linear(8, 4), size=600)
    loop = in_blocks(procedure, plan, block=9)
    monkeypatch.setattr(CapturedBatches, "levels", lambda self, steps: [0] * len(steps))
    loop.launch()
    with pytest.raises(NothingReleasedError, match="larger than counted"):
        loop.collect()
    with pytest.raises(NothingReleasedError):
        loop.progress  # noqa: B018


def test_parts_are_views_of_neighbours_and_of_others():
    together = empty_like({"a": torch.zeros(2, 3), "b": torch.zeros(0), "c": torch.zeros(5)})
    apart = {name: torch.zeros(value.shape) for name, value in together.items()}
    for several in ((together,), (apart,), (together, apart)):
        for rows in parts(*several, most=4):
            assert all(value.numel() <= 4 for value in rows)
            for value in rows:
                value.fill_(7.0)
        for one in several:
            assert all((value == 7.0).all() for value in one.values())
            for value in one.values():
                value.zero_()


@pytest.mark.gpu
@pytest.mark.parametrize(("arm", "most"), [("dpsgd", 1.2), ("dpsur", 1.2)])
@pytest.mark.parametrize("width", [3_072, 9_792])
def test_peak_memory_on_a_gpu_is_that_of_plain_training(width, arm, most):
    """Set-up included. A gate may have one more copy of weights and momentum."""
    from dataclasses import replace
    from functools import partial

    from reproduction.bench import network_grid
    from reproduction.bench.measurement import release
    from reproduction.bench.networks import network_named, perceptron

    device = torch.device("cuda", 0)
    torch.cuda.init()  # otherwise the allocator knows no device yet
    found = {}

    def measured(name, network):
        release(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step = network_grid.ARMS[name](Cell(network, network.batch(1024, device)))
        for _ in range(3):
            step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        return peak - getattr(step, "data_bytes", 0)

    for name in ("plain", arm):
        measured(name, network_named("mlp"))  # workspaces are there before counting
        found[name] = measured(
            name, replace(network_named("mlp"), build=partial(perceptron, width))
        )
    size = 4 * sum(value.numel() for value in perceptron(width).parameters())
    candidate = 0 if arm == "dpsgd" else CANDIDATE * size
    print(f"{arm}, width {width}: {found[arm]:,} bytes, plain {found['plain']:,}")
    assert found[arm] <= most * found["plain"] + candidate
