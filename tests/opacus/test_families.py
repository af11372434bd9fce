"""Losses as programs write them: the form of Opacus makes the steps of a private step, or refuses.

What is refused there runs as a private step, which its message shows.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from dpsur.errors import DpsurError

RECORDS = 24


class Heads(nn.Module):
    """Two outputs for a record."""

    def __init__(self, inputs=6, one=3, other=3):
        super().__init__()
        self.body, self.one = nn.Linear(inputs, 8), nn.Linear(8, one)
        self.other = nn.Linear(8, other)

    def forward(self, x, label=None):
        if label is not None:
            x = torch.cat([x, F.one_hot(label, 3).to(x.dtype)], 1)
        h = torch.tanh(self.body(x))
        return self.one(h), self.other(h)


class Packed(nn.Module):
    """Texts of different lengths as a packed sequence."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(20, 6), nn.GRU(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(
            self.words(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.head(self.rnn(packed)[1][-1])


class Pooled(nn.Module):
    """A transformer with a mask of padding, and the mean of what is left."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(8, 3)

    def forward(self, tokens, lengths):
        keep = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        h = self.layers(self.words(tokens), src_key_padding_mask=~keep)
        h = (h * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)
        return self.head(h)


class Factors(nn.Module):
    """Recommendations: users and items."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(20, 4), nn.Embedding(20, 4)

    def forward(self, users, items):
        return (self.users(users) * self.items(items)).sum(-1)


class Language(nn.Module):
    """A language model with a loss of its own."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(20, 6), nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 20)

    def forward(self, tokens):
        return self.head(self.rnn(self.words(tokens))[0])

    def nll(self, tokens):
        scores = self.head(self.rnn(self.words(tokens[:, :-1]))[0])
        return F.cross_entropy(scores.reshape(-1, 20), tokens[:, 1:].reshape(-1))


class Diffusion(nn.Module):
    """Noise that is predicted from a noisy record and its time."""

    def __init__(self):
        super().__init__()
        self.net, self.times = nn.Linear(6, 6), nn.Embedding(10, 6)
        self.register_buffer("alphas", torch.linspace(0.99, 0.01, 10))

    def forward(self, x, t):
        return self.net(torch.relu(x + self.times(t)))

    def p_losses(self, x, t, noise):
        share = self.alphas[t][:, None]
        return F.mse_loss(self(share.sqrt() * x + (1 - share).sqrt() * noise, t), noise)


def mlp(outputs=3, inputs=6):
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def x_of(*shape):
    return torch.randn(RECORDS, *(shape or (6,)))


def classes(*shape, most=3):
    return torch.randint(0, most, (RECORDS, *shape))


def texts():
    lengths = torch.arange(RECORDS) % 5 + 2
    tokens = torch.randint(1, 20, (RECORDS, 6))
    return tokens * (torch.arange(6) < lengths[:, None]), lengths


def focal(m, x, y):
    each = F.cross_entropy(m(x), y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def focal_with_alpha(m, x, y):
    log = F.log_softmax(m(x), 1)
    at = log.gather(1, y.view(-1, 1)).view(-1)
    alpha = torch.tensor([0.2, 0.5, 0.3])[y]
    return (-alpha * (1 - at.exp()) ** 2 * at).mean()


def soft_dice(found, wanted):
    found, wanted = torch.sigmoid(found).flatten(1), wanted.flatten(1)
    overlap = (found * wanted).sum(1)
    return (1 - (2 * overlap + 1) / (found.sum(1) + wanted.sum(1) + 1)).mean()


def dice(m, x, t):
    return soft_dice(m(x), t)


def dice_and_bce(m, x, t):
    out = m(x)
    return F.binary_cross_entropy_with_logits(out, t) + soft_dice(out, t)


def dice_of_the_batch(m, x, t):
    p = torch.sigmoid(m(x))
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def weights_of_rows(m, x, y, w):
    return (F.cross_entropy(m(x), y, reduction="none") * w).mean()


def weights_of_classes(m, x, y):
    return F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 2.0, 0.5]).to(x.dtype))


def autoencoder(m, x):
    found, code = m(x)
    return F.mse_loss(found, x, reduction="sum") / len(x) + 0.1 * (code**2).sum(1).mean()


def conditional(m, x, y):
    found, log_variance = m(x, y)
    kl = -0.5 * torch.sum(1 + log_variance - log_variance.exp(), dim=1)
    return (((found - x) ** 2).sum(1) + kl).mean()


def contrastive(m, one, other, same):
    apart = F.pairwise_distance(m(one), m(other))
    return (same * apart**2 + (1 - same) * F.relu(1 - apart) ** 2).mean()


def triplet(m, anchor, positive, negative):
    return nn.TripletMarginLoss(margin=1.0)(m(anchor), m(positive), m(negative))


def ranking(m, user, liked, other):
    return -F.logsigmoid(m(user, liked) - m(user, other)).mean()


def in_batch(m, one, other):
    a, b = F.normalize(m(one), dim=1), F.normalize(m(other), dim=1)
    return F.cross_entropy(a @ b.t() / 0.1, torch.arange(len(a)))


def prototypes(m, x, y):
    centres = F.normalize(torch.arange(12.0).view(3, 4), dim=1).to(x.dtype)
    return F.cross_entropy(F.normalize(m(x), dim=1) @ centres.t() * 5, y)


def distilled(m, x, y):
    wanted = F.softmax(x[:, :3] / 2, 1)
    out = m(x)
    kl = F.kl_div(F.log_softmax(out / 2, 1), wanted, reduction="batchmean") * 4
    return 0.7 * kl + 0.3 * F.cross_entropy(out, y)


def of_texts(m, tokens, lengths, y):
    return F.cross_entropy(m(tokens, lengths), y)


def next_word(m, tokens, _):
    scores = m(tokens[:, :-1])
    return F.cross_entropy(scores.reshape(-1, 20), tokens[:, 1:].reshape(-1), ignore_index=0)


def next_word_by_a_method(m, tokens, _):
    return m.nll(tokens)


def masked_mean(m, tokens, lengths):
    each = F.cross_entropy(m(tokens).transpose(1, 2), tokens, reduction="none")
    mask = (tokens != 0).float()
    return (each * mask).sum() / mask.sum()


def quantiles(m, x, y):
    gap = y - m(x)
    levels = torch.tensor([0.1, 0.5, 0.9])
    return torch.max((levels - 1) * gap, levels * gap).sum(1).mean()


def gaussian(m, x, y):
    mean, log_variance = m(x)
    return (0.5 * (log_variance + (y - mean) ** 2 / log_variance.exp())).mean()


def poisson(m, x, y):
    return nn.PoissonNLLLoss()(m(x), y.float())


def two_tasks(m, x, y, z):
    one, other = m(x)
    return F.cross_entropy(one, y) + 0.3 * F.mse_loss(other, z)


def several_labels(m, x, t):
    return nn.BCEWithLogitsLoss()(m(x), t)


def hinge(m, x, y):
    return F.relu(1 - (2.0 * (y > 1) - 1) * m(x).squeeze(1)).mean()


def squeezed(m, x, y):
    return F.binary_cross_entropy_with_logits(m(x).squeeze(), (y > 1).float())


def smoothed(m, x, y):
    return nn.CrossEntropyLoss(label_smoothing=0.1)(m(x), y)


def dropped_twice(m, x, y):
    one, other = m(x), m(x)
    kl = F.kl_div(F.log_softmax(one, 1), F.softmax(other, 1), reduction="batchmean")
    return F.cross_entropy(one, y) + F.cross_entropy(other, y) + kl


def diffusion(m, x, t, noise):
    return m.p_losses(x, t, noise)


def hazards(m, x, t):
    rates = torch.sigmoid(m(x))
    before = (1 - rates + 1e-6).log()
    at = (rates + 1e-6).log().gather(1, t[:, None]).squeeze(1)
    mask = (torch.arange(3) < t[:, None]).float()
    return -(at + (before * mask).sum(1)).mean()


def confident(m, x, y):
    out = m(x)
    p = F.softmax(out, 1)
    return F.cross_entropy(out, y) + 0.1 * (p * F.log_softmax(out, 1)).sum(1).mean()


def evidential(m, x, y):
    alpha = F.softplus(m(x)) + 1
    total = alpha.sum(1, keepdim=True)
    wanted = F.one_hot(y, 3).to(x.dtype)
    return (wanted * (torch.digamma(total) - torch.digamma(alpha))).sum(1).mean()


def connected(m, x, _):
    out = F.log_softmax(m(x), 2).transpose(0, 1)
    n = len(x)
    targets = torch.ones(n, 2, dtype=torch.long)
    return nn.CTCLoss()(out, targets, torch.full((n,), 5), torch.full((n,), 2))


def angular(m, x, y):
    cosine = F.linear(F.normalize(m(x)), torch.eye(3, 4).to(x.dtype))
    margin = F.one_hot(y, 3) * 0.2
    return F.cross_entropy(4 * torch.cos(torch.acos(cosine.clamp(-0.99, 0.99)) + margin), y)


def penalised(m, x, y):
    return F.cross_entropy(m(x), y) + 1e-2 * sum(p.pow(2).sum() for p in m.parameters())


def smooth(m, x, y):
    """A record's outputs must not move with its inputs."""
    x = x.clone().requires_grad_(True)
    out = m(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + slope.square().sum(1).mean()


def images():
    return x_of(1, 6, 6), classes(1, 6, 6, most=2).double()


def conv():
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 1, 1))


XY = lambda: (x_of(), classes())  # noqa: E731
# loss, model, records, and what the form of Opacus says where it refuses
WORKS = [
    (focal, mlp, XY),
    (focal_with_alpha, mlp, XY),
    (dice, conv, images),
    (dice_and_bce, conv, images),
    (weights_of_rows, mlp, lambda: (*XY(), torch.rand(RECORDS))),
    (autoencoder, lambda: Heads(6, 6, 4), lambda: (x_of(),)),
    (conditional, lambda: Heads(9, 6, 4), XY),
    (contrastive, mlp, lambda: (x_of(), x_of(), classes(most=2).float())),
    (triplet, mlp, lambda: (x_of(), x_of(), x_of())),
    (ranking, Factors, lambda: (classes(most=20), classes(most=20), classes(most=20))),
    (prototypes, lambda: mlp(4), XY),
    (distilled, mlp, XY),
    (of_texts, Packed, lambda: (*texts(), classes())),
    (of_texts, Pooled, lambda: (*texts(), classes())),
    (next_word, Language, texts),
    (next_word_by_a_method, Language, texts),
    (quantiles, mlp, lambda: (x_of(), x_of(3))),
    (gaussian, Heads, lambda: (x_of(), x_of(3))),
    (poisson, mlp, lambda: (x_of(), classes(3))),
    (two_tasks, Heads, lambda: (*XY(), x_of(3))),
    (several_labels, mlp, lambda: (x_of(), classes(3, most=2).double())),
    (hinge, lambda: mlp(1), XY),
    (squeezed, lambda: mlp(1), XY),
    (smoothed, mlp, XY),
    (dropped_twice, mlp, XY),
    (diffusion, Diffusion, lambda: (x_of(), classes(most=10), x_of())),
    (hazards, mlp, XY),
    (confident, mlp, XY),
    (evidential, mlp, XY),
    (angular, lambda: mlp(4), XY),
]
REFUSED = [
    (connected, mlp, lambda: (x_of(5, 6), classes()), "operation `transpose`"),
    (dice_of_the_batch, conv, images, "operation `div`"),
    (weights_of_classes, mlp, XY, r"engine\.criterion\(outputs, targets\)"),
    (in_batch, mlp, lambda: (x_of(), x_of()), "operation `t`"),
    (masked_mean, Language, texts, r"divided by a tensor, .* \(a number of tokens"),
    (penalised, mlp, XY, "past the clipped sum"),
    (smooth, mlp, XY, "no output of the model"),
]


def made(build, records):
    torch.manual_seed(0)
    model = build().double()
    data = [v.double() if v.is_floating_point() else v for v in records()]
    engine = dpsur.PrivacyEngine()
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(*data), batch_size=6),
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        epochs=1,
        seed=1,
    )


def weights(model):
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def in_the_form_of_opacus(loss, build, records):
    _, model, optimizer, loader = made(build, records)
    for batch in loader:
        optimizer.zero_grad()
        loss(model, *batch).backward()
        optimizer.step()
    return weights(model)


def as_private_steps(loss, build, records):
    engine, model, _, loader = made(build, records)
    step = engine.private_step(lambda model, batch: loss(model, *batch))
    for batch in loader:
        step(batch)
    assert engine.accountant.steps == 4
    return weights(model)


@pytest.mark.parametrize(("loss", "build", "records"), WORKS)
def test_both_forms_make_the_same_steps(loss, build, records):
    found = in_the_form_of_opacus(loss, build, records)
    wanted = as_private_steps(loss, build, records)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    assert (found - weights(made(build, records)[1])).norm() > 1e-3


@pytest.mark.parametrize(("loss", "build", "records", "words"), REFUSED)
def test_what_couples_records_runs_as_a_private_step(loss, build, records, words):
    with pytest.raises(DpsurError, match=words):
        in_the_form_of_opacus(loss, build, records)
    assert as_private_steps(loss, build, records).isfinite().all()
