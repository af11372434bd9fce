"""The gradients of a private step as CUDA graphs.

A step of a custom loop is thousands of small launches, which take a GPU several times as long to
receive as to do. The gradients of a batch are therefore captured once, for each shape of record and
each of a few sizes of batch, and replayed: the launches of a whole step become one. Batches are
padded to the next size with copies of a record that a mask leaves out of the clipped sum.

A replay runs no Python. What a function reads beside its batch is therefore compared before each
replay: numbers and tensors that it finds in its closure, in globals and in attributes of the
modules. Where one has changed the graph is captured again, and where it keeps changing the steps
run without a graph. Arguments of the step need no graph of their own: numbers with a fraction and
tensors become inputs of the graph.
"""

import dis
import inspect
import logging
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsur.engine.loader import Unreadable, settings_of
from dpsur.engine.weights import Sums, TrainedModule
from dpsur.errors import DpsurError
from dpsur.functional.process_settings import seeded_globally, widen
from dpsur.functional.tree import (
    Params,
    children_of,
    empty_like,
    keep,
    map_tensors,
    tensors_of,
    with_tensors,
)
from dpsur.mechanism import cuda_graphs
from dpsur.mechanism.cuda_graphs import capture_graphs, fill
from dpsur.mechanism.gaussian import level_for, padded_sizes
from dpsur.per_example.record_function import RecordFunction
from dpsur.per_example.record_level import only_trusted_rules
from dpsur.per_example.tape import Tape

# Graphs of one function. Each holds some memory, and most texts come in few lengths.
MOST_GRAPHS = 24
DEVICE = "cuda"  # which is captured on
# A capture takes as long as some steps. So many replays are padded to every third size alone, which
# spares captures; later each size has its graph, which spares padding.
COARSE_STEPS, COARSE = 100, 3
# Kinds of batches and arguments that are remembered until they come again.
MOST_SEEN = 1000
# After so many captures for other reasons than a new shape, what changes keeps changing.
MOST_CHANGES = 4
# Longer lists are data, not settings.
MOST_ITEMS = 100
# Sizes of batches that are parts of a sample: at most a third of the rows are padding.
SIZES = tuple(sorted({base << power for power in range(24) for base in (2, 3)}))


@dataclass(eq=False)
class _Graph:
    """A captured pass over a batch of one size, and where its inputs and outputs lie.

    All that a replay reads and that was made before the capture is kept here, or its memory would
    be given to others.
    """

    surroundings: "Surroundings"
    batch: list[Tensor]
    rows: Tensor  # numbers of the places
    count: Tensor
    arguments: list[Tensor]
    replays: list[Callable[[], None]] = field(default_factory=list)
    found: Any = None  # losses and other figures, or outputs
    # of a call of the model: which outputs have no gradient, and the gradients of the others
    constant: list[bool] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    tape: Tape | None = None

    def __post_init__(self) -> None:
        self.scale = torch.ones_like(self.rows, dtype=torch.float64)
        self.counted = torch.ones_like(self.rows, dtype=torch.bool)

    def load(self, batch: Any, count: int, arguments: Sequence[Any] = ()) -> None:
        """Put a batch of `count` records into place, and copies of one where there is room left."""
        for place, value in zip(self.batch, tensors_of(batch), strict=True):
            fill(place, value, count)
        self.count.fill_(count)
        for place, argument in zip(self.arguments, arguments, strict=True):
            if isinstance(argument, Tensor):
                place.copy_(argument, non_blocking=True)
            else:
                place.fill_(argument)

    @property
    def keep(self) -> Tensor:
        return (self.rows < self.count) & self.counted


class _Graphs:
    """Captured passes of one function, for each shape of record and a few sizes of batch.

    `module` clips the gradients and adds them up; `sample` is the number of records and the rate at
    which they are drawn; `owner` is the user's function, or None, whose closure is compared.
    """

    def __init__(
        self,
        module: TrainedModule,
        records: RecordFunction,
        sample: tuple[int, float],
        owner: Any = None,
    ) -> None:
        self._module, self._records, self._owner = module, records, owner
        # Not the last, which holds any sample: where batches are small it is twice as large, and
        # one in a thousand needs it.
        self._sizes = tuple(sorted(set(padded_sizes(*sample)[:-1])))
        self._steps = 0
        self._seen: set[object] = set()
        self._graphs: dict[object, _Graph] = {}
        self._changes = 0
        self._pool: Any = None
        self.why_not: str | None = None  # once it is known that passes cannot be captured
        self.totals: Params = {}

    def _find(
        self, batch: Any, count: int, most: int | None, arguments: Any
    ) -> tuple[int, object] | None:
        """Room and key of a graph for a batch; None where it has to run eagerly.

        `most` is the number of records in a whole microbatch, where a sample is split. The first
        batch of a kind runs eagerly: that finds how the function can be run, and compiles kernels.
        """
        device = tensors_of(batch)[0].device
        if device.type != DEVICE or self.why_not is not None or not _comparable(arguments, batch):
            return None
        if most is None:  # a whole sample
            sizes = self._sizes
            if self._steps < COARSE_STEPS:
                sizes = sizes[::-COARSE][::-1]  # the last among them
            room = sizes[level_for(sizes, count)]
        else:
            room = min(most, next((size for size in SIZES if size >= count), most))
        kind = (
            _structure(batch, _row),
            _structure(arguments, _constant),
            settings_of((batch, arguments)),
            self._module.max_grad_norm,
            cuda_graphs.failures,
            torch.is_autocast_enabled(device.type),
            torch.get_autocast_dtype(device.type),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
        )
        captured = self._module.sums.captured
        others = captured is not None and captured is not self.totals
        if room < count or others or kind not in self._seen:
            if len(self._seen) > MOST_SEEN:  # an argument that never comes again
                self._seen.clear()
            self._seen.add(kind)
            return None
        return room, (room, kind)

    def _replayed(
        self,
        kind: str,
        batch: Any,
        count: int,
        most: int | None,
        arguments: Any,
        functions: Callable[[_Graph], list[Callable[[], None]]],
    ) -> _Graph | None:
        """A graph that has run its first function on a batch, captured now if need be."""
        found = self._find(batch, count, most, arguments)
        if found is None:
            return None
        room, key = found
        values = [value for value in leaves_of(arguments) if _is_input(value)]
        graph = self._graphs.get(key)
        changed = None if graph is None else graph.surroundings.changed()
        if changed is not None:
            graph = None
            del self._graphs[key]
            self._changes += 1
            if self._changes >= MOST_CHANGES:
                self._give_up(
                    f"'{changed}' changes between steps; pass it to the step as an argument"
                )
        if graph is None and self.why_not is None and self._records.in_level(kind, batch):
            if len(self._graphs) >= MOST_GRAPHS:  # the oldest makes room
                del self._graphs[next(iter(self._graphs))]
            graph = self._captured(room, batch, values, functions)
            if graph is not None:
                self._graphs[key] = graph
        if graph is not None:
            self._steps += 1
            self._begin(self._module.sums)
            graph.load(batch, count, values)
            self._module.sums.replaying = kind == "gradients"
            with self._module.randomness():
                graph.replays[0]()
        return graph

    def _captured(
        self,
        room: int,
        batch: Any,
        values: Sequence[Any],
        functions: Callable[[_Graph], list[Callable[[], None]]],
    ) -> _Graph | None:
        """A graph with replays of functions; None where they cannot be captured."""
        given = tensors_of(batch)
        device = given[0].device
        if self.totals and next(iter(self.totals.values())).device != device:
            self.totals, self._graphs = {}, {}  # the model has moved
        if not self.totals:
            trained = self._records.trained
            self.totals = empty_like({n: widen(value.detach()) for n, value in trained.items()})
        graph = _Graph(
            Surroundings(self._owner, self._records.models),
            [value.new_empty(room, *value.shape[1:]) for value in given],
            torch.arange(room, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
            [
                value.detach().to(device, copy=True)
                if isinstance(value, Tensor)
                else torch.full((), value, dtype=torch.float32, device=device)
                for value in values
            ],
        )
        graph.load(batch, len(given[0]), values)
        graph.count.zero_()  # so that what is computed to capture it adds zero
        if self._pool is None and device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with seeded_globally(0, device):  # the draws of the step are those of its replay
                before = graph.surroundings.draws()
                graph.replays = capture_graphs(
                    *(functions(graph), device),
                    pool=self._pool,
                    warm_up=1,
                    try_out=not self._graphs,
                )
                if graph.surroundings.draws() != before:
                    self._give_up("the function draws random numbers on the host")
                    return None
            return graph
        except DpsurError:
            raise
        except torch.OutOfMemoryError:
            self._give_up("there is too little memory for a graph")
        except Exception as error:  # without its text, which may quote a record
            self._give_up(
                f"the function raises {type(error).__name__} while it is captured, as code does "
                "that reads values on the host"
            )
        return None

    def _begin(self, sums: Sums) -> None:
        """Before a replay: the totals of another step are forgotten."""
        if sums.captured is None:
            torch._foreach_zero_(list(self.totals.values()))
            sums.captured = self.totals

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self._graphs.clear()
        logging.getLogger("dpsur.engine").warning(
            "dpsur: private steps are not captured as a CUDA graph, with the same results, but "
            "slower: %s",
            why,
        )


class GradientGraphs(_Graphs):
    """Captured gradients of a private step: forward and backward pass, norms and clipped sums."""

    def run(
        self,
        function: Callable[..., Any],
        batch: Any,
        count: int,
        most: int | None,
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Losses and other figures of the records of a batch. Private."""

        def functions(graph: _Graph) -> list[Callable[[], None]]:
            inner, following = with_tensors(batch, graph.batch), iter(graph.arguments)
            inner_args, inner_kwargs = map_tensors(
                lambda _: next(following),
                (args, kwargs),
                otherwise=lambda value: next(following) if _is_input(value) else value,
            )

            def gradients() -> None:
                tape, *graph.found = self._records.tape(
                    lambda one: function(one, *inner_args, **inner_kwargs), inner, len(graph.rows)
                )
                self._module.clip(tape, keep=graph.keep, totals=self.totals)

            return [gradients]

        graph = self._replayed("gradients", batch, count, most, (args, kwargs), functions)
        if graph is None:
            return None
        losses, figures = graph.found
        figures = {name: value[:count].clone() for name, value in figures.items()}
        return losses[:count].clone(), figures


# Clips the gradients of the outputs of a call, times a scale, of the records that count.
Clip = Callable[[float | Tensor, Tensor | None], None]


class CallGraphs(_Graphs):
    """Captured calls of a module, in a loop that computes the loss from its outputs itself.

    One graph runs forward. Its outputs get a node in autograd's graph, which runs the second one
    backward from whatever gradient comes from the user's loss: the backward pass of the module,
    norms, and clipped sums. What they are added to is shared by all graphs, and so is the memory
    of their activations: while one has run forward and not yet back, no other may run.
    """

    _forward_in: Sums | None = None  # the step in which one has run forward, not yet back

    def run(
        self, function: Callable[[Any], Any], batch: Any, count: int, most: int | None
    ) -> tuple[Any, Clip] | None:
        """Outputs of a replayed call, and what clips their gradients."""
        sums = self._module.sums
        if not torch.is_grad_enabled() or self._forward_in is sums:
            return None
        functions = partial(self._functions, function, batch)
        graph = self._replayed("outputs", batch, count, most, None, functions)
        if graph is None:
            return None
        self._forward_in = sums
        outputs = _Replayed.apply(graph, count, graph.scale.new_zeros((), requires_grad=True))  # type: ignore[no-untyped-call]

        def clip(scale: float | Tensor, keep: Tensor | None) -> None:
            if isinstance(scale, Tensor) and scale.dim():
                fill(graph.scale, scale.reshape(-1), count)
            else:
                graph.scale.fill_(scale)
            graph.counted.fill_(True)
            if keep is not None:
                fill(graph.counted, keep, count)
            sums.replaying = True
            graph.replays[1]()
            self._forward_in = None

        return with_tensors(graph.found, outputs), clip

    def _functions(
        self, function: Callable[[Any], Any], batch: Any, graph: _Graph
    ) -> list[Callable[[], None]]:
        inner, room = with_tensors(batch, graph.batch), len(graph.rows)

        def forward() -> None:
            graph.found = None  # with its graph, before another is made
            graph.tape, graph.found = self._records.run(function, inner, room)
            graph.constant = [not value.requires_grad for value in tensors_of(graph.found)]

        def backward() -> None:
            tape, outputs = graph.tape, tensors_of(graph.found)
            assert tape is not None
            if not graph.gradients:
                graph.gradients = [torch.zeros_like(value) for value in outputs]
            pairs = [
                pair for pair in zip(outputs, graph.gradients, strict=True) if pair[0].requires_grad
            ]
            # a backward pass is outside of the autocast that the call may be in
            with only_trusted_rules(), torch.autocast(graph.rows.device.type, enabled=False):
                torch.autograd.grad(
                    [value for value, _ in pairs],
                    tape.leaves,
                    [gradient for _, gradient in pairs],
                    allow_unused=True,
                )
            tape.recording = False
            tape.spoiled = rows_with_nan(outputs, room)
            self._module.clip(tape, keep=graph.keep, totals=self.totals, scale=graph.scale)
            graph.tape = None
            graph.found = map_tensors(Tensor.detach, graph.found, otherwise=keep)

        return [forward, backward]


class _Replayed(torch.autograd.Function):
    """Outputs of a replayed forward pass; their gradients are put where its backward pass reads."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, count: int, _: Tensor) -> tuple[Tensor, ...]:
        ctx.graph, ctx.count = graph, count
        found = tuple(value[:count].clone() for value in tensors_of(graph.found))
        constant = zip(found, graph.constant, strict=True)
        ctx.mark_non_differentiable(*(value for value, fixed in constant if fixed))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        for place, gradient in zip(ctx.graph.gradients, gradients, strict=True):
            if gradient is not None and place.is_floating_point():
                fill(place, gradient, ctx.count)
        return None, None, None


def rows_with_nan(outputs: Sequence[Tensor], records: int) -> Tensor | None:
    """Records with NaN among their outputs, from which a loss is NaN; None without an output."""
    found = [
        value.reshape(records, -1).amax(1).isnan()
        for value in outputs
        if value.numel() and value.is_floating_point()
    ]
    return torch.stack(found).any(0) if found else None


class Surroundings:
    """What a function reads beside its arguments, as far as it can be found, to be compared.

    That is what its closure and its globals name, and those of functions that it calls; what
    objects, classes and Python modules among these hold under names that the code reads; the
    attributes of `nn.Module`s; and what stands directly in lists and dictionaries. Numbers, texts
    and places of tensors are compared, other objects by identity.
    Not seen: what changes inside of an object that is none of these (an array of NumPy), or deeper
    in lists and dictionaries.
    """

    def __init__(self, owner: Any, models: Sequence[nn.Module]) -> None:
        # name for logs, how to look it up again, what it was
        self._read: list[tuple[str, Callable[[], Any], Any]] = []
        # what modules hold: thousands of things, so all of a module are compared at once
        self._held: list[tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]]] = []
        self._names: list[str] = []  # of numbers, with how to get them again and what they were
        self._get_numbers: list[Callable[[], Any]] = []
        self._numbers: list[Any] = []
        self._generators: list[Any] = []  # that the function may draw from, on the host
        for name, look_up in _readings(owner):
            self._read.append((name, look_up, look_up()))
            self._add(name, self._read[-1][2])
        for module in (module for model in models for module in model.modules()):
            for held in (vars(module), module._parameters, module._buffers):
                self._held.append((held, tuple(held), tuple(held.values())))
                for name, value in held.items():
                    self._add(name, value)

    def _add(self, name: str, value: Any, *, inside: bool = False) -> None:
        """What a value holds itself, beside being the value that it is."""
        if isinstance(value, Tensor):
            self._number(name, value.data_ptr)
            if value.device.type == "cpu" and value.numel() == 1:  # which a graph would keep
                self._number(name, value.item)
        elif isinstance(value, (random.Random, np.random.Generator, torch.Generator)):
            self._generators.append(value)
        elif not inside and isinstance(value, (dict, list, tuple)) and len(value) <= MOST_ITEMS:
            self._number(name, value.__len__)
            get = value.get if isinstance(value, dict) else value.__getitem__
            for key in list(value) if isinstance(value, dict) else range(len(value)):
                # under the name of the whole: keys of a dictionary may be data
                self._read.append((name, partial(get, key), get(key)))
                self._add(name, get(key), inside=True)

    def _number(self, name: str, get: Callable[[], Any]) -> None:
        self._names.append(name)
        self._get_numbers.append(get)
        self._numbers.append(get())

    def draws(self) -> list[str]:
        """Where random numbers of the host stand, which a replay would not draw."""
        own = [
            one.getstate()
            if isinstance(one, random.Random)
            else one.bit_generator.state
            if isinstance(one, np.random.Generator)
            else one.get_state().tolist()
            for one in self._generators
        ]
        usual = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()]
        with np.printoptions(threshold=sys.maxsize):
            return [repr(one) for one in (*usual, *own)]

    def changed(self) -> str | None:
        """The first that is not as it was, and where it was; None if all is."""
        for held, names, values in self._held:
            if not all(map(is_, map(held.get, names), values)):
                for name, value in zip(names, values, strict=True):
                    if _differ(held.get(name), value):
                        return name
        numbers = [get() for get in self._get_numbers]
        if numbers != self._numbers:
            pairs = zip(self._names, numbers, self._numbers, strict=True)
            return next(name for name, now, value in pairs if now != value)
        for name, look_up, value in self._read:
            if _differ(look_up(), value):  # anything may stand there by now
                return name
        return None


def _differ(now: Any, value: Any) -> bool:
    if now is value:
        return False
    plain = isinstance(value, (bool, int, float, str)) and type(now) is type(value)
    return not (plain and now == value)


def _content(cell: Any) -> Any:
    """What a variable of a closure holds; None for nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _readings(owner: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What a function and those that it calls read by name."""
    functions, objects = ([], []) if owner is None else _reached(owner)
    for function in functions:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            yield name, partial(_content, cell)
        for name in _globals_in(function):
            yield name, partial(function.__globals__.get, name)
    for one in objects:
        for name in _names_in(functions):
            yield name, partial(vars(one).get, name)


def _reached(owner: Any) -> tuple[list[FunctionType], list[Any]]:
    """Functions that are called, and objects, classes and modules whose attributes they read."""
    functions: list[FunctionType] = []
    objects: list[Any] = []
    seen: list[Any] = []
    ahead = [owner]
    while ahead:
        value = ahead.pop()
        seen.append(value)
        if isinstance(value, partial):
            ahead += [value.func, *value.args, *value.keywords.values()]
        elif callable(value):
            ahead.append(getattr(value, "__self__", None))
            value = inspect.unwrap(getattr(value, "__func__", value))
        if isinstance(value, FunctionType):
            if value not in functions and (value is owner or not _is_library(value.__module__)):
                functions.append(value)
                ahead += map(_content, value.__closure__ or ())
                ahead += map(value.__globals__.get, _globals_in(value))
        elif _has_attributes(value) and not any(value is one for one in objects):
            objects.append(value)
            ahead += () if isinstance(value, (type, ModuleType)) else type(value).__mro__
        if not ahead:  # more names may be read by now
            held = (vars(one).get(name) for one in objects for name in _names_in(functions))
            ahead += [one for one in held if not any(one is each for each in seen)]
    return functions, objects


def _is_library(home: str) -> bool:
    return home.partition(".")[0] in ("torch", "transformers", "peft", "dpsur")


def _has_attributes(value: Any) -> bool:
    if isinstance(value, (Tensor, nn.Module)) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, ModuleType):
        home = value.__name__
    else:
        home = (value if isinstance(value, type) else type(value)).__module__
    return home != "builtins" and not _is_library(home)


def _codes(functions: Iterable[FunctionType]) -> list[CodeType]:
    """Their code, and that of functions inside of them."""
    found = [one.__code__ for one in functions]
    for code in found:
        found += [one for one in code.co_consts if isinstance(one, CodeType)]
    return found


def _names_in(functions: Sequence[FunctionType]) -> list[str]:
    return sorted({"__call__", *(name for code in _codes(functions) for name in code.co_names)})


def _globals_in(function: FunctionType) -> list[str]:
    read = (one for code in _codes([function]) for one in dis.get_instructions(code))
    return [one.argval for one in read if one.opname == "LOAD_GLOBAL"]


def leaves_of(tree: Any) -> list[Any]:
    """Tensors and whatever else a tree holds."""
    found: list[Any] = []
    map_tensors(found.append, tree, otherwise=found.append)
    return found


def _is_input(value: Any) -> bool:
    return isinstance(value, (Tensor, float))


def _comparable(arguments: Any, batch: Any) -> bool:
    """Whether all arguments are inputs of a graph, or constants whose text says what they are."""
    try:
        given = leaves_of((arguments, batch))
    except Exception:  # a dataclass that cannot be made of other values
        return False
    plain = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, Unreadable)
    return all(
        not value.requires_grad if isinstance(value, Tensor) else isinstance(value, plain)
        for value in given
    )


def _structure(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Classes, names and leaves of a tree, to be compared: its own text may not say them."""
    children = None if isinstance(tree, Tensor) else children_of(tree)
    if children is None:
        return leaf(tree)
    return type(tree), tuple((name, _structure(one, leaf)) for name, one in children.items())


def _row(value: Any) -> Any:
    """A tensor of records by one of them."""
    return (tuple(value.shape[1:]), value.dtype) if isinstance(value, Tensor) else repr(value)


def _constant(value: Any) -> Any:
    """What a graph holds for alone: all arguments but numbers in its inputs."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return "number" if _is_input(value) else repr(value)
