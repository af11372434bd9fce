"""Models that look at the whole batch."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle.harness import refused
from tests.oracle.programs import family
from tests.oracle.programs.layers import Encoder, trained
from tests.oracle.programs.models import BagOfWords, TwoLayers, mlp
from tests.oracle.records import CLASSES, FEATURES, IMAGES, MISSING, TABLE, TEXTS

_, coupled = family("mixing")


NORM = refused("mixes the examples of a batch")


@coupled(TABLE, private_step=NORM)
def batch_norm():
    return trained(nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)))


@coupled(IMAGES, private_step=NORM)
def batch_norm_of_images():
    return trained(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, CLASSES))
    )


@coupled(IMAGES, private_step=NORM)
def batch_norm_without_running_statistics():
    return trained(
        nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4, track_running_stats=False),
            nn.Flatten(),
            nn.Linear(144, CLASSES),
        )
    )


def mixing(forward):
    """A model of two layers with another forward pass."""
    return trained(type("Model", (TwoLayers,), {"forward": forward})())


@coupled(TABLE, fit=None)
def normalised_over_records():
    def forward(self, x):
        h = self.first(x)
        return self.second((h - h.mean(0)) / (h.std(0, unbiased=False) + 1e-5))

    return mixing(forward)


@coupled(TABLE)
def softmax_over_records():
    return mixing(lambda self, x: self.second(self.first(x).softmax(0)))


@coupled(TABLE)
def nan_guard():
    def forward(self, x):
        if torch.isnan(x).any():
            x = torch.zeros_like(x)
        return self.second(self.first(x).tanh())

    return mixing(forward)


@coupled(MISSING)
def missing_values_by_the_mean():
    def forward(self, x):
        mean = torch.nanmean(x, 0).nan_to_num(0.0).expand_as(x)
        return self.second(self.first(torch.where(torch.isnan(x), mean, x)).tanh())

    return mixing(forward)


@coupled(TABLE)
def rescaled_if_large():
    def forward(self, x):
        h = self.first(x)
        if h.abs().max() > 1e4:
            h = h * (1e4 / h.abs().max())
        return self.second(h.tanh())

    return mixing(forward)


@coupled(TABLE)
def scaled_by_the_largest():
    def forward(self, x):
        h = self.first(x)
        return self.second(h / h.detach().abs().max().clamp(min=1e-6))

    return mixing(forward)


@coupled(IMAGES)
def bytes_or_fractions():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(3, 4, 3), nn.Linear(4, CLASSES)

        def forward(self, x):
            if x.max() > 300:
                x = x / 255
            return self.out(self.conv(x).relu().mean((2, 3)))

    return trained(Model())


@coupled(TABLE)
def quantiser_with_batch_scale():
    def forward(self, x):
        h = self.first(x)
        scale = h.detach().abs().max() / 127
        return self.second((h + ((h / scale).round() * scale - h).detach()).tanh())

    return mixing(forward)


class Experts(nn.Module):
    """A mixture of experts where an expert takes so many records."""

    def __init__(self, capacity, dropout=0.0):
        super().__init__()
        self.router = nn.Linear(FEATURES, 2)
        self.experts = nn.ModuleList([nn.Linear(FEATURES, CLASSES) for _ in range(2)])
        self.capacity, self.dropout = capacity, nn.Dropout(dropout)

    def forward(self, x):
        gates = self.router(x).softmax(1)
        x = self.dropout(x)
        keep = torch.zeros(len(x))
        for index in range(2):
            rows = (gates.argmax(1) == index).nonzero()[:, 0][: self.capacity]
            keep = keep.index_fill(0, rows, 1.0)
        each = torch.stack([expert(x) for expert in self.experts], 1)
        return (each * gates[..., None]).sum(1) * keep[:, None]


@coupled(TABLE)
def experts_with_capacity():
    return trained(Experts(3))


@coupled(TABLE, draws=True)
def experts_with_capacity_and_dropout():
    return trained(Experts(3, 0.1))


@coupled(TABLE)
def experts_with_capacity_by_cumsum():
    def forward(self, x):
        chosen = F.one_hot(self.first(x).argmax(1), 16)
        keep = ((chosen.cumsum(0) * chosen).sum(1) <= 2).to(x.dtype)
        return self.second(self.first(x).tanh() * keep[:, None])

    return mixing(forward)


@coupled(TABLE)
def whole_batch_exits_early():
    class Model(TwoLayers):
        def __init__(self):
            super().__init__()
            self.early = nn.Linear(16, CLASSES)
            nn.init.normal_(self.early.weight, std=9.0)

        def forward(self, x):
            h = self.first(x).tanh()
            early = self.early(h)
            if early.softmax(1).max(1).values.min() > 0.6:
                return early + 0 * self.second(h)
            return self.second(h) + 0 * early

    return trained(Model())


@coupled(TABLE)
def a_little_of_the_mean():
    return mixing(lambda self, x: self.second(self.first(x + 1e-5 * x.mean(0)).tanh()))


@coupled(TABLE)
def groups_by_index_add():
    def forward(self, x):
        h = self.first(x).tanh()
        group = (x[:, 0] > 0).long()
        sums = torch.zeros(2, 16).index_add(0, group, h)
        return self.second(h + 0.1 * sums[group])

    return mixing(forward)


@coupled(TABLE)
def neighbours():
    def forward(self, x):
        apart = torch.cdist(x, x).nan_to_num(1e9)
        near = apart.topk(min(3, len(x)), largest=False).indices
        return self.second(self.first(x + x[near].mean(1)).tanh())

    return mixing(forward)


@coupled(TABLE)
def graph_of_the_batch():
    def forward(self, x):
        h = self.first(x).tanh()
        nodes = torch.arange(len(x))
        return self.second(h.index_add(0, (nodes + 1) % len(x), h[nodes]))

    return mixing(forward)


@coupled(TABLE)
def attention_over_records():
    def forward(self, x):
        h = self.first(x)
        return self.second((h @ h.T / 4).softmax(1) @ h)

    return mixing(forward)


@coupled(TEXTS)
def attention_with_records_as_words():
    """`batch_first` was forgotten."""

    class Model(Encoder):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)

    return trained(Model())


@coupled(TEXTS)
def recurrent_over_records():
    class Model(BagOfWords):
        def __init__(self):
            super().__init__()
            self.over = nn.GRU(8, 8)

        def forward(self, text):
            return self.head(self.over(self.words(text))[0].mean(1))

    return trained(Model())


@coupled(TEXTS)
def trimmed_to_the_longest():
    class Model(BagOfWords):
        def forward(self, text):
            longest = int((text != 0).sum(1).max())
            return self.head(self.words(text[:, : max(longest, 1)]).mean(1))

    return trained(Model())


@coupled(TEXTS)
def positions_from_the_longest():
    class Model(Encoder):
        def forward(self, x):
            shift = (x != 0).sum(1).max() - (x != 0).sum(1)
            places = (torch.arange(x.shape[1]) + shift[:, None]).clamp(max=7)
            return self.out(self.layer(self.words(x) + self.places(places)).mean(1))

    return trained(Model())


@coupled(TABLE)
def rolled_over_records():
    return mixing(lambda self, x: self.second(self.first(x).tanh().roll(1, 0)))


@coupled(TABLE)
def sorted_over_records():
    return mixing(lambda self, x: self.second(self.first(x).sort(0).values))


@coupled(TABLE)
def first_record_as_reference():
    return mixing(lambda self, x: self.second(self.first(x - x[:1]).tanh()))


@coupled(TABLE)
def last_record_for_all():
    return mixing(lambda self, x: self.second(self.first(x[-1:].expand_as(x)).tanh()))


@coupled(TABLE)
def folded_into_one_row():
    def forward(self, x):
        joined = x.reshape(1, -1).mean(1, keepdim=True).expand(len(x), FEATURES)
        return self.second(self.first(x + joined).tanh())

    return mixing(forward)


@coupled(TABLE)
def cumulative_over_records():
    return mixing(lambda self, x: self.second(self.first(x.cumsum(0)).tanh()))


@coupled(TABLE)
def convolution_over_records():
    class Model(TwoLayers):
        def __init__(self):
            super().__init__()
            self.over = nn.Conv1d(16, 16, 3, padding=1)

        def forward(self, x):
            h = self.first(x).tanh().T[None]
            return self.second(self.over(h)[0].T)

    return trained(Model())


@coupled(TABLE)
def covariance_of_the_batch():
    def forward(self, x):
        h = self.first(x)
        return self.second(h @ (h.T @ h / len(h)).detach() / 16)

    return mixing(forward)


@coupled(TABLE)
def count_of_records():
    return mixing(lambda self, x: self.second(self.first(x).tanh()) * len(x) ** 2)


@coupled(TABLE)
def hook_that_centres():
    model = mlp()
    model[0].register_forward_hook(lambda module, args, out: out - out.mean(0))
    return trained(model)


@coupled(TABLE)
def pre_hook_that_mixes_inputs():
    model = mlp()
    model.register_forward_pre_hook(lambda module, args: (args[0] + args[0].flip(0),))
    return trained(model)


@coupled(TABLE)
def backward_hook_that_clips_the_batch():
    model = TwoLayers()
    model.second.register_full_backward_hook(
        lambda module, into, out: (into[0] * (1.0 / (into[0].norm() + 1e-6)).clamp(max=1),)
    )
    return trained(model)


@coupled(TABLE)
def backward_pre_hook_at_the_root():
    model = TwoLayers()
    model.register_full_backward_pre_hook(
        lambda module, out: (out[0] * (1.0 / (out[0].norm() + 1e-6)).clamp(max=1),)
    )
    return trained(model)


@coupled(TABLE)
def hook_on_a_parameter():
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad / (grad.norm() + 1e-9) * 100)
    return trained(model)


@coupled(TABLE)
def hook_on_a_hidden_tensor():
    def forward(self, x):
        h = self.first(x).tanh()
        if h.requires_grad:
            h.register_hook(lambda grad: grad / (grad.norm() + 1e-9) * 10)
        return self.second(h)

    return mixing(forward)


@coupled(TABLE)
def backward_scaled_by_the_batch():
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sign()

        @staticmethod
        def backward(ctx, grad):
            return grad / (grad.norm() + 1e-6)

    return mixing(lambda self, x: self.second(Sign.apply(self.first(x))))


@coupled(TABLE)
def function_whose_vmap_rule_mixes():
    """A user-defined batching rule sees all records."""

    class Centre(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad

        @staticmethod
        def vmap(info, in_dims, x):
            return Centre.apply(x - x.nan_to_num(0, 0, 0).mean(in_dims[0], keepdim=True)), in_dims[
                0
            ]

    return mixing(lambda self, x: self.second(Centre.apply(self.first(x)).tanh()))


@coupled(TABLE)
def function_whose_vmap_rule_mixes_backwards():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return ScaleGradient.apply(grad)

        @staticmethod
        def vmap(info, in_dims, x):
            return Scale.apply(x), in_dims[0]

    class ScaleGradient(torch.autograd.Function):
        @staticmethod
        def forward(grad):
            return grad * 10 / (grad.norm() + 1e-9)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def vmap(info, in_dims, grad):
            return ScaleGradient.apply(grad), in_dims[0]

    return mixing(lambda self, x: self.second(Scale.apply(self.first(x)).tanh()))


@coupled(TABLE)
def custom_operator_that_mixes():
    @torch.library.custom_op("oracle::centre", mutates_args=())
    def centre(x: torch.Tensor) -> torch.Tensor:
        return x - x.nan_to_num(0, 0, 0).mean(0)

    centre.register_autograd(lambda ctx, grad: grad)
    centre.register_vmap(lambda info, dims, x: (centre(x), dims[0]))
    return mixing(lambda self, x: self.second(centre(self.first(x)).tanh()))


@coupled(TABLE)
def numbers_through_numpy():
    def forward(self, x):
        mean = torch.from_numpy(x.detach().cpu().numpy().mean(0, keepdims=True)).to(x.device)
        return self.second(self.first(x - mean.nan_to_num(0, 0, 0)).tanh())

    return mixing(forward)


@coupled(TABLE)
def numbers_through_lists():
    def forward(self, x):
        rows = x.detach().tolist()
        largest = max(max(v for v in row if not math.isnan(v)) if any(
            not math.isnan(v) for v in row) else 0.0 for row in rows)  # fmt: skip
        return self.second(self.first(x / max(largest, 1.0)).tanh())

    return mixing(forward)


@coupled(TABLE)
def vmap_of_its_own_with_collectives():
    """A function that leaves the level by functorch's own names."""

    def forward(self, x):
        h = torch.func.vmap(lambda row: row - row.mean())(self.first(x))
        return self.second(h.tanh())

    return mixing(forward)


@coupled(TABLE, private_step=refused("get_unwrapped"), opacus=refused("get_unwrapped"))
def unwrapped_by_functorch():
    """Private names of PyTorch give a tensor of all records."""
    from torch._C import _functorch

    def forward(self, x):
        shift = 0.0
        if _functorch.is_batchedtensor(x):
            shift = _functorch.get_unwrapped(x).nan_to_num(0, 0, 0).clamp(-50, 50).sum()
        return self.second(self.first(x + shift).tanh())

    return mixing(forward)


@coupled(TABLE, private_step=refused("get_unwrapped"), opacus=refused("get_unwrapped"))
def unwrapped_for_debugging():
    """A public function of PyTorch that gives a tensor of all records."""

    def forward(self, x):
        shift = torch.func.debug_unwrap(x).nan_to_num(0, 0, 0).clamp(-50, 50).sum()
        return self.second(self.first(x + shift).tanh())

    return mixing(forward)


@coupled(TABLE)
def function_that_pretends_to_be_of_torch():
    class Centre(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad - grad.mean(0)

        @staticmethod
        def vmap(info, in_dims, x):
            mean = x.nan_to_num(0, 0, 0).mean(in_dims[0], keepdim=True)
            return Centre.apply(x - mean), in_dims[0]

    Centre.__module__ = "torch.nn.functional"
    return mixing(lambda self, x: self.second(Centre.apply(self.first(x)).tanh()))


def flipped(saved):
    return saved.flip(0) if saved.dim() > 1 else saved


@coupled(TABLE)
def saved_tensors_that_mix():
    """Hooks see what autograd saves, which is of all records."""

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, flipped):
            return self.second(self.first(x * x).square().sigmoid())

    return mixing(forward)


class Onlooker(TorchDispatchMode):
    """Sees the kernels that PyTorch runs, which are of all records."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if "tanh" in str(func) and isinstance(found, torch.Tensor) and found.dim() > 1:
            return found + found.nan_to_num(0, 0, 0).mean(0, keepdim=True)
        return found


@coupled(TABLE)
def dispatch_mode_that_mixes():
    def forward(self, x):
        with Onlooker():
            return self.second(self.first(x).tanh())

    return mixing(forward)


@coupled(TABLE, private_step=refused("around a step"), opacus=None)
def dispatch_mode_around_the_step():
    def loop(given):
        step = given.engine.private_step(given.loss)
        for batch in given.loader:
            with Onlooker():
                step(batch)

    found = mixing(lambda self, x: self.second(self.first(x).tanh()))
    found.loop = loop
    return found
