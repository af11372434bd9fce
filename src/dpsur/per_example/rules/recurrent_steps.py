"""Recurrent layers that are written as one linear map after the other: cells and projections."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.per_example.rules.linear import linear_map
from dpsur.per_example.tape import Layout, NotSupportedError, Tape

State = tuple[Tensor, Tensor]


def projected_lstm(
    module: nn.LSTM, tape: Tape, input: Tensor, hx: State | None
) -> tuple[Tensor, State]:
    """An LSTM whose outputs are projected, one linear map after the other."""
    if not isinstance(input, Tensor) or input.dim() != 3:
        raise NotSupportedError("packed or unbatched sequences")
    tape.examples_in(input, axis=0 if module.batch_first else 1)
    output = input.transpose(0, 1) if module.batch_first else input
    ends = ["", "_reverse"] if module.bidirectional else [""]
    hidden_states, cells = [], []
    for layer in range(module.num_layers):
        ways = []
        for way, end in enumerate(ends):
            weights = [
                getattr(module, f"{kind}_l{layer}{end}", None)
                for kind in ("weight_ih", "bias_ih", "weight_hh", "bias_hh", "weight_hr")
            ]
            place = layer * len(ends) + way
            start = None if hx is None else (hx[0][place], hx[1][place])
            states, last = _projected_steps(
                module, tape, output.flip(0) if way else output, weights, start
            )
            ways.append(states.flip(0) if way else states)
            hidden_states.append(last[0])
            cells.append(last[1])
        output = torch.cat(ways, -1)
        if layer + 1 < module.num_layers and module.dropout:
            output = F.dropout(output, module.dropout, module.training)
    output = output.transpose(0, 1) if module.batch_first else output
    return output, (torch.stack(hidden_states), torch.stack(cells))


def _projected_steps(
    module: nn.LSTM,
    tape: Tape,
    sequence: Tensor,
    weights: list[Any],
    start: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    to_gates, gates_bias, from_hidden, hidden_bias, project = weights
    fold, rows = tape.place.fold, sequence.shape[1]
    with tape.placed(Layout(1, fold)):
        gates = linear_map(tape, sequence, to_gates, gates_bias)
    hidden, cell = start or (
        gates.new_zeros(rows, module.proj_size),
        gates.new_zeros(rows, module.hidden_size),
    )
    states = []
    with tape.placed(Layout(0, fold)):
        for now in gates:
            own = linear_map(tape, hidden, from_hidden, hidden_bias)
            enter, keep, fresh, leave = (now + own).chunk(4, -1)
            cell = keep.sigmoid() * cell + enter.sigmoid() * fresh.tanh()
            hidden = linear_map(tape, leave.sigmoid() * cell.tanh(), project, None)
            states.append(hidden)
    return torch.stack(states), (hidden, cell)


def rnn_cell(module: nn.RNNCell, tape: Tape, input: Tensor, hx: Tensor | None = None) -> Tensor:
    """One step of a plain RNN."""
    before, own, _ = _cell(module, tape, input, hx)
    return (before + own).relu() if module.nonlinearity == "relu" else (before + own).tanh()


def gru_cell(module: nn.GRUCell, tape: Tape, input: Tensor, hx: Tensor | None = None) -> Tensor:
    """One step of a GRU."""
    before, own, hidden = _cell(module, tape, input, hx)
    width = module.hidden_size
    both = (before[..., : 2 * width] + own[..., : 2 * width]).sigmoid()
    reset, update = both.chunk(2, -1)
    fresh = (before[..., 2 * width :] + reset * own[..., 2 * width :]).tanh()
    return fresh + update * (hidden - fresh)


def lstm_cell(module: nn.LSTMCell, tape: Tape, input: Tensor, hx: State | None = None) -> State:
    """One step of an LSTM."""
    hidden, cell = (None, None) if hx is None else hx
    before, own, hidden = _cell(module, tape, input, hidden)
    enter, keep, fresh, leave = (before + own).chunk(4, -1)
    cell = torch.zeros_like(hidden) if cell is None else cell
    cell = keep.sigmoid() * cell + enter.sigmoid() * fresh.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _cell(
    module: nn.RNNCellBase, tape: Tape, input: Tensor, hidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gates' input part, their hidden part and the state before."""
    if input.dim() != 2:
        raise NotSupportedError("a cell without a batch")
    before = linear_map(tape, input, module.weight_ih, module.bias_ih)
    hidden = before.new_zeros(len(input), module.hidden_size) if hidden is None else hidden
    return before, linear_map(tape, hidden, module.weight_hh, module.bias_hh), hidden
