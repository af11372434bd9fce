"""The contract of the fast engine: every rule, in many configurations, against the definition."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from dpsur.errors import InvalidInputError
from dpsur.functional.problem import Problem
from dpsur.functional.records import Examples
from dpsur.mechanism.streams import LAYERS, Streams
from dpsur.per_example import clipped_sum, contributions
from dpsur.per_example.clipping import strategy_for
from dpsur.per_example.contributions import clip_factors, guard
from dpsur.per_example.memory_budget import microbatch_rows
from dpsur.per_example.rules.embedding import Lookups, add_up_repeats
from dpsur.per_example.tape import Tape

# torch says so when it has to copy for "same" padding, or has no fast kernel for a test's layer
pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same'", "ignore:LSTM with proj", "ignore:There is a performance drop"
)
ROWS = 5
CPU = torch.device("cpu")


class Through(nn.Module):
    """A layer, flattened, and a linear head. `pick` chooses one of several outputs."""

    def __init__(self, layer, inputs, pick=lambda output: output, call=None):
        super().__init__()
        self.layer, self.pick = layer, pick
        self.call = call or (lambda layer, x: layer(x))
        with torch.no_grad():
            width = self.pick(self.call(layer, inputs[:1])).numel()
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.pick(self.call(self.layer, x))).flatten(1))


def floats(*shape):
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(3))


def tokens(count, length):
    return torch.randint(0, count, (ROWS, length), generator=torch.Generator().manual_seed(3))


def layer(build, *shape, inputs=None, **how):
    inputs = floats(*shape) if inputs is None else inputs
    return (lambda: Through(build(), inputs, **how), inputs)


def first(output):
    return output[0]


def last_states(output):
    _, states = output
    states = states if isinstance(states, tuple) else (states,)
    return torch.cat(states, -1).transpose(0, 1)


def time_first(call):
    return lambda layer, x: call(layer, x.transpose(0, 1))


class Folded(nn.Module):
    """Sees the parts of an example as if they were examples."""

    def __init__(self, inner, width):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(width, 3)

    def forward(self, x):
        parts = self.inner(x.flatten(0, 1))
        return self.head(parts.reshape(len(x), -1))


class SlowFirst(nn.Module):
    """Folds the examples into the batch the other way round."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 2), nn.Linear(2, 3)

    def forward(self, x):
        parts = self.inner(x.transpose(0, 1).reshape(-1, 4)).tanh()
        return self.head(parts.view(-1, len(x), 2).sum(0))


class TimeMajor(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.lift, self.head = nn.LayerNorm(4), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.lift(self.norm(x.transpose(0, 1)))).mean(0))


class TiedLanguage(nn.Module):
    """A table of words that is also the last linear layer."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(torch.tanh(self.words(x))).mean(1)


class Twice(nn.Module):
    def __init__(self, inner, head):
        super().__init__()
        self.inner, self.head = inner, head

    def forward(self, x):
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))).flatten(1))


class TwiceAttention(nn.Module):
    """Self-attention uses the whole in_proj, cross-attention a third of it at a time."""

    def __init__(self):
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        own = self.attend(x, x, x)[0]
        return self.head(self.attend(own, x, own + x)[0].mean(1))


class Functional(nn.Module):
    """Uses a layer's weight without calling the layer: no rule can see that."""

    def __init__(self):
        super().__init__()
        self.words, self.mix = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(torch.tanh(self.mix(self.words(x))), self.words.weight).mean(1)


class OwnParameters(nn.Module):
    """Plain parameters of a user's layer, with a child that has a rule."""

    def __init__(self):
        super().__init__()
        self.slope, self.matrix = nn.Parameter(torch.ones(4)), nn.Parameter(torch.randn(4, 4))
        self.temperature, self.inner = nn.Parameter(torch.tensor(0.7)), nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(torch.tanh(self.slope * x @ self.matrix)) / self.temperature


class OwnDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(40))

    def forward(self, x):
        return F.dropout(self.slope * x, 0.5, self.training)


class Vision(nn.Module):
    """Class token and position embedding at the root, as in vision transformers."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.position = nn.Parameter(torch.randn(1, 6, 4))
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.block(x)[:, 0])


class OneWay(nn.Linear):
    """Changes what the layer computes: its rule must not apply."""

    def forward(self, x):
        return F.linear(x, self.weight.abs(), self.bias)


class Stubborn(SlowFirst):
    """Looks at values as well, which code in the record level cannot do."""

    def forward(self, x):
        return super().forward(x) * (1.0 if bool(x.isfinite().any()) else 2.0)


class DirectParameters(nn.Module):
    """What transformers do with parameters that belong to no layer."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(4))
        self.position = nn.Parameter(torch.randn(9, 4))
        self.scale, self.power = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(()))
        self.mix, self.bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(1, 1, 6))
        self.block, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), 1, -1), x], 1) + self.position[: x.shape[1] + 1]
        x = x + self.scale * self.block(torch.tanh(x @ self.mix + self.bias))
        return self.head(x.mean(1)) / (1 + self.power.exp())


class Positions(nn.Module):
    """An embedding of positions: the same rows for all examples, some of them twice."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.places, self.norm = nn.Embedding(5, 4, padding_idx=1), nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("order", torch.tensor([[0, 1, 2, 2, 4]]))

    def forward(self, x):
        return self.head(torch.tanh(self.words(x) + self.norm(self.places(self.order))).mean(1))


class RelativeBias(nn.Module):
    """A small network on constants, added to the scores of an attention."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))
        self.table = nn.Parameter(torch.randn(9))
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x):
        steps = torch.arange(x.shape[1])
        far = steps[:, None] - steps[None]
        bias = self.net(far[..., None].to(x.dtype))[..., 0] + self.table[far + 4]
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(query, key, value, bias).mean(1))


class Standardised(nn.Conv2d):
    """Weight standardisation."""

    def forward(self, x):
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        spread = self.weight.std((1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (spread + 1e-5), self.bias)


class Summation(nn.Module):
    """Products that only an equation describes."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(2, 4, 3)), nn.Parameter(torch.randn(5))

    def forward(self, x):
        return torch.einsum("hde,btd,t->bhe", self.left, x, self.right).flatten(1)


class TransposedTable(nn.Module):
    """A table of words that is read, and multiplied by in a product."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4)

    def forward(self, x):
        return (torch.tanh(self.words(x)) @ self.words.weight.t()).mean(1)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair, self.head = nn.Bilinear(4, 3, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.pair(x[..., :4], x[..., 4:])).mean(1))


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.long, self.gated = nn.LSTMCell(4, 3), nn.GRUCell(3, 3)
        self.plain, self.head = nn.RNNCell(3, 3, nonlinearity="relu"), nn.Linear(3, 3)

    def forward(self, x):
        state = one = two = None
        for now in x.unbind(1):
            state = self.long(now, state)
            one = self.gated(state[0], one)
            two = self.plain(one, two)
        return self.head(two)


class Bags(nn.Module):
    def __init__(self, padding=None, **options):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(7, 4, padding_idx=padding, **options), nn.Linear(4, 3)

    def forward(self, x):
        weights = None if self.bag.mode != "sum" else torch.cos(x.to(self.head.weight.dtype))
        return self.head(torch.tanh(self.bag(x, per_sample_weights=weights)))


def cross(module, x):
    return module(x[:, :2], x[:, 1:], x[:, 1:] * 2, need_weights=False)


def masked(module, x):
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    padding[:, -1] = True
    return module(x, x, x, key_padding_mask=padding, attn_mask=causal)


def with_states(module, x):
    states = x[:, :1, :3].transpose(0, 1).contiguous().tanh()
    return module(x, (states, 2 * states) if isinstance(module, nn.LSTM) else states)


def recurrent(kind):
    one = kind.__name__.lower()
    return {
        one: layer(lambda: kind(4, 3, batch_first=True), 6, 4, pick=first),
        f"{one}-both-ways": layer(
            lambda: kind(4, 3, bidirectional=True, batch_first=True), 6, 4, pick=first
        ),
        f"{one}-deep": layer(
            lambda: kind(4, 3, num_layers=3, bidirectional=True, batch_first=True), 5, 4, pick=first
        ),
        f"{one}-no-bias": layer(
            lambda: kind(4, 3, num_layers=2, bias=False, batch_first=True), 5, 4, pick=first
        ),
        f"{one}-time-first": layer(
            lambda: kind(4, 3, bidirectional=True),
            6,
            4,
            pick=lambda output: output[0].transpose(0, 1),
            call=time_first(lambda module, x: module(x)),
        ),
        f"{one}-last-states": layer(
            lambda: kind(4, 3, num_layers=2, bidirectional=True, batch_first=True),
            6,
            4,
            pick=last_states,
        ),
        f"{one}-own-states": layer(
            lambda: kind(4, 3, batch_first=True), 6, 4, pick=first, call=with_states
        ),
        f"{one}-one-step": layer(lambda: kind(4, 3, batch_first=True), 1, 4, pick=first),
    }


def attention(**options):
    return lambda: nn.MultiheadAttention(4, 2, batch_first=True, **options)


def itself(module, x):
    return module(x, x, x, need_weights=False)


ONE_PASS = {
    "linear": layer(lambda: nn.Linear(5, 4), 5),
    "linear-no-bias": layer(lambda: nn.Linear(5, 4, bias=False), 5),
    "linear-sequence": layer(lambda: nn.Linear(5, 4), 3, 5),
    "linear-long-sequence": layer(lambda: nn.Linear(3, 2), 40, 3),
    "linear-wide-sequence": layer(lambda: nn.Linear(40, 50), 2, 40),
    "linear-grid": layer(lambda: nn.Linear(5, 4), 2, 3, 5),
    "time-major": (TimeMajor, floats(6, 4)),
    "conv1d": layer(lambda: nn.Conv1d(2, 4, 3, dilation=2, padding=1), 2, 9),
    "conv1d-same": layer(lambda: nn.Conv1d(2, 4, 4, padding="same"), 2, 9),
    "conv1d-wide": layer(lambda: nn.Conv1d(20, 30, 3), 20, 4),
    "conv2d": layer(lambda: nn.Conv2d(2, 4, 3, stride=2, padding=1), 2, 7, 6),
    "conv2d-grouped": layer(lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1, bias=False), 4, 5, 5),
    "conv2d-depthwise": layer(lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2), 4, 7, 7),
    "conv2d-uneven": layer(
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2)), 2, 8, 6
    ),
    "conv2d-same": layer(lambda: nn.Conv2d(2, 3, (2, 3), padding="same", dilation=(3, 1)), 2, 6, 6),
    "conv2d-valid": layer(lambda: nn.Conv2d(2, 3, 3, padding="valid", stride=2), 2, 6, 6),
    "conv2d-reflect": layer(
        lambda: nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect"), 2, 6, 6
    ),
    "conv2d-circular": layer(
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", stride=2), 2, 6, 6
    ),
    "conv2d-replicate-same": layer(
        lambda: nn.Conv2d(2, 3, 4, padding="same", padding_mode="replicate"), 2, 6, 6
    ),
    "conv2d-wide": layer(lambda: nn.Conv2d(24, 32, 3, padding=1, stride=2), 24, 3, 3),
    "conv2d-wide-strided": layer(lambda: nn.Conv2d(24, 32, 3, padding=2, dilation=2), 24, 3, 3),
    "conv2d-1x1": layer(lambda: nn.Conv2d(3, 4, 1), 3, 4, 4),
    "conv3d": layer(lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=1), 2, 3, 4, 3),
    "conv3d-wide": layer(lambda: nn.Conv3d(16, 24, 2), 16, 2, 3, 3),
    "conv-folded": (lambda: Folded(nn.Conv1d(2, 3, 3), 48), floats(4, 2, 6)),
    "conv-folded-wide": (lambda: Folded(nn.Conv1d(30, 30, 3, padding=1), 120), floats(2, 30, 2)),
    "linear-folded": (lambda: Folded(nn.Linear(4, 5), 15), floats(3, 4)),
    "group-norm-folded": (lambda: Folded(nn.GroupNorm(2, 4), 72), floats(3, 4, 6)),
    "embedding": layer(lambda: nn.Embedding(7, 4), inputs=tokens(7, 6)),
    "embedding-padding": layer(lambda: nn.Embedding(4, 3, padding_idx=2), inputs=tokens(4, 9)),
    "embedding-one-token": layer(lambda: nn.Embedding(4, 3), inputs=tokens(4, 1).flatten()),
    "embedding-grid": layer(lambda: nn.Embedding(4, 3), inputs=tokens(4, 6).unflatten(1, (2, 3))),
    "group-norm": layer(lambda: nn.GroupNorm(2, 4), 4, 5),
    "group-norm-vector": layer(lambda: nn.GroupNorm(2, 6), 6),
    "group-norm-image": layer(lambda: nn.GroupNorm(4, 4), 4, 3, 3),
    "layer-norm": layer(lambda: nn.LayerNorm(5), 5),
    "layer-norm-sequence": layer(lambda: nn.LayerNorm(5, bias=False), 3, 5),
    "layer-norm-image": layer(lambda: nn.LayerNorm((3, 4)), 2, 3, 4),
    "instance-norm-1d": layer(lambda: nn.InstanceNorm1d(3, affine=True), 3, 6),
    "instance-norm-2d": layer(lambda: nn.InstanceNorm2d(2, affine=True), 2, 4, 4),
    "instance-norm-3d": layer(lambda: nn.InstanceNorm3d(2, affine=True), 2, 2, 3, 3),
    "rms-norm": layer(lambda: nn.RMSNorm(5), 3, 5),
    "rms-norm-image": layer(lambda: nn.RMSNorm((3, 4), eps=1e-3), 2, 3, 4),
    **recurrent(nn.LSTM),
    **recurrent(nn.GRU),
    **{
        name: case
        for name, case in recurrent(nn.RNN).items()
        if name not in ("rnn", "rnn-one-step")
    },
    "rnn-relu": layer(
        lambda: nn.RNN(4, 3, nonlinearity="relu", batch_first=True), 5, 4, pick=first
    ),
    "lstm-projected": layer(
        lambda: nn.LSTM(4, 6, 2, proj_size=3, bidirectional=True, batch_first=True),
        5,
        4,
        pick=first,
    ),
    "cells": (Cells, floats(4, 4)),
    "attention": layer(attention(), 5, 4, pick=first, call=itself),
    "attention-weights": layer(
        attention(bias=False),
        5,
        4,
        pick=lambda out: torch.cat([out[0], out[1]], -1),
        call=lambda module, x: module(x, x, x),
    ),
    "attention-cross": layer(attention(), 5, 4, pick=first, call=cross),
    "attention-other-widths": layer(
        attention(kdim=3, vdim=2),
        5,
        4,
        pick=first,
        call=lambda module, x: module(x, x[..., :3], x[..., 2:]),
    ),
    "attention-masked": layer(attention(), 5, 4, pick=first, call=masked),
    "attention-time-first": layer(
        lambda: nn.MultiheadAttention(4, 2),
        5,
        4,
        pick=lambda output: output[0].transpose(0, 1),
        call=time_first(itself),
    ),
    "transformer": layer(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        ),
        5,
        4,
    ),
    "tied-language": (TiedLanguage, tokens(7, 5)),
    "linear-twice": (lambda: Twice(nn.Linear(4, 4), nn.Linear(4, 3)), floats(4)),
    "conv-twice": (
        lambda: Twice(nn.Conv2d(3, 3, 3, padding=1), nn.Linear(48, 3)),
        floats(3, 4, 4),
    ),
    "conv-twice-wide": (
        lambda: Twice(nn.Conv1d(30, 30, 3, padding=1), nn.Linear(60, 3)),
        floats(30, 2),
    ),
    "norm-twice": (lambda: Twice(nn.LayerNorm(4), nn.Linear(4, 3)), floats(4)),
    "attention-twice": (TwiceAttention, floats(5, 4)),
    "in-place": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(48, 6),
            nn.ReLU(inplace=True),
            nn.Linear(6, 3),
        ),
        floats(2, 6, 6),
    ),
    "own-parameters": (
        lambda: nn.Sequential(nn.Linear(6, 4), OwnParameters(), nn.Tanh(), nn.Linear(4, 3)),
        floats(6),
    ),
    "own-parameters-twice": (lambda: Twice(OwnParameters(), nn.Linear(4, 3)), floats(4)),
    "changed-layer": (lambda: nn.Sequential(OneWay(5, 4), nn.Tanh(), nn.Linear(4, 3)), floats(5)),
    "weight-norm": (
        lambda: nn.Sequential(weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)),
        floats(5),
    ),
    "weight-norm-conv": layer(lambda: weight_norm(nn.Conv2d(2, 3, 3, padding=1)), 2, 5, 5),
    "weight-standardised": layer(lambda: Standardised(2, 3, 3, stride=2, padding=1), 2, 5, 5),
    "direct-parameters": (DirectParameters, floats(5, 4)),
    "positions": (Positions, tokens(7, 5)),
    "relative-bias": (RelativeBias, floats(5, 4)),
    "equation": (lambda: nn.Sequential(Summation(), nn.Linear(6, 3)), floats(5, 4)),
    "transposed-table": (TransposedTable, tokens(7, 5)),
    "weight-without-its-layer": (Functional, tokens(7, 5)),
    "bilinear": (TwoInputs, floats(3, 7)),
    "bag": (Bags, tokens(7, 6)),
    "bag-sum": (lambda: Bags(mode="sum"), tokens(7, 6)),
    "bag-max": (lambda: Bags(mode="max"), tokens(7, 6)),
    "bag-padding": (lambda: Bags(2), tokens(7, 6)),
    "bag-max-padding": (lambda: Bags(2, mode="max"), tokens(7, 6)),
    "prelu-one": layer(nn.PReLU, 3, 4),
    "prelu-channels": layer(lambda: nn.PReLU(3), 3, 4, 4),
    "prelu-folded": (lambda: Folded(nn.PReLU(4), 12), floats(3, 4)),
    "prelu": (lambda: nn.Sequential(nn.Linear(5, 4), nn.PReLU(4), nn.Linear(4, 3)), floats(5)),
    "transposed-conv": layer(lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), 2, 3, 3),
    "transposed-conv1d": layer(
        lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, output_padding=1, groups=2), 4, 5
    ),
    "transposed-conv3d": layer(lambda: nn.ConvTranspose3d(2, 3, 2, dilation=2), 2, 2, 3, 2),
    "transposed-conv-wide": layer(
        lambda: nn.ConvTranspose2d(12, 20, 4, 2, 1, bias=False), 12, 2, 2
    ),
    "transposed-conv-depthwise": layer(lambda: nn.ConvTranspose2d(4, 4, 3, groups=4), 4, 4, 4),
    "transposed-conv-folded": (lambda: Folded(nn.ConvTranspose1d(2, 3, 3), 48), floats(2, 2, 6)),
    "vision": (Vision, floats(5, 4)),
    "folded-the-other-way": (SlowFirst, floats(3, 4)),
    "attention-bias-kv": layer(attention(add_bias_kv=True), 5, 4, pick=first, call=itself),
}
SLOWER = {
    "folded-and-stubborn": (Stubborn, floats(3, 4)),
}
MODELS = ONE_PASS | SLOWER


def made(name, dtype=torch.float64, models=MODELS):
    build, inputs = models[name]
    torch.manual_seed(0)
    model = build().to(dtype)
    for parameter in model.parameters():  # norms begin with ones and zeros, which would hide faults
        nn.init.normal_(parameter, std=0.5)
    inputs = inputs.to(dtype) if inputs.dtype.is_floating_point else inputs
    classes = model(inputs).shape[1]
    return Problem(model, F.cross_entropy, Examples(inputs, torch.arange(ROWS) % classes))


SHARED = {}


def shared(name, dtype=torch.float64):
    """For tests that leave the model as it is: its plan, which takes long, is made once."""
    if (name, dtype) not in SHARED:
        SHARED[name, dtype] = made(name, dtype)
    return SHARED[name, dtype]


def gradients(problem, params, batch):
    """The definition: one backward pass per record."""
    rows = []
    for input_, target in zip(batch.inputs, batch.targets, strict=True):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        output = torch.func.functional_call(problem.model, leaves, (input_[None],))
        problem.loss(output, target[None]).backward()
        rows.append({name: leaf.grad for name, leaf in leaves.items()})
    return rows


def norm(gradient):
    return float(torch.sqrt(sum(value.square().sum() for value in gradient.values())))


def clipped(rows, bound):
    scales = [min(1.0, bound / norm(row)) for row in rows]
    return {
        name: sum(scale * row[name] for scale, row in zip(scales, rows, strict=True))
        for name in rows[0]
    }


def assert_same(ours, expected, tolerance):
    """Agreement relative to the size of the whole sum."""
    assert set(ours) == set(expected)
    size = norm(expected)
    for name, value in expected.items():
        assert ours[name].dtype == value.dtype
        assert float((ours[name] - value).norm()) <= tolerance * size, name


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name", MODELS)
def test_every_rule_against_one_example_at_a_time(name, dtype, tolerance):
    problem = shared(name, dtype)
    params, batch = problem.initial_params(), problem.train
    rows = gradients(problem, params, batch)
    norms = sorted(map(norm, rows))
    for bound in (1e-3 * norms[0], norms[ROWS // 2], 1e6):
        ours = clipped_sum(problem, params, batch, bound)
        assert ours.sensitivity == bound
        assert_same(ours.params, clipped(rows, bound), tolerance)
    for row in range(ROWS):  # every example's norm by itself, through what a tiny bound makes of it
        only = torch.arange(ROWS) == row
        alone = clipped_sum(problem, params, batch, 1e6, mask=only).params
        assert_same(alone, rows[row], tolerance)
        short = clipped_sum(problem, params, batch, 1e-3 * norms[0], mask=only).params
        assert norm(short) == pytest.approx(1e-3 * norms[0], rel=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_the_expected_engine_is_chosen(name):
    problem = shared(name)
    plan = strategy_for(problem, problem.initial_params(), problem.train.inputs)
    assert (plan.reason is None) == (name not in SLOWER)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e200])
@pytest.mark.parametrize("name", MODELS)
def test_a_row_that_is_not_finite_or_masked_adds_nothing(name, poison):
    problem = shared(name)
    params, batch = problem.initial_params(), problem.train
    mask = torch.tensor([True, True, False, True, True])
    targets = batch.targets.clone()
    inputs = batch.inputs.clone()
    targets[2] = -7  # no class at all
    kept = [0, 1, 3, 4]
    if inputs.dtype.is_floating_point:
        inputs[[2, 4]] *= poison
        kept = [0, 1, 3]
    ours = clipped_sum(problem, params, Examples(inputs, targets), 0.3, mask=mask).params
    without = clipped(gradients(problem, params, Examples(inputs[kept], targets[kept])), 0.3)
    far = gradients(problem, params, Examples(inputs[[4]], targets[[4]]))
    if 4 in kept or not norm(far[0]) < float("inf"):
        assert_same(ours, without, 1e-9)
        return
    # A saturated layer can make the gradient of a huge input finite. Its square may overflow on the
    # way: then the row is dropped, which is safe. It may not be counted in part.
    added = {name: ours[name] - without[name] for name in ours}
    if norm(added) > 1e-9:
        assert_same(added, clipped(far, 0.3), 1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_pieces_and_the_empty_batch(name):
    problem = shared(name)
    params, batch = problem.initial_params(), problem.train
    whole = clipped_sum(problem, params, batch, 0.3).params
    one_row = clipped_sum(problem, params, batch, 0.3, at_once=1).params
    assert_same(one_row, whole, 1e-9)
    nothing = batch.select(torch.zeros(0, dtype=torch.int64))
    for masked in (None, torch.zeros(0, dtype=torch.bool)):
        empty = clipped_sum(problem, params, nothing, 0.3, mask=masked).params
        assert all(torch.equal(value, torch.zeros_like(params[n])) for n, value in empty.items())
    none = clipped_sum(problem, params, batch, 0.3, mask=torch.zeros(ROWS, dtype=torch.bool)).params
    assert all(torch.equal(value, torch.zeros_like(params[n])) for n, value in none.items())


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_left_as_it_was(name):
    problem = made(name)
    before = {key: value.clone() for key, value in problem.model.state_dict().items()}
    forwards = [vars(module).get("forward") for module in problem.model.modules()]
    clipped_sum(problem, problem.initial_params(), problem.train, 0.3)
    assert all(torch.equal(v, before[k]) for k, v in problem.model.state_dict().items())
    assert forwards == [vars(module).get("forward") for module in problem.model.modules()]
    assert all(parameter.grad is None for parameter in problem.model.parameters())


DROPOUT = {
    "layers": (
        lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(40, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
        floats(40),
    ),
    "lstm": layer(
        lambda: nn.LSTM(4, 3, num_layers=2, dropout=0.5, batch_first=True), 6, 4, pick=first
    ),
    "attention": layer(attention(dropout=0.5), 5, 4, pick=first, call=itself),
    "attention-weights": layer(
        attention(dropout=0.5), 5, 4, pick=first, call=lambda module, x: module(x, x, x)
    ),
    "own-module": (lambda: nn.Sequential(OwnDropout(), nn.Linear(40, 3)), floats(40)),
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_repeatable_and_drawn_for_each_example(name):
    problem = made(name, models=DROPOUT)
    inputs = problem.train.inputs
    problem = Problem(
        problem.model,
        F.cross_entropy,
        Examples(inputs[:1].expand_as(inputs), torch.zeros(ROWS, dtype=torch.int64)),
    )
    params, batch = problem.initial_params(), problem.train

    def drawn(seed, mask):
        with Streams(seed, CPU).at(1).global_randomness(LAYERS):
            return clipped_sum(problem, params, batch, 1e6, mask=mask).params

    masks = [torch.arange(ROWS) == row for row in range(2)]
    again = [drawn(1, mask) for mask in masks]
    one, two = (drawn(1, mask) for mask in masks)
    assert_same(one, again[0], 0.0)
    assert_same(two, again[1], 0.0)
    for other in (two, drawn(2, masks[0])):  # another example, another seed
        assert any(not torch.allclose(one[key], other[key]) for key in one)


def test_the_plan_draws_nothing_from_the_global_stream():
    problem = made("own-module", models=DROPOUT)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    strategy_for(problem, problem.initial_params(), problem.train.inputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_frozen_layers_buffers_and_unused_parameters():
    class Partial(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.ones(4))
            self.first, self.second = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True)
            self.unused, self.head = nn.Linear(2, 2), nn.Linear(4, 3)
            self.first.requires_grad_(False)
            self.second.weight_hh_l0.requires_grad_(False)
            self.head.bias.requires_grad_(False)

        def forward(self, x):
            return self.head(self.second((self.first(x) + self.shift).tanh())[0][:, -1])

    examples = Examples(floats(5, 4).double(), torch.zeros(ROWS, dtype=torch.int64))
    problem = Problem(Partial().double(), F.cross_entropy, examples)
    params = problem.initial_params()
    rows = []
    for row in range(ROWS):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        output = torch.func.functional_call(problem.model, leaves, (problem.train.inputs[[row]],))
        found = torch.autograd.grad(
            F.cross_entropy(output, problem.train.targets[[row]]),
            list(leaves.values()),
            allow_unused=True,
            materialize_grads=True,
        )
        rows.append(dict(zip(leaves, [one.detach() for one in found], strict=True)))
    assert_same(clipped_sum(problem, params, problem.train, 0.2).params, clipped(rows, 0.2), 1e-9)


def test_a_loss_that_cannot_be_batched():
    problem = made("linear")

    def stubborn(outputs, targets):
        return F.cross_entropy(outputs, targets) * (2.0 if outputs.max().item() > 0 else 1.0)

    stubborn_problem = Problem(problem.model, stubborn, problem.train)
    params = problem.initial_params()
    rows = gradients(stubborn_problem, params, problem.train)
    ours = clipped_sum(stubborn_problem, params, problem.train, 0.3).params
    assert_same(ours, clipped(rows, 0.3), 1e-9)


def test_a_plan_that_was_made_with_zeros_serves_other_weights():
    """Nothing that vanishes with the weights may be decided by them."""
    problem = made("weight-without-its-layer")
    params = problem.initial_params()
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    plan = strategy_for(problem, zeros, problem.train.inputs)
    assert plan is strategy_for(problem, params, problem.train.inputs)
    ours = clipped_sum(problem, params, problem.train, 0.2).params
    assert_same(ours, clipped(gradients(problem, params, problem.train), 0.2), 1e-9)


@pytest.mark.parametrize("mask", [torch.ones(4, dtype=torch.bool), torch.ones(ROWS)])
def test_a_wrong_mask_is_refused(mask):
    problem = made("linear")
    with pytest.raises(InvalidInputError, match="mask must hold one bool per row, 5 in all"):
        clipped_sum(problem, problem.initial_params(), problem.train, 1.0, mask=mask)


def test_rows_per_piece_are_a_power_of_two_of_what_there_is_room_for():
    assert microbatch_rows(2**20, CPU) == 64
    assert microbatch_rows(2**20 - 1, CPU) == 64
    assert microbatch_rows(2**40, CPU) == 1
    assert microbatch_rows(2**20, CPU, weights=2**26) == 128  # of a large model


@pytest.mark.parametrize(
    "name", ["conv2d-wide", "conv2d-wide-strided", "conv2d-few-places", "linear"]
)
def test_what_is_stored_about_the_data_changes_nothing(name):
    stored = {
        "conv2d-few-places": layer(lambda: nn.Conv2d(5, 4, 3, stride=2, padding=1), 5, 5, 5),
    }
    problem = made(name, models=ONE_PASS | stored)
    params = problem.initial_params()
    rows = torch.tensor([3, 0, 3, 4])
    batch = problem.train.select(rows)
    expected = clipped(gradients(problem, params, batch), 0.3)
    for _ in range(2):  # when the table is made, and when it is there
        ours = clipped_sum(problem, params, problem.train, 0.3, rows=rows).params
        assert_same(ours, expected, 1e-9)
    other = Problem(problem.model, problem.loss, problem.train.select(torch.arange(ROWS).flip(0)))
    ours = clipped_sum(other, params, other.train, 0.3, rows=rows).params
    again = clipped(gradients(other, params, other.train.select(rows)), 0.3)
    assert_same(ours, again, 1e-9)


def test_rows_that_are_no_indices_are_refused():
    problem = made("linear")
    with pytest.raises(InvalidInputError, match="rows must be a list of indices"):
        clipped_sum(problem, problem.initial_params(), problem.train, 1.0, rows=torch.ones(2))


class Echo(nn.Module):
    """A layer on two positions whose outputs are subtracted: gradients nearly cancel."""

    def __init__(self, width, kind):
        super().__init__()
        self.layer = (
            nn.Linear(width, 64, bias=False)
            if kind == "linear"
            else nn.Conv1d(width, 64, 1, bias=False)
        )
        self.kind = kind

    def forward(self, x):
        out = self.layer(x) if self.kind == "linear" else self.layer(x.mT).mT
        return out[:, 0] - out[:, 1]


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-5])
def test_a_record_made_to_cancel_does_not_pass_the_clip(size, gap, kind):
    """Norms from inner products lose all digits here; the contribution must stay bounded."""
    torch.manual_seed(0)
    width, bound = 512, 0.1
    base = size * torch.randn(1, 1, width)
    record = torch.cat([base, base + gap * torch.randn(1, 1, width) * size**0.5], dim=1)
    problem = Problem(
        Echo(width, kind), lambda out, _: (out * 3.0).sum(), Examples(record, torch.zeros(1))
    )
    assert contribution(problem, bound) <= bound * 1.01


def contribution(problem, bound):
    total = clipped_sum(problem, problem.initial_params(), problem.train, bound)
    return float(torch.sqrt(sum(value.double().square().sum() for value in total.params.values())))


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_without_the_guard_some_such_record_passes(kind, monkeypatch):
    """The control: plain sums of inner products let a record through."""

    never_too_small = "dpsur.per_example.contributions.guard"
    monkeypatch.setattr(never_too_small, lambda squares, _: squares.clamp(min=0))
    worst = 0.0
    for seed in range(20):
        torch.manual_seed(seed)
        base = 1e6 * torch.randn(1, 1, 512)
        record = torch.cat([base, base + 1e-1 * torch.randn(1, 1, 512)], dim=1)
        problem = Problem(
            Echo(512, kind), lambda out, _: (out * 3.0).sum(), Examples(record, torch.zeros(1))
        )
        worst = max(worst, contribution(problem, 0.1))
    assert worst > 1.0


class Tied(nn.Module):
    """One small layer called for many positions, whose outputs nearly cancel."""

    def __init__(self, kind):
        super().__init__()
        self.layer = nn.MultiheadAttention(16, 1) if kind == "overlapping" else nn.Linear(16, 16)
        self.layer.requires_grad_(False)
        self.kind = kind
        weight = self.layer.in_proj_weight if kind == "overlapping" else self.layer.weight
        weight.requires_grad_()

    def forward(self, x):
        signs = (-1.0) ** torch.arange(x.shape[1])
        if self.kind == "several":
            return sum(sign * self.layer(one) for sign, one in zip(signs, x.unbind(1), strict=True))
        one, other = x[:, :1], x[:, 1:2]
        whole = self.layer(one, one, one, need_weights=False)[0]
        by_thirds = self.layer(other, other * 1.0, other * 1.0, need_weights=False)[0]
        return (whole - by_thirds).flatten(1)


def cancelling(kind, seed):
    torch.manual_seed(seed)
    base = 1e6 * torch.randn(1, 8, 1, 16)
    record = torch.cat([base, base + 1e-1 * torch.randn(1, 8, 1, 16)], 2).flatten(1, 2)
    return Problem(Tied(kind), lambda out, _: (out * 3.0).sum(), Examples(record, torch.zeros(1)))


@pytest.mark.parametrize("kind", ["several", "overlapping"])
def test_uses_of_one_weight_that_cancel_do_not_pass_the_clip(kind):
    worst = max(contribution(cancelling(kind, seed), 0.1) for seed in range(20))
    assert worst <= 0.1 * (1 + 1e-5)


def test_sums_that_are_not_the_measured_ones_pass_it(monkeypatch):
    """The control: every use is added up again, and rounded unlike the norm."""
    plain = Tape.norms

    def forgetful(tape):
        uses = dict(tape.contributions)
        norms = plain(tape)
        tape.contributions = uses
        return norms

    monkeypatch.setattr(Tape, "norms", forgetful)
    assert max(contribution(cancelling("several", seed), 0.1) for seed in range(20)) > 0.11


class Contrast(nn.Module):
    """Weighs positions by numbers that sum to zero: those of a repeated token cancel."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 1, bias=False)

    def forward(self, x):
        weights = torch.tensor([1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 8.0, -8.0])
        return self.head((self.table(x) * weights.unsqueeze(1)).sum(1))


def moved_by_one_token(stored):
    """How far a record of one token and a huge target moves the sum of others, at bound 1."""
    torch.manual_seed(0)
    words = torch.randint(1, 5, (501, 8))
    words[:, 0] = 0
    words[-1] = 0
    targets = torch.full((501, 1), -100.0)
    targets[-1] = 1e15
    problem = Problem(Contrast(), F.mse_loss, Examples(words, targets))
    params = problem.initial_params()
    if stored:
        rows = torch.arange(501)
        parts = [{"examples": problem.train, "rows": some} for some in (rows, rows[:-1])]
    else:
        parts = [{"examples": problem.train.part(slice(end))} for end in (501, 500)]
    more, fewer = (clipped_sum(problem, params, max_grad_norm=1.0, **part).params for part in parts)
    return float(torch.cat([(more[n] - fewer[n]).flatten() for n in more]).norm())


@pytest.mark.parametrize("stored", [False, True])
def test_a_repeated_token_whose_gradients_cancel_does_not_wipe_out_others(stored):
    assert moved_by_one_token(stored) <= 1 + 1e-3


def test_positions_that_are_summed_one_by_one_do(monkeypatch):
    """The control: the norm of the sum over a token's positions, and the sum of all of them."""
    single = {}

    def remembering(outputs, places):
        sums = add_up_repeats(outputs, places)
        single[id(sums)] = outputs, sums
        return sums

    def one_by_one(self, factors):
        outputs, _ = single[id(self.outputs)]
        return plain(Lookups(self.tokens, outputs, self.table_rows), factors)

    plain = Lookups.weighted_sum
    rule = importlib.import_module("dpsur.per_example.rules.embedding")
    monkeypatch.setattr(rule, "add_up_repeats", remembering)
    monkeypatch.setattr(Lookups, "weighted_sum", one_by_one)
    assert moved_by_one_token(stored=False) > 10


class Hooked(nn.Module):
    """Changes the gradient of an activation, perhaps by what all of the batch is."""

    def __init__(self, change, asks=False):
        super().__init__()
        self.lift, self.head, self.change, self.asks = (
            nn.Linear(6, 8),
            nn.Linear(8, 1),
            change,
            asks,
        )

    def forward(self, x):
        hidden = torch.tanh(self.lift(x))
        if not self.asks or hidden.requires_grad:
            hidden.register_hook(self.change)
        return self.head(hidden)


def hooked(change, asks=False):
    torch.manual_seed(0)
    targets = torch.full((20, 1), 2.0)
    targets[-1] = 1e12
    return Problem(Hooked(change, asks), F.mse_loss, Examples(torch.randn(20, 6) + 1.0, targets))


def moved_by_the_last(problem, bound):
    """How far the last record moves the sum of the others."""
    params, train = problem.initial_params(), problem.train
    more, fewer = (
        clipped_sum(problem, params, train.part(slice(end)), bound).params
        for end in (len(train), len(train) - 1)
    )
    return norm({name: more[name] - fewer[name] for name in more})


HOOKS = {
    "doubled": lambda g: 2 * g,
    "clipped by record": lambda g: g * (0.1 / g.norm(dim=1, keepdim=True).clamp(min=0.1)),
    "clipped by the batch": lambda g: g * (0.1 / g.norm().clamp(min=0.1)),
    "divided by the batch": lambda g: g / g.norm(),
    "divided by its size": lambda g: g / len(g),
    "centred": lambda g: g - g.mean(0),
}


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_changes_each_records_gradient_alone(name, asks):
    """What it computes from the batch, it computes from a batch of one."""
    problem = hooked(HOOKS[name], asks)
    params, some = problem.initial_params(), problem.train.part(slice(6))
    ours = clipped_sum(problem, params, some, 0.1).params
    assert_same(ours, clipped(gradients(problem, params, some), 0.1), 1e-4)
    assert moved_by_the_last(problem, 0.1) <= 0.1 * (1 + 1e-3)


def test_gradients_that_meet_in_one_backward_pass_break_this():
    """The control: plain PyTorch on the batch, whose hook sees all of it."""
    problem = hooked(HOOKS["divided by the batch"])

    def lift(end):
        problem.model.zero_grad()
        output = problem.model(problem.train.inputs[:end])
        F.mse_loss(output, problem.train.targets[:end], reduction="sum").backward()
        return problem.model.lift.weight.grad.clone()

    assert float((lift(20) - lift(19)).norm()) > 0.5


class Mixing(nn.Module):
    """Two layers, and something in between that concerns the whole batch."""

    def __init__(self, between):
        super().__init__()
        self.lift, self.head, self.between = nn.Linear(4, 8), nn.Linear(8, 2), between

    def forward(self, x):
        return self.head(self.between(torch.tanh(self.lift(x))))


def by_capacity(x):
    """Every record goes to one expert of two, which takes a limited number of records."""
    first = (x[:, :1] > 0).to(x.dtype)
    return x * (first * (first.cumsum(0) <= 2))


MIXING = {
    "centred": lambda x: x - 0.9 * x.mean(0),
    "centred by a constant": lambda x: x - 0.9 * x.mean(0, keepdim=True).detach(),
    "mixed up": lambda x: 0.5 * x + 0.5 * x.flip(0),
    "mixed at random": lambda x: 0.5 * x + 0.5 * x[torch.randperm(len(x))],
    "divided by the largest": lambda x: x / x.detach().abs().max().clamp(min=1e-3),
    "many records only": lambda x: x - x.mean(0) if len(x) >= 4 else x,
    "by capacity": by_capacity,
    "decided by the batch": lambda x: x / 255 if x.max() > 0.5 else x,
    "decided by one number": lambda x: x * (1.0 if x.mean().item() > 0 else 3.0),
    "attention over records": lambda x: torch.softmax(x @ x.T, -1) @ x,
}


@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_mixes_records_gives_each_the_gradient_it_has_alone(name):
    """Records cannot meet, so mixing is harmless: it sees a batch of one."""
    torch.manual_seed(0)
    records = Examples(torch.randn(6, 4).double(), torch.arange(6) % 2)
    problem = Problem(Mixing(MIXING[name]).double(), F.cross_entropy, records)
    params = problem.initial_params()
    for bound in (0.05, 1e6):
        ours = clipped_sum(problem, params, records, bound).params
        assert_same(ours, clipped(gradients(problem, params, records), bound), 1e-9)


# Everything that is a number in float32: smaller ones are zero, larger ones overflow.
SMALLEST, LARGEST = -44.0, 38.0


def scales(count, generator, lowest=SMALLEST, highest=LARGEST):
    return 10 ** (lowest + (highest - lowest) * torch.rand(count, generator=generator).double())


def worst_contribution(name, draws=4):
    """Largest norm of what a record adds, in units of the bound, over records of any size.

    The loss multiplies outputs by the target: its gradient is of any size as well. In every other
    draw one weight is trained alone, since a bias hides what underflow does to weights, and sizes
    of inputs and targets make up for each other, since few products are finite otherwise.
    """
    problem, worst = made(name, torch.float32), 0.0
    for draw in range(draws):
        generator = torch.Generator().manual_seed(draw)
        weights = [p for p in problem.model.parameters() if p.dim() > 1]
        for parameter in problem.model.parameters():
            alone = weights[draw // 2 % len(weights)]
            parameter.requires_grad_(draw % 2 == 0 or parameter is alone)
        size = float(scales(1, generator, -30.0, 10.0)) if draw % 4 > 1 else 1.0
        params = {n: v * size for n, v in problem.initial_params().items()}
        bound = float(scales(1, generator, -6.0, 1.0))
        odd = records_of_any_size(problem, bound, generator, paired=draw % 2 == 1)
        for row in range(ROWS):
            only = torch.arange(ROWS) == row
            total = clipped_sum(odd, params, odd.train, bound, mask=only).params
            size = float(torch.sqrt(sum(v.double().square().sum() for v in total.values())))
            assert size < float("inf")
            worst = max(worst, size / bound)
    return worst


def records_of_any_size(problem, bound, generator, *, paired):
    inputs = problem.train.inputs
    outputs = problem.model(inputs).shape
    of_inputs, of_targets = scales(ROWS, generator), scales(ROWS, generator)
    if not inputs.dtype.is_floating_point:
        of_inputs = torch.ones(ROWS)
    if paired:
        of_inputs = scales(ROWS, generator, -25.0, -18.0)
        of_targets = bound * scales(ROWS, generator, -1.0, 6.0) / of_inputs
    if inputs.dtype.is_floating_point:
        each = of_inputs.view(-1, *[1] * (inputs.dim() - 1))
        inputs = (torch.randn(inputs.shape, generator=generator) * each).float()
    each = of_targets.view(-1, *[1] * (len(outputs) - 1))
    targets = (torch.randn(outputs, generator=generator) * each).float()
    return Problem(problem.model, product, Examples(inputs, targets))


def product(outputs, targets):
    return (outputs * targets).sum()


@pytest.mark.parametrize("name", MODELS)
def test_no_record_of_any_size_passes_the_clip(name):
    """Squares of small numbers vanish, their products with large ones do not."""
    assert worst_contribution(name) <= 1 + 1e-5


def vanishing(build, *shape):
    """A record whose squares vanish, with output gradients large enough to make up for it."""
    torch.manual_seed(0)
    inputs = torch.full((1, *shape), 1e-23)
    model = nn.Sequential(build(), nn.Flatten(), nn.AdaptiveMaxPool1d(4))
    return Problem(model, product, Examples(inputs, torch.full((1, 4), 1e18)))


VANISHING = {
    "one product": lambda: vanishing(lambda: nn.Linear(4, 4, bias=False), 4),
    "positions": lambda: vanishing(lambda: nn.Linear(64, 64, bias=False), 3, 64),
    "patches": lambda: vanishing(lambda: nn.Conv2d(24, 32, 3, bias=False), 24, 4, 4),
}


@pytest.mark.parametrize("name", VANISHING)
def test_a_record_whose_squares_vanish_does_not_pass_the_clip(name):
    assert contribution(VANISHING[name](), 1e-6) <= 1e-6 * (1 + 1e-5)


def nothing_is_lost(count, dtype):
    return 0.0


@pytest.mark.parametrize("name", VANISHING)
def test_norms_that_underflow_let_such_a_record_pass(name, monkeypatch):
    """The control: nothing is added for what vanished."""
    monkeypatch.setattr("dpsur.per_example.contributions.lost_to_underflow", nothing_is_lost)
    assert contribution(VANISHING[name](), 1e-6) > 1e-5


@pytest.mark.parametrize("name", ["linear-no-bias", "linear-wide-sequence", "conv2d-wide"])
def test_records_of_all_sizes_find_norms_that_underflow(name, monkeypatch):
    monkeypatch.setattr("dpsur.per_example.contributions.lost_to_underflow", nothing_is_lost)
    assert worst_contribution(name, draws=40) > 1 + 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_are_right_for_every_norm(dtype):
    """Also where bound / norm is next to nothing: rounded there, it could be twice as large."""
    generator = torch.Generator().manual_seed(0)
    highest = 38.5 if dtype == torch.float32 else 308.0
    norms = scales(20_000, generator, 0.0, highest).to(dtype)
    for bound in (1e-38, 1e-20, 1e-6, 1.0, 10.0):
        factors = clip_factors(norms, bound, None).values
        assert float((factors.double() * norms.double()).nan_to_num().max()) <= bound * (1 + 1e-6)
        plain = torch.where(norms < float("inf"), (bound / norms).clamp(max=1.0), 0.0)
        if bound == 1e-6 and dtype == torch.float32:  # the control
            assert float((plain.double() * norms.double()).nan_to_num().max()) > bound * (1 + 1e-2)


def test_an_overflow_among_inner_products_stays_one():
    """It may come out as minus infinity, which is less than any bound on rounding errors."""
    squares = torch.tensor([-torch.inf, -1.0, 4.0, 4.0])
    safe = guard(squares, torch.tensor([1e10, 1.0, 1e-4, torch.nan]))
    assert safe[0] == torch.inf
    assert safe[1] >= 1.0
    assert safe[2] == 4.0
    assert safe[3].isnan()  # an error that is not known: the record is left out


class MaskedSum(nn.Module):
    """A layer on positions of which some are masked out, and a second one on their sum."""

    def __init__(self, width=64):
        super().__init__()
        self.each, self.whole = nn.Linear(width, width, bias=False), nn.Linear(width, 2, bias=False)
        with torch.no_grad():
            self.each.weight[:, 0] = 1e-6  # so that the gradient of the second layer stays small
            direction = nn.functional.normalize(torch.randn(width), dim=0)
            self.whole.weight.copy_(torch.tensor([[0.36], [-0.36]]) * direction)

    def forward(self, x):
        return self.whole((self.each(x[..., :-1]) * x[..., -1:]).sum(1))


@pytest.mark.parametrize("guarded", [True, False])
def test_an_overflow_that_meets_a_masked_position_does_not_hide_an_error(guarded, monkeypatch):
    """Positions nearly cancel, and the bound on the error is zero times infinity."""
    if not guarded:  # the control: an error that is no number compares as small
        monkeypatch.setattr(
            "dpsur.per_example.contributions.guard",
            lambda squares, errors: torch.where(errors > 4e-3 * squares, squares + errors, squares),
        )
    count, most = 16, 0.45 * 3.4e38  # below the largest number, and twice it is above
    record = torch.zeros(1, count + 1, 65)
    places = torch.arange(count)
    record[0, :count, 0] = (most / count) ** 0.5 * (1 - 2 * (places % 2)) * (1 + places % 7 * 1e-6)
    record[0, :count, -1] = 1.0
    record[0, count, 0] = most**0.5
    moved = []
    for seed in range(6):
        torch.manual_seed(seed)
        records = Examples(record, torch.tensor([0]))
        problem = Problem(MaskedSum(), nn.functional.cross_entropy, records)
        moved.append(contribution(problem, 1.0))
    assert max(moved) <= 1.001 if guarded else max(moved) > 100.0


@pytest.mark.parametrize("formed", [True, False])
def test_tied_tables_are_measured_without_vectors_as_long_as_the_table(formed, monkeypatch):
    """Both ways that the linear layer may come in: as gradients, and as factors."""
    monkeypatch.setattr(contributions, "instantiating_pays", lambda *_: formed)
    monkeypatch.delattr(Lookups, "_chosen")
    problem = made("tied-language", torch.float64)
    params = problem.initial_params()
    assert strategy_for(problem, params, problem.train.inputs).reason is None
    found = clipped_sum(problem, params, problem.train, 0.01).params
    each = gradients(problem, params, problem.train)
    scales = [min(1.0, 0.01 / norm(row)) for row in each]
    for name, value in found.items():
        expected = sum(scale * row[name] for scale, row in zip(scales, each, strict=True))
        torch.testing.assert_close(value, expected)
