"""LSTM, GRU and plain RNN, layers and cells.

The recurrence of an LSTM runs for all examples and both directions at once and loops over time
only. Its backward pass leaves the gradients of all gates before their activation, for all times,
and with them every weight is used as by a linear layer on a sequence. All others, an LSTM with
projections among them, are written out as one linear map after the other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.functional.process_settings import widen
from dpsur.per_example.contributions import Products, Rows
from dpsur.per_example.kernels.fused import LstmCells
from dpsur.per_example.rules.linear import linear_map
from dpsur.per_example.tape import Layout, NotSupportedError, Tape, Uses

State = tuple[Tensor, ...]
# From the gates' input part, their hidden part and the last state to the next state.
Cell = Callable[[Tensor, Tensor, State], State]


@dataclass(frozen=True)
class Weights:
    """Parameters of one layer, one entry per direction; those that it has not are empty lists."""

    inputs: list[Tensor]
    hidden: list[Tensor]
    input_bias: list[Tensor]
    hidden_bias: list[Tensor]
    project: list[Tensor]

    @staticmethod
    def of(module: nn.RNNBase | nn.RNNCellBase, layer: int | None = None) -> "Weights":
        ends = [""] if layer is None else [f"_l{layer}"]
        if isinstance(module, nn.RNNBase) and module.bidirectional:
            ends = [*ends, f"_l{layer}_reverse"]
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        named = [[getattr(module, f"{kind}{end}", None) for end in ends] for kind in kinds]
        return Weights(*([one for one in several if one is not None] for several in named))


def recurrent_layer(
    module: nn.RNNBase, tape: Tape, input: Tensor, hx: Any = None
) -> tuple[Tensor, Tensor | State]:
    """Same result as `nn.LSTM`, `nn.GRU` and `nn.RNN`, with the recurrence written out."""
    if not isinstance(input, Tensor) or input.dim() != 3:
        raise NotSupportedError("packed or unbatched sequences")
    layout = tape.examples_in(input, axis=0 if module.batch_first else 1)
    directions = 2 if module.bidirectional else 1
    final: list[list[Tensor]] = []
    # Rounding would add up over the times of a sequence: a recurrence keeps its precision.
    with torch.autocast(input.device.type, enabled=False):
        initial = [widen(state) for state in _states(hx)]
        output = widen(input.transpose(0, 1) if module.batch_first else input)
        for layer in range(module.num_layers):
            start = [state[layer * directions :][:directions] for state in initial]
            weights, cell = Weights.of(module, layer), _cell_of(module)
            output, last = _layer(tape, layout.fold, output, weights, start, cell)
            final.append(last)
            if layer + 1 < module.num_layers and module.dropout:
                output = F.dropout(output, module.dropout, module.training)
    output = output.transpose(0, 1) if module.batch_first else output
    states = [torch.cat(layers) for layers in zip(*final, strict=True)]
    return output, (states[0], states[1]) if len(states) > 1 else states[0]


def recurrent_cell(
    module: nn.RNNCellBase, tape: Tape, input: Tensor, hx: Any = None
) -> Tensor | State:
    """Same result as `nn.LSTMCell`, `nn.GRUCell` and `nn.RNNCell`: a sequence of one time."""
    if input.dim() != 2:
        raise NotSupportedError("a cell without a batch")
    fold = tape.examples_in(input, axis=0).fold
    with torch.autocast(input.device.type, enabled=False):
        start = [widen(state).unsqueeze(0) for state in _states(hx)]
        sequence, cell = widen(input).unsqueeze(0), _cell_of(module)
        _, final = _layer(tape, fold, sequence, Weights.of(module), start, cell)
    states = [state[0] for state in final]
    return (states[0], states[1]) if len(states) > 1 else states[0]


def _states(hx: Any) -> list[Tensor]:
    return [] if hx is None else [hx] if isinstance(hx, Tensor) else list(hx)


def _cell_of(module: nn.RNNBase | nn.RNNCellBase) -> Cell:
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        return _lstm
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        return _gru
    activation = torch.relu if module.nonlinearity == "relu" else torch.tanh
    return lambda now, own, _: (activation(now + own),)


def _lstm(now: Tensor, own: Tensor, state: State) -> State:
    """Gates in torch's order i, f, g, o."""
    enter, keep, fresh, leave = (now + own).chunk(4, -1)
    cell = keep.sigmoid() * state[1] + enter.sigmoid() * fresh.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru(now: Tensor, own: Tensor, state: State) -> State:
    """Gates in torch's order r, z, n."""
    reset, update, fresh = now.chunk(3, -1)
    own_reset, own_update, recalled = own.chunk(3, -1)
    fresh = (fresh + (reset + own_reset).sigmoid() * recalled).tanh()
    return (torch.lerp(fresh, state[0], (update + own_update).sigmoid()),)


def _layer(
    tape: Tape, fold: int, sequence: Tensor, weights: Weights, initial: list[Tensor], cell: Cell
) -> tuple[Tensor, list[Tensor]]:
    """A layer's outputs for all times, and its last states (directions, rows, width)."""
    seen = [sequence, sequence.flip(0)][: len(weights.inputs)]
    if cell is _lstm and not weights.project:
        states, final = _lstm_layer(tape, fold, seen, weights, initial)
    else:
        found = [
            _written_out(tape, fold, one, weights, [state[way] for state in initial], way, cell)
            for way, one in enumerate(seen)
        ]
        states = torch.stack([one[0] for one in found])
        final = [torch.stack(last) for last in zip(*(one[1] for one in found), strict=True)]
    if len(seen) == 1:
        return states.squeeze(0), final  # whose backward pass needs no memory
    return torch.cat([states[0], states[1].flip(0)], -1), final


def _written_out(
    tape: Tape,
    fold: int,
    sequence: Tensor,
    weights: Weights,
    start: list[Tensor],
    way: int,
    cell: Cell,
) -> tuple[Tensor, State]:
    """One direction of a recurrence, one linear map after the other."""
    bias = [
        several[way] if several else None for several in (weights.input_bias, weights.hidden_bias)
    ]
    with tape.placed(Layout(1, fold)):
        gates = linear_map(tape, sequence, weights.inputs[way], bias[0])
    state: State = tuple(start)
    if not state:
        hidden = weights.hidden[way]
        widths = hidden.shape[1], hidden.shape[0] // 4  # of the state, and of an LSTM's cell
        zeros = [gates.new_zeros(sequence.shape[1], width) for width in widths]
        state = tuple(zeros) if cell is _lstm else (zeros[0],)
    states = []
    with tape.placed(Layout(0, fold)):
        for now in gates:
            state = cell(now, linear_map(tape, state[0], weights.hidden[way], bias[1]), state)
            if weights.project:
                state = linear_map(tape, state[0], weights.project[way], None), *state[1:]
            states.append(state[0])
    return torch.stack(states), state


def _lstm_layer(
    tape: Tape, fold: int, seen: list[Tensor], weights: Weights, initial: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """All directions of an LSTM (directions, times, rows, width), and their last states."""
    of_inputs = [weights.inputs, *([weights.input_bias] * bool(weights.input_bias))]
    each = [F.linear(*one) for one in zip(seen, *of_inputs, strict=True)]
    gates = torch.stack(each) if len(each) > 1 else each[0].unsqueeze(0).contiguous()
    del each
    if weights.hidden_bias:
        # in place, where nothing else reads it; the graph need not know of a constant
        gates.data.add_(torch.stack(weights.hidden_bias)[:, None, None])
    seen = [one.detach() for one in seen]
    kept: list[Tensor] = []  # states (directions, times + 1, rows, width), the initial one first
    layout = Layout(1, fold)
    matrices, biases = (
        [[tape.slot(value) for value in values] for values in both]
        for both in ((weights.inputs, weights.hidden), (weights.input_bias, weights.hidden_bias))
    )

    def by_example(values: Tensor) -> Tensor:
        rows = layout.by_example(values).reshape(tape.examples, -1, values.shape[-1])
        return rows.contiguous()  # used several times, and slow to read across times

    def record(gradient: Tensor) -> Uses:
        for direction, one in enumerate(seen):
            slopes = by_example(gradient[direction])
            for slots, inputs in zip(matrices, (one, kept[0][direction, :-1]), strict=True):
                slot = slots[direction]
                if slot is not None:
                    yield slot, Products(by_example(inputs), slopes).cheapest()
            for slots in biases:
                slot = slots[direction] if slots else None
                if slot is not None:
                    yield slot, Rows(slopes.sum(1))

    gates = tape.watch(gates, record)
    hidden = torch.stack(weights.hidden)
    if not initial:
        initial = [gates.new_zeros(*gates.shape[::2], hidden.shape[2])] * 2
    states, last = LstmRecurrence.apply(gates, hidden, *initial, kept)  # type: ignore[no-untyped-call]
    return states, [states[:, -1], last]


class LstmRecurrence(torch.autograd.Function):
    """All times of a layer; tensors have the shape (directions, times, rows, ...).

    Weights get no gradient here: the tape records their uses.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        hidden_weight: Tensor,
        hidden: Tensor,
        cell: Tensor,
        kept: list[Tensor],
    ) -> Any:
        directions, times, rows, width = *gates.shape[:3], hidden_weight.shape[2]
        states = gates.new_empty(directions, times + 1, rows, width)
        states[:, 0] = hidden
        weight, cells = hidden_weight.mT, torch.empty_like(states)
        active, squashed = torch.empty_like(gates), torch.empty_like(states[:, 1:])
        cells[:, 0] = cell
        fused = LstmCells(active, cells, squashed)
        launches = fused.there and gates.is_contiguous()
        with _rounding_of_layers():
            for time in range(times):
                if launches:
                    fused.forward(time, gates, torch.bmm(states[:, time], weight), states)
                    continue
                before = torch.baddbmm(gates[:, time], states[:, time], weight)
                now = active[:, time]
                torch.sigmoid(before[..., : 2 * width], out=now[..., : 2 * width])
                torch.tanh(before[..., 2 * width : 3 * width], out=now[..., 2 * width : 3 * width])
                torch.sigmoid(before[..., 3 * width :], out=now[..., 3 * width :])
                enter, keep, fresh, leave = now.chunk(4, -1)
                torch.mul(keep, cells[:, time], out=cells[:, time + 1])
                cells[:, time + 1].addcmul_(enter, fresh)
                torch.tanh(cells[:, time + 1], out=squashed[:, time])
                torch.mul(leave, squashed[:, time], out=states[:, time + 1])
        ctx.save_for_backward(hidden_weight, active, cells, squashed)
        kept.append(states)
        return states[:, 1:], cells[:, -1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gates' gradients are multiples of the cells' and of the states'."""
        (outputs, last), (weight, active, cells, squashed) = gradients, ctx.saved_tensors
        with _rounding_of_layers():
            fused = LstmCells(active, cells, squashed)
            if not fused.there:
                gates, cell = _gate_slopes(outputs, last, weight, active, cells, squashed)
            else:  # one kernel per time, which writes those of the gates and overwrites the cell's
                gates, cell = torch.empty_like(active), last.contiguous().clone()
                outputs, times = outputs.contiguous(), outputs.shape[1]
                for time in reversed(range(times)):
                    later = torch.bmm(gates[:, time + 1], weight) if time + 1 < times else None
                    fused.backward(time, outputs, later, cell, gates)
            first = torch.bmm(gates[:, 0], weight) if ctx.needs_input_grad[2] else None
        return gates, None, first, cell, None


def _gate_slopes(
    outputs: Tensor, last: Tensor, weight: Tensor, active: Tensor, cells: Tensor, squashed: Tensor
) -> tuple[Tensor, Tensor]:
    times, width = active.shape[1], outputs.shape[-1]
    enter, keep, fresh, leave = active.chunk(4, -1)
    to_cell = leave * (1 - squashed.square())
    # What every gate's gradient is a multiple of, for all times; the loop only multiplies it.
    parts = (
        fresh * enter * (1 - enter),
        cells[:, :-1] * keep * (1 - keep),
        enter * (1 - fresh.square()),
        squashed * leave * (1 - leave),
    )
    gates = torch.cat(parts, -1)
    by_gate = gates.view(*gates.shape[:-1], 4, width)
    cell, hidden = last, outputs[:, times - 1]
    for time in reversed(range(times)):
        if time + 1 < times:
            hidden = torch.baddbmm(outputs[:, time], gates[:, time + 1], weight)
        cell = torch.addcmul(cell, hidden, to_cell[:, time])
        by_gate[:, time, :, :3].mul_(cell.unsqueeze(-2))
        by_gate[:, time, :, 3].mul_(hidden)
        cell = cell * keep[:, time]
    return gates, cell


@contextmanager
def _rounding_of_layers() -> Iterator[None]:
    """Let a recurrence round where PyTorch's own would: it follows the setting of cuDNN."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
