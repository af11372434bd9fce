"""GRU, with both directions and all examples at once."""

from typing import Any

import torch
from torch import Tensor, nn

from dpsur.core.gradients.rules.recurrent import Trace, Weights, hidden_weight_gradient, run
from dpsur.core.gradients.tape import Tape


def gru(
    module: nn.GRU, tape: Tape, input: Tensor, hx: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Same result as `nn.GRU`, with the recurrence written out."""
    outcome = run(module, tape, input, [] if hx is None else [hx], _recurrence)
    return outcome.output, torch.cat([last[0] for last in outcome.final])


def _recurrence(
    gates: Tensor, weights: Weights, initial: list[Tensor], trace: Trace
) -> tuple[Tensor, list[Tensor]]:
    hidden = torch.stack(weights.hidden)
    if weights.hidden_bias:
        bias = torch.stack(weights.hidden_bias).unsqueeze(1)
    else:
        bias = hidden.new_zeros(len(hidden), 1, hidden.shape[1])
    states = _Gru.apply(gates, hidden, bias, initial[0], trace)  # type: ignore[no-untyped-call]
    return states, [states[:, -1]]


class _Gru(torch.autograd.Function):
    """Tensors have the shape (directions, times, rows, ...), gates in torch's order r, z, n."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, bias: Tensor, hidden: Tensor, trace: Trace
    ) -> Any:
        directions, times, rows, width = *gates.shape[:3], weight.shape[2]
        states = gates.new_empty(directions, times + 1, rows, width)
        states[:, 0] = hidden
        active, recalled = torch.empty_like(gates), torch.empty_like(states[:, 1:])
        transposed = weight.mT
        for time in range(times):
            own = torch.baddbmm(bias, states[:, time], transposed)
            now, before = active[:, time], gates[:, time]
            torch.add(before[..., : 2 * width], own[..., : 2 * width], out=now[..., : 2 * width])
            now[..., : 2 * width].sigmoid_()
            reset, update, fresh = now.chunk(3, -1)
            recalled[:, time] = own[..., 2 * width :]
            torch.addcmul(before[..., 2 * width :], reset, recalled[:, time], out=fresh)
            fresh.tanh_()
            torch.lerp(fresh, states[:, time], update, out=states[:, time + 1])
        ctx.save_for_backward(active, recalled, weight)
        ctx.trace = trace
        trace.states = states
        return states[:, 1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (outputs,) = gradients
        active, recalled, weight = ctx.saved_tensors
        times, width = active.shape[1], weight.shape[2]
        reset, update, fresh = active.chunk(3, -1)
        # What every gate's gradient is a multiple of, for all times; the loop only multiplies it.
        to_fresh = (1 - update) * (1 - fresh.square())
        parts = (
            to_fresh * recalled * reset * (1 - reset),
            (ctx.trace.states[:, :-1] - fresh) * update * (1 - update),
            to_fresh * reset,
        )
        gates = torch.cat(parts, -1)
        by_gate = gates.view(*gates.shape[:-1], 3, width)
        hidden = outputs[:, times - 1]
        for time in reversed(range(times)):
            by_gate[:, time].mul_(hidden.unsqueeze(-2))
            to_fresh[:, time].mul_(hidden)
            through = torch.mul(hidden, update[:, time])
            through.baddbmm_(gates[:, time], weight)
            hidden = through + outputs[:, time - 1] if time else through
        ctx.trace.hidden_gates = gates
        inputs = torch.cat([gates[..., : 2 * width], to_fresh], -1)
        weight_gradient = hidden_weight_gradient(ctx.trace) if ctx.needs_input_grad[1] else None
        bias_gradient = gates.sum((1, 2)).unsqueeze(1) if ctx.needs_input_grad[2] else None
        return inputs, weight_gradient, bias_gradient, hidden, None
