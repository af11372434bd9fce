"""LSTM, with both directions and all examples at once."""

from typing import Any

import torch
from torch import Tensor, nn

from dpsur.core.gradients.rules.recurrent import Trace, Weights, hidden_weight_gradient, run
from dpsur.core.gradients.tape import Tape

State = tuple[Tensor, Tensor]


def lstm(
    module: nn.LSTM, tape: Tape, input: Tensor, hx: State | None = None
) -> tuple[Tensor, State]:
    """Same result as `nn.LSTM`, with the recurrence written out."""
    outcome = run(module, tape, input, [] if hx is None else list(hx), _recurrence)
    hidden, cells = (torch.cat([last[kind] for last in outcome.final]) for kind in (0, 1))
    return outcome.output, (hidden, cells)


def _recurrence(
    gates: Tensor, weights: Weights, initial: list[Tensor], trace: Trace
) -> tuple[Tensor, list[Tensor]]:
    if weights.hidden_bias:
        gates = gates + torch.stack(weights.hidden_bias)[:, None, None]
    hidden = torch.stack(weights.hidden)
    states, cells = _Lstm.apply(gates, hidden, *initial, trace)  # type: ignore[no-untyped-call]
    return states, [states[:, -1], cells]


class _Lstm(torch.autograd.Function):
    """Tensors have the shape (directions, times, rows, ...), gates in torch's order i, f, g, o."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor, trace: Trace
    ) -> Any:
        directions, times, rows, width = *gates.shape[:3], weight.shape[2]
        states = gates.new_empty(directions, times + 1, rows, width)
        cells, squashed = torch.empty_like(states), gates.new_empty(directions, times, rows, width)
        states[:, 0], cells[:, 0] = hidden, cell
        active, transposed = torch.empty_like(gates), weight.mT
        for time in range(times):
            before = torch.baddbmm(gates[:, time], states[:, time], transposed)
            now = active[:, time]
            torch.sigmoid(before[..., : 2 * width], out=now[..., : 2 * width])
            torch.tanh(before[..., 2 * width : 3 * width], out=now[..., 2 * width : 3 * width])
            torch.sigmoid(before[..., 3 * width :], out=now[..., 3 * width :])
            enter, keep, fresh, leave = now.chunk(4, -1)
            torch.mul(keep, cells[:, time], out=cells[:, time + 1])
            cells[:, time + 1].addcmul_(enter, fresh)
            torch.tanh(cells[:, time + 1], out=squashed[:, time])
            torch.mul(leave, squashed[:, time], out=states[:, time + 1])
        ctx.save_for_backward(active, cells, squashed, weight)
        ctx.trace = trace
        trace.states = states
        return states[:, 1:], cells[:, -1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        outputs, last_cell = gradients
        active, cells, squashed, weight = ctx.saved_tensors
        times, width = active.shape[1], weight.shape[2]
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
        cell = last_cell
        hidden = outputs[:, times - 1]
        for time in reversed(range(times)):
            if time + 1 < times:
                hidden = torch.baddbmm(outputs[:, time], gates[:, time + 1], weight)
            cell = torch.addcmul(cell, hidden, to_cell[:, time])
            by_gate[:, time, :, :3].mul_(cell.unsqueeze(-2))
            by_gate[:, time, :, 3].mul_(hidden)
            cell = cell * keep[:, time]
        ctx.trace.hidden_gates = gates
        weight_gradient = hidden_weight_gradient(ctx.trace) if ctx.needs_input_grad[1] else None
        first = torch.bmm(gates[:, 0], weight) if ctx.needs_input_grad[2] else None
        return gates, weight_gradient, first, cell, None
