"""Checks on the autograd graph that a loss is a sum or mean of per-record losses.

Clipping bounds what one record adds only if its gradient depends on that record alone. A loss that
is divided by the number of tokens in the batch, by the class weights of the batch, or that compares
records with each other, breaks that. In a custom loop the loss is custom code too, so the graph
that autograd has recorded is followed from the loss down to the model's outputs. Every operation
on the way must be known to keep records apart; what is not known is refused.

A mean over the rows of a batch is undone: what is clipped is the gradient of each record's own
loss, which for a mean over several items of a record (tokens) is the mean over its own items.
"""

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpsur.engine.criterion import PerRecord
from dpsur.errors import CouplingError

REMEDY = """write the loss as a private step, which takes any function:
    @engine.private_step
    def step(model, batch):
        return loss(model(batch[0]), batch[1])
    for batch in loader:
        step(batch)"""


_BY_A_TENSOR = (
    "the loss is multiplied or divided by a tensor, which may come from the batch (a number of "
    "tokens, a torch.amp.GradScaler): use bfloat16 without a GradScaler, and divide by plain "
    "numbers; or " + REMEDY
)


@dataclass(frozen=True)
class RecordRows:
    """A tensor whose first dimension holds `shape[0] // records` rows for each record in turn.

    `stretched`: it was broadcast, to be combined with another one of the same shape.
    """

    shape: tuple[int, ...]
    stretched: bool = False


@dataclass(frozen=True)
class Total:
    """A number: the sum over records of their losses, each divided by `scale` (one per record).

    `mean` says whether the batch was averaged over, `items` how many numbers were added up.
    Where records have scales of their own, `divisor` is what the loss divides all of them by.
    """

    scale: float | Tensor
    mean: bool
    items: tuple[int, ...] = ()
    divisor: Tensor | None = None


State = RecordRows | Total
Cut = Mapping[tuple[Any, int], Any]  # (node, number of its output): the call that returned it

# Applied to each number alone. Arguments that are tensors are refused, since they may come from the
# whole batch (a mask, a bound); plain numbers have to be the same in every batch.
_ELEMENTWISE = {
    *("Abs", "Neg", "Exp", "Expm1", "Log", "Log1P", "Log2", "Log10", "Sqrt", "Rsqrt", "Square"),
    *("Sigmoid", "Tanh", "Relu", "LogSigmoid", "Softplus", "Gelu", "Silu", "Erf", "Sin", "Cos"),
    *("Clamp", "ClampMin", "ClampMax", "Pow", "Reciprocal", "ToCopy", "Clone", "Alias", "Sgn"),
    *("NanToNum", "Elu", "LeakyRelu", "Hardtanh", "Huber", "Xlogy", "Lgamma", "Digamma"),
    *("Tan", "Sinh", "Cosh", "Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh", "Erfc", "Mish"),
    *("Hardswish", "Hardsigmoid", "Sinc"),
}
_ARGUMENTS = (
    *("min", "max", "min_val", "max_val", "exponent", "other", "alpha", "beta", "threshold"),
    *("negative_slope", "scale", "input_scale", "delta", "mask", "condition"),
)
# Gradients that go through these do not depend on what is added up.
_LINEAR = {"Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "View", "Squeeze", "ToCopy", "Clone"}
_OF_ONE_NUMBER = {
    *("Neg", "ToCopy", "Clone", "Alias", "View", "Squeeze", "Unsqueeze", "Mean", "Sum"),
}
_VIEWS = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"}
_PAIRS = {"Maximum", "Minimum", "Xlogy", "Atan2", "Hypot"}  # of each number and its counterpart
# Along some dimensions, among which that of the records must not be.
_ALONG = {
    *("LinalgVectorNorm", "Norm", "Max", "Min", "Amax", "Amin", "Cat", "Stack", "Split", "Cumsum"),
    *("Sort", "Topk", "Softmax", "LogSoftmax", "Logsumexp", "Select", "Slice", "Gather"),
    *("Transpose", "Permute", "Sum", "Mean"),
}
# Losses with a reduction of their own; what may weight their items has to be absent.
_OF_CLASSES = {"NllLoss", "NllLoss2D", "MultiMarginLoss", "MultilabelMarginLoss"}
_LOSSES = _OF_CLASSES | {
    *("MseLoss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss", "KlDiv"),
    *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
}
_NONE, _MEAN = 0, 1


def below(tensors: Iterable[Tensor], cut: Container[Any] = ()) -> Iterator[tuple[Any, int]]:
    """What graphs of tensors consist of, by node and number of its output, down to a cut."""
    ahead: list[tuple[Any, int]] = [(one.grad_fn, one.output_nr) for one in tensors if one.grad_fn]
    seen = set(ahead)
    while ahead:
        one = ahead.pop()
        yield one
        if one not in cut:
            new = [child for child in one[0].next_functions if child[0] and child not in seen]
            seen.update(new)
            ahead += new


def check_loss_graph(
    loss: Tensor, cut: Cut, records: int, names: dict[int, str], fed: Sequence[Tensor] = ()
) -> tuple[Total, tuple[float, ...]]:
    """Follow a loss down to the outputs in `cut`; refuse it where records may be coupled.

    Returns what the loss is, and the numbers in it that have to be the same in every batch.
    `names` are those of parameters by identity, for messages; `fed` are inputs of calls that were
    computed from outputs of others.
    """
    walk = _Walk(cut, records, names)
    for value in fed:
        if not isinstance(walk.state(value.grad_fn, value.output_nr), RecordRows) and records > 1:
            raise CouplingError(
                "the model is called with a total over the batch of what it has returned; " + REMEDY
            )
    if records == 1:  # a mean is a sum, and nothing couples but numbers from elsewhere
        made_of = [node for node, number in below([loss], cut) if (node, number) not in cut]
        for node in made_of:
            walk.refuse_leaf(node)
        try:
            walk.state(loss.grad_fn, 0)
        except CouplingError:  # rows and totals look alike, and that there is one is private
            walk.factors.clear()
            for node in made_of:
                if node.name().startswith(("MulBackward", "DivBackward")):
                    number, plain = _constant(node)
                    if number is not None and not plain:
                        raise CouplingError(_BY_A_TENSOR) from None
        return Total(1.0, True), tuple(walk.factors)
    state = walk.state(loss.grad_fn, 0)
    if not isinstance(state, Total):
        if math.prod(state.shape) != 1:
            raise CouplingError("the loss must be one number; reduce it with .mean() or .sum()")
        state = Total(1.0, False)
    return state, tuple(walk.factors)


def calls_meet(loss: Tensor, cut: Cut) -> bool:
    """Whether outputs of several calls meet in more than a sum: one's gradient then needs both."""
    made_of: dict[Any, frozenset[int]] = {}  # the calls below, where all that joins them is linear
    for one in _upwards((loss.grad_fn, loss.output_nr), cut):
        if one in cut:
            made_of[one] = frozenset((id(cut[one]),))
            continue
        children = [child for child in one[0].next_functions if child[0]]
        made_of[one] = frozenset().union(*(made_of[child] for child in children))
        kind = _kind(one[0])
        scaled = kind in ("Mul", "Div") and len(children) == 1
        if len(made_of[one]) > 1 and kind not in _LINEAR and not scaled:
            return True
    return False


def _upwards(top: tuple[Any, int], cut: Cut) -> Iterator[tuple[Any, int]]:
    """What a graph consists of, each part after those that it is made of; no deep recursion."""
    ahead, done = [top], set()
    while ahead:
        one = ahead[-1]
        children = () if one in cut else one[0].next_functions
        missing = [child for child in children if child[0] and child not in done]
        if missing:
            ahead += missing
            continue
        ahead.pop()
        if one not in done:
            done.add(one)
            yield one


def _kind(node: Any) -> str:
    return re.sub(r"Backward[012]?$", "", node.name())


class _Walk:
    def __init__(self, cut: Cut, records: int, names: dict[int, str]) -> None:
        self.cut, self.records, self.names = cut, records, names
        self.factors: list[float] = []
        self._known: dict[tuple[Any, int], State] = {}

    def state(self, node: Any, output: int) -> State:
        """What a node's output is."""
        for one in _upwards((node, output), self.cut):
            if one in self._known:
                continue
            if one in self.cut:
                self._known[one] = RecordRows(tuple(one[0]._input_metadata[one[1]].shape))
            else:
                self._known[one] = self._apply(*one)
        return self._known[node, output]

    def refuse_leaf(self, node: Any) -> None:
        variable = getattr(node, "variable", None)
        if variable is None:
            return
        name = self.names.get(id(variable))
        if name is None:
            raise CouplingError(
                "the loss depends on a tensor that requires a gradient and is no output of the "
                "model; detach it, or compute it inside the model"
            )
        raise CouplingError(
            f"the loss uses the parameter {name} directly, past the clipped sum, where a penalty "
            "would be dropped or counted once per record; use the optimizer's weight_decay, or "
            + REMEDY
        )

    def _apply(self, node: Any, output: int) -> State:
        self.refuse_leaf(node)
        kind = _kind(node)
        inputs = [self._known[child] for child in node.next_functions if child[0]]
        if not inputs:
            raise CouplingError(
                "the loss depends on the model by another way than its outputs, such as an "
                "auxiliary loss of a layer; return what it needs as an output with a row per record"
            )
        shape = tuple(node._input_metadata[output].shape)
        if all(isinstance(one, Total) for one in inputs):
            return self._of_totals(node, kind, inputs)  # type: ignore[arg-type]
        if not all(isinstance(one, RecordRows) for one in inputs):
            raise self._unknown(node, "a total of the batch together with its rows")
        return self._of_rows(node, kind, inputs, shape)  # type: ignore[arg-type]

    def _of_totals(self, node: Any, kind: str, inputs: list[Total]) -> Total:
        first = inputs[0]
        if kind in ("Add", "Sub"):
            for other in inputs[1:]:
                if first.mean != other.mean or not _same(first.scale, other.scale):
                    raise CouplingError(
                        "the loss adds terms that are averaged over the batch in different ways; "
                        + REMEDY
                    )
            return Total(first.scale, first.mean, divisor=first.divisor)
        if kind in _OF_ONE_NUMBER:
            return first
        if kind not in ("Mul", "Div") or len(inputs) != 1:
            raise self._unknown(node)
        value, plain = _constant(node)
        if value is None:
            raise self._unknown(node, "a total of the batch times a tensor")
        if kind == "Div" and not first.mean and value in (self.records, *first.items):
            self.factors.append(self.records / value)  # over the number of its items it is a mean
            return Total(float(self.records), True)
        if not plain:
            raise CouplingError(_BY_A_TENSOR)
        self.factors.append(value if kind == "Mul" else 1 / value)
        return Total(first.scale, first.mean, divisor=first.divisor)

    def _of_rows(
        self, node: Any, kind: str, rows: list[RecordRows], shape: tuple[int, ...]
    ) -> State:
        first = rows[0]
        if any(one.stretched for one in rows):
            # else a target of another shape would be compared with all records
            pair = kind in ("Add", "Sub", "Mul", "Div") and len(rows) == 2
            if not pair or all(one.stretched for one in rows):
                raise self._unknown(node, "do outputs and targets have different shapes?")
        if getattr(node, "_forward_cls", None) is PerRecord:
            if any(one.shape[0] != node.records for one in rows) or node.records % self.records:
                raise self._unknown(node, "it was given parts of records")
            if node.mean:
                self._per_record(node.records)
            return Total(float(self.records) if node.mean else 1.0, node.mean)
        if kind in _ELEMENTWISE and len(rows) == 1 and shape == first.shape:
            self._note_arguments(node)
            return first
        # a constant that is broadcast would compare each record with the targets of all
        side_by_side = (
            all(len(one.shape) == len(shape) and one.shape[:1] == shape[:1] for one in rows)
            if len(rows) > 1
            else first.shape == shape
        )
        if kind in ("Add", "Sub", "Rsub") and side_by_side:
            self._note_arguments(node)
            return RecordRows(shape)
        if kind == "Bmm" and side_by_side:
            if len(rows) == 2 or self._is_target(_saved(node, "_saved_mat2", "_saved_self")):
                return RecordRows(shape)
            raise self._unknown(node)
        if kind == "Mm" and len(rows) == 1 and node.next_functions[1][0] is None:
            self._note_fixed(node._saved_mat2)  # such as prototypes
            return RecordRows(shape)
        if kind == "MaskedFill" and len(rows) == 1 and not node._saved_mask.any():
            return first  # of label smoothing, whose mask holds ignored targets
        same = all(one.shape == shape for one in rows)
        if kind in _PAIRS and same and len(rows) == 2:
            return RecordRows(shape)
        if kind == "Where" and same and self._is_target(node._saved_condition):
            return RecordRows(shape)
        if kind == "Expand" and shape and shape[0] == first.shape[0]:
            return RecordRows(shape, stretched=True)
        if kind in _ALONG:
            return self._along(node, kind, rows, shape)
        if kind == "Index" and len(rows) == 1:
            return self._index(node, first, shape)
        if kind in ("Mul", "Div"):
            return self._product(node, rows, shape)
        if kind in _VIEWS:
            if math.prod(first.shape) != math.prod(shape) or not shape or shape[0] % self.records:
                raise self._unknown(node, "records are folded into another dimension")
            return RecordRows(shape)
        if kind in _LOSSES:
            return self._loss(node, kind, first, shape)
        raise self._unknown(node)

    def _note_fixed(self, value: Tensor) -> None:
        """Note a tensor that has to be the same in every batch, by numbers that tell it."""
        places = torch.arange(1, value.numel() + 1, device=value.device, dtype=torch.float64)
        found = value.detach().double().flatten()
        self.factors += [float(found.sum()), float(found.norm()), float(found @ places.sqrt())]

    def _is_target(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and len(value) % self.records == 0

    def _along(self, node: Any, kind: str, rows: list[RecordRows], shape: tuple[int, ...]) -> State:
        """What is done along another dimension than that of the records, or a total of all."""
        first = rows[0]
        count = math.prod(first.shape)
        if kind in ("Sum", "Mean") and math.prod(shape) == 1:
            if kind == "Mean":
                self._per_record(count)
                return Total(float(self.records), True, (first.shape[0], count))
            return Total(1.0, False, (first.shape[0], count))
        rank = len(shape) if kind == "Stack" else len(first.shape)
        whole = kind == "Slice" and shape == first.shape
        apart = shape and all(one.shape[:1] == shape[:1] for one in rows)
        if not apart or (0 in _dims(node, kind, rank) and not whole):
            raise self._unknown(node, "over the records of the batch")
        self._note_arguments(node)
        if kind == "Select":  # where the longest record of a batch ends, perhaps
            self.factors.append(float(_signed(node._saved_index)))
        if kind == "Slice":
            self.factors += [float(_signed(node._saved_start)), float(_signed(node._saved_end))]
        if kind == "Mean":  # of a record's items, whose number may be that of the longest record
            self.factors.append(math.prod(shape) / count)
        return RecordRows(shape)

    def _index(self, node: Any, first: RecordRows, shape: tuple[int, ...]) -> RecordRows:
        """`rows[arange, y]`: one entry of each row, in their order."""
        indices = [one for one in node._saved_indices if isinstance(one, Tensor)]
        count = first.shape[0]
        if (
            bool(indices)
            and indices[0].dtype == torch.int64
            and torch.equal(indices[0].cpu(), torch.arange(count))
            and shape[:1] == (count,)
            and all(map(self._is_target, indices[1:]))
        ):
            return RecordRows(shape)
        raise self._unknown(node, "rows are chosen by a tensor")

    def _note_arguments(self, node: Any) -> None:
        """Refuse tensors beside the rows, and note numbers: a clamp, a mask, an exponent."""
        for name in _ARGUMENTS:
            value = getattr(node, f"_saved_{name}", None)
            if isinstance(value, Tensor):
                raise self._unknown(
                    node, "a tensor beside the rows, which may come from the whole batch"
                )
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self.factors.append(float(value))

    def _product(self, node: Any, rows: list[RecordRows], shape: tuple[int, ...]) -> RecordRows:
        if shape and all(one.shape[:1] == shape[:1] for one in rows):
            if len(rows) == 2:
                return RecordRows(shape)
            value, plain = _constant(node)
            if value is not None and plain and rows[0].shape == shape:
                self.factors.append(value)
                return RecordRows(shape)
            other = _saved(node)  # a target, or a weight of each record
            if other is not None and rows[0].shape == shape:
                if tuple(other.shape) == shape:
                    return RecordRows(shape)
                if other.dim() < len(shape):  # the same in every batch, such as levels of quantiles
                    self._note_fixed(other)
                    return RecordRows(shape)
        raise self._unknown(node, "rows times a tensor, which may hold weights of the whole batch")

    def _per_record(self, count: int) -> None:
        """Note what a mean divides each record by: numbers that follow the longest record vary."""
        self.factors.append(self.records / count)

    def _loss(self, node: Any, kind: str, first: RecordRows, shape: tuple[int, ...]) -> State:
        for name, why in (
            ("_saved_weight", "weights of classes or items, by which its mean divides all records"),
            ("_saved_pos_weight", "a pos_weight, which may have been computed from the batch"),
        ):
            if getattr(node, name, None) is not None:
                raise CouplingError(
                    f"the loss has {why}; give it to make_private(criterion=...) and call "
                    f"engine.criterion(outputs, targets), or {REMEDY}"
                )
        for name in ("delta", "beta"):
            self.factors += [float(v) for v in [getattr(node, f"_saved_{name}", None)] if v]
        target = getattr(node, "_saved_target", None)
        if kind.startswith("Nll"):
            self.factors.append(float(_signed(node._saved_ignore_index)))
        if kind in _OF_CLASSES:
            if target is None or not target.dim() or target.shape[0] != first.shape[0]:
                raise self._unknown(node)
        elif target is not None and tuple(target.shape) != first.shape:
            raise self._unknown(node, "targets are broadcast over the records")
        if node._saved_reduction == _NONE:
            return RecordRows(shape)
        if node._saved_reduction != _MEAN:
            return Total(1.0, False, (first.shape[0], math.prod(first.shape)))
        if not kind.startswith("Nll"):
            self._per_record(math.prod(first.shape))
            return Total(float(self.records), True)
        # The mean is over the items of the batch that count. Multiplied by their number and
        # divided by the number of a record's own items it is that record's mean.
        assert target is not None
        counted = target.ne(_signed(node._saved_ignore_index)).reshape(self.records, -1).sum(1)
        total = node._saved_total_weight.double()
        return Total(total / counted.clamp(min=1).double(), True, divisor=total)

    def _unknown(self, node: Any, why: str = "") -> CouplingError:
        if not why and node.name().startswith("ExpandBackward"):
            why = "do outputs and targets have different shapes?"
        detail = f" ({why})" if why else ""
        # as torch calls it, such as linalg_vector_norm for LinalgVectorNormBackward0
        name = re.sub(r"Backward\d*$", "", node.name())
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        return CouplingError(
            f"the loss contains the operation `{name}`{detail}, and it cannot be "
            "verified that each record's loss depends on that record alone, so that clipping "
            f"might not bound what one record changes; {REMEDY}"
        )


def _dims(node: Any, kind: str, rank: int) -> set[int]:
    """The dimensions that an operation works along, as numbers from 0; the first for all."""
    if kind == "Permute":
        return {0} if _signed(node._saved_dims[0]) % rank else set()
    if kind == "Transpose":
        found = [node._saved_dim0, node._saved_dim1]
    else:
        named = getattr(node, "_saved_dim", None)
        found = list(named) if isinstance(named, (tuple, list)) else [0 if named is None else named]
    return {_signed(one) % max(1, rank) for one in found} or {0}


def _signed(value: int) -> int:
    """Autograd keeps negative numbers as unsigned words."""
    return value - 2**64 if value >= 2**63 else value


def _same(one: float | Tensor, other: float | Tensor) -> bool:
    first, second = (torch.as_tensor(each, dtype=torch.float64).cpu() for each in (one, other))
    return bool(torch.allclose(first, second, rtol=1e-12))


def _saved(node: Any, *names: str) -> Tensor | None:
    for name in names or ("_saved_other", "_saved_self"):
        found = getattr(node, name, None)
        if isinstance(found, Tensor):
            return found
    return None


def _constant(node: Any) -> tuple[float | None, bool]:
    """The number that a node multiplies or divides by, and whether it is a plain Python number."""
    value = getattr(node, "_saved_other", None)
    if isinstance(value, (int, float)):
        return float(value), True
    found = _saved(node)
    if found is None or found.dim():
        return None, False
    # type promotion treats a number from Python as weaker than any tensor
    weak = torch.ones((), dtype=torch.float16 if found.is_floating_point() else torch.int8)
    return float(found), torch.result_type(weak, found) is weak.dtype
