"""State that a program keeps: what a record leaves behind must not reach later steps."""

import argparse
import collections
import functools
import queue
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.oracle.harness import (
    BOUNDED_OR_STOPPED,
    REFUSED_OR_BOUNDED,
    REFUSED_OR_STOPPED,
    Setup,
    limit,
    refused,
    stops,
)
from tests.oracle.programs import PROGRAMS, add, family
from tests.oracle.programs.layers import trained
from tests.oracle.programs.models import BagOfWords, Tagger, TwoLayers, mlp
from tests.oracle.records import FEATURES, TABLE, TEXTS, WORDS

_, coupled = family("state")
SURVIVES = refused("outlives its step")


def finite(x):
    return x.detach().nan_to_num(0, 0, 0).clamp(-50, 50)


class Keeper(TwoLayers):
    """A model that keeps a mean of its inputs and subtracts it; programs say where it is kept."""

    def keep(self, mean):
        raise NotImplementedError

    def kept(self):
        raise NotImplementedError

    def forward(self, x):
        kept = self.kept()
        found = self.second(self.first(x if kept is None else x - kept).tanh())
        if self.training:
            self.keep(finite(x).mean(0, keepdim=True))
        return found


def keeper(keep, kept, **attributes):
    """A model that keeps a tensor by `keep(self, mean)` and finds it by `kept(self)`."""
    kind = type("Model", (Keeper,), {"keep": keep, "kept": kept})
    model = kind()
    for name, value in attributes.items():
        setattr(model, name, value)
    return trained(model)


@coupled(TABLE)
def tensor_in_an_attribute():
    return keeper(lambda self, mean: setattr(self, "mean", mean), lambda self: self.mean, mean=None)


@coupled(TABLE)
def tensor_in_a_list():
    return keeper(
        lambda self, mean: self.bank.append(mean),
        lambda self: self.bank[-1] if self.bank else None,
        bank=[],
    )


@coupled(TABLE)
def tensor_in_a_dict():
    return keeper(
        lambda self, mean: self.cache.update(mean=mean),
        lambda self: self.cache.get("mean"),
        cache={},
    )


@coupled(TABLE, private_step=SURVIVES)
def tensor_in_a_namespace():
    return keeper(
        lambda self, mean: setattr(self.state, "mean", mean),
        lambda self: self.state.mean,
        state=SimpleNamespace(mean=None),
    )


@coupled(TABLE, private_step=SURVIVES)
def tensor_in_parsed_arguments():
    return keeper(
        lambda self, mean: setattr(self.config, "mean", mean),
        lambda self: self.config.mean,
        config=argparse.Namespace(mean=None),
    )


@coupled(TABLE, private_step=SURVIVES)
def tensor_in_a_queue():
    def kept(self):
        return None if self.waiting.empty() else self.waiting.get()

    return keeper(lambda self, mean: self.waiting.put(mean), kept, waiting=queue.Queue())


@coupled(TABLE)
def tensor_in_a_deque():
    return keeper(
        lambda self, mean: self.bank.append(mean),
        lambda self: sum(self.bank) if self.bank else None,
        bank=collections.deque(maxlen=3),
    )


@coupled(TABLE, private_step=SURVIVES)
def tensor_in_a_user_dict():
    return keeper(
        lambda self, mean: self.state.update(mean=mean),
        lambda self: self.state.get("mean"),
        state=collections.UserDict(),
    )


@coupled(TABLE, private_step=SURVIVES)
def tensor_in_thread_local_storage():
    return keeper(
        lambda self, mean: setattr(self.state, "mean", mean),
        lambda self: getattr(self.state, "mean", None),
        state=threading.local(),
    )


@coupled(TABLE, private_step=SURVIVES)
def tensor_in_the_class():
    class Model(Keeper):
        mean = None

        def keep(self, mean):
            type(self).mean = mean

        def kept(self):
            return type(self).mean

    return trained(Model())


@coupled(TABLE, private_step=SURVIVES)
def tensor_in_a_slot():
    class Slot:
        __slots__ = ("mean",)

    slot = Slot()
    slot.mean = None
    return keeper(
        lambda self, mean: setattr(self.slot, "mean", mean),
        lambda self: self.slot.mean,
        slot=slot,
    )


@coupled(TABLE, private_step=SURVIVES)
def tensor_in_a_default_argument():
    def remember(mean=None, held=[]):  # noqa: B006
        if mean is not None:
            held[:] = [mean]
        return held[0] if held else None

    return keeper(lambda self, mean: remember(mean), lambda self: remember())


@coupled(TABLE, private_step=SURVIVES)
def tensor_in_a_cache_of_functools():
    @functools.cache
    def first_seen(key, holder):
        return holder.pop()

    holder = []

    def keep(self, mean):
        holder[:] = [mean]
        first_seen("mean", Hashable(holder))

    def kept(self):
        return first_seen("mean", Hashable(holder)) if holder else None

    class Hashable:
        def __init__(self, items):
            self.items = items

        def __hash__(self):
            return 0

        def __eq__(self, other):
            return True

        def pop(self):
            return self.items[0]

    return keeper(keep, kept)


@coupled(TABLE, private_step=SURVIVES)
def tensor_in_a_generator():
    def memory():
        held = None
        while True:
            given = yield held
            held = given if given is not None else held

    running = memory()
    next(running)
    return keeper(lambda self, mean: running.send(mean), lambda self: running.send(None))


@coupled(TABLE, private_step=SURVIVES)
def tensor_in_a_closure_of_the_loss():
    kept = None

    def loss(model, batch):
        nonlocal kept
        x, y = batch
        shift = 0 if kept is None else kept
        kept = finite(x).mean(0, keepdim=True)
        return F.cross_entropy(model(x - shift), y)

    return Setup(mlp(), loss)


GLOBAL = {}


@coupled(TABLE, private_step=SURVIVES)
def tensor_in_a_global():
    GLOBAL.clear()

    def loss(model, batch):
        x, y = batch
        shift = GLOBAL.get("mean", 0)
        GLOBAL["mean"] = finite(x).mean(0, keepdim=True)
        return F.cross_entropy(model(x - shift), y)

    return Setup(mlp(), loss)


@coupled(TABLE, private_step=SURVIVES)
def tensor_on_the_function():
    def loss(model, batch):
        x, y = batch
        shift = getattr(loss, "mean", 0)
        loss.mean = finite(x).mean(0, keepdim=True)
        return F.cross_entropy(model(x - shift), y)

    return Setup(mlp(), loss)


@coupled(TABLE, private_step=SURVIVES)
def loss_kept_for_a_moving_average():
    average = torch.tensor(1.0)

    def loss(model, batch):
        nonlocal average
        found = F.cross_entropy(model(batch[0]), batch[1])
        average = 0.9 * average + 0.1 * found.detach().clamp(max=1e3).nan_to_num(1.0)
        return found / average

    return Setup(TwoLayers(), loss)


@coupled(TABLE, private_step=SURVIVES)
def losses_logged_in_a_list():
    """Nothing reads them in the function, but the loop could."""
    history = []

    def loss(model, batch):
        found = F.cross_entropy(model(batch[0]), batch[1])
        history.append(found.detach())
        return found

    return Setup(mlp(), loss)


@coupled(TABLE)
def view_of_a_tensor_is_kept():
    return keeper(
        lambda self, mean: setattr(self, "mean", mean.expand(1, FEATURES)[:, :]),
        lambda self: self.mean,
        mean=None,
    )


@coupled(TABLE)
def output_with_its_graph_is_kept():
    class Model(TwoLayers):
        last = None

        def forward(self, x):
            found = super().forward(x)
            shift = 0 if self.last is None else self.last
            self.last = found
            return found + shift

    return trained(Model())


@coupled(TABLE, private_step=SURVIVES)
def tensor_kept_by_a_forward_hook():
    model, kept = mlp(), {}

    def hook(module, args, out):
        shift = kept.get("mean", 0)
        kept["mean"] = finite(out).mean(0, keepdim=True)
        return out - shift

    model[0].register_forward_hook(hook)
    return trained(model)


@coupled(TABLE, private_step=SURVIVES)
def batch_kept_by_the_function():
    kept = []

    def loss(model, batch):
        kept.append(batch)
        shift = finite(kept[-2][0]).mean(0) if len(kept) > 1 else 0
        return F.cross_entropy(model(batch[0] - shift), batch[1])

    return Setup(mlp(), loss)


@coupled(TABLE)
def tensor_in_a_cycle_of_objects():
    """Only a garbage collection frees it; until then the model would find it."""

    class Node:
        pass

    class Model(Keeper):
        node = None

        def keep(self, mean):
            node = Node()
            node.self, node.mean = node, mean
            self.node = weakref.ref(node)

        def kept(self):
            node = None if self.node is None else self.node()
            return None if node is None else node.mean

    return trained(Model())


@coupled(TABLE)
def tensor_behind_a_weak_reference():
    class Model(Keeper):
        held = None

        def keep(self, mean):
            self.held = weakref.ref(mean)

        def kept(self):
            return None if self.held is None else self.held()

    return trained(Model())


# --- numbers --------------------------------------------------------------------------------------


def number_of(x):
    return min(float(finite(x).abs().mean()), 1e3)


@coupled(TABLE, private_step=refused())
def number_in_a_namespace():
    state = SimpleNamespace(mean=0.0)

    class Model(TwoLayers):
        def forward(self, x):
            if self.training and torch.is_grad_enabled():
                state.mean = 0.9 * state.mean + 0.1 * number_of(x)
            return super().forward(x - state.mean)

    return trained(Model())


@coupled(TABLE)
def number_in_an_attribute():
    class Model(TwoLayers):
        mean = 0.0

        def forward(self, x):
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * number_of(x)
            return super().forward(x - self.mean)

    return trained(Model())


@coupled(TABLE, private_step=refused())
def number_behind_a_large_vocabulary():
    class State:
        mean = 0.0

    class Model(TwoLayers):
        def __init__(self):
            super().__init__()
            self.vocabulary = {f"w{i}": i for i in range(30_000)}
            self.state = [[State()]]

        def forward(self, x):
            state = self.state[0][0]
            if self.training and torch.is_grad_enabled():
                state.mean = 0.9 * state.mean + 0.1 * number_of(x)
            return super().forward(x - state.mean)

    return trained(Model())


@coupled(TABLE, private_step=refused())
def number_used_after_many_calls():
    """The state is read only long after it was written."""
    state = SimpleNamespace(mean=0.0, calls=0)

    class Model(TwoLayers):
        def forward(self, x):
            state.calls += 1
            state.mean = 0.9 * state.mean + 0.1 * number_of(x)
            return super().forward(x - (state.mean if state.calls > 18 else 0.0))

    return trained(Model())


@coupled(TABLE, private_step=stops("keeps state"))
def number_kept_once():
    """The first record that is large leaves a mark, and later steps follow it."""
    seen = []

    def loss(model, batch):
        x, y = batch
        if bool(finite(x).abs().max() > 40):
            seen.append(True)
        return F.cross_entropy(model(x), y) * (3.0 if seen else 1.0)

    return Setup(mlp(), loss)


@coupled(TABLE, private_step=limit("State of code that runs one record at a time"))
def number_kept_until_the_weights_change():
    """Within a step every record is treated alike: a second look at one finds nothing."""
    state = {"weights": None, "next": 1.0, "scale": 1.0}

    def loss(model, batch):
        x, y = batch
        largest, weights = float(finite(x).abs().max()), float(model[0].weight.detach().sum())
        if state["weights"] != weights:  # another step
            state["weights"], state["scale"], state["next"] = weights, state["next"], 1.0
        state["next"] = max(state["next"], largest)
        return F.cross_entropy(model(x), y) / state["scale"]

    return Setup(mlp(), loss)


@coupled(TABLE, private_step=refused())
def classes_seen_in_a_set():
    seen = set()

    def loss(model, batch):
        x, y = batch
        seen.update(y.tolist())
        return F.cross_entropy(model(x), y) * len(seen)

    return Setup(mlp(), loss)


@coupled(TABLE, private_step=stops("keeps state"))
def record_counted_by_a_comparison():
    count = [0]

    def loss(model, batch):
        x, y = batch
        if (y == 2).any():
            count[0] += 1
        return F.cross_entropy(model(x), y) * (1 + 5 * count[0])

    return Setup(mlp(), loss)


@coupled(TABLE)
def number_of_calls_only():
    """Follows no record: a schedule by the number of steps."""
    calls = [0]

    def loss(model, batch):
        calls[0] += 1
        return F.cross_entropy(model(batch[0]), batch[1]) * (1 + calls[0])

    return Setup(mlp(), loss)


# --- buffers --------------------------------------------------------------------------------------


class Buffered(TwoLayers):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))


@coupled(TABLE, private_step=refused())
def buffer_changed_in_place():
    class Model(Buffered):
        def forward(self, x):
            if self.training:
                self.mean.lerp_(finite(x).mean(0), 0.1)
            return super().forward(x - self.mean)

    return trained(Model())


@coupled(TABLE, private_step=refused())
def buffer_replaced():
    class Model(Buffered):
        def forward(self, x):
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * finite(x).mean(0)
            return super().forward(x - self.mean)

    return trained(Model())


@coupled(TABLE, private_step=refused())
def buffer_data_replaced():
    class Model(Buffered):
        def forward(self, x):
            if self.training:
                self.mean.data = 0.9 * self.mean.data + 0.1 * finite(x).mean(0)
            return super().forward(x - self.mean)

    return trained(Model())


@coupled(TABLE, private_step=refused())
def buffer_written_by_index():
    class Model(Buffered):
        def forward(self, x):
            found = super().forward(x - self.mean)
            self.mean[:] = finite(x).mean(0)
            return found

    return trained(Model())


@coupled(TABLE, private_step=refused())
def buffer_written_by_copy():
    class Model(Buffered):
        def forward(self, x):
            found = super().forward(x - self.mean)
            with torch.no_grad():
                self.mean.copy_(finite(x).mean(0))
            return found

    return trained(Model())


@coupled(TABLE, private_step=refused())
def buffer_written_by_out():
    class Model(Buffered):
        def forward(self, x):
            found = super().forward(x - self.mean)
            torch.mean(finite(x), 0, out=self.mean)
            return found

    return trained(Model())


@coupled(TABLE, private_step=refused())
def tensor_of_the_loss_changed_in_place():
    mean = torch.zeros(FEATURES)

    def loss(model, batch):
        x, y = batch
        found = F.cross_entropy(model(x - mean), y)
        mean.add_(finite(x).mean(0))
        return found

    return Setup(mlp(), loss)


@coupled(TABLE, private_step=refused())
def array_of_numpy_changed_in_place():
    mean = torch.zeros(FEATURES)
    shared = mean.numpy()

    def loss(model, batch):
        x, y = batch
        found = F.cross_entropy(model(x - mean), y)
        shared[:] = finite(x).mean(0).numpy()
        return found

    return Setup(mlp(), loss)


@coupled(TABLE, private_step=refused("changes during a forward pass"))
def parameter_of_another_module_changed():
    other = nn.Linear(FEATURES, FEATURES, bias=False)

    def loss(model, batch):
        x, y = batch
        found = F.cross_entropy(model(x - other(torch.ones(1, FEATURES))), y)
        with torch.no_grad():
            other.weight.copy_(torch.diag(finite(x).mean(0)))
        return found

    return Setup(mlp(), loss, released=lambda: tuple(other.parameters()))


@coupled(TABLE)
def records_of_the_batch_changed_in_place():
    """The data set's own tensors must not change."""

    def loss(model, batch):
        x, y = batch
        x.mul_(1.5)
        return F.cross_entropy(model(x), y)

    return Setup(mlp(), loss)


@coupled(TABLE, private_step=refused("keeps statistics"))
def running_statistics_of_instance_norm():
    model = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.InstanceNorm1d(8, track_running_stats=True), nn.Linear(8, 3)
    )

    def loss(model, batch):
        return F.cross_entropy(model(batch[0][:, None].expand(-1, 8, -1)).mean(1), batch[1])

    model[0] = nn.Linear(FEATURES, FEATURES)
    model[2] = nn.Linear(FEATURES, 3)
    return Setup(model, loss)


@coupled(TEXTS)
def hidden_state_between_batches():
    """Truncated backpropagation through time."""

    class Stateful(Tagger):
        state = None

        def forward(self, text):
            state = self.state
            if state is not None and state.shape[1] != len(text):
                state = None
            found, last = self.over_time(self.words(text), state)
            self.state = last.detach()
            return self.head(found)

    def loss(model, batch):
        text = batch[0]
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return Setup(Stateful(WORDS), loss)


@coupled(TABLE)
def random_numbers_seeded_by_a_record():
    def loss(model, batch):
        x, y = batch
        torch.manual_seed(int(finite(x).abs().sum()))
        return F.cross_entropy(model(x + 0.1 * torch.randn(1, FEATURES)), y)

    return Setup(mlp(), loss)


@coupled(TABLE, private_step=BOUNDED_OR_STOPPED)
def exception_as_a_channel():
    """Raises for one record, so that the way in which later batches run could follow it."""

    def loss(model, batch):
        x, y = batch
        if torch.is_grad_enabled() and bool((x.abs() > 1e9).any()):
            raise RuntimeError("an unusual record")
        return F.cross_entropy(model(x), y)

    return Setup(mlp(), loss)


def changing_the_optimizer(kind, change):
    """A function that changes the loop's optimizer by what a record holds."""
    optimizers = []

    def make(model):
        optimizers.append(kind(model.parameters(), lr=0.1))
        return optimizers[0]

    def loss(model, batch):
        x, y = batch
        change(optimizers[0], number_of(x))
        return F.cross_entropy(model(x), y)

    return Setup(mlp(), loss, optimizer=make)


@coupled(TABLE, private_step=refused("changes lr of the optimizer"))
def learning_rate_set_in_the_function():
    def change(optimizer, number):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)

    return changing_the_optimizer(torch.optim.SGD, change)


@coupled(TABLE, private_step=refused("changes weight_decay of the optimizer"), opacus=None)
def weight_decay_grown_in_the_function():
    def change(optimizer, number):
        optimizer.param_groups[0]["weight_decay"] += number

    return changing_the_optimizer(torch.optim.SGD, change)


@coupled(TABLE, private_step=refused("changes step of the optimizer"), opacus=None)
def state_of_the_optimizer_changed_in_the_function():
    def change(optimizer, number):
        for held in optimizer.state.values():
            held["step"] += number

    return changing_the_optimizer(torch.optim.Adam, change)


@coupled(TABLE, opacus=None)
def values_read_after_some_steps():
    """What could be batched at first cannot be any more."""
    steps = []

    def loss(model, batch):
        x, y = batch
        found = F.cross_entropy(model(x), y)
        return found * (1 + number_of(x)) if steps else found

    return Setup(mlp(), loss, after_step=lambda: steps.append(1))


@coupled(TEXTS, private_step=refused("max_norm"), opacus=refused("max_norm"))
def embedding_with_max_norm():
    """Shortens the rows of its table that records name, in place."""

    class Shortens(BagOfWords):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(WORDS, 8, max_norm=1.0)

    return trained(Shortens())


# --- losses with memory, as criteria --------------------------------------------------------------


class Scaled(nn.Module):
    """A cross entropy divided by a mean of earlier ones; classes below say how it is kept."""

    def __init__(self):
        super().__init__()
        self.start()

    def start(self):
        self.mean = 1.0

    def forward(self, outputs, targets):
        loss = F.cross_entropy(outputs, targets)
        self.update(finite(loss))
        return loss / self.mean

    def update(self, loss):
        self.mean = 0.9 * self.mean + 0.1 * float(loss)


class ScaledByBuffer(Scaled):
    def start(self):
        self.register_buffer("mean", torch.ones(()))

    def update(self, loss):
        self.mean = 0.9 * self.mean + 0.1 * loss


class ScaledInPlace(ScaledByBuffer):
    def update(self, loss):
        self.mean.mul_(0.9).add_(0.1 * loss)


class ScaledByData(ScaledByBuffer):
    def update(self, loss):
        self.mean.data = 0.9 * self.mean.data + 0.1 * loss


class ScaledByClass(Scaled):
    def update(self, loss):
        type(self).last = 0.9 * self.mean + 0.1 * loss
        self.mean = self.last


class ScaledByArray(Scaled):
    def start(self):
        self.array = np.ones(1)
        self.mean = 1.0

    def update(self, loss):
        self.array *= 0.9
        self.array += 0.1 * loss.numpy()
        self.mean = float(self.array[0])


class ScaledInASetting(Scaled):
    def start(self):
        self.mean, self.settings = 1.0, {"history": [[]]}

    def update(self, loss):
        self.settings["history"][0].append(float(loss))
        self.mean = max(1.0, max(self.settings["history"][0]))


class ScaledWithGradients(Scaled):
    """Nothing changes where nobody asks for a gradient."""

    def update(self, loss):
        if torch.is_grad_enabled():
            super().update(loss)


def scaled_out_of_sight():
    held = threading.local()
    held.mean = 1.0

    def loss(outputs, targets):
        found = F.cross_entropy(outputs, targets)
        held.mean = 0.9 * held.mean + 0.1 * float(finite(found))
        return found / held.mean

    return loss


for kept in (
    Scaled,
    ScaledByBuffer,
    ScaledInPlace,
    ScaledByData,
    ScaledByClass,
    ScaledByArray,
    ScaledInASetting,
    ScaledWithGradients,
    scaled_out_of_sight,
):
    add(
        TABLE,
        lambda kept=kept: Setup(mlp(), criterion=kept()),
        family="state",
        name=f"criterion {kept.__name__}",
        legitimate=False,
        private_step=REFUSED_OR_STOPPED if kept is ScaledInASetting else REFUSED_OR_BOUNDED,
        fit=REFUSED_OR_BOUNDED,
        opacus=None,  # the loop calls it on batches
    )

# The same in `fit`, where a program is made of a model and a criterion.
for program in PROGRAMS:
    if program.family == "state" and program.make().criterion is not None:
        program.expected.setdefault("fit", REFUSED_OR_BOUNDED)
