"""Gradients of private steps as CUDA graphs. On a CPU a replay makes the pass anew."""

import copy
import logging
import random
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from dpsur.engine import captured
from dpsur.errors import StepError
from dpsur.mechanism import cuda_graphs
from tests.mutants import Mutant, law_tests

RECORDS, CLIP = 48, 0.7


@pytest.fixture
def replays(monkeypatch):
    """Passes that stand in for graphs, which need a GPU; the number of captures and replays."""
    return stand_in(monkeypatch)


def stand_in(monkeypatch):
    counts = SimpleNamespace(captures=0, replays=0)

    def capture(functions, *_, **__):
        counts.captures += 1
        for function in functions:
            function()

        def replay(function):
            counts.replays += 1
            function()

        return [partial(replay, function) for function in functions]

    monkeypatch.setattr(captured, "DEVICE", "cpu")
    monkeypatch.setattr(captured, "capture_graphs", capture)
    return counts


def records():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(RECORDS, 6, generator=generator), torch.arange(RECORDS) % 3)


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def private(model, data, *, batch_size=RECORDS, max_grad_norm=CLIP, steps=12, **options):
    """An engine, and model, optimizer and loader that it has made private."""
    engine = dpsur.PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(data, batch_size=batch_size),
        noise_multiplier=1.0,
        max_grad_norm=max_grad_norm,
        steps=steps,
        seed=5,
        **options,
    )
    return engine, *made


def train(
    function=cross_entropy,
    *,
    capture=True,
    model=None,
    device="cpu",
    data=None,
    each=None,
    batch_size=12,
    **options,
):
    """Weights after some private steps."""
    model = (network() if model is None else copy.deepcopy(model)).to(device)
    engine, _, _, loader = private(
        model,
        records() if data is None else data,
        batch_size=batch_size,
        max_grad_norm=CLIP,
        steps=12,
        **options,
    )
    step = engine.private_step(function, capture=capture)
    for epoch in range(3):
        for batch in loader:
            step(batch, **({} if each is None else each(epoch)))
    return torch.cat([value.detach().flatten().cpu() for value in model.parameters()])


def train_as_in_opacus(
    *, capture=True, model=None, device="cpu", data=None, loss=F.cross_entropy, **options
):
    """Weights after some steps of a loop that computes the loss from outputs."""
    model = (network() if model is None else copy.deepcopy(model)).to(device)
    engine, model, optimizer, loader = private(
        model,
        records() if data is None else data,
        batch_size=12,
        max_grad_norm=CLIP,
        steps=12,
        **options,
    )
    if not capture:
        engine._watcher.graphs = None
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
    return torch.cat([value.detach().flatten().cpu() for value in model.parameters()])


def close(one, other, tolerance=1e-6):
    return torch.allclose(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 5}])
def test_captured_steps_are_those_of_eager_ones(replays, options):
    eager = train(capture=False, **options)
    assert not replays.replays
    assert close(train(**options), eager)
    assert replays.replays > 6
    assert replays.captures < replays.replays


def test_rows_that_fill_a_graph_up_add_nothing(replays):
    """Copies of a record that is not finite would spoil every sum."""
    data = records()
    data.tensors[0][::5] = torch.nan
    assert close(train(data=data), train(data=data, capture=False))
    assert replays.replays
    assert train(data=data).isfinite().all()


def test_numbers_with_a_fraction_are_inputs_of_the_graph(replays):
    def weighted(model, batch, weight, epoch):
        return weight * cross_entropy(model, batch) + 0.0 * epoch

    def each(epoch):
        return {"weight": 0.25 * 3**epoch, "epoch": 1}

    constant = train(weighted, each=lambda _: each(0))
    captures = replays.captures
    changing = train(weighted, each=each)
    assert replays.captures == 2 * captures
    assert close(changing, train(weighted, each=each, capture=False))
    assert not close(changing, constant)


def test_whole_numbers_decide_which_graph_is_used(replays):
    def deeper(model, batch, epoch):
        return cross_entropy(model, batch) * (2 if epoch else 1)

    def each(epoch):
        return {"epoch": epoch}

    assert close(train(deeper, each=each), train(deeper, each=each, capture=False))


@pytest.mark.parametrize("kind", ["closure", "object", "attribute", "tensor", "item"])
def test_what_changes_beside_the_batch_is_captured_again(replays, kind):
    model, held = network(), SimpleNamespace(weight=1.0, scale=torch.ones(()), several=[1.0])
    model.weight = 1.0
    weight = 1.0

    def step(model, batch):
        factors = {
            "closure": weight,
            "object": held.weight,
            "attribute": model.weight,
            "tensor": held.scale,
            "item": held.several[0],
        }
        return cross_entropy(model, batch) * factors[kind]

    def run(capture):
        nonlocal weight
        inner = copy.deepcopy(model)
        engine, _, _, loader = private(
            inner, records(), batch_size=RECORDS, max_grad_norm=100.0, steps=9
        )
        made = engine.private_step(step, capture=capture)
        weight, held.weight, held.scale, held.several[0] = 1.0, 1.0, torch.ones(()), 1.0
        for number in range(9):
            if number and number % 3 == 0:
                value = 1.0 + number
                if kind == "closure":
                    weight = value
                elif kind == "object":
                    held.weight = value
                elif kind == "attribute":
                    inner.weight = value
                elif kind == "tensor":
                    held.scale = torch.tensor(value)
                else:
                    held.several[0] = value
            for batch in loader:
                made(batch)
        return torch.cat([value.detach().flatten() for value in inner.parameters()])

    assert close(run(True), run(False), 1e-5)
    assert replays.captures == 3


def test_what_changes_in_every_step_ends_the_capture(replays, caplog):
    model = network()
    held = SimpleNamespace(weight=0.0)

    def step(model, batch):
        return cross_entropy(model, batch) * held.weight

    def each(epoch):
        held.weight += 1.0
        return {}

    with caplog.at_level(logging.WARNING, "dpsur.engine"):
        once = train(step, model=model, each=each)
    held.weight = 0.0
    assert close(once, train(step, model=model, each=each, capture=False))
    assert "'weight' changes between steps" in caplog.text


def test_keys_of_a_dictionary_are_not_logged(replays, caplog):
    held = {"patient 7": 0.0}

    def step(model, batch):
        return cross_entropy(model, batch) * held["patient 7"]

    def change(number, _):
        held["patient 7"] = 1.0 + number

    with caplog.at_level(logging.WARNING, "dpsur.engine"):
        assert close(*train_with(step, change), 1e-5)
    assert "'held' changes between steps" in caplog.text
    assert "patient" not in caplog.text


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
def test_what_cannot_be_captured_runs_eagerly(kind, monkeypatch, caplog):
    """Neither a message nor the size of a batch, which one of too little memory has, is logged."""

    def capture(*_, **__):
        raise kind("captured a secret of a record")

    monkeypatch.setattr(captured, "DEVICE", "cpu")
    monkeypatch.setattr(captured, "capture_graphs", capture)
    with caplog.at_level(logging.WARNING, "dpsur.engine"):
        once = train()
    assert close(once, train(capture=False))
    assert "not captured as a CUDA graph" in caplog.text
    assert "secret" not in caplog.text


def train_with(step, change, count=9):
    """Weights of captured and of eager steps, before some of which something is changed."""
    found = []
    for capture in (True, False):
        model = network()
        engine, _, _, loader = private(
            model, records(), batch_size=RECORDS, max_grad_norm=100.0, steps=count
        )
        made = engine.private_step(step, capture=capture)
        for number in range(count):
            arguments = change(number, model) or {}
            for batch in loader:
                made(batch, **arguments)
        found.append(torch.cat([value.detach().flatten() for value in model.parameters()]))
    return found


settings = SimpleNamespace(inner=SimpleNamespace(weight=1.0), criterion=F.cross_entropy)


class Weighted:
    weight = 1.0

    def __init__(self):
        self.own = 1.0

    def scale(self):
        return self.own * self.weight

    def __call__(self, model, batch):
        x, y = batch
        return settings.criterion(model(x), y) * self.scale() * settings.inner.weight


def nested(number):
    settings.inner.weight = 1.0 + number // 3


def of_the_class(number):
    Weighted.weight = 1.0 + number // 3


def doubled(scores, labels):
    return 2 * F.cross_entropy(scores, labels)


def other_criterion(number):
    settings.criterion = (F.cross_entropy, doubled)[number // 3 % 2]


@pytest.mark.parametrize("change", [nested, of_the_class, other_criterion])
def test_what_objects_and_classes_hold_is_compared(replays, change):
    captured_ones, eager = train_with(Weighted(), lambda number, _: change(number))
    change(0)
    assert replays.captures == 3
    assert close(captured_ones, eager, 1e-5)


def test_a_list_that_grows_and_another_submodule_are_compared(replays):
    held = [1.0]

    def step(model, batch):
        return cross_entropy(model, batch) * sum(held)

    def change(number, model):
        if number == 0:
            del held[1:]
        if number == 3:
            held.append(1.0)
        if number == 6:
            model[1] = nn.ReLU()

    assert close(*train_with(step, change), 1e-5)
    assert replays.captures == 3


def test_arguments_that_a_graph_could_take_for_others_run_eagerly(replays):
    teachers = [nn.Linear(6, 3), nn.Linear(6, 3)]

    def step(model, batch, teacher, weights):
        x, _ = batch
        penalty = sum(value.square().sum() for value in weights)
        return F.mse_loss(model(x), teacher(x).detach()) + 0.1 * penalty

    def change(number, model):
        return {"teacher": teachers[number % 2], "weights": list(model.parameters())}

    assert close(*train_with(step, change), 1e-5)
    assert not replays.replays


@dataclass(repr=False)
class Plain:
    """Whose text is its address, which the next one may have."""

    x: torch.Tensor
    y: torch.Tensor
    name: str = ""


def test_what_a_batch_holds_is_compared_and_not_its_text():
    def key(tree):
        return captured._structure(tree, captured._row), captured._structure(
            tree, captured._constant
        )

    one, y = torch.ones(4, 3), torch.ones(4)
    assert key(Plain(one, y)) == key(Plain(one + 1, y))
    others = [
        *(Plain(one[:, :1], y), Plain(one.double(), y), Plain(one, y, "b")),
        *((one, y), {"x": one, "y": y}, [one, y], (one, (y,))),
    ]
    kinds = {key(Plain(one, y)), *map(key, others), key({"x": one, "z": y})}
    assert len(kinds) == 2 + len(others)


class Scaled:
    """Records, and a number beside them."""

    def __init__(self, x, by):
        self.x, self.by = x, by


_pytree.register_pytree_node(
    Scaled, lambda one: ([one.x], one.by), lambda parts, by: Scaled(*parts, by)
)


class ScaledNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, one):
        return self.inner(one.x) * one.by


def test_what_a_class_keeps_beside_its_tensors_is_compared(replays):
    def train_scaled(capture):
        engine, model, optimizer, loader = private(ScaledNetwork(), records(), batch_size=12)
        if not capture:
            engine._watcher.graphs = None
        for epoch in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(Scaled(x, 1 + epoch)), y).backward()
                optimizer.step()
        return torch.cat([value.detach().flatten() for value in model.parameters()])

    assert close(train_scaled(capture=True), train_scaled(capture=False))
    assert replays.replays


@pytest.mark.parametrize("draws", [random.Random(3), np.random.default_rng(3)])
def test_own_generators_of_the_host_are_found(replays, caplog, draws):
    def noisy(model, batch):
        return cross_entropy(model, batch) * (1.0 + draws.random())

    with caplog.at_level(logging.WARNING, "dpsur.engine"):
        train(noisy)
    assert "draws random numbers on the host" in caplog.text


def test_an_interrupted_replay_does_not_count_twice(replays, monkeypatch):
    """Its records stand in the totals already, and the step may not be made again."""
    model = network()
    engine, _, _, loader = private(model, records(), steps=5)
    step = engine.private_step(cross_entropy)
    for _ in range(2):
        step(next(iter(loader)))
    batch = next(iter(loader))
    with monkeypatch.context() as patch:
        patch.setattr(captured.Sums, "add", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            step(batch)
    assert replays.replays
    with pytest.raises(StepError, match="interrupted"):
        step(batch)
    step(next(iter(loader)))  # drawn anew


def test_an_interrupted_call_does_not_count_twice(replays, monkeypatch):
    model = network()
    _, model, optimizer, loader = private(model, records(), steps=5)

    def backward(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()

    for _ in range(2):
        backward(*next(iter(loader)))
        optimizer.step()
    x, y = next(iter(loader))
    with monkeypatch.context() as patch:
        patch.setattr(captured.Sums, "add", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            backward(x, y)
    assert replays.replays
    with pytest.raises(StepError, match="interrupted"):
        backward(x, y)
    backward(*next(iter(loader)))
    optimizer.step()


def raising(kind):
    def raises(*_):
        raise kind

    return raises


# --- mutants -------------------------------------------------------------------------------------


def captured_and_eager_steps_are_the_same():
    """Rows that fill a graph up add nothing, and a step's sums nothing to those of the next."""
    with pytest.MonkeyPatch.context() as patch:
        counts = stand_in(patch)
        assert close(train(), train(capture=False))
        assert close(train_as_in_opacus(), train_as_in_opacus(capture=False))
        assert counts.replays


def padding_counts(monkeypatch):
    monkeypatch.setattr(captured._Graph, "keep", property(lambda graph: graph.rows >= 0))


def sums_of_the_step_before_stay(monkeypatch):
    def begin(graphs, sums):
        sums.captured = graphs.totals

    monkeypatch.setattr(captured._Graphs, "_begin", begin)


def interrupted_steps_are_not_made_again():
    with pytest.MonkeyPatch.context() as patch:
        try:
            test_an_interrupted_replay_does_not_count_twice(stand_in(patch), patch)
        except pytest.fail.Exception as error:
            raise AssertionError from error


def nothing_notes_a_replay(monkeypatch):
    off = property(lambda sums: False, lambda sums, value: None)
    monkeypatch.setattr(captured.Sums, "replaying", off)


test_law, test_mutant = law_tests(
    [
        Mutant(interrupted_steps_are_not_made_again, nothing_notes_a_replay),
        Mutant(captured_and_eager_steps_are_the_same, padding_counts),
        Mutant(captured_and_eager_steps_are_the_same, sums_of_the_step_before_stay),
    ]
)


class Dropping(nn.Module):
    """A network with layers that draw."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 3)

    def forward(self, x):
        return self.last(F.dropout(torch.relu(self.first(x)), 0.5, self.training))


def convolutional():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def attending():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (3, 2)),
        nn.Linear(2, 16),
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 5}])
def test_captured_calls_are_those_of_eager_ones(replays, options):
    eager = train_as_in_opacus(capture=False, **options)
    assert not replays.replays
    assert close(train_as_in_opacus(**options), eager)
    assert replays.replays > 6


def test_what_fills_a_captured_call_up_adds_nothing(replays):
    data = records()
    data.tensors[0][::5] = torch.nan
    once = train_as_in_opacus(data=data)
    assert replays.replays
    assert once.isfinite().all()
    assert close(once, train_as_in_opacus(data=data, capture=False))


@pytest.mark.parametrize("rows", [slice(None), slice(2)], ids=["same size", "another size"])
def test_while_outputs_are_still_to_be_used_no_other_call_is_replayed(replays, rows):
    """It would overwrite the activations of the first: all graphs share their memory."""

    def run(capture):
        model = network()
        engine, model, optimizer, loader = private(model, records(), batch_size=12)
        if not capture:
            engine._watcher.graphs = None
        for number in range(12):
            x, y = next(iter(loader))
            before = replays.replays
            optimizer.zero_grad()
            if number < 4:  # the other size may have a graph too
                model(x[rows])
            scores = model(x)
            model(x[rows] + 1.0)  # for a figure, say
            F.cross_entropy(scores, y).backward()
            optimizer.step()
            if capture and number >= 4:
                assert replays.replays - before in (0, 2)  # forward and backward of one call
        return torch.cat([value.detach().flatten() for value in model.parameters()])

    assert close(run(True), run(False))
    assert replays.replays


def test_a_loss_that_couples_records_is_refused_after_a_replay(replays):
    def coupled(scores, y):
        coupled.calls += 1
        found = F.cross_entropy(scores, y)
        return found if coupled.calls < 6 else found / scores.detach().norm()

    coupled.calls = 0
    with pytest.raises(dpsur.DpsurError, match="multiplied or divided"):
        train_as_in_opacus(loss=coupled)
    assert replays.replays


def test_what_draws_on_the_host_is_not_captured(replays, caplog):
    def noisy(model, batch):
        x, y = batch
        return F.cross_entropy(model(x + random.random()), y)

    with caplog.at_level(logging.WARNING, "dpsur.engine"):
        train(noisy)
    assert not replays.replays
    assert "draws random numbers on the host" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("model", [network, convolutional, attending])
@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 5}])
def test_calls_on_a_gpu_are_those_of_eager_steps(model, options, caplog):
    with caplog.at_level(logging.WARNING, "dpsur.engine"):
        found = train_as_in_opacus(model=model(), device="cuda", **options)
    assert "not captured" not in caplog.text
    eager = train_as_in_opacus(model=model(), device="cuda", capture=False, **options)
    assert close(found, eager, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("model", [network, convolutional, attending])
@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 5}])
def test_graphs_on_a_gpu_are_those_of_eager_steps(model, options, caplog):
    with caplog.at_level(logging.WARNING, "dpsur.engine"):
        found = train(model=model(), device="cuda", **options)
    assert "not captured" not in caplog.text
    assert close(found, train(model=model(), device="cuda", capture=False, **options), 1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_replay_draws_anew(device, request):
    """As eager steps do, where a graph has as many rows: what layers draw follows the batch."""
    if device == "cpu":
        request.getfixturevalue("replays")
    run = partial(train, model=Dropping(), device=device, batch_size=RECORDS)
    assert close(run(), run(capture=False), 1e-4)


@pytest.mark.gpu
def test_a_failed_capture_leaves_the_device_as_it_was(caplog):
    """The generator and the stream, and other functions can be captured."""

    def reads(model, batch):
        loss = cross_entropy(model, batch)
        return loss * float(torch.ones((), device="cuda") + 0.0)

    stream = torch.cuda.current_stream()
    with caplog.at_level(logging.WARNING, "dpsur.engine"):
        found = train(reads, device="cuda")
    assert "not captured as a CUDA graph" in caplog.text
    assert close(found, train(reads, device="cuda", capture=False), 1e-4)
    assert torch.cuda.current_stream() == stream
    torch.randn(3, device="cuda")
    with pytest.raises(RuntimeError):
        cuda_graphs.capture_graph(lambda: float(torch.ones((), device="cuda")), stream.device)
    torch.randn(3, device="cuda")
    assert torch.cuda.current_stream() == stream
    caplog.clear()
    train(device="cuda")
    assert "not captured" not in caplog.text
