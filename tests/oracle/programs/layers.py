"""Models whose records do not meet: layers, sharing, sampling and control flow."""

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.oracle.harness import BOUNDED, BOUNDED_OR_STOPPED, REFUSED_OR_BOUNDED, Setup
from tests.oracle.programs import add, family
from tests.oracle.programs.models import BagOfWords, Tagger, TwoLayers, mlp
from tests.oracle.records import (
    CLASSES,
    FEATURES,
    IMAGES,
    LENGTH,
    RAGGED,
    TABLE,
    TEXTS,
    WORDS,
)

legitimate, _ = family("layers")


def trained(model):
    return Setup(model, criterion=F.cross_entropy)


class Net(nn.Module):
    """A network of a function of its layers."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self._forward = forward

    def forward(self, x):
        return self._forward(x, **self.layers)


def table(name, model, **options):
    """A network on tables that trains with cross-entropy in all forms."""
    options = {"fit": BOUNDED, **options}
    add(TABLE, lambda: trained(model()), family="layers", name=name, legitimate=True, **options)


def images(name, model, **options):
    options = {"fit": BOUNDED, **options}
    add(IMAGES, lambda: trained(model()), family="layers", name=name, legitimate=True, **options)


def texts(name, model, **options):
    options = {"fit": BOUNDED, **options}
    add(TEXTS, lambda: trained(model()), family="layers", name=name, legitimate=True, **options)


def head(width):
    return nn.Linear(width, CLASSES)


table("mlp", mlp)
table("in-place relu", lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(True), head(8)))
table("layer norm", lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), head(8)))
table("rms norm", lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.RMSNorm(8), head(8)))
table("group norm", lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.GroupNorm(2, 8), head(8)))
table("prelu", lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.PReLU(8), head(8)))
table("weight norm", lambda: nn.Sequential(
    parametrizations.weight_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), head(8)))  # fmt: skip
table("orthogonal weights", lambda: nn.Sequential(
    parametrizations.orthogonal(nn.Linear(FEATURES, 8)), nn.Tanh(), head(8)))  # fmt: skip
table("spectral norm", lambda: nn.Sequential(
    parametrizations.spectral_norm(nn.Linear(FEATURES, 8), n_power_iterations=60), nn.Tanh(),
    head(8)), fit=REFUSED_OR_BOUNDED)  # fmt: skip
table("frozen layer", lambda: nn.Sequential(
    nn.Linear(FEATURES, 8).requires_grad_(False), nn.Tanh(), head(8)))  # fmt: skip
table("dropout", lambda: nn.Sequential(
    nn.Linear(FEATURES, 32), nn.Dropout(0.3), nn.Tanh(), head(32)), draws=True)  # fmt: skip
table("alpha dropout", lambda: nn.Sequential(
    nn.Linear(FEATURES, 32), nn.SELU(), nn.AlphaDropout(0.3), head(32)), draws=True)  # fmt: skip
table("randomised leaky relu", lambda: nn.Sequential(
    nn.Linear(FEATURES, 8), nn.RReLU(), head(8)), draws=True)  # fmt: skip
table(
    "bilinear",
    lambda: Net(
        lambda x, pair, out: out(pair(x[:, :3], x[:, 3:])), pair=nn.Bilinear(3, 3, 5), out=head(5)
    ),
)
images("cnn", lambda: nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(True), nn.MaxPool2d(2),
    nn.Flatten(), head(36)))  # fmt: skip
images("grouped and strided convolutions", lambda: nn.Sequential(
    nn.Conv2d(3, 6, 3, stride=2, groups=3), nn.SiLU(), nn.Conv2d(6, 6, 3, groups=6, padding=1),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), head(6)))  # fmt: skip
images("transposed convolution", lambda: nn.Sequential(
    nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3), nn.Flatten(),
    head(50)))  # fmt: skip
images("instance norm", lambda: nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Flatten(),
    head(144)))  # fmt: skip
images("channels last", lambda: nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(),
    head(288)).to(memory_format=torch.channels_last))  # fmt: skip
images(
    "convolution over one dimension",
    lambda: Net(
        lambda x, conv, out: out(conv(x.flatten(2)).mean(2)), conv=nn.Conv1d(3, 4, 5), out=head(4)
    ),
)
images("convolution over three dimensions", lambda: Net(
    lambda x, conv, out: out(conv(x[:, None]).flatten(1)), conv=nn.Conv3d(1, 2, (3, 5, 5)),
    out=head(32)))  # fmt: skip
images("squeeze and excitation", lambda: Net(
    lambda x, conv, gate, out: out((conv(x) * gate(conv(x).mean((2, 3))).sigmoid()[..., None, None])
                                   .mean((2, 3))),
    conv=nn.Conv2d(3, 4, 3), gate=nn.Linear(4, 4), out=head(4)))  # fmt: skip
images("dropout of channels", lambda: nn.Sequential(
    nn.Conv2d(3, 4, 3), nn.Dropout2d(0.3), nn.Flatten(), head(144)), draws=True)  # fmt: skip
texts("bag of words", BagOfWords)
texts(
    "unweighted mean of words",
    lambda: Net(
        lambda x, words, out: out(words(x).mean(1)), words=nn.Embedding(WORDS, 8), out=head(8)
    ),
)
texts("embedding bag of rows", lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 8), head(8)))
texts("embedding bag max", lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 8, mode="max"), head(8)))
texts("embedding scaled by frequency", lambda: Net(
    lambda x, words, out: out(words(x).mean(1)),
    words=nn.Embedding(WORDS, 8, scale_grad_by_freq=True), out=head(8)))  # fmt: skip
texts("lstm, last output", lambda: Net(
    lambda x, words, rnn, out: out(rnn(words(x))[0][:, -1]), words=nn.Embedding(WORDS, 8),
    rnn=nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True), out=head(16)))  # fmt: skip
texts("gru, time first", lambda: Net(
    lambda x, words, rnn, out: out(rnn(words(x).transpose(0, 1))[1][-1]),
    words=nn.Embedding(WORDS, 8), rnn=nn.GRU(8, 8), out=head(8)))  # fmt: skip
texts("rnn with a first state", lambda: Net(
    lambda x, words, rnn, out: out(rnn(words(x), torch.zeros(1, len(x), 8))[1][-1]),
    words=nn.Embedding(WORDS, 8), rnn=nn.RNN(8, 8, batch_first=True), out=head(8)))  # fmt: skip
texts("lstm with dropout", lambda: Net(
    lambda x, words, rnn, out: out(rnn(words(x))[1][0][-1]), words=nn.Embedding(WORDS, 8),
    rnn=nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2), out=head(8)), draws=True)  # fmt: skip


class OwnWeights(nn.Module):
    """A layer, and weights that its subclasses use in operations."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.scale, self.table = nn.Parameter(torch.rand(8)), nn.Parameter(torch.randn(CLASSES, 8))


@legitimate(TABLE, fit=BOUNDED)
def cosine_head():
    class Model(OwnWeights):
        def forward(self, x):
            turned = F.normalize(self.first(x)) * self.scale
            return F.linear(turned, F.normalize(self.table))

    return trained(Model())


@legitimate(TABLE, fit=BOUNDED)
def weights_written_into_values():
    class Model(OwnWeights):
        def forward(self, x):
            found = self.first(x) * 1
            found.mul_(self.scale).add_(self.table[0])
            found[:, :2] = self.scale[:2]
            return F.linear(found, self.table)

    return trained(Model())


@legitimate(TABLE, fit=BOUNDED)
def a_weight_added_to_new_zeros():
    class Model(OwnWeights):
        def forward(self, x):
            found = torch.zeros(len(x), 8, device=x.device, dtype=x.dtype)
            return F.linear(found.add_(self.scale).add_(self.first(x)), self.table)

    return trained(Model())


@legitimate(TEXTS)
def gru_cell_in_a_loop():
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.cell = nn.Embedding(WORDS, 8), nn.GRUCell(8, 8)
            self.out = head(8)

        def forward(self, x):
            found = self.words(x)
            state = found.new_zeros(len(x), 8)
            for time in range(x.shape[1]):
                state = self.cell(found[:, time], state)
            return self.out(state)

    return trained(Cells())


@legitimate(TEXTS)
def lstm_cell_in_a_loop():
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.cell = nn.Embedding(WORDS, 8), nn.LSTMCell(8, 8)
            self.out = head(8)

        def forward(self, x):
            state = None
            for column in self.words(x).unbind(1):
                state = self.cell(column, state)
            return self.out(state[0])

    return trained(Cells())


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True)
        self.out = head(8)

    def lengths(self, x):
        return (x != 0).sum(1).clamp(min=1).cpu()


@legitimate(TEXTS)
def packed_sequences():
    class Model(Packed):
        def forward(self, x):
            packed = pack_padded_sequence(
                self.words(x), self.lengths(x), batch_first=True, enforce_sorted=False
            )
            return self.out(self.rnn(packed)[1][-1])

    return trained(Model())


@legitimate(TEXTS)
def packed_and_unpacked():
    class Model(Packed):
        def forward(self, x):
            packed = pack_padded_sequence(
                self.words(x), self.lengths(x), batch_first=True, enforce_sorted=False
            )
            found, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return self.out(found.sum(1))

    return trained(Model())


@legitimate(TEXTS)
def sorted_by_length_and_back():
    class Model(Packed):
        def forward(self, x):
            order = self.lengths(x).argsort(descending=True)
            packed = pack_padded_sequence(
                self.words(x[order]), self.lengths(x)[order], batch_first=True
            )
            return self.out(self.rnn(packed)[1][-1][order.argsort()])

    return trained(Model())


def bag_collate(records):
    lengths = torch.tensor([len(record[0]) for record in records])
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])
    return torch.cat([r[0] for r in records]), starts, torch.stack([r[1] for r in records])


@legitimate(RAGGED)
def embedding_bag_with_offsets():
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags, self.out = nn.EmbeddingBag(WORDS, 8), head(8)

        def forward(self, words, starts):
            return self.out(self.bags(words, starts))

    return Setup(Bags(), lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]), collate=bag_collate)


# --- attention ------------------------------------------------------------------------------------


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(LENGTH, 8)
        self.out = head(8)

    def embed(self, x):
        return self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))


class Encoder(Embedded):
    def __init__(self, dropout=0.0, **options):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, **options)

    def forward(self, x):
        return self.out(self.layer(self.embed(x)).mean(1))


texts("transformer", Encoder)
texts("transformer norm first", lambda: Encoder(norm_first=True))
texts("transformer with dropout", lambda: Encoder(0.2), draws=True)


@legitimate(TEXTS, fit=BOUNDED)
def transformer_with_padding_mask():
    class Model(Encoder):
        def forward(self, x):
            pad = x == 0
            pad = torch.cat([torch.zeros_like(pad[:, :1]), pad[:, 1:]], 1)
            used = (~pad).to(self.out.weight.dtype)[..., None]
            found = self.layer(self.embed(x), src_key_padding_mask=pad)
            return self.out((found * used).sum(1) / used.sum(1))

    return trained(Model())


@legitimate(TEXTS, fit=BOUNDED)
def transformer_with_causal_mask():
    class Model(Encoder):
        def forward(self, x):
            causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            found = self.layer(self.embed(x), src_mask=causal.to(self.out.weight), is_causal=True)
            return self.out(found[:, -1])

    return trained(Model())


@legitimate(TEXTS, fit=BOUNDED)
def fused_attention():
    class Model(Encoder):
        def __init__(self):
            super().__init__()
            self.heads = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.heads(self.embed(x)).unflatten(2, (2, 12)).transpose(1, 2).chunk(3, 3)
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(self.layer(found.transpose(1, 2).flatten(2)).mean(1))

    return trained(Model())


@legitimate(TEXTS, fit=BOUNDED)
def attention_bias_is_trained():
    class Model(Embedded):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(LENGTH, LENGTH))

        def forward(self, x):
            q = self.embed(x)[:, None]
            found = F.scaled_dot_product_attention(q, q, q, attn_mask=self.bias)
            return self.out(found[:, 0].mean(1))

    return trained(Model())


@legitimate(TEXTS, fit=BOUNDED)
def attention_written_out():
    class Model(Embedded):
        def forward(self, x):
            h = self.embed(x)
            scores = h @ h.transpose(1, 2) / 8**0.5
            scores = scores.masked_fill((x == 0)[:, None], -1e4)
            return self.out((scores.softmax(2) @ h).mean(1))

    return trained(Model())


@legitimate(TEXTS, fit=BOUNDED)
def class_token_and_layer_scale():
    class Model(Encoder):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, 8))
            self.scale = nn.Parameter(torch.full((8,), 0.5))

        def forward(self, x):
            h = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
            return self.out((h + self.scale * self.layer(h))[:, 0])

    return trained(Model())


# --- sharing --------------------------------------------------------------------------------------


@legitimate(TEXTS)
def tied_embedding_and_output():
    class Tied(Tagger):
        def __init__(self):
            super().__init__(WORDS)
            self.head = nn.Linear(8, WORDS, bias=False)
            self.head.weight = self.words.weight

    def loss(model, batch):
        text = batch[0]
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return Setup(Tied(), loss)


@legitimate(TABLE, fit=BOUNDED)
def low_rank_adapter():
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
            self.down = nn.Parameter(0.3 * torch.randn(2, FEATURES))
            self.up = nn.Parameter(0.3 * torch.randn(CLASSES, 2))

        def forward(self, x):
            return self.base(x) + x @ self.down.T @ self.up.T

    return trained(Lora())


@legitimate(TABLE, fit=BOUNDED)
def parameters_of_a_list():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(FEATURES), torch.zeros(FEATURES)])
            self.out = head(FEATURES)

        def forward(self, x):
            return self.out(x * self.scales[0] + self.scales[1])

    return trained(Listed())


@legitimate(TABLE, fit=BOUNDED)
def weight_made_of_another_by_a_network():
    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.code, self.make = nn.Parameter(torch.randn(4)), nn.Linear(4, FEATURES * CLASSES)

        def forward(self, x):
            return x @ self.make(self.code).view(FEATURES, CLASSES)

    return trained(Hyper())


@legitimate(TABLE, fit=BOUNDED)
def weights_of_each_record_by_a_network():
    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.make = nn.Linear(FEATURES, FEATURES * CLASSES)

        def forward(self, x):
            return torch.bmm(x[:, None], self.make(x).view(-1, FEATURES, CLASSES)).squeeze(1)

    return trained(Hyper())


# --- control flow, drawing, writing ---------------------------------------------------------------


@legitimate(TABLE, draws=True)
def stochastic_depth_by_coin():
    class Model(TwoLayers):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(16, 16)

        def forward(self, x):
            h = self.first(x).tanh()
            keep = torch.empty(len(x), 1, device=x.device).bernoulli_(0.8)
            return self.second(h + keep * self.more(h) / 0.8)

    return trained(Model())


@legitimate(TABLE, draws=True)
def stochastic_depth_by_if():
    class Model(TwoLayers):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(16, 16)

        def forward(self, x):
            h = self.first(x).tanh()
            if torch.rand(()) > 0.5:
                h = h + self.more(h)
            return self.second(h) + 0 * self.more.weight.sum()

    return trained(Model())


@legitimate(TABLE, fit=BOUNDED)
def checkpointed_block():
    class Model(TwoLayers):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(16, 16)

        def forward(self, x):
            h = self.first(x).tanh()
            return self.second(checkpoint(lambda v: self.more(v).tanh(), h, use_reentrant=False))

    return trained(Model())


@legitimate(TABLE)
def checkpointed_block_reentrant():
    class Model(TwoLayers):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(16, 16)

        def forward(self, x):
            h = self.first(x).tanh()
            return self.second(torch.utils.checkpoint.checkpoint(self.more, h, use_reentrant=True))

    return trained(Model())


@legitimate(TABLE, draws=True)
def checkpointed_dropout():
    class Model(TwoLayers):
        def __init__(self):
            super().__init__()
            self.more = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3))

        def forward(self, x):
            h = self.first(x).tanh()
            return self.second(torch.utils.checkpoint.checkpoint(self.more, h, use_reentrant=False))

    return trained(Model())


@legitimate(TABLE)
def early_exit_of_each_record():
    class Model(TwoLayers):
        def __init__(self):
            super().__init__()
            self.early = nn.Linear(16, CLASSES)

        def forward(self, x):
            h = self.first(x).tanh()
            early = self.early(h)
            if early.softmax(1).max() > 0.4:
                return early + 0 * self.second(h)
            return self.second(h) + 0 * early

    return trained(Model())


@legitimate(TABLE)
def experts_by_nonzero():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(FEATURES, 2)
            self.experts = nn.ModuleList([nn.Linear(FEATURES, CLASSES) for _ in range(2)])

        def forward(self, x):
            gates = self.router(x).softmax(1)
            chosen = gates.argmax(1)
            out = x.new_zeros(len(x), CLASSES)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero()[:, 0]
                out = out.index_add(0, rows, expert(x[rows]) * gates[rows, index, None])
            return out

    return trained(Model())


@legitimate(TABLE, fit=BOUNDED)
def experts_by_weights():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(FEATURES, 2)
            self.experts = nn.ModuleList([nn.Linear(FEATURES, CLASSES) for _ in range(2)])

        def forward(self, x):
            each = torch.stack([expert(x) for expert in self.experts], 1)
            return (each * self.router(x).softmax(1)[..., None]).sum(1)

    return trained(Model())


@legitimate(TABLE, fit=BOUNDED)
def written_in_place():
    class Model(TwoLayers):
        def forward(self, x):
            h = self.first(x)
            h[:, :4] = 0
            h[:, 4:8] += 1
            h.mul_(2).tanh_()
            return self.second(h)

    return trained(Model())


@legitimate(TABLE)
def written_into_a_new_tensor():
    class Model(TwoLayers):
        def forward(self, x):
            h = torch.zeros(len(x), 16, device=x.device)
            h[:, ::2] = self.first(x)[:, ::2]
            return self.second(h)

    return trained(Model())


@legitimate(TABLE)
def input_clamped_in_place():
    class Model(TwoLayers):
        def forward(self, x):
            x.clamp_(-3, 3)
            return super().forward(x)

    return trained(Model())


@legitimate(TABLE, fit=BOUNDED)
def views_of_views():
    class Model(TwoLayers):
        def forward(self, x):
            h = self.first(x).view(len(x), 4, 4).transpose(1, 2)
            h = torch.cat([h[:, :2], h[:, 2:].flip(2)], 1).reshape(len(x), 16)
            return self.second(h.tanh())

    return trained(Model())


@legitimate(TABLE, fit=BOUNDED)
def straight_through_quantiser():
    class Model(TwoLayers):
        def forward(self, x):
            h = self.first(x)
            return self.second((h + ((h * 8).round() / 8 - h).detach()).tanh())

    return trained(Model())


@legitimate(TABLE, fit=BOUNDED)
def squeezed_output():
    """The shape of the output depends on the number of records."""

    class Model(TwoLayers):
        def forward(self, x):
            return super().forward(x).squeeze()

    return Setup(Model(), criterion=lambda out, y: F.cross_entropy(out.view(len(y), -1), y))


@legitimate(TABLE)
def batch_norm_in_evaluation_mode():
    class Model(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    return trained(
        Model(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8, affine=False), nn.Tanh(), head(8)).train()
    )


@legitimate(TABLE)
def mixed_precision():
    def loss(model, batch):
        with torch.autocast(batch[0].device.type, dtype=torch.bfloat16):
            out = model(batch[0])
        return F.cross_entropy(out.to(torch.get_default_dtype()), batch[1])

    return Setup(nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), head(64)), loss)


@legitimate(TABLE)
def forward_hook_that_scales():
    model = mlp()
    model[0].register_forward_hook(lambda module, args, out: out * 0.5)
    return trained(model)


@legitimate(TABLE)
def function_of_its_own():
    class Sign(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.sign()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, grad):
            return grad * (ctx.saved_tensors[0].abs() < 1)

    class Model(TwoLayers):
        def forward(self, x):
            return self.second(Sign.apply(self.first(x)))

    return trained(Model())


@legitimate(TABLE)
def function_of_its_own_in_the_older_form():
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx, grad):
            return grad * (ctx.saved_tensors[0].abs() < 1)

    class Model(TwoLayers):
        def forward(self, x):
            return self.second(Sign.apply(self.first(x)))

    return trained(Model())


@legitimate(IMAGES, fit=BOUNDED)
def spatial_transformer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.where, self.out = nn.Linear(192, 6), head(192)
            nn.init.normal_(self.where.weight, std=0.01)

        def forward(self, x):
            moves = self.where(x.flatten(1)).view(-1, 2, 3)
            grid = F.affine_grid(moves, list(x.shape), align_corners=False)
            return self.out(F.grid_sample(x, grid, align_corners=False).flatten(1))

    return trained(Model())


@legitimate(IMAGES, fit=BOUNDED)
def u_net():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.deep = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.up, self.out = nn.Conv2d(8, 2, 3, padding=1), head(128)

        def forward(self, x):
            one = self.down(x).relu()
            two = self.deep(F.avg_pool2d(one, 2)).relu()
            two = F.interpolate(two, scale_factor=2, mode="bilinear", align_corners=False)
            return self.out(self.up(torch.cat([one, two], 1)).flatten(1))

    return trained(Model())


@legitimate(IMAGES, fit=BOUNDED)
def patches_as_words():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.places = nn.Linear(48, 8), nn.Parameter(0.1 * torch.randn(1, 4, 8))
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.out = head(8)

        def forward(self, x):
            patches = F.unfold(x, 4, stride=4).transpose(1, 2)
            return self.out(self.layer(self.embed(patches) + self.places).mean(1))

    return trained(Model())


@legitimate(TABLE, private_step=BOUNDED_OR_STOPPED, fit=BOUNDED_OR_STOPPED)
def matrix_functions():
    class Model(TwoLayers):
        def forward(self, x):
            h = self.first(x).view(-1, 4, 4)
            spd = h @ h.transpose(1, 2) + torch.eye(4, device=x.device)
            return self.second(torch.linalg.cholesky(spd).flatten(1))

    return trained(Model())
