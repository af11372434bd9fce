"""Losses that couple records are computed for each record alone, or refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from dpsur.errors import CouplingError, StepError
from tests.engine.helpers import private, without_noise

CLIP = 1e6  # clips nothing, so that a wrong scale shows
WEIGHTS = torch.tensor([1.0, 5.0, 0.2])


def first_batch(**options):
    _, model, _, loader = private(seed=1, **options)
    return model, *next(iter(loader))


def one_hot(y):
    return F.one_hot(y, 3).float()


SEPARABLE = {
    "cross entropy": lambda o, y: F.cross_entropy(o, y),
    "label smoothing": lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1),
    "probabilities": lambda o, y: F.cross_entropy(o, one_hot(y)),
    "nll": lambda o, y: F.nll_loss(o.log_softmax(1), y),
    "mse": lambda o, y: F.mse_loss(o, one_hot(y)),
    "l1": lambda o, y: F.l1_loss(o, one_hot(y)),
    "smooth l1": lambda o, y: F.smooth_l1_loss(o, one_hot(y)),
    "huber": lambda o, y: F.huber_loss(o, one_hot(y)),
    "bce": lambda o, y: F.binary_cross_entropy(o.sigmoid(), one_hot(y)),
    "bce with logits": lambda o, y: F.binary_cross_entropy_with_logits(o, one_hot(y)),
    "by hand": lambda o, y: ((o - one_hot(y)) ** 2).sum(1).mean(),
    "none, then mean": lambda o, y: F.cross_entropy(o, y, reduction="none").mean(),
    "sum over length": lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(y),
    "divided": lambda o, y: F.cross_entropy(o, y) / 4,
    "two losses": lambda o, y: F.cross_entropy(o, y) + 0.1 * F.mse_loss(o, one_hot(y)),
    "one column": lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.float().clamp(max=1)),
    "squeezed": lambda o, y: F.mse_loss(o[:, :1].squeeze(-1), y.float()),
    "gathered": lambda o, y: -o.log_softmax(1).gather(1, y[:, None]).mean(),
}


@pytest.mark.parametrize("name", SEPARABLE)
def test_losses_that_keep_records_apart_pass(name, monkeypatch):
    """The gradient of the batch is the sum of those of its records, each alone in a batch."""
    without_noise(monkeypatch)
    loss = SEPARABLE[name]
    _, model, optimizer, loader = private(seed=1, max_grad_norm=CLIP)
    plain = copy.deepcopy(model)
    x, y = next(iter(loader))
    loss(model(x), y).backward()
    optimizer.step()
    total = sum(loss(plain(x[i : i + 1]), y[i : i + 1]) for i in range(len(x)))
    expected = torch.autograd.grad(total, list(plain.parameters()))
    for value, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad * 12, value, rtol=1e-4, atol=1e-6)


def contrastive(o, y):
    return F.cross_entropy(o @ o.T, torch.arange(len(o)))


def each(o, y):
    return F.cross_entropy(o, y, reduction="none")


def masked_by_the_mean(o, y):
    losses = each(o, y)
    return losses.masked_fill(losses < losses.detach().mean(), 0.0).mean()


COUPLED = {
    "a mask by the mean of the batch": masked_by_the_mean,
    "a bound from the batch": lambda o, y: (
        each(o, y).clamp(max=each(o, y).detach().median()).mean()
    ),
    "a floor from the batch": lambda o, y: torch.maximum(each(o, y), y.float().mean()).mean(),
    "an exponent from the batch": lambda o, y: each(o, y).pow(y.float().mean()).mean(),
    "class weights": lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS),
    "contrastive": contrastive,
    "batch statistics": lambda o, y: F.cross_entropy(o - o.mean(0), y),
    "softmax over records": lambda o, y: F.cross_entropy(o.softmax(0), y),
    "normaliser": lambda o, y: F.cross_entropy(o, y, reduction="sum") / (y > 0).sum(),
    "broadcast targets": lambda o, y: ((o[:, :1] - y.float()) ** 2).mean(),
    "some records": lambda o, y: F.cross_entropy(o[y > 0], y[y > 0]),
    "half of the records": lambda o, y: F.cross_entropy(o[::2], y[::2]),
    "the largest": lambda o, y: F.cross_entropy(o, y, reduction="none").max(),
    "pos_weight": lambda o, y: F.binary_cross_entropy_with_logits(
        o, one_hot(y), pos_weight=WEIGHTS
    ),
    "product of losses": lambda o, y: F.cross_entropy(o, y) * F.mse_loss(o, one_hot(y)),
    "root of a mean": lambda o, y: F.mse_loss(o, one_hot(y)).sqrt(),
}


@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_may_couple_records_are_refused(name):
    model, x, y = first_batch()
    with pytest.raises(CouplingError, match=r"private_step|GradScaler"):
        COUPLED[name](model(x), y).backward()


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_of_another_shape_are_named_as_the_cause():
    model, x, y = first_batch()
    with pytest.raises(CouplingError, match="outputs and targets have different shapes"):
        F.mse_loss(model(x)[:, :1], y.float()).backward()


def test_a_normaliser_that_changes_from_batch_to_batch_is_refused():
    """As a plain number it leaves no trace in one graph, but it is not the same in the next."""
    _, model, optimizer, loader = private(seed=1)

    def loop():
        for x, y in loader:
            loss = F.cross_entropy(model(x), y, reduction="mean") / int((y > 0).sum())
            loss.backward()
            optimizer.step()

    with pytest.raises(StepError, match="the loss scale differs from the first batch"):
        loop()


def test_a_factor_that_only_some_batches_have_is_refused():
    _, model, optimizer, loader = private(seed=1)

    def loop():
        for number, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            (2 * loss if number else loss).backward()
            optimizer.step()

    with pytest.raises(StepError, match="the loss scale differs from the first batch"):
        loop()


def test_a_hook_on_outputs_is_refused():
    """It sees the gradients of all records, and the graph of the loss does not show it."""
    model, x, y = first_batch()

    def loss():
        outputs = model(x)
        outputs.register_hook(lambda gradient: gradient / gradient.norm())
        return F.cross_entropy(outputs, y)

    with pytest.raises(StepError, match="an output of the model has a hook"):
        loss().backward()


def test_create_graph_is_refused():
    model, x, y = first_batch()
    with pytest.raises(StepError, match="create_graph=True"):
        F.cross_entropy(model(x), y).backward(create_graph=True)


def huber(o, y):
    return F.huber_loss(o[:, 0], y.float(), delta=float(y.float().std()))


def softplus(o, y):
    return F.softplus(o[:, 0], beta=float(y.float().mean())).mean()


def ignoring(o, y):
    return F.cross_entropy(o, y, ignore_index=int(y.mode().values))


def added(o, y):
    return torch.add(o[:, 0], o[:, 1], alpha=float(y.float().mean())).mean()


@pytest.mark.parametrize(
    ("loss", "most"),
    [
        *[(huber, None), (softplus, None), (added, None), (ignoring, None)],
        *[(softplus, 1), (added, 1)],
    ],
)
def test_numbers_that_come_from_the_batch_are_refused(loss, most):
    _, model, optimizer, loader = private(seed=1, max_physical_batch_size=most)

    def loop():
        for x, y in loader:
            loss(model(x), y).backward()
            optimizer.step()

    with pytest.raises(StepError, match="the loss scale differs from the first batch"):
        loop()


def test_a_penalty_on_parameters_is_refused():
    model, x, y = first_batch()
    with pytest.raises(CouplingError, match="weight_decay"):
        (F.cross_entropy(model(x), y) + model[0].weight.square().sum()).backward()


def test_a_criterion_is_computed_for_each_record_alone(monkeypatch):
    """Class weights: each record counts with its own weight, not over those of the batch."""
    without_noise(monkeypatch)
    engine, model, optimizer, loader = private(
        seed=1, max_grad_norm=CLIP, criterion=nn.CrossEntropyLoss(weight=WEIGHTS)
    )
    plain = copy.deepcopy(model)
    x, y = next(iter(loader))
    engine.criterion(model(x), y).backward()
    optimizer.step()
    total = (F.cross_entropy(plain(x), y, reduction="none") * WEIGHTS[y]).sum()
    expected = torch.autograd.grad(total, list(plain.parameters()))
    for value, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad * 12, value, rtol=1e-4, atol=1e-6)


class Tagger(nn.Module):
    """A class for every token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(10, 5), nn.Linear(5, 10)

    def forward(self, tokens, labels=None):
        logits = self.head(self.table(tokens))
        if labels is None:
            return logits
        return {"loss": token_mean(logits, labels), "logits": logits}


def token_mean(logits, labels):
    """As language models do: the mean over all tokens of the batch that count."""
    return F.cross_entropy(logits.view(-1, 10), labels.view(-1), ignore_index=-100)


def sequences(count=40, length=6):
    """Records with 1 to 6 tokens that count."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 10, (count, length), generator=generator)
    lengths = torch.arange(count) % length + 1
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(length) >= lengths[:, None], -100)
    return TensorDataset(tokens, labels)


def clipped_alone(model, x, y, bound):
    """Each record's own mean over its own tokens, clipped, by plain autograd."""
    total = [torch.zeros_like(value) for value in model.parameters()]
    for tokens, labels in zip(x, y, strict=True):
        loss = token_mean(model(tokens[None]), labels[None])
        found = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.stack([value.norm() for value in found]).norm()
        for place, value in zip(total, found, strict=True):
            place += value * min(1.0, bound / float(norm))
    return total


@pytest.mark.parametrize("way", ["plain", "model", "criterion"])
def test_a_mean_over_tokens_is_over_each_records_own(way, monkeypatch):
    """Unequal lengths: the number of tokens in the batch must not scale anyone's gradient."""
    without_noise(monkeypatch)
    bound = 0.5
    engine, model, optimizer, loader = private(
        Tagger(), sequences(), seed=1, max_grad_norm=bound, criterion=token_mean
    )
    plain = copy.deepcopy(model)
    x, y = next(iter(loader))
    assert len((y >= 0).sum(1).unique()) > 1
    if way == "plain":
        loss = token_mean(model(x), y)
    elif way == "model":
        loss = model(x, labels=y)["loss"]
    else:
        loss = engine.criterion(model(x), y)
    loss.backward()
    optimizer.step()
    expected = clipped_alone(plain, x, y, bound)
    for value, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad * loader.sample_rate * 40, value, rtol=1e-4, atol=1e-6
        )


def pad(batch):
    """Texts of several lengths, padded to the longest of the batch."""
    tokens = nn.utils.rnn.pad_sequence([row for row, _ in batch], batch_first=True)
    labels = [row for _, row in batch]
    return tokens, nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)


def each_token(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


LONGEST = {
    "at once": lambda _, o, y: each_token(o, y).mean(),
    "in two steps": lambda _, o, y: each_token(o, y).mean(1).mean(),
    "by the criterion": lambda e, o, y: e.criterion(o.flatten(0, 1), y.clamp(min=0).flatten()),
}


@pytest.mark.parametrize("name", LONGEST)
def test_a_mean_over_the_length_of_the_longest_record_is_refused(name):
    """A long record would make the gradients of all others smaller."""
    tokens = [torch.arange(9 if row < 4 else 2 + row % 3) for row in range(40)]
    model = Tagger()
    engine = dpsur.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader([(row, row) for row in tokens], batch_size=8, collate_fn=pad),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=nn.CrossEntropyLoss(),
        seed=1,
    )

    def loop():
        for x, y in loader:
            LONGEST[name](engine, model(x), y).backward()
            optimizer.step()

    with pytest.raises(StepError, match="the loss scale differs from the first batch"):
        loop()


def test_normalising_over_the_batch_is_noticed(monkeypatch):
    """The mutant: with the batch's number of tokens the test above must fail."""
    from dpsur.engine import loss_graph

    honest = loss_graph._Walk._loss

    def over_the_batch(self, *arguments):
        found = honest(self, *arguments)
        return loss_graph.Total(float(self.records), True) if found.mean else found

    monkeypatch.setattr(loss_graph._Walk, "_loss", over_the_batch)
    with pytest.raises(AssertionError, match="not close"):
        test_a_mean_over_tokens_is_over_each_records_own("plain", monkeypatch)


def test_a_criterion_that_keeps_state_is_refused():
    class Remembers(nn.Module):
        seen = 0.0

        def forward(self, outputs, targets):
            self.seen = self.seen + outputs.detach().mean()
            return F.cross_entropy(outputs, targets) + self.seen

    engine, model, _, loader = private(seed=1, criterion=Remembers())
    x, y = next(iter(loader))
    with pytest.raises(dpsur.InvalidInputError, match="keeps state"):
        engine.criterion(model(x), y)


def test_a_loss_is_one_number():
    model, x, y = first_batch()
    with pytest.raises((CouplingError, RuntimeError)):
        F.cross_entropy(model(x), y, reduction="none").backward()
