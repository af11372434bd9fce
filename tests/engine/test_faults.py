"""A custom loop whose accounting would be wrong is refused, in a line that says what to do."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    WeightedRandomSampler,
)

import dpsur
from dpsur.errors import CheckpointError, CouplingError, StepError, UnsupportedModelError
from tests.engine.helpers import linear_model, private, records, without_noise


def batch_of(loader):
    """A batch with more than one record, which the first of a seed has."""
    return next(iter(loader))


def set_up(**options):
    return private(seed=1, **options)


def test_a_step_without_a_private_batch():
    _, model, optimizer, _ = set_up()
    with pytest.raises(StepError, match="without a new batch of the private loader"):
        optimizer.step()
    with pytest.raises(StepError, match="without a batch of the private loader"):
        model(torch.randn(4, 6))


def test_a_batch_from_another_loader():
    _, model, optimizer, loader = set_up()
    other = DataLoader(records(), batch_size=29)
    for _, (x, y) in zip(loader, other, strict=False):
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(StepError, match="another number of records"):
            optimizer.step()
        break


def test_a_batch_that_is_used_twice():
    _, model, optimizer, loader = set_up()
    x, y = batch_of(loader)
    for _ in range(2):
        F.cross_entropy(model(x.clone()), y).backward()
    with pytest.raises(StepError, match="exactly once"):
        optimizer.step()


@pytest.mark.parametrize("way", ["halves", "every other", "transposed", "one buffer"])
def test_parts_of_a_batch_that_are_used_once(way):
    """The same memory, other rows; or the same rows with other contents."""
    _, model, optimizer, loader = set_up()
    x, y = batch_of(loader)
    half = len(x) // 2
    if way == "transposed":
        x = x.T.contiguous().T
    parts = [slice(None, half), slice(half, None)]
    if way == "every other":
        parts = [slice(0, None, 2), slice(1, None, 2)]
    buffer = torch.empty_like(x)
    for part in parts:
        rows = x[part]
        if way == "one buffer":
            rows = buffer[: len(x[part])].copy_(x[part])
        F.cross_entropy(model(rows), y[part]).backward()
    optimizer.step()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_reduction_that_does_not_match(reduction):
    _, model, _, loader = set_up(loss_reduction=reduction)
    x, y = batch_of(loader)
    other = {"mean": "sum", "sum": "mean"}[reduction]
    with pytest.raises(StepError, match=f"loss_reduction is '{reduction}'"):
        F.cross_entropy(model(x), y, reduction=other).backward()


def test_a_trainable_parameter_that_took_no_part():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.used(x)

    _, model, _, loader = set_up(model=Unused())
    x, y = batch_of(loader)
    with pytest.raises(StepError, match=r"unused\.weight took no part"):
        F.cross_entropy(model(x), y).backward()


def test_a_trainable_parameter_that_is_not_in_the_optimizer():
    model = linear_model()
    with pytest.raises(dpsur.InvalidInputError, match=r"2\.weight requires a gradient but is not"):
        private(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))


def test_a_parameter_that_is_unfrozen_replaced_or_added_later():
    model = linear_model()
    model[0].requires_grad_(False)
    _, model, _, loader = set_up(model=model)
    x, _ = batch_of(loader)
    model[0].requires_grad_(True)
    with pytest.raises(StepError, match=r"0\.weight requires a gradient but is not"):
        model(x)
    _, model, _, loader = set_up()
    x, _ = batch_of(loader)
    model[2].weight = nn.Parameter(torch.zeros(3, 8))
    with pytest.raises(StepError, match=r"2\.weight was replaced"):
        model(x)
    _, model, _, loader = set_up()
    x, _ = batch_of(loader)
    model.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(StepError, match="extra was added"):
        model(x)


@pytest.mark.parametrize("way", ["added", "frozen"])
def test_an_optimizer_with_parameters_that_are_not_private(way):
    """Their gradients come from plain autograd, without clipping and noise."""
    model, other = linear_model(), nn.Linear(6, 3)
    model[0].requires_grad_(way != "frozen")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, model, optimizer, loader = set_up(model=model, optimizer=optimizer)
    if way == "added":
        optimizer.add_param_group({"params": other.parameters()})
    x, y = batch_of(loader)
    F.cross_entropy(model(x), y).backward()
    if way == "added":
        F.cross_entropy(other(x), y).backward()
    else:
        model[0].weight.grad = x.mean() * torch.ones(8, 6)
    with pytest.raises(StepError, match="neither clipped nor noisy"):
        optimizer.step()
    (other if way == "added" else model[0]).zero_grad(set_to_none=False)
    optimizer.step()  # zeros move nothing


def test_a_forked_process_has_the_same_noise():
    """Two children on the same engine could take the noise away from each other's gradients."""
    _, model, optimizer, loader = set_up()
    x, y = batch_of(loader)
    F.cross_entropy(model(x), y).backward()
    child = os.fork()
    if not child:
        try:
            optimizer.step()
        except StepError as error:
            os._exit(7 if "another process" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    optimizer.step()


class Scaled(nn.Module):
    """Multiplies by a number that it is given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, factor, *, head=0):
        return self.layer(x) * factor + head


def test_a_number_from_the_batch_as_an_argument_of_the_model():
    _, model, optimizer, loader = set_up(model=Scaled())
    batches = iter(loader)
    for _ in range(2):
        x, y = next(batches)
        F.cross_entropy(model(x, 0.5, head=1), y).backward()
        optimizer.step()
    x, _ = next(batches)
    with pytest.raises(CouplingError, match="another number or text than in its first call"):
        model(x, float(x.abs().mean()), head=1)


@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, torch.nested.as_nested_tensor])
def test_tensors_without_rows(change):
    _, model, _, loader = set_up()
    x, _ = batch_of(loader)
    with pytest.raises(UnsupportedModelError, match="sparse or nested"):
        model(change(x))


def test_a_step_after_the_budget_is_spent():
    _, model, optimizer, loader = set_up(steps=2)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if optimizer.engine.accountant.steps == 2:
            break
    with pytest.raises(dpsur.BudgetError, match="spent after 2 steps"):
        next(iter(loader))


def test_an_optimizer_that_steps_twice_on_one_batch():
    _, model, optimizer, loader = set_up()
    x, y = batch_of(loader)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(StepError, match="without a new batch"):
        optimizer.step()


def test_a_batch_that_is_skipped():
    _, _, _, loader = set_up()
    batches = iter(loader)
    next(batches)
    with pytest.raises(StepError, match="was not called for the one before"):
        next(batches)


def test_two_passes_over_the_loader_at_a_time():
    """Their batches and noise would have the same addresses."""
    _, model, optimizer, loader = set_up()
    one, other = iter(loader), iter(loader)
    x, y = next(one)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(StepError, match="not the latest one"):
        next(other)


def test_an_empty_batch_is_a_noisy_step():
    """At this rate most batches are empty; every one of them is a step that moves the weights."""
    engine, model, optimizer, loader = private(batch_size=1, seed=5, lr=1.0)
    empty = 0
    for x, y in loader:
        before = [value.detach().clone() for value in model.parameters()]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        empty += not engine.due.rows
        clipped = engine._watcher.sums.params
        if not engine.due.rows:
            assert all(not value.any() for value in clipped.values())
        optimizer.step()
        pairs = zip(before, model.parameters(), strict=True)
        assert all(not torch.equal(old, new) for old, new in pairs)
    assert empty > 5
    assert engine.accountant.steps == len(loader) == 60


def test_evaluation_in_the_private_path():
    _, model, optimizer, loader = set_up()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with pytest.raises(StepError, match=r"model\.eval\(\) or torch\.no_grad"):
            model(x)
        with torch.no_grad():
            assert model(x).shape == (len(x), 3)
        model.eval()
        assert model(x).shape == (len(x), 3)
        break


@pytest.mark.parametrize(
    "meddle",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model: [p.grad.add_(1) for p in model.parameters()],
    ],
)
def test_gradients_that_another_library_changes(meddle):
    _, model, optimizer, loader = set_up()
    x, y = batch_of(loader)
    F.cross_entropy(model(x), y).backward()
    meddle(model)
    with pytest.raises(StepError, match="was changed between"):
        optimizer.step()


def test_gradients_that_do_not_come_from_the_watched_call():
    _, model, optimizer, loader = set_up()
    x, y = batch_of(loader)
    F.cross_entropy(model(x), y).backward()
    model[2](torch.randn(4, 8)).sum().backward()  # a part of the model, called past it
    with pytest.raises(StepError, match="was changed"):
        optimizer.step()


def test_gradients_that_are_cleared_before_the_step():
    _, model, optimizer, loader = set_up()
    x, y = batch_of(loader)
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    with pytest.raises(StepError, match="were cleared between"):
        optimizer.step()


def test_layers_that_mix_records():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(dpsur.UnsupportedModelError, match="BatchNorm1d"):
        set_up(model=model)
    _, model, _, loader = set_up(model=model.eval())
    x, _ = batch_of(loader)
    with pytest.raises(dpsur.UnsupportedModelError, match="BatchNorm1d"):
        model.train()(x)


def test_a_model_in_evaluation_mode_during_training():
    _, model, optimizer, loader = set_up()
    model.eval()
    x, y = batch_of(loader)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(StepError, match=r"call model\.train\(\)"):
        optimizer.step()


def test_a_data_set_whose_length_changes():
    class Growing(Dataset):
        size = 30

        def __len__(self):
            return self.size

        def __getitem__(self, index):
            return torch.full((6,), float(index)), index % 3

    data = Growing()
    _, _, _, loader = set_up(data=data)
    data.size = 31
    with pytest.raises(StepError, match="another number of records"):
        next(iter(loader))


@pytest.mark.parametrize(
    "optimizer", [torch.optim.LBFGS, torch.optim.SparseAdam], ids=lambda kind: kind.__name__
)
def test_optimizers_that_cannot_be_private(optimizer):
    model = linear_model()
    with pytest.raises(dpsur.InvalidInputError, match=optimizer.__name__):
        private(model, optimizer=optimizer(model.parameters()))


def test_a_gradient_scaler():
    _, model, _, loader = set_up()
    x, y = batch_of(loader)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(CouplingError, match="GradScaler"):
        scaler.scale(F.cross_entropy(model(x), y)).backward()


def test_autocast_in_float16():
    _, model, _, loader = set_up()
    x, _ = batch_of(loader)
    with torch.autocast("cpu", torch.float16), pytest.raises(StepError, match="float16"):
        model(x)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("poisson_sampling", False),
        ("batch_first", False),
        ("clipping", "per_layer"),
        ("noise_generator", torch.Generator()),
        ("noise_multiplier", 0.0),
        ("loss_reduction", "none"),
        ("grad_sample_mode", "magic"),
    ],
)
def test_options_that_are_refused_by_name(option, value):
    with pytest.raises(dpsur.InvalidInputError, match=option):
        private(**{option: value})


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.randn(6), 0


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (lambda: DataLoader(Endless(), batch_size=2), "IterableDataset"),
        (lambda: DataLoader(records(), batch_size=None), "batch_size"),
        (
            lambda: DataLoader(records(), 4, sampler=WeightedRandomSampler(torch.ones(60), 60)),
            "WeightedRandomSampler",
        ),
    ],
)
def test_loaders_that_are_refused_by_name(loader, name):
    model = linear_model()
    with pytest.raises(dpsur.InvalidInputError, match=name):
        dpsur.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader(),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_an_engine_that_has_made_steps_does_not_go_back():
    """It would draw the same noise again, and forget steps that were made."""
    engine, model, optimizer, loader = set_up()
    state = engine.state_dict()
    x, y = batch_of(loader)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match="has made 1 steps, which are charged"):
        engine.load_state_dict(state)
    assert engine.accountant.steps == 1


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_an_interrupted_trial_leaves_nothing_behind(error):
    calls = []

    def loss(model, batch):
        calls.append(1)
        if len(calls) == 2:  # of the candidate
            raise error
        return F.cross_entropy(model(batch[0]), batch[1])

    gate = dpsur.LossGate(loss, val_batch_size=20)
    _, model, optimizer, loader = set_up(gate=gate)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(type(error)):
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


class Interrupted(nn.Module):
    now = False

    def forward(self, x):
        if self.now:
            raise KeyboardInterrupt
        return x


def test_an_interrupted_call_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(6, 8), Interrupted(), nn.Linear(8, 3))
    _, model, optimizer, loader = set_up(model=model)
    x, y = batch_of(loader)
    F.cross_entropy(model(x), y)
    model[1].now = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    model[1].now = False
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert all(isinstance(value, nn.Parameter) for value in model.parameters())


class Centred(nn.Module):
    """Mixes records, if it is asked to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, centre=False):
        return self.layer(x - x.mean(0) if centre else x)


def test_a_layer_that_is_replaced_later_is_looked_at_too():
    _, model, optimizer, loader = set_up()
    batches = iter(loader)
    x, y = next(batches)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    model[1] = nn.BatchNorm1d(8, affine=False, track_running_stats=False)
    x, _ = next(batches)
    with pytest.raises(UnsupportedModelError, match="BatchNorm1d"):
        model(x)


def test_a_model_that_mixes_records_in_a_loop_sees_one_at_a_time(monkeypatch):
    """Centred by itself a record is zero: the weight gets no gradient, whatever others are."""
    without_noise(monkeypatch)
    _, model, optimizer, loader = set_up(model=Centred())
    x, y = batch_of(loader)
    F.cross_entropy(model(x, centre=True), y).backward()
    optimizer.step()
    assert len(x) > 1
    assert torch.equal(model.layer.weight.grad, torch.zeros(3, 6))
    assert model.layer.bias.grad.norm() > 0
