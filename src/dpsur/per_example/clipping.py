"""Clip the gradient of every record by itself and add them up (Alg. 1, L4-7).

How the gradients of a model are found, and for how many records at once, is decided once: the model
is called on the first records of the inputs, in the record level, and what the pass holds on to is
measured. Nothing of it is kept but the decision (`GradientStrategy`).
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.distributed import ALONE, Ranks, Reduction
from dpsur.errors import InvalidInputError
from dpsur.functional.problem import (
    LossFunction,
    Objective,
    Problem,
    call,
    every_module,
    mode,
    output_rows,
)
from dpsur.functional.process_settings import precision, seeded_globally, widen
from dpsur.functional.records import Examples
from dpsur.functional.tree import (
    Params,
    TensorTree,
    device_of,
    empty_like,
    map_tensors,
    row_count,
    signature,
    slice_rows,
    split_rows,
    tensors_of,
)
from dpsur.per_example.contributions import Factors, clip_factors
from dpsur.per_example.memory_budget import microbatch_rows
from dpsur.per_example.record_function import RecordFunction
from dpsur.per_example.tape import KnownInputs, Tape

# Of a model's inputs to inputs of the same structure, shapes and types, row by row.
Augment = Callable[[Any], Any]


@dataclass(frozen=True)
class GradientStrategy:
    """How gradients are found for a model, and records per microbatch.

    `reason` says why records are worked on one by one, if they are; `copied` which parameters are
    used by operations without a rule, with a gradient for every record.
    """

    rows: int
    records: RecordFunction = field(compare=False)
    reason: str | None = None
    copied: frozenset[str] = frozenset()


_strategies: WeakKeyDictionary[nn.Module, dict[object, GradientStrategy]] = WeakKeyDictionary()


def strategy_for(objective: Objective, params: Params, inputs: TensorTree) -> GradientStrategy:
    """How gradients are found for inputs of this shape, which may be on the host; made once."""
    device = next(iter(params.values())).device
    key = _key(objective, params, inputs)
    made = _strategies.setdefault(objective.model, {})
    if key not in made:
        first = map_tensors(lambda value: value.to(device), slice_rows(inputs, slice(2)))
        with seeded_globally(0, device):
            made[key] = _make(objective, params, first)
    return made[key]


def _key(objective: Objective, params: Params, inputs: TensorTree) -> tuple[object, ...]:
    """What a strategy depends on, the model aside."""
    device = next(iter(params.values())).device
    return (
        objective.bf16,
        signature(inputs),
        device,
        tuple((name, value.shape, value.dtype) for name, value in params.items()),
        tuple(
            (type(module), "forward" in vars(module)) for module in every_module(objective.model)
        ),
    )


def _make(objective: Objective, params: Params, inputs: TensorTree) -> GradientStrategy:
    own = dict(objective.model.named_parameters())
    records = RecordFunction((objective.model,), {name: own[name] for name in params})
    held, copied = [], frozenset[str]()
    most = row_count(inputs)
    for rows in range(1, most + 1):
        saved: list[Tensor] = []
        part = slice_rows(inputs, slice(rows))

        def hold(value: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(value.detach())  # a graph that holds its own outputs is never given back
            return saved[-1]

        try:
            with torch.autograd.graph.saved_tensors_hooks(hold, lambda value: value):
                tape = make_tape(objective, params, records, part, loss=sum_of_outputs)
        except RuntimeError:  # torch.func in a model allows no such hooks
            saved.clear()
            tape = make_tape(objective, params, records, part, loss=sum_of_outputs)
        saved += [
            value for uses in tape.contributions.values() for one in uses for value in one.tensors()
        ]
        storages = {value.untyped_storage()._cdata: value.untyped_storage() for value in saved}
        held.append(sum(storage.nbytes() for storage in storages.values()))
        copied = frozenset(tape.copied)
    alone = not records.by_construction
    memory = held[-1] - (held[-2] if most > 1 else 0)
    if alone:
        memory = 8 * sum(value.numel() for value in params.values())
    return GradientStrategy(
        microbatch_rows(
            memory,
            next(iter(params.values())).device,
            sum(value.nbytes for value in {**own, **params}.values()),
        ),
        records,
        records.why_alone if alone else None,
        copied,
    )


def sum_of_outputs(outputs: TensorTree, _: TensorTree) -> Tensor:
    """A loss that every number of the outputs matters to."""
    sums = [value.sum() for value in tensors_of(outputs) if value.is_floating_point()]
    if not sums:
        raise InvalidInputError("the model returns no tensor of numbers to compute a loss from")
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def make_tape(
    objective: Objective,
    params: Params,
    records: RecordFunction,
    inputs: TensorTree,
    targets: TensorTree = None,
    *,
    loss: LossFunction | None = None,
    known: KnownInputs | None = None,
) -> Tape:
    """What is known about every record's gradient: enough for its norm and for weighted sums.

    Norms and sums are to be taken with `precision(tf32=False)`. `loss` is one to use in the place
    of the objective's, `known` says where in a data set the inputs are.
    """
    views, augment = objective.views, objective.augment
    loss = objective.loss if loss is None else loss

    def function(one: tuple[TensorTree, TensorTree]) -> Tensor:
        given, wanted = one
        if augment is not None:
            given = _augmented(augment, given, views)
        with objective.training_precision():
            outputs = output_rows(call(objective.model, given))
        outputs = map_tensors(widen, outputs)
        if views == 1:
            return loss(outputs, wanted).reshape(())
        each = [loss(one_view, wanted).reshape(()) for one_view in split_rows(outputs, 1)]
        return torch.stack(each).mean()

    alone = map_tensors(lambda value: value.unsqueeze(1), (inputs, targets))
    with mode(objective.model, training=True):
        tape, _, _ = records.tape(function, alone, row_count(inputs), params=params, known=known)
    return tape


def check_augmentation(augment: Augment | None, views: int) -> None:
    checks.at_least_one("views", views)
    if augment is None and views > 1:
        raise InvalidInputError(f"views={views} needs augment=..., which makes them different")
    if augment is not None and not callable(augment):
        raise InvalidInputError("augment must be a function of the model's inputs")


def _augmented(augment: Augment, rows: TensorTree, views: int) -> TensorTree:
    """Several views of one record, whose gradients are averaged inside its one clipped gradient.

    It is called in the record level: what it does to a record cannot depend on other records.
    """
    rows = map_tensors(lambda value: value.repeat_interleave(views, 0), rows)
    found = augment(rows)
    same = type(found) is type(rows) and row_count(found) == views
    if not same or signature(found) != signature(rows):
        raise InvalidInputError(
            "augment must return what it is given: the same structure, number of rows, shapes and "
            "types"
        )
    return found


@dataclass(frozen=True)
class ClippedSum:
    """A sum of vectors and the most that one record can change it by, in L2 norm.

    Attributes:
        scratch: nobody else needs its memory, so that noise may be added in place.
        offsets: where the first number of each tensor stands in the whole vector, if these are
            the shards that one rank holds.
        whole: how many numbers that vector has.
    """

    params: Params
    sensitivity: float | Tensor
    scratch: bool = False
    offsets: Mapping[str, int] | None = None
    whole: int | None = None

    @property
    def count(self) -> int:
        if self.whole is not None:
            return self.whole
        return sum(value.numel() for value in self.params.values())


def clipped_sum(
    objective: Objective,
    params: Params,
    examples: Examples,
    max_grad_norm: float | Tensor,
    *,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    coins: Tensor | None = None,
    ranks: Ranks = ALONE,
    at_once: int | None = None,
) -> ClippedSum:
    """Sum of the per-example gradients of a batch, each scaled down to the norm bound.

    The batch is all of `examples`, or those that `rows` names, gathered a microbatch at a
    time. For the training set of a problem, what depends on the data alone is computed once.

    Formal guarantee: adding or removing one record of the batch moves the sum by at most
    `max_grad_norm` in L2 norm (over the reals), for any record: a gradient that is not finite
    counts as zero, and so does that of a loss that is NaN. An empty batch has the sum zero. A row
    for which `mask` is False adds exactly zero whatever it holds, so that batches of different
    sizes can be padded to one shape. After the first call for a model and a shape nothing here
    waits for the device. Where memory runs out, microbatches become smaller from then on. `coins`,
    a uniform draw in (0, 1] per row, rounds every clipped gradient at random to the norm 0 or the
    bound: the guarantee is the same, and so is the mean of the sum. `max_grad_norm` may be a number
    on the device.

    At most `at_once` rows are worked on at the same time, if that is given.

    The rows are those of this rank, and the sum is that of all `ranks`: all of them must call this,
    those without rows too.
    """
    size = len(examples) if rows is None else len(rows)
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (size,)):
        raise InvalidInputError(
            f"mask must hold one bool per row, {size} in all, "
            f"got {tuple(mask.shape)} of {mask.dtype}"
        )
    if rows is not None and (rows.dim() != 1 or rows.dtype != torch.int64):
        raise InvalidInputError(
            f"rows must be a list of indices, got {tuple(rows.shape)} of {rows.dtype}"
        )
    if any(value.dtype in (torch.float16, torch.bfloat16) for value in params.values()):
        raise InvalidInputError(
            "weights are in half precision, in which a clipped sum would be rounded before the "
            "noise; keep them in float32 and let layers round (bf16=True, or autocast)"
        )
    reduction, total = Reduction(ranks), dict[str, Tensor]()
    if not size:
        for name in reversed(params):
            reduction.add(name, torch.zeros_like(params[name]))
        return ClippedSum(_in_order(reduction.result(), params), sensitivity=max_grad_norm)
    strategy = strategy_for(objective, params, examples.inputs)
    start = 0
    while start < size:
        most = max(1, strategy.rows // objective.views)
        most = most if at_once is None else min(most, at_once)
        some = slice(start, min(start + most, size))
        found: Params = {}
        enough = True
        try:
            batch, known = _microbatch(objective, examples, some, rows, mask)
            travels = ranks.size > 1 and some.stop == size
            tape = make_tape(
                objective, params, strategy.records, batch.inputs, batch.targets, known=known
            )
            for name, value in clip_tape(
                tape,
                params,
                max_grad_norm,
                keep=None if mask is None else mask[some],
                coins=None if coins is None else coins[some],
                # one vector, so that whatever is done to all of them needs no copy
                places=total or empty_like(params),
                add=bool(total),
            ):
                found[name] = value
                if travels:  # to the other ranks, while the next layer's sum is computed
                    reduction.add(name, found.pop(name))
        except torch.OutOfMemoryError:
            captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            if some.stop - start == 1 or captured or reduction.begun:
                raise
            enough = False
        if not enough:  # outside of `except`, whose traceback would keep the memory
            fewer = 1 << (some.stop - start - 1).bit_length() - 1
            strategy = replace(strategy, rows=fewer * objective.views)
            _strategies[objective.model][_key(objective, params, examples.inputs)] = strategy
            logging.getLogger("dpsur.engine").warning(
                "dpsur: out of memory: continuing with microbatches of %d; the result is the same",
                strategy.rows,
            )
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            # from the first row: some layers may have added this microbatch to the total already
            total, start = {}, 0
            continue
        total, start = found, some.stop
    if ranks.size > 1:
        total = reduction.result()
    return ClippedSum(_in_order(total, params), sensitivity=max_grad_norm)


def _in_order(found: Params, params: Params) -> Params:
    return {name: found[name] for name in params}


def _microbatch(
    objective: Objective,
    examples: Examples,
    some: slice,
    rows: Tensor | None,
    mask: Tensor | None,
) -> tuple[Examples, KnownInputs | None]:
    """Some rows of a batch, with what they hold under the mask replaced, and where they stand."""
    keep = None if mask is None else mask[some]
    if rows is None:
        batch, known = examples.part(some), None
    else:
        batch = examples.select(rows[some])
        known = None
        if (  # of the training set, what depends on the data alone is computed once
            isinstance(objective, Problem)
            and examples.inputs is objective.train.inputs
            and isinstance(examples.inputs, Tensor)
        ):
            known = KnownInputs(examples.inputs, rows[some], batch.inputs, objective.tables)
    if keep is not None and not (known is not None and known.finite):
        batch = Examples(_blank(batch.inputs, keep), _blank(batch.targets, keep))
        known = None if known is None else replace(known, inputs=batch.inputs)
    return batch, known


def _blank(values: TensorTree, keep: Tensor) -> TensorTree:
    """Replace what masked rows hold, for a target that is no class would be an error."""
    return map_tensors(Factors(keep, keep).clean, values)


def clip_tape(
    tape: Tape,
    params: Params,
    max_grad_norm: float | Tensor,
    *,
    keep: Tensor | None = None,
    coins: Tensor | None = None,
    scale: float | Tensor | None = None,
    places: Params | None = None,
    add: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Norms, factors and weighted sums of a tape's records: the one place where gradients are cut.

    `scale` is what each gradient on the tape has to be multiplied by. Sums are put into `places`,
    or added to what is there, one parameter after the other.

    Formal guarantee: what is added for a record is, over the reals, its gradient times min(1,
    max_grad_norm / norm), where norm is that of the same gradient over all parameters; zero if the
    norm is not finite, the loss is NaN or the row is not kept. Nothing here waits for the device.
    """
    with torch.no_grad(), precision(tf32=False):
        norms = tape.norms()
        if scale is None:
            factors = clip_factors(norms, max_grad_norm, keep, coins)
        else:
            scale = torch.as_tensor(scale, device=norms.device).to(norms.dtype)
            factors = clip_factors(norms * scale, max_grad_norm, keep, coins)
            factors = Factors(factors.values * scale, factors.keep)
            if factors.keep is not None:
                factors.values.masked_fill_(~factors.keep, 0.0)
    # The last layer first: what it kept is given back before larger things are worked on.
    for name in reversed(params):
        out = None if places is None else places[name]
        with precision(tf32=False):
            found = tape.weighted_sum(name, factors, last=True, out=out, add=add)
        yield name, found


def tapes_of(objective: Objective, params: Params, examples: Examples) -> Iterator[Tape]:
    """What is known about the gradients of all records, a microbatch after the other."""
    strategy = strategy_for(objective, params, examples.inputs)
    most = max(1, strategy.rows // objective.views)
    for start in range(0, len(examples), most):
        part = examples.part(slice(start, start + most))
        yield make_tape(objective, params, strategy.records, part.inputs, part.targets)


def clipped_norms(
    objective: Objective, params: Params, batch: Examples, max_grad_norm: float
) -> Tensor:
    """Norm of each record's clipped gradient, in double precision.

    Formal guarantee: each value depends on its own record only and lies in [0, max_grad_norm]; a
    gradient that is not finite counts as zero.
    """
    if not len(batch):
        return torch.zeros(0, dtype=torch.float64, device=device_of(batch.inputs))
    norms = []
    for tape in tapes_of(objective, params, batch):
        with torch.no_grad(), precision(tf32=False):
            norms.append(tape.norms())
    found = torch.cat(norms).double()
    return torch.where(found.isfinite(), found.clamp(max=max_grad_norm), 0.0)
