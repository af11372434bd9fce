"""Ways in which programs use trained weights beside layers. A use that nothing sees would be lost.

In the record level weights carry no graph: what is done to them is followed one by one.
"""

import torch
import torch.func
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from tests.oracle.harness import BOUNDED, Setup, refused
from tests.oracle.programs import add, family
from tests.oracle.programs.models import mlp
from tests.oracle.records import CLASSES, FEATURES, TABLE, TEXTS, WORDS

legitimate, _ = family("weights")


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Net(nn.Module):
    """A network of a function of itself and of its inputs, with weights and layers by name."""

    def __init__(self, forward, *, layers=None, **shapes):
        super().__init__()
        self._forward = forward
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.3))
        for name, layer in (layers or {}).items():
            self.add_module(name, layer)

    def forward(self, x):
        return self._forward(self, x)


def net(forward, **parts):
    return Setup(Net(forward, **parts), cross_entropy)


def head(width=FEATURES):
    return {"head": nn.Linear(width, CLASSES)}


def halves(x):
    return torch.complex(x[:, :3], x[:, 3:])


@legitimate(TABLE, opacus=refused("past the clipped sum"))
def squeezed_rolled_and_as_scores():
    def forward(net, x):
        scaled = x * net.one.squeeze() + x * net.one[0].roll(1, 0) + torch.squeeze(net.number)
        return net.head(scaled + torch.roll(net.one, 2, -1).squeeze() * x)

    def loss(model, batch):
        found = F.cross_entropy(model.one, torch.tensor([1]))
        found = found + F.scaled_dot_product_attention(model.one, model.one, model.one).sum()
        return cross_entropy(model, batch) + found

    model = Net(forward, one=(1, FEATURES), number=(1, 1), layers=head())
    return Setup(model, loss)


@legitimate(TABLE)
def complex_numbers_of_real_weights():
    def forward(net, x):
        weight, z = torch.view_as_complex(net.weight), halves(x)
        found = (z @ weight.T).abs() + F.linear(z, weight).real
        return net.head(found + torch.einsum("bi,oi->bo", z, weight).imag + net.weight.sum((1, 2)))

    return net(forward, weight=(4, 3, 2), layers=head(4))


@legitimate(TABLE)
def filter_in_the_frequency_domain():
    def forward(net, x):
        changed = torch.fft.rfft(x) * torch.view_as_complex(net.filter)
        return net.head(torch.fft.irfft(changed, n=FEATURES) + x)

    return net(forward, filter=(FEATURES // 2 + 1, 2), layers=head())


@legitimate(TABLE)
def layer_with_a_complex_parametrization():
    class Complex(nn.Module):
        def forward(self, weight):
            return torch.complex(weight, weight.roll(1, 0))

        def right_inverse(self, weight):
            return weight

    layer = nn.Linear(3, 4, bias=False)
    parametrize.register_parametrization(layer, "weight", Complex(), unsafe=True)
    return net(
        lambda net, x: net.head(net.layer(halves(x)).abs()), layers={"layer": layer, **head(4)}
    )


def swish(weight):
    return weight * torch.sigmoid(weight)


def product(x, weight):
    return torch.matmul(x, weight.t())


@legitimate(TABLE)
def function_of_torchscript():
    of_weight, of_both = torch.jit.script(swish), torch.jit.script(product)

    def forward(net, x):
        scripted = F.linear(x, of_weight(net.weight)) + of_both(x, net.weight)
        return net.head(scripted + x @ net.weight)

    return net(forward, weight=(FEATURES, FEATURES), layers=head())


@legitimate(TABLE)
def ensemble_by_vmap():
    def forward(net, x):
        each = torch.func.vmap(lambda weight: (x @ weight).tanh())(net.weights)
        return net.head(each.mean(0) + x @ net.weights[0])

    return net(forward, weights=(4, FEATURES, FEATURES), layers=head())


@legitimate(TABLE, opacus=refused("inside of torch.func"))
def inner_step_by_func_grad():
    def loss(model, batch):
        x, y = batch
        weights = dict(model.named_parameters())

        def inner(these):
            return torch.func.functional_call(model, these, (x.flip(1),)).square().mean()

        slopes = torch.func.grad(inner)(weights)
        moved = {name: value - 0.5 * slopes[name] for name, value in weights.items()}
        return F.cross_entropy(torch.func.functional_call(model, moved, (x,)), y)

    return Setup(mlp(), loss)


@legitimate(TABLE)
def copy_written_in_place():
    def forward(net, x):
        links = net.links.clone()
        links.fill_diagonal_(0)
        links[0] = links[1] * 2
        return net.head(x @ links + x @ net.links)

    return net(forward, links=(FEATURES, FEATURES), layers=head())


@legitimate(TABLE)
def masked_in_place():
    mask = (torch.arange(FEATURES**2).view(FEATURES, FEATURES) % 2).float()

    def forward(net, x):
        weight = net.weight * 1.0
        weight.mul_(mask)
        return net.head(x @ weight)

    return net(forward, weight=(FEATURES, FEATURES), layers=head())


@legitimate(TABLE, opacus=refused("used outside of the model's own call"))
def view_that_was_made_before():
    found = net(
        lambda net, x: net.head(x * net.flat[:FEATURES] + x @ net.weight),
        weight=(FEATURES, FEATURES),
        layers=head(),
    )
    found.model.flat = found.model.weight.view(-1)
    return found


@legitimate(TABLE)
def compiled_part():
    model = mlp()
    model[0] = torch.compile(model[0], backend="eager")
    return Setup(model, cross_entropy)


@legitimate(TABLE, opacus=BOUNDED)
def compiled_in_place():
    model = mlp()
    model.compile(backend="eager")
    return Setup(model, cross_entropy)


@legitimate(TABLE)
def experts_that_some_batches_do_not_use():
    def forward(net, x):
        chances, chosen = net.gate(x).softmax(-1).topk(2, dim=-1)
        found = torch.zeros(len(x), CLASSES, dtype=x.dtype)
        for number in range(6):
            rows, place = torch.where(chosen == number)
            if len(rows):
                made = getattr(net, f"expert {number}")(x[rows])
                found = found.index_add(0, rows, chances[rows, place, None] * made)
        return found

    experts = {f"expert {number}": nn.Linear(FEATURES, CLASSES) for number in range(6)}
    return net(forward, layers={"gate": nn.Linear(FEATURES, 6), **experts})


# --- weights as inputs of layers ------------------------------------------------------------------


class Asking(nn.Module):
    """Words that are read by a few learned vectors; programs say how."""

    def __init__(self):
        super().__init__()
        self.words, self.asked = nn.Embedding(WORDS, 8), nn.Parameter(torch.randn(1, 3, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.over_time, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, CLASSES)

    def read(self, words, asked):
        raise NotImplementedError

    def forward(self, text):
        asked = self.asked.expand(len(text), -1, -1)
        found = self.head(self.read(self.words(text), asked).mean(1))
        all_layers = self.over_time(asked)[0].sum() + self.attention(asked, asked, asked)[0].sum()
        return found + 0 * all_layers


def asking(name, read):
    kind = type("Model", (Asking,), {"read": read})

    def make():
        return Setup(kind(), criterion=F.cross_entropy)

    add(TEXTS, make, family="weights", name=name, legitimate=True, fit=BOUNDED)


asking("learned queries", lambda self, x, asked: self.attention(asked, x, x)[0])
asking("learned queries added", lambda self, x, asked: asked + self.attention(asked, x, x)[0])
asking("learned keys", lambda self, x, asked: self.attention(x, asked, asked)[0])
asking("gru over both", lambda self, x, asked: self.over_time(torch.cat([asked, x], 1))[0])
asking(
    "gru over learned vectors from a record",
    lambda self, x, asked: asked + self.over_time(asked, x.mean(1)[None])[0],
)
