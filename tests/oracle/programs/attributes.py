"""Attributes of modules: what a step sets there is for this step.

A shape is no value: code in the record level reads it, and could keep it for later steps.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from tests.oracle.harness import BOUNDED, Setup, limit, refused
from tests.oracle.programs import add, family
from tests.oracle.programs.layers import trained
from tests.oracle.programs.models import BagOfWords, Tagger, TwoLayers
from tests.oracle.records import LENGTH, RAGGED, TABLE, TEXTS

legitimate, coupled = family("attributes")
CHANGES = refused("changes during a forward pass")


def padded(records):
    texts, labels = zip(*records, strict=True)
    return pad_sequence(texts, batch_first=True), torch.stack(labels)


class Lengths(BagOfWords):
    """Scales by the longest text that it has seen; programs say where that is kept."""

    def __init__(self):
        super().__init__()
        self.start()

    def start(self):
        self.longest = 3

    def note(self, length):
        self.longest = max(self.longest, length)

    def kept(self):
        return self.longest

    def forward(self, text):
        self.note(text.shape[1])
        return super().forward(text) * (1 + self.kept() / 8)


def by_length(name, *, private_step=BOUNDED, **methods):
    """A program whose model keeps lengths by `start`, `note` and `kept`."""

    def make():
        def loss(model, batch):
            return F.cross_entropy(model(batch[0]), batch[1])

        return Setup(type("Model", (Lengths,), methods)(), loss, collate=padded)

    add(
        RAGGED,
        make,
        family="attributes",
        name=name,
        legitimate=False,
        private_step=private_step,
        opacus=private_step if private_step is CHANGES else None,  # it pads in the loop
    )


LARGEST = {"note": lambda self, length: self.longest.fill_(max(float(self.longest), length))}
BUFFER = {"start": lambda self: self.register_buffer("longest", torch.tensor(3.0))}


def frozen(self):
    self.longest = nn.Parameter(torch.tensor(3.0), requires_grad=False)


def registered(self, length):
    """As positions with dynamic scaling do."""
    if length > float(self.longest):
        self.register_buffer("longest", torch.tensor(float(length)), persistent=False)


by_length("longest in a number")
by_length(
    "longest in a list",
    start=lambda self: setattr(self, "seen", [3]),
    note=lambda self, length: self.seen.append(length),
    kept=lambda self: max(self.seen),
)
by_length(
    "lengths in a set in a list in a dict",
    start=lambda self: setattr(self, "seen", {"all": [{3}]}),
    note=lambda self, length: self.seen["all"][0].add(length),
    kept=lambda self: max(self.seen["all"][0]),
)
by_length(
    "longest in a module in a list",
    start=lambda self: setattr(self, "others", [nn.Identity()]),
    note=lambda self, length: setattr(
        self.others[0], "most", max(getattr(self.others[0], "most", 3), length)
    ),
    kept=lambda self: getattr(self.others[0], "most", 3),
)
by_length(
    "buffer registered anew",
    start=lambda self: self.register_buffer("longest", torch.tensor(3.0), persistent=False),
    note=registered,
)
by_length(
    "buffer of the saved state registered anew", **BUFFER, note=registered, private_step=CHANGES
)
by_length("buffer filled", **BUFFER, **LARGEST, private_step=CHANGES)
by_length(
    "buffer filled through its data",
    **BUFFER,
    note=lambda self, length: self.longest.data.fill_(max(float(self.longest), length)),
    private_step=CHANGES,
)
by_length(
    "data of a buffer replaced",
    **BUFFER,
    note=lambda self, length: setattr(self.longest, "data", torch.tensor(float(length))),
    private_step=CHANGES,
)
by_length("frozen parameter filled", start=frozen, **LARGEST, private_step=CHANGES)
by_length(
    "tensor in an attribute filled",
    start=lambda self: setattr(self, "longest", torch.tensor(3.0)),
    **LARGEST,
    private_step=CHANGES,
)
by_length(
    "hook registered for a long text",
    note=lambda self, length: (
        length > LENGTH and self.head.register_forward_hook(lambda module, args, out: 2 * out)
    ),
)
by_length(
    "child in evaluation mode after a long text",
    start=lambda self: setattr(self, "child", nn.Identity()),
    note=lambda self, length: self.child.train(length <= LENGTH),
    kept=lambda self: 3 + self.child.training,
)
by_length(
    "child replaced after a long text",
    start=lambda self: setattr(self, "child", nn.Identity()),
    note=lambda self, length: length > LENGTH and setattr(self, "child", nn.Tanh()),
    kept=lambda self: self.child(torch.tensor(3.0)),
)


def hooked(self, length):
    """In the record level this raises; then each record is tried alone."""
    if length > LENGTH:
        self.head.register_full_backward_hook(lambda module, given, out: (2 * given[0],))


class Doubled(Lengths):
    def forward(self, text):
        return 2 * super().forward(text) + self.head.bias


def become(self, length):
    if length > LENGTH:
        self.__class__ = Doubled


by_length("backward hook registered for a long text", note=hooked)
by_length(
    "settings of a layer for a long text",
    note=lambda self, length: length > LENGTH and setattr(self.words, "padding_idx", None),
)
by_length("another class after a long text", note=become)
by_length(
    "longest in an object of a class",
    start=lambda self: setattr(self, "held", SimpleNamespace(longest=3)),
    note=lambda self, length: setattr(self.held, "longest", max(self.held.longest, length)),
    kept=lambda self: self.held.longest,
    private_step=limit("State in Python objects that a model keeps"),
)


@legitimate(TABLE, opacus=refused("outlives its step in kl"))
def loss_of_a_layer_in_an_attribute():
    """As variational autoencoders and mixtures of experts leave it for the loss."""

    class Model(TwoLayers):
        kl = 0.0

        def forward(self, x):
            hidden = self.first(x)
            self.kl = hidden.square().mean()
            return self.second(hidden.tanh())

    return Setup(Model(), lambda m, b: F.cross_entropy(m(b[0]), b[1]) + 0.1 * m.kl)


@legitimate(TABLE, opacus=refused("outlives its step"))
def maps_of_layers_in_a_dict():
    class Model(TwoLayers):
        def __init__(self):
            super().__init__()
            self.maps = {}

        def forward(self, x):
            self.maps["first"] = self.first(x)
            return self.second(self.maps["first"].tanh())

    def loss(model, batch):
        found = F.cross_entropy(model(batch[0]), batch[1])
        return found + model.maps["first"].abs().mean()

    return Setup(Model(), loss)


@legitimate(TABLE)
def attribute_read_by_a_checkpoint():
    class Model(TwoLayers):
        scale = 1.0

        def block(self, x):
            return self.first(x).tanh() * self.scale

        def forward(self, x):
            self.scale = 2.0
            return self.second(checkpoint(self.block, x, use_reentrant=False))

    return trained(Model())


@legitimate(TEXTS)
def cache_by_length():
    class Model(Tagger):
        def __init__(self):
            super().__init__()
            self.cache = {}

        def forward(self, text):
            length = text.shape[1]
            if length not in self.cache:
                self.cache[length] = torch.linspace(0, 1, length).to(self.head.weight)
            return (super().forward(text) * self.cache[length][:, None]).mean(1)

    return trained(Model())


@legitimate(TEXTS, opacus=refused("outlives its step"))
def keys_and_values_in_a_list():
    """As a cache of a decoder grows, word by word."""

    class Model(Tagger):
        def __init__(self):
            super().__init__()
            self.cache = []

        def forward(self, text):
            self.cache.clear()
            found = []
            for place in range(text.shape[1]):
                self.cache.append(self.words(text[:, place : place + 1]))
                known = torch.cat(self.cache, 1)
                found.append((self.cache[-1] @ known.transpose(1, 2)).softmax(-1) @ known)
            return self.head(self.over_time(torch.cat(found, 1))[0]).mean(1)

    return trained(Model())


@legitimate(TABLE, opacus=refused("outlives its step"))
def features_of_a_hook_in_an_attribute():
    model = TwoLayers()
    model.seen = {}
    model.first.register_forward_hook(lambda _, __, out: model.seen.update(first=out))

    def loss(model, batch):
        found = F.cross_entropy(model(batch[0]), batch[1])
        return found + model.seen["first"].square().mean()

    return Setup(model, loss)


@coupled(TABLE, private_step=refused("puts attributes of modules back"), opacus=None)
def features_of_a_hook_in_a_closure():
    model, seen = TwoLayers(), {}
    model.first.register_forward_hook(lambda _, __, out: seen.update(first=out))

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + seen["first"].square().mean()

    return Setup(model, loss)
