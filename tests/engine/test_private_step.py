"""`engine.private_step`: a function of model and batch, called for each record alone."""

import copy
import gc
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.utils import _pytree
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate

import dpsur
from dpsur.engine import loader as loader_module
from dpsur.engine import steps as steps_module
from dpsur.engine.loader import (
    LENGTHS,
    Collate,
    PrivateBatch,
    groups_of,
    records_in,
)
from dpsur.errors import CouplingError, InvalidInputError, StepError, UnsupportedModelError
from dpsur.functional import tree
from dpsur.mechanism.cuda_graphs import waiting_raises
from dpsur.per_example import record_level
from dpsur.per_example.tape import Tape

CLIP = 0.7


def records(count=40):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, torch.arange(count) % 3)


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def private(model=None, data=None, **options):
    model = network() if model is None else model
    engine = dpsur.PrivacyEngine()
    options = {"noise_multiplier": 1.0, "max_grad_norm": CLIP, "epochs": 2, "seed": 5, **options}
    loader = DataLoader(
        records() if data is None else data,
        batch_size=options.pop("batch_size", 10),
        collate_fn=options.pop("collate_fn", None),
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    made = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **options)
    return engine, *made


def cross_entropy(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


@pytest.fixture
def sums(monkeypatch):
    """The clipped sums before noise."""
    seen = []

    def keep(total, *_):
        seen.append({name: value.clone() for name, value in total.params.items()})
        return total.params

    monkeypatch.setattr("dpsur.mechanism.gaussian.add_noise", keep)
    return seen


def alone(model, function, x, y):
    """Clipped gradients of single records, added up."""
    total = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for row in range(len(x)):
        loss = function(model, (x[row : row + 1], y[row : row + 1]))
        found = torch.autograd.grad(
            loss, list(model.parameters()), allow_unused=True, materialize_grads=True
        )
        norm = torch.cat([value.flatten() for value in found]).norm()
        for value, gradient in zip(total.values(), found, strict=True):
            value += gradient * min(1.0, CLIP / float(norm))
    return total


def batch_of(engine, loader, data):
    """The first opaque batch, and the rows that are in it."""
    batch = next(iter(loader))
    rows = list(engine.due.records)
    return batch, data.tensors[0][rows], data.tensors[1][rows]


def centred(model, batch):
    """Couples records wherever they could meet."""
    x, y = batch
    outputs = model(x) - model(x).mean(0) * 0.5
    return F.cross_entropy(outputs / (1 + outputs.std(unbiased=False)), y)


def penalised(model, batch):
    x, y = batch
    penalty = sum(value.square().sum() for value in model.parameters())
    return F.cross_entropy(model(x), y) + 0.1 * penalty


def twice(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y) + (model(x) - model(-x)).square().mean()


def chosen(model, batch):
    x, y = batch
    return -F.log_softmax(model(x), 1)[torch.arange(len(y)), y].mean()


def by_value(model, batch):
    """Runs one record at a time."""
    x, y = batch
    return F.cross_entropy(model(x), y) * (2 if float(x[0, 0]) > 0 else 1)


@pytest.mark.parametrize("function", [cross_entropy, centred, penalised, twice, chosen, by_value])
def test_the_sum_is_that_of_records_alone(function, sums):
    data = records()
    engine, model, _, loader = private(data=data)
    plain, step = copy.deepcopy(model), engine.private_step(function)
    batch, x, y = batch_of(engine, loader, data)
    assert len(x) > 3
    step(batch)
    for name, value in alone(plain, function, x, y).items():
        torch.testing.assert_close(sums[0][name], value, rtol=1e-5, atol=1e-6)


def test_microbatches_change_nothing(sums):
    for options, most in (({}, None), ({}, 2), ({"max_physical_batch_size": 3}, None)):
        engine, _, _, loader = private(**options)
        step = engine.private_step(cross_entropy)
        step.max_physical_batch_size = most
        for batch in loader:
            step(batch)
            if engine.accountant.steps:
                break
    for other in sums[1:]:
        for name, value in sums[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


def test_arguments_may_change_between_steps(sums):
    def weighted(model, batch, weight):
        return weight * cross_entropy(model, batch)

    for weight in (1e-3, 2e-3):
        engine, _, _, loader = private()
        engine.private_step(weighted)(next(iter(loader)), weight)
    for name, value in sums[0].items():
        torch.testing.assert_close(sums[1][name], 2 * value, rtol=1e-4, atol=1e-8)


def test_figures_are_means_over_the_batch():
    def with_accuracy(model, batch):
        x, y = batch
        outputs = model(x)
        right = (outputs.argmax(1) == y).float().mean()
        return {"loss": F.cross_entropy(outputs, y), "accuracy": right}

    data = records()
    engine, model, _, loader = private(data=data)
    step = engine.private_step(with_accuracy)
    batch, x, y = batch_of(engine, loader, data)
    outputs = copy.deepcopy(model)(x)
    figures = step(batch)
    torch.testing.assert_close(figures["loss"], F.cross_entropy(outputs, y).detach())
    torch.testing.assert_close(figures["accuracy"], (outputs.argmax(1) == y).float().mean())


def test_only_a_step_opens_a_batch():
    engine, _, _, loader = private()
    engine.private_step(cross_entropy)
    batch = next(iter(loader))
    assert isinstance(batch, PrivateBatch)
    assert "40" not in repr(batch)
    with pytest.raises(StepError, match="a private step alone opens it"):
        _, _ = batch


def test_a_batch_may_be_moved_by_the_loop(sums):
    found = []
    for moved in (lambda batch: batch, lambda batch: batch.to("cpu")):
        engine, _, _, loader = private()
        step = engine.private_step(cross_entropy)
        step(moved(next(iter(loader))))
        found.append(sums.pop())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_batch_is_used_once():
    engine, _, _, loader = private()
    step = engine.private_step(cross_entropy)
    batches = iter(loader)
    first = next(batches)
    step(first)
    with pytest.raises(StepError, match="without a new batch"):
        step(first)
    next(batches)
    with pytest.raises(StepError, match="another batch than the latest"):
        step(first)


def train(engine, loader, step):
    for _ in range(2):
        for batch in loader:
            step(batch)


def test_the_statement_says_how_records_were_kept_apart(tmp_path):
    engine, _, _, loader = private()
    train(engine, loader, engine.private_step(cross_entropy))
    assert engine.statement()["independence"]["how"] == "by construction"
    faults, _ = dpsur.verify(engine.save(tmp_path / "run"))
    assert faults == []
    engine, _, _, loader = private()
    train(engine, loader, engine.private_step(by_value))
    assert engine.statement()["independence"]["how"] == "checked"
    engine, model, optimizer, loader = private()
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.step()
    assert engine.statement()["independence"]["how"] == "checked"


def test_a_resumed_run_stays_checked():
    engine, _, _, loader = private()
    step = engine.private_step(by_value)
    for batch in loader:
        step(batch)
    resumed, _, _, loader = private()
    resumed.load_state_dict(engine.state_dict())
    step = resumed.private_step(cross_entropy)
    for batch in loader:
        step(batch)
    assert resumed.statement()["independence"]["how"] == "checked"


class Keeping(nn.Module):
    """Keeps what it has seen."""

    def __init__(self):
        super().__init__()
        self.layer = network()
        self.seen = SimpleNamespace(last=None)

    def forward(self, x):
        found = self.layer(x)
        self.seen.last = found.detach()
        return found


def test_a_tensor_that_outlives_its_step_ends_the_training(tmp_path):
    engine, model, _, loader = private(Keeping())
    step = engine.private_step(cross_entropy)
    batches = iter(loader)
    with pytest.raises(CouplingError, match="outlives its step"):
        step(next(batches))
    model.seen.last = None
    for again in (
        lambda: step(engine._content),
        engine.statement,
        lambda: engine.save(tmp_path / "run"),
    ):
        with pytest.raises(StepError, match="final"):
            again()
    assert engine.accountant.steps == 0


def test_a_function_that_counts_by_values_is_found():
    state = {"mean": 0.0}

    def drifting(model, batch):
        x, y = batch
        state["mean"] = 0.9 * state["mean"] + 0.1 * float(x.mean())
        return F.cross_entropy(model(x), y) * (1 + state["mean"])

    engine, _, _, loader = private()
    with pytest.raises(CouplingError, match="keeps state"):
        engine.private_step(drifting)(next(iter(loader)))


def test_a_function_that_sets_the_learning_rate_is_refused():
    engine, _, optimizer, loader = private()

    def adapting(model, batch):
        optimizer.param_groups[0]["lr"] = 1 / (1 + float(batch[0].abs().mean()))
        return cross_entropy(model, batch)

    with pytest.raises(CouplingError, match="changes lr of the optimizer"):
        engine.private_step(adapting)(next(iter(loader)))


def test_a_record_that_raises_counts_as_zero(sums):
    def strict(model, batch):
        x, y = batch
        return nn.BCELoss()(model(x).sigmoid(), F.one_hot(y, 3).float())

    data = records()
    plain = copy.deepcopy(data)
    engine, _, _, loader = private(data=data)
    _, x, y = batch_of(engine, loader, plain)
    bad = int(engine.due.records[1])
    data.tensors[0][bad] = torch.nan
    engine, _, _, loader = private(data=data)
    step = engine.private_step(strict)
    step(next(iter(loader)))
    kept = torch.arange(len(x)) != 1
    for name, value in alone(network(), strict, x[kept], y[kept]).items():
        torch.testing.assert_close(sums[-1][name], value, rtol=1e-5, atol=1e-6)


def test_no_made_up_value_reaches_the_model():
    seen = []

    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, tokens):
            seen.append((get_unwrapped(tokens) if is_batchedtensor(tokens) else tokens).flatten())
            return self.head(self.table(tokens).mean(1))

    tokens = torch.randint(40, 50, (40, 5), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(tokens, torch.arange(40) % 3)
    for form in ("private_step", "opacus"):
        engine, model, optimizer, loader = private(Watching(), data)
        if form == "private_step":
            engine.private_step(cross_entropy)(next(iter(loader)))
            continue
        cross_entropy(model, next(iter(loader))).backward()
        optimizer.step()
    assert len(seen) == 2
    assert all(int(values.min()) >= 40 for values in seen)


def test_texts_are_padded_by_their_own_length():
    pad = {"tokens": 7, "mask": 0}
    texts = [{"tokens": torch.arange(n), "mask": torch.ones(n)} for n in (3, 9, 8, 40)]
    collate = Collate(torch.utils.data.default_collate, texts)
    collate.alone, collate.pad = True, pad
    shapes = dict.fromkeys(range(4))
    for others in ([], texts):
        for place, text in enumerate(texts):
            batch = collate([text, *others])
            (group,) = [
                g for g in groups_of(batch) if g["tokens"].shape[-1] >= len(text["tokens"])
            ][:1]
            length = group["tokens"].shape[-1]
            assert length == next(n for n in LENGTHS if n >= len(text["tokens"]))
            assert shapes[place] in (None, length)
            shapes[place] = length
            assert (group["tokens"][0, 0, len(text["tokens"]) :] == 7).all()


def test_what_is_no_tensor_cannot_be_read():
    class Named(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return {"x": x, "y": y, "name": f"patient {index}"}

    def greedy(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"]) * len(batch["name"][0].strip())

    engine, _, _, loader = private(data=Named(*records().tensors))
    with pytest.raises(InvalidInputError, match="turn it into a tensor"):
        engine.private_step(greedy)(next(iter(loader)))
    engine, _, _, loader = private(data=Named(*records().tensors))
    engine.private_step(lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))(
        next(iter(loader))
    )


@dataclass
class Summed:
    """A batch that computes a number of its records, which is no field."""

    x: torch.Tensor
    y: torch.Tensor

    @cached_property
    def scale(self):
        return self.x.abs().sum()


def copied_whole(tree, children):
    """As if what is no field came along: of the first record, or of all."""
    found = copy.copy(tree)
    vars(found).update(children)
    return found


@pytest.mark.parametrize("mutant", [False, True])
def test_no_record_sees_what_a_batch_has_computed_of_others(mutant, monkeypatch):
    def collate(one):
        batch = Summed(*default_collate(one))
        assert batch.scale >= 0  # and kept
        return batch

    if mutant:
        real = tree._rebuild
        monkeypatch.setattr(
            tree,
            "_rebuild",
            lambda one, children: (copied_whole if type(one) is Summed else real)(one, children),
        )
    engine, _, _, loader = private(collate_fn=collate)

    @engine.private_step
    def step(model, one):
        return {"loss": F.cross_entropy(model(one.x), one.y), "scale": one.scale}

    batch = next(iter(loader))
    own = [group.x.abs().sum((1, 2)) for group in groups_of(batch)]
    found = step(batch)
    assert torch.allclose(found["scale"], torch.cat(own).mean()) is not mutant


class Registered:
    """A batch of a class that PyTorch knows, with a number of its records beside its tensors."""

    def __init__(self, x, y, most):
        self.x, self.y, self.most = x, y, most


_pytree.register_pytree_node(
    Registered, lambda one: ([one.x, one.y], one.most), lambda parts, most: Registered(*parts, most)
)


@pytest.mark.parametrize("mutant", [False, True])
@pytest.mark.parametrize("varies", [False, True])
def test_what_a_class_keeps_beside_its_tensors_is_the_same_for_all_records(
    varies, mutant, monkeypatch
):
    def collate(one):
        x, y = default_collate(one)
        return Registered(x, y, ([float(x.max()) if varies else 1.0], {"of": "x"}))

    if mutant:
        monkeypatch.setattr(loader_module, "settings_of", lambda _: None)
        monkeypatch.setattr(steps_module, "settings_of", lambda _: None)
    engine, _, _, loader = private(collate_fn=collate)
    read = set()

    @engine.private_step
    def step(model, one):
        read.add(one.most[0][0])
        return F.cross_entropy(model(one.x), one.y)

    refused = varies and not mutant
    with pytest.raises(CouplingError, match="beside its") if refused else nullcontext():
        for batch in loader:
            step(batch)
    assert (len(read) > 1) is (varies and mutant)


@pytest.mark.parametrize(
    "repeated",
    [
        lambda data: Subset(data, [0, 1, 2, 1]),
        lambda data: Subset(Subset(data, [3, 4, 3]), [0, 2]),
        lambda data: ConcatDataset([data, data]),
        lambda data: ConcatDataset([Subset(data, [1, 2]), Subset(data, [2, 3])]),
    ],
)
def test_a_record_at_several_indices_is_refused(repeated):
    with pytest.raises(InvalidInputError, match="several indices"):
        private(data=repeated(records()), batch_size=2)


def test_parts_without_repeats_are_fine():
    data = records()
    private(data=ConcatDataset([Subset(data, [1, 2]), Subset(data, [3, 4])]), batch_size=2)


def test_the_sample_rate_is_the_one_that_is_charged():
    *_, loader = private()
    with pytest.raises(StepError, match="sample_rate is fixed"):
        loader.poisson.sample_rate = 0.5


def test_two_modules_in_one_step(sums):
    """A discriminator on real and made-up records; the generator is nobody's business."""
    generator = nn.Linear(2, 6)
    noise = torch.randn(1, 2)

    def adversarial(model, batch):
        x, _ = batch
        real, fake = model(x)[:, 0], model(generator(noise).detach())[:, 0]
        return F.softplus(-real).mean() + F.softplus(fake).mean()

    data = records()
    engine, model, _, loader = private(data=data)
    plain, step = copy.deepcopy(model), engine.private_step(adversarial)
    batch, x, y = batch_of(engine, loader, data)
    step(batch)
    for name, value in alone(plain, adversarial, x, y).items():
        torch.testing.assert_close(sums[0][name], value, rtol=1e-5, atol=1e-6)
    assert all(value.grad is None for value in generator.parameters())


def test_a_loss_of_several_numbers_is_refused():
    engine, _, _, loader = private()
    with pytest.raises(InvalidInputError, match=r"reduce it with \.mean\(\)"):
        engine.private_step(lambda model, batch: model(batch[0]))(next(iter(loader)))


@pytest.mark.parametrize("change", [torch.Tensor.item, lambda loss: (loss, loss)])
def test_what_is_no_loss_is_refused_with_what_to_return(change):
    engine, _, _, loader = private()
    step = engine.private_step(lambda model, batch: change(cross_entropy(model, batch)))
    with pytest.raises(InvalidInputError, match="other figures as {'loss'"):
        step(next(iter(loader)))


def test_an_empty_batch_is_noise_alone(sums):
    engine, _, _, loader = private(data=records(400), batch_size=1, epochs=None, steps=12)
    step = engine.private_step(cross_entropy)
    empty = []
    for batch in loader:
        empty.append(not records_in(batch))
        step(batch)
        if len(empty) == 12:
            break
    assert any(empty)
    for nothing, total in zip(empty, sums, strict=True):
        assert all(not value.any() for value in total.values()) == nothing


def test_check_says_what_a_function_would_compute_otherwise():
    x, y = records().tensors
    engine, model, _, _ = private()
    assert not dpsur.check(engine.private_step(cross_entropy), (x, y)).problems
    (found,) = dpsur.check(centred, (x, y), model=model).problems
    assert found.severity == "warning"
    assert "together" in found.reason
    (found,) = dpsur.check(by_value, (x[:1].repeat(2, 1), y[:2]), model=model).problems
    assert found.severity == "slow"
    with pytest.raises(InvalidInputError, match="public records"):
        dpsur.check(cross_entropy, model=model)


def test_texts_of_tensors_hold_no_values(caplog):
    """Python could keep them, and an error could quote them."""
    seen = []

    def printing(_, batch):
        seen.append(f"{batch[0]!r} {batch[0]}")
        raise ValueError(f"a strange record: {seen[-1]}")

    x, y = records().tensors
    data = TensorDataset(x + 31337, y)
    engine, _, _, loader = private(data=data)
    with pytest.raises(ValueError, match="strange"):
        engine.private_step(printing)(next(iter(loader)))
    assert "private records" in seen[0]
    assert "3133" not in seen[0]
    assert "one record at a time" in caplog.text
    assert "3133" not in caplog.text


def test_the_log_names_the_line_that_cannot_be_batched(caplog):
    def reads_values(model, batch):
        x, y = batch
        return F.cross_entropy(model(torch.tensor(x.tolist())), y)

    engine, _, _, loader = private()
    engine.private_step(reads_values)(next(iter(loader)))
    line = reads_values.__code__.co_firstlineno + 2
    assert "reads values of a tensor into Python" in caplog.text
    assert f"({Path(__file__).name}, line {line})" in caplog.text


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_what_cannot_be_watched_or_bounded_is_refused_by_name():
    complex_weights = nn.Sequential(nn.Linear(6, 3))
    complex_weights.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    for model, words in (
        (torch.jit.script(nn.Sequential(nn.Linear(6, 3))), "compiled by TorchScript"),
        (complex_weights, "parameter phase is complex"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            private(model)


def test_dropout_one_record_at_a_time_is_no_state():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    engine, _, _, loader = private(model)
    step = engine.private_step(by_value)
    for batch in loader:
        step(batch)
    assert engine.accountant.steps == 4


def test_under_no_grad_the_loader_yields_every_record_once():
    engine, _, _, loader = private(batch_size=12)
    with torch.no_grad():
        seen = torch.cat([x for x, _ in loader])
    assert torch.equal(seen, loader.dataset.tensors[0])
    assert engine.accountant.steps == 0
    engine.private_step(lambda model, batch: model(batch[0]).sum())
    with torch.no_grad():  # private steps alone open their batches
        assert "opened by engine.private_step" in repr(next(iter(loader)))


def test_with_private_steps_the_loop_may_call_the_model():
    """As a generator does that learns from a critic; what it leaves in `.grad` is named."""
    engine, model, _, loader = private()
    step = engine.private_step(lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]))
    batches = iter(loader)
    first = next(batches)
    model(torch.randn(2, 6)).sum().backward()
    with pytest.raises(StepError, match=r"optimizer\.zero_grad\(\) before the step"):
        step(first)
    assert engine.accountant.steps == 0


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("opacus", [False, True])
def test_the_default_device_may_be_another_one(gated, opacus):
    """What the library makes for itself stands where it needs it."""

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def train(device):
        gate = {"gate": dpsur.LossGate(loss, val_batch_size=10)} if gated else {}
        engine, model, optimizer, loader = private(seed=3, epochs=1, **gate)
        step = optimizer.step if opacus else engine.private_step(loss)
        for batch in loader:
            with torch.device(device):
                if opacus:
                    optimizer.zero_grad()
                    loss(model, batch).backward()
                    step()
                else:
                    step(batch)
        return torch.cat([value.detach().flatten() for value in model.parameters()])

    assert torch.equal(train("cpu"), train("meta"))


@pytest.mark.parametrize("opacus", [False, True])
def test_tensors_are_read_by_index_like_one_record_after_the_other(opacus):
    """A data set of another class with the same records gives the same weights."""

    class OneByOne(TensorDataset):
        pass

    found = []
    for kind in (TensorDataset, OneByOne):
        data = kind(*records().tensors)
        engine, model, optimizer, loader = private(data=data, batch_size=2)
        assert isinstance(loader.dataset, TensorDataset)
        assert hasattr(loader.dataset, "__getitems__") is (kind is TensorDataset)
        step = None if opacus else engine.private_step(cross_entropy)
        while not engine.finished():
            for batch in loader:
                if step is not None:
                    step(batch)
                else:
                    optimizer.zero_grad()
                    F.cross_entropy(model(batch[0]), batch[1]).backward()
                    optimizer.step()
        found.append([value.detach().clone() for value in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Reading(nn.Module):
    """A recurrent layer that reads a record and learned vectors, and the learned ones alone."""

    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(2)
        self.layer = kind(2, 3, batch_first=True, **options)
        self.learned = nn.Parameter(torch.randn(1, 2, 2))

    def forward(self, x):
        learned = self.learned.expand(len(x), -1, -1)
        alone = self.layer(learned)[0][:, -1, :3]
        return alone * self.layer(torch.cat([learned, x.view(-1, 3, 2)], 1))[0][:, -1, :3]


@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"nonlinearity": "relu"}]
)
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_recurrences_over_weights_without_those_of_cudnn(kind, options, sums, monkeypatch):
    if "nonlinearity" in options and kind is nn.GRU:
        return
    called = []
    table = torch._decomp.decomposition_table
    watched = {
        key: lambda *args, one=found, **rest: (called.append(1), one(*args, **rest))[1]
        for key, found in table.items()
        if key.name().startswith(("aten::gru", "aten::rnn"))
    }
    monkeypatch.setattr(torch._decomp, "decomposition_table", {**table, **watched})
    monkeypatch.setattr(record_level, "CUDNN_DEVICE", "cpu")
    data, model = records(), Reading(kind, **options)
    engine, model, _, loader = private(model, data)
    step = engine.private_step(cross_entropy)
    batch, x, y = batch_of(engine, loader, data)
    expected = alone(model, cross_entropy, x, y)
    step(batch)
    assert called
    for name, value in sums[0].items():
        assert torch.allclose(value, expected[name].to(value.dtype), atol=1e-5), name


@pytest.mark.parametrize("fit", [True, False])
def test_recurrent_layers_have_no_attribute_that_is_put_back(fit, caplog):
    data, model = records(), Reading(nn.LSTM)
    if fit:
        method = dpsur.Dpsgd(updates=2)
        dpsur.fit(model, data.tensors, method=method, budget=dpsur.Budget(3.0, 1e-3))
    else:
        engine, model, _, loader = private(model, data)
        step = engine.private_step(cross_entropy)
        for batch in loader:
            step(batch)
    assert "flatten_parameters" not in caplog.text


def tapes():
    return [one for one in gc.get_objects() if isinstance(one, Tape)]


@pytest.mark.parametrize("opacus", [True, False])
def test_the_activations_of_a_step_do_not_wait_for_the_garbage_collector(opacus):
    engine, model, optimizer, loader = private(batch_size=20)
    step = None if opacus else engine.private_step(cross_entropy)
    gc.collect()
    others = tapes()
    gc.disable()
    try:
        for batch in loader:
            if step is not None:
                step(batch)
            else:
                optimizer.zero_grad()
                F.cross_entropy(model(batch[0]), batch[1]).backward()
                optimizer.step()
        assert len(tapes()) == len(others)
    finally:
        gc.enable()


@pytest.mark.gpu
def test_a_step_on_tensors_of_the_device_waits_for_nothing():
    data = TensorDataset(*(value.cuda() for value in records().tensors))
    engine, _, _, loader = private(network().cuda(), data, batch_size=len(data), epochs=8)
    step = engine.private_step(cross_entropy)
    for epoch in range(8):
        with waiting_raises() if epoch > 4 else nullcontext():  # the first ones capture
            for batch in loader:
                step(batch)
