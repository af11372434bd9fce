import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._C._functorch import get_unwrapped
from torch.utils.checkpoint import checkpoint

from dpsur.errors import InvalidInputError, UnsupportedModelError
from dpsur.functional.problem import Objective, Problem, drop_weights
from dpsur.functional.records import Examples
from dpsur.networks import pixel_cnn
from dpsur.per_example import check_model, clipped_sum, clipping
from dpsur.per_example.api import per_example_gradients
from dpsur.per_example.clipping import strategy_for
from dpsur.per_example.record_function import Way
from tests.conftest import blobs, small_model


class LastStep(nn.Module):
    """A recurrent layer that returns its last output."""

    def __init__(self, layer, width):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attend(x, x, x, need_weights=False)[0].mean(1))


class Tied(nn.Module):
    """One weight used twice, and a plain parameter of the user's own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5) / 2)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x @ self.weight)))))


class HalfFrozen(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        self[0].requires_grad_(False)


def tokens():
    return torch.randint(0, 7, (6, 5), generator=torch.Generator().manual_seed(3))


def floats(*shape):
    return torch.randn(6, *shape, generator=torch.Generator().manual_seed(3))


MODELS = {
    "linear": (lambda: nn.Linear(5, 3), floats(5)),
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), floats(5)),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3, dilation=2), nn.Flatten(), nn.Linear(16, 3)),
        floats(2, 8),
    ),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.Flatten(), nn.Linear(36, 3)
        ),
        floats(2, 6, 6),
    ),
    "pixel-cnn": (pixel_cnn, floats(1, 28, 28)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 3)),
        tokens(),
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 3)
        ),
        floats(2, 6, 6),
    ),
    "instance-norm": (
        lambda: nn.Sequential(nn.InstanceNorm2d(2, affine=True), nn.Flatten(), nn.Linear(72, 3)),
        floats(2, 6, 6),
    ),
    "lstm": (lambda: LastStep(nn.LSTM(4, 6, batch_first=True), 6), floats(5, 4)),
    "gru": (
        lambda: LastStep(nn.GRU(4, 6, batch_first=True, bidirectional=True), 12),
        floats(5, 4),
    ),
    "attention": (Attention, floats(5, 4)),
    "tied": (Tied, floats(5)),
    "half-frozen": (HalfFrozen, floats(5)),
}


def one_at_a_time(problem, params, batch, bound):
    """The definition, as slowly as it gets: one backward pass per record, then clip, then add."""
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    for input_, target in zip(batch.inputs, batch.targets, strict=True):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        output = torch.func.functional_call(problem.model, leaves, (input_[None],))
        problem.loss(output, target[None]).backward()
        norm = torch.sqrt(sum(leaf.grad.square().sum() for leaf in leaves.values()))
        scale = min(1.0, bound / float(norm))
        for name, leaf in leaves.items():
            total[name] += scale * leaf.grad
    return total


def made(name):
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    examples = Examples(inputs, torch.tensor([0, 1, 2, 0, 1, 2]))
    return Problem(build(), F.cross_entropy, examples)


@pytest.mark.parametrize("bound", [1e-2, 0.7, 1e6])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_against_one_example_at_a_time(name, bound):
    problem = made(name)
    check_model(problem.model, problem.train)
    params = problem.initial_params()
    ours = clipped_sum(problem, params, problem.train, bound)
    expected = one_at_a_time(problem, params, problem.train, bound)
    assert ours.sensitivity == bound
    assert set(ours.params) == {n for n, p in problem.model.named_parameters() if p.requires_grad}
    for key, value in expected.items():
        torch.testing.assert_close(ours.params[key], value, rtol=1e-4, atol=1e-5 * min(bound, 1))


def test_pieces_do_not_change_the_sum():
    problem = made("mlp")
    params = problem.initial_params()
    whole = clipped_sum(problem, params, problem.train, 0.3).params
    pieces = clipped_sum(problem, params, problem.train, 0.3, at_once=1).params
    for key, value in whole.items():
        torch.testing.assert_close(pieces[key], value)


def test_empty_batch_sums_to_zero(problem):
    empty = problem.train.select(torch.zeros(0, dtype=torch.int64))
    total = clipped_sum(problem, problem.initial_params(), empty, 1.0)
    assert all(value.abs().max() == 0 for value in total.params.values())


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
def test_a_gradient_that_is_not_finite_contributes_zero(problem, poison):
    params = problem.initial_params()
    batch = problem.train.select(torch.arange(4))
    # a loss that blows up for one record: the inputs themselves pass through a linear layer
    inputs = batch.inputs.clone()
    inputs[2] = poison
    model = nn.Linear(2, 3)
    bad = Problem(model, F.mse_loss, Examples(inputs, torch.zeros(4, 3)))
    params = bad.initial_params()
    with_it = clipped_sum(bad, params, bad.train, 1.0).params
    without = clipped_sum(bad, params, bad.train.select(torch.tensor([0, 1, 3])), 1.0).params
    for key, value in without.items():
        assert with_it[key].isfinite().all()
        torch.testing.assert_close(with_it[key], value)


class Shifted(nn.Module):
    """Its gradient depends on what an activation makes of its inputs, and on nothing else."""

    def __init__(self, activation):
        super().__init__()
        self.shift, self.activation = nn.Parameter(torch.full((3,), 0.5)), activation

    def forward(self, x):
        return self.activation(x + self.shift)


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("activation", [nn.ELU(), nn.SELU(), nn.Hardtanh(), nn.Hardswish()])
def test_a_loss_that_is_nan_contributes_zero_wherever_it_stands(activation, way):
    """Vectorised kernels make a number of NaN at the end of a batch, and NaN or zero elsewhere.

    So one more record would move many: from 31 rows of three numbers to 32 the end is gone.
    """
    model = Shifted(activation)

    def sum_of(inputs):
        problem = Problem(
            model, lambda out, _: out.sum(), Examples(inputs, torch.zeros(len(inputs)))
        )
        params = problem.initial_params()
        records = strategy_for(problem, params, inputs).records
        records.ways.update(dict.fromkeys(records.ways, way))
        return clipping.clipped_sum(problem, params, problem.train, 1.0).params["shift"]

    gradient = sum_of(torch.zeros(1, 3))
    assert gradient.norm() > 0.5
    for rows in (1, 5, 31, 32, 33):
        inputs = torch.full((rows + 1, 3), torch.nan)
        assert torch.equal(sum_of(inputs), torch.zeros(3))
        inputs[rows // 2] = 0.0
        torch.testing.assert_close(sum_of(inputs), gradient)


def distance(one, two):
    return float(torch.sqrt(sum((one[k] - two[k]).double().square().sum() for k in one)))


coordinates = st.floats(-1e4, 1e4, width=32)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(coordinates, coordinates, st.integers(0, 2)), max_size=4),
    extra=st.tuples(coordinates, coordinates, st.integers(0, 2)),
    bound=st.floats(1e-3, 10.0),
)
def test_sensitivity_for_neighbouring_batches(rows, extra, bound):
    def batch(rows):
        inputs = torch.tensor([row[:2] for row in rows], dtype=torch.float32).reshape(-1, 2)
        return Examples(inputs, torch.tensor([row[2] for row in rows], dtype=torch.int64))

    problem = Problem(small_model(), F.cross_entropy, batch(rows))
    params = problem.initial_params()
    without = clipped_sum(problem, params, batch(rows), bound)
    with_it = clipped_sum(problem, params, batch([*rows, extra]), bound)
    assert distance(with_it.params, without.params) <= without.sensitivity * (1 + 1e-4)


def test_an_unclipped_sum_breaks_that_sensitivity(problem):
    params = problem.initial_params()
    far = Examples(torch.full((1, 2), 1e3), torch.tensor([0]))
    one = clipped_sum(problem, params, far, 1e9).params
    assert distance(one, {k: torch.zeros_like(v) for k, v in one.items()}) > 1.0


class TestRefusals:
    def test_batch_norm_is_refused_by_name(self):
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        with pytest.raises(UnsupportedModelError, match=r"module 1 \(BatchNorm1d\).*nn.GroupNorm"):
            check_model(model, blobs())

    def test_instance_norm_with_running_statistics_is_refused(self):
        model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.InstanceNorm2d(2, track_running_stats=True))
        inputs = Examples(torch.zeros(3, 2, 4, 4), torch.zeros(3, dtype=torch.int64))
        with pytest.raises(UnsupportedModelError, match="track_running_stats=False"):
            check_model(model, inputs)

    def test_a_buffer_that_changes_is_refused(self):
        class Memory(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("seen", torch.zeros(2))
                self.head = nn.Linear(2, 3)

            def forward(self, x):
                self.seen += x.sum(0)
                return self.head(x)

        with pytest.raises(UnsupportedModelError, match="buffer seen"):
            check_model(Memory(), blobs())

    def test_a_wrong_shape_is_told(self):
        with pytest.raises(UnsupportedModelError, match=r"inputs of shape \(2, 2\)"):
            check_model(nn.Linear(9, 3), blobs())

    def test_nothing_to_train(self):
        with pytest.raises(UnsupportedModelError, match="no parameter"):
            check_model(nn.Linear(2, 3).requires_grad_(False), blobs())

    def test_half_precision(self):
        with pytest.raises(UnsupportedModelError, match=r"model.float\(\)"):
            check_model(nn.Linear(2, 3).half(), blobs())

    def test_the_probe_leaves_the_model_as_it_was(self):
        model = small_model().train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        check_model(model, blobs())
        assert model.training
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not any(module._forward_hooks for module in model.modules())


def test_dropout_draws_fresh_randomness_for_each_example():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(40, 1, bias=False))
    problem = Problem(model, lambda out, _: out.sum(), Examples(torch.ones(2, 40), torch.zeros(2)))
    rows = per_example_gradients(model, problem.loss, problem.train.inputs, problem.train.targets)
    rows = rows["1.weight"]
    assert not torch.equal(rows[0], rows[1])


class Adversarial(nn.Module):
    """Moves its inputs along a gradient that it takes in its forward pass."""

    def __init__(self, *, functional):
        super().__init__()
        self.first, self.scale = nn.Linear(4, 5), nn.Parameter(torch.ones(5))
        self.head, self.functional = nn.Linear(5, 3), functional

    def score(self, x):
        return self.head(torch.tanh(self.first(x)) * self.scale)

    def forward(self, x):
        if self.functional:
            slope = torch.func.grad(lambda moved: self.score(moved).sum())(x)
            return self.score(x + 0.1 * slope.detach().sign())
        with torch.enable_grad():
            moved = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.score(moved).sum(), moved)
        return self.score(x + 0.1 * slope.sign())


@pytest.mark.parametrize(("functional", "one_pass"), [(False, False), (True, True)])
def test_a_gradient_that_a_model_takes_itself_is_not_added(functional, one_pass):
    torch.manual_seed(0)
    records = Examples(torch.randn(6, 4), torch.arange(6) % 3)
    problem = Problem(Adversarial(functional=functional), F.cross_entropy, records)
    params, bound = problem.initial_params(), 0.5
    check_model(problem.model, records)
    assert (strategy_for(problem, params, records.inputs).reason is None) == one_pass
    found = clipped_sum(problem, params, records, bound).params
    expected = one_at_a_time(problem, params, records, bound)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-4)


class Checkpointed(nn.Module):
    """Forgets the activations of its first layers and computes them again in a backward pass."""

    def __init__(self, depth, forgets=True):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()),) * depth)
        self.head, self.forgets = nn.Linear(4, 3), forgets

    def forward(self, x):
        if not self.forgets:
            return self.head(self.layers(x))
        return self.head(checkpoint(self.layers, x, use_reentrant=False))


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
@pytest.mark.parametrize("depth", [1, 2])
def test_activations_are_computed_again_with_the_weights_of_the_state(depth, shape, dropped):
    torch.manual_seed(0)
    records = Examples(torch.randn(5, *shape), torch.randint(3, (5, *shape[:-1])))

    def loss(outputs, targets):
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    problem = Problem(Checkpointed(depth), loss, records)
    params = {n: value + torch.randn_like(value) for n, value in problem.initial_params().items()}
    if dropped:  # as in a run, whose state has the weights
        drop_weights(problem.model)
    found = clipped_sum(problem, params, records, 0.5).params
    plain = Problem(Checkpointed(depth, forgets=False), loss, records)
    expected = clipped_sum(plain, params, records, 0.5).params
    assert max(value.norm() for value in expected.values()) > 0.1
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)


def test_without_memory_microbatches_become_smaller(monkeypatch, caplog):
    """The sum is the same, later sums begin with smaller ones, and a row alone is an error."""
    records = Examples(torch.randn(5, 4), torch.arange(5) % 3)
    problem = Problem(nn.Linear(4, 3), F.cross_entropy, records)
    params = problem.initial_params()
    expected = clipped_sum(problem, params, problem.train, 0.1).params
    sizes, most, real = [], [2], clipping.clip_tape

    def limited(tape, *rest, **more):
        sizes.append(tape.examples)
        if sizes[-1] > most[0]:
            raise torch.OutOfMemoryError("no room")
        return real(tape, *rest, **more)

    monkeypatch.setattr(clipping, "clip_tape", limited)
    for _ in range(2):
        found = clipped_sum(problem, params, problem.train, 0.1).params
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
    assert sizes == [5, 4, 2, 2, 1, 2, 2, 1]
    assert "microbatches of 2" in caplog.text
    most[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        clipped_sum(problem, params, problem.train, 0.1)


def test_a_microbatch_that_ran_out_of_memory_halfway_counts_once(monkeypatch):
    """Some layers had added it to the sum: that begins anew, or records would count twice."""
    records = Examples(torch.randn(6, 4), torch.arange(6) % 3)
    problem = Problem(nn.Linear(4, 3), F.cross_entropy, records)
    params = problem.initial_params()
    expected = clipped_sum(problem, params, problem.train, 0.1, at_once=4).params
    sizes, real = [], clipping.clip_tape

    def limited(tape, *rest, **more):
        sizes.append(tape.examples)
        for count, found in enumerate(real(tape, *rest, **more)):
            if count and len(sizes) == 2:
                raise torch.OutOfMemoryError("no room")
            yield found

    monkeypatch.setattr(clipping, "clip_tape", limited)
    found = clipped_sum(problem, params, problem.train, 0.1, at_once=4).params
    assert sizes == [4, 2, 1, 1, 1, 1, 1, 1]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


class Watchful(nn.Module):
    """Notes whatever the model is called on, and not in itself: a step puts attributes back."""

    def __init__(self, note):
        super().__init__()
        self.layer, self.note = nn.Linear(4, 3), note

    def forward(self, x):
        level = torch._C._functorch.is_batchedtensor(x)
        self.note(get_unwrapped(x).flatten(0, -2) if level else x)
        return self.layer(x)


def test_no_made_up_value_reaches_a_model():
    """Labels out of range would end a process on a GPU."""
    all_seen = []
    model, inputs = Watchful(all_seen.append), torch.randn(5, 4) + 7.0
    problem = Problem(model, F.cross_entropy, Examples(inputs, torch.arange(5) % 3))
    clipped_sum(problem, problem.initial_params(), problem.train, 0.1)
    rows = {tuple(row) for row in inputs.tolist()}
    assert all_seen
    assert {tuple(row) for seen in all_seen for row in seen.tolist()} <= rows
    # two passes to measure memory, with one record and with two, and the sum itself
    assert [len(seen) for seen in all_seen] == [1, 2, 5]


def test_weights_in_half_precision_are_refused():
    """Their clipped sum would be rounded before the noise."""
    model = nn.Linear(4, 3).bfloat16()
    params = {name: value.detach() for name, value in model.named_parameters()}
    examples = Examples(torch.randn(5, 4).bfloat16(), torch.zeros(5, dtype=torch.int64))
    with pytest.raises(InvalidInputError, match="half precision"):
        clipped_sum(Objective(model, F.cross_entropy), params, examples, 1.0)
