"""LSTM, GRU and plain RNN: layers, directions and where their parameters' gradients are.

The recurrence runs for all examples and both directions at once and loops over time only. Its
backward pass leaves the gradients of all gates before their activation, for all times, and with
them every weight is used as by a linear layer on a sequence.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.functional.process_settings import widen
from dpsur.per_example.contributions import Contribution, Products, Rows
from dpsur.per_example.kernels.recurrent_cells import gru_cells, lstm_cells, rounding_of_layers
from dpsur.per_example.rules.recurrent_steps import State, projected_lstm
from dpsur.per_example.tape import Layout, NotSupportedError, Slot, Tape


@dataclass
class Trace:
    """What the backward pass of a recurrence leaves behind, with one direction per entry.

    `states` (directions, times + 1, rows, width) begins with the initial state; `hidden_gates` are
    the gradients of the gates' hidden part (directions, times, rows, gates).
    """

    states: Tensor | None = None
    hidden_gates: Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """Parameters of one layer, one entry per direction."""

    inputs: list[Tensor]
    hidden: list[Tensor]
    input_bias: list[Tensor]
    hidden_bias: list[Tensor]

    @staticmethod
    def of(module: nn.RNNBase, layer: int) -> "Weights":
        """Read the parameters of a layer by the names that torch gives them."""
        ends = ["", "_reverse"] if module.bidirectional else [""]

        def named(kind: str) -> list[Tensor]:
            return [getattr(module, f"{kind}_l{layer}{end}") for end in ends]

        biases = (named("bias_ih"), named("bias_hh")) if module.bias else ([], [])
        return Weights(named("weight_ih"), named("weight_hh"), *biases)


# (input part of the gates, weights, initial states of the layer, trace) -> outputs and final states
Recurrence = Callable[[Tensor, Weights, list[Tensor], Trace], tuple[Tensor, list[Tensor]]]


@dataclass
class Outcome:
    """Output of the last layer and the final states of all layers."""

    output: Tensor
    final: list[list[Tensor]] = field(default_factory=list)


def run(
    module: nn.RNNBase,
    tape: Tape,
    input: Tensor,
    initial: list[Tensor],
    recurrence: Recurrence,
) -> Outcome:
    """Run all layers of a recurrent module; `initial` holds its initial states or nothing."""
    if not isinstance(input, Tensor) or input.dim() != 3:
        raise NotSupportedError("packed or unbatched sequences")
    layout = tape.examples_in(input, axis=0 if module.batch_first else 1)
    # Rounding would add up over the times of a sequence: a recurrence keeps its precision.
    with torch.autocast(input.device.type, enabled=False):
        return _layers(
            module, tape, layout, widen(input), [widen(one) for one in initial], recurrence
        )


def _layers(
    module: nn.RNNBase,
    tape: Tape,
    layout: Layout,
    input: Tensor,
    initial: list[Tensor],
    recurrence: Recurrence,
) -> Outcome:
    output = input.transpose(0, 1) if module.batch_first else input
    directions = 2 if module.bidirectional else 1
    final: list[list[Tensor]] = []
    for layer in range(module.num_layers):
        weights = Weights.of(module, layer)
        start = [state[layer * directions :][:directions] for state in initial]
        output, last = _layer(tape, layout.fold, output, weights, start, recurrence)
        final.append(last)
        if layer + 1 < module.num_layers and module.dropout:
            output = F.dropout(output, module.dropout, module.training)
    return Outcome(output.transpose(0, 1) if module.batch_first else output, final)


def _layer(
    tape: Tape,
    fold: int,
    sequence: Tensor,
    weights: Weights,
    initial: list[Tensor],
    recurrence: Recurrence,
) -> tuple[Tensor, list[Tensor]]:
    rows = sequence.shape[1]
    seen = [sequence, sequence.flip(0)][: len(weights.inputs)]
    trace = Trace()
    parts = [
        F.linear(one, weight, *bias)
        for one, weight, *bias in zip(
            seen, weights.inputs, *([weights.input_bias] if weights.input_bias else []), strict=True
        )
    ]
    gates = torch.stack(parts) if len(parts) > 1 else parts[0].unsqueeze(0)
    record = _record(tape, fold, [one.detach() for one in seen], weights, trace)
    gates = tape.watch(gates, record)
    if not initial:
        hidden = weights.hidden[0].shape[1]
        initial = [gates.new_zeros(len(parts), rows, hidden)] * 2
    states, final = recurrence(gates, weights, initial, trace)
    if len(parts) == 1:
        return states[0], final
    return torch.cat([states[0], states[1].flip(0)], -1), final


def _record(
    tape: Tape, fold: int, seen: list[Tensor], weights: Weights, trace: Trace
) -> Callable[[Tensor], Iterable[tuple[Slot, Contribution]]]:
    layout = Layout(1, fold)

    def by_example(values: Tensor) -> Tensor:
        rows = layout.by_example(values).reshape(tape.examples, -1, values.shape[-1])
        return rows.contiguous()  # used several times, and slow to read across times

    slots = [
        [tape.slot(value) for value in values]
        for values in (weights.inputs, weights.hidden, weights.input_bias, weights.hidden_bias)
    ]

    def record(gradient: Tensor) -> Iterable[tuple[Slot, Contribution]]:
        assert trace.states is not None
        assert trace.hidden_gates is not None
        for direction, one in enumerate(seen):
            gates = by_example(gradient[direction])
            hidden_gates = gates
            if trace.hidden_gates is not gradient:
                hidden_gates = by_example(trace.hidden_gates[direction])
            pairs = [
                (slots[0][direction], gates, one),
                (slots[1][direction], hidden_gates, trace.states[direction, :-1]),
            ]
            for slot, outputs, inputs in pairs:
                if slot is not None:
                    yield slot, Products(by_example(inputs), outputs).cheapest()
            biases = [(slots[2], gates), (slots[3], hidden_gates)]
            for bias_slots, outputs in biases:
                slot = bias_slots[direction] if bias_slots else None
                if slot is not None:
                    yield slot, Rows(outputs.sum(1))

    return record


def hidden_weight_gradient(trace: Trace) -> Tensor:
    """Gradient of the hidden weights for all rows together, as autograd wants it."""
    assert trace.states is not None
    assert trace.hidden_gates is not None
    return torch.einsum("dtng,dtnh->dgh", trace.hidden_gates, trace.states[:, :-1])


def lstm(
    module: nn.LSTM, tape: Tape, input: Tensor, hx: State | None = None
) -> tuple[Tensor, State]:
    """Same result as `nn.LSTM`, with the recurrence written out."""
    if module.proj_size:
        return projected_lstm(module, tape, input, hx)
    outcome = run(module, tape, input, [] if hx is None else list(hx), _lstm_recurrence)
    hidden, cells = (torch.cat([last[kind] for last in outcome.final]) for kind in (0, 1))
    return outcome.output, (hidden, cells)


def _lstm_recurrence(
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
        fused = lstm_cells(active, cells, squashed) if gates.is_contiguous() else None
        for time in range(times):
            if fused is not None:
                with rounding_of_layers():
                    recurrent = torch.bmm(states[:, time], transposed)
                fused.forward(time, gates, recurrent, states)
                continue
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
        found = _fused_backward(outputs, last_cell, active, cells, squashed, weight)
        if found is not None:
            return _Lstm._gradients(ctx, weight, *found)
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
        return _Lstm._gradients(ctx, weight, gates, cell)

    @staticmethod
    def _gradients(ctx: Any, weight: Tensor, gates: Tensor, cell: Tensor) -> Any:
        ctx.trace.hidden_gates = gates
        weight_gradient = hidden_weight_gradient(ctx.trace) if ctx.needs_input_grad[1] else None
        first = torch.bmm(gates[:, 0], weight) if ctx.needs_input_grad[2] else None
        return gates, weight_gradient, first, cell, None


def _fused_backward(
    outputs: Tensor,
    last_cell: Tensor,
    active: Tensor,
    cells: Tensor,
    squashed: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """Gradients of all gates and of the first cell by one kernel per time, where there is one."""
    fused = lstm_cells(active, cells, squashed)
    if fused is None:
        return None
    outputs, slope = outputs.contiguous(), last_cell.contiguous().clone()
    gates, times = torch.empty_like(active), active.shape[1]
    for time in reversed(range(times)):
        recurrent = None
        if time + 1 < times:
            with rounding_of_layers():
                recurrent = torch.bmm(gates[:, time + 1], weight)
        fused.backward(time, outputs, recurrent, slope, gates)
    return gates, slope


def gru(
    module: nn.GRU, tape: Tape, input: Tensor, hx: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Same result as `nn.GRU`, with the recurrence written out."""
    outcome = run(module, tape, input, [] if hx is None else [hx], _gru_recurrence)
    return outcome.output, torch.cat([last[0] for last in outcome.final])


def _gru_recurrence(
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
        active = torch.empty_like(gates)
        recalled = gates.new_empty(directions, times, rows, width)
        transposed = weight.mT
        fused = gru_cells(active, states, recalled) if gates.is_contiguous() else None
        for time in range(times):
            if fused is not None:
                with rounding_of_layers():
                    recurrent = torch.bmm(states[:, time], transposed)
                fused.forward(time, gates, recurrent, bias)
                continue
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
        found = _fused_gru_backward(outputs, active, recalled, ctx.trace.states, weight)
        if found is not None:
            return _Gru._gradients(ctx, *found)
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
        inputs = torch.cat([gates[..., : 2 * width], to_fresh], -1)
        return _Gru._gradients(ctx, gates, inputs, hidden)

    @staticmethod
    def _gradients(ctx: Any, gates: Tensor, inputs: Tensor, hidden: Tensor) -> Any:
        ctx.trace.hidden_gates = gates
        weight_gradient = hidden_weight_gradient(ctx.trace) if ctx.needs_input_grad[1] else None
        bias_gradient = gates.sum((1, 2)).unsqueeze(1) if ctx.needs_input_grad[2] else None
        return inputs, weight_gradient, bias_gradient, hidden, None


def _fused_gru_backward(
    outputs: Tensor, active: Tensor, recalled: Tensor, states: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gradients of both parts of the gates and of the first state by one kernel per time."""
    fused = gru_cells(active, states, recalled)
    if fused is None:
        return None
    outputs, slope = outputs.contiguous(), torch.empty_like(outputs[:, 0])
    gates, inputs, times = torch.empty_like(active), torch.empty_like(active), active.shape[1]
    for time in reversed(range(times)):
        recurrent = None
        if time + 1 < times:
            with rounding_of_layers():
                recurrent = torch.bmm(gates[:, time + 1], weight)
        fused.backward(time, outputs, recurrent, slope, gates, inputs)
    return gates, inputs, slope.baddbmm_(gates[:, 0], weight)


def rnn(
    module: nn.RNN, tape: Tape, input: Tensor, hx: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Same result as `nn.RNN`, with the recurrence written out."""
    recurrence = partial(_rnn_recurrence, module.nonlinearity == "relu")
    outcome = run(module, tape, input, [] if hx is None else [hx], recurrence)
    return outcome.output, torch.cat([last[0] for last in outcome.final])


def _rnn_recurrence(
    relu: bool, gates: Tensor, weights: Weights, initial: list[Tensor], trace: Trace
) -> tuple[Tensor, list[Tensor]]:
    if weights.hidden_bias:
        gates = gates + torch.stack(weights.hidden_bias)[:, None, None]
    hidden = torch.stack(weights.hidden)
    states = _Rnn.apply(gates, hidden, initial[0], trace, relu)  # type: ignore[no-untyped-call]
    return states, [states[:, -1]]


class _Rnn(torch.autograd.Function):
    """Tensors have the shape (directions, times, rows, width)."""

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, hidden: Tensor, trace: Trace, relu: bool
    ) -> Any:
        directions, times, rows, width = *gates.shape[:3], weight.shape[2]
        states = gates.new_empty(directions, times + 1, rows, width)
        states[:, 0] = hidden
        transposed = weight.mT
        for time in range(times):
            with rounding_of_layers():
                before = torch.baddbmm(gates[:, time], states[:, time], transposed)
            states[:, time + 1] = before.relu_() if relu else before.tanh_()
        ctx.save_for_backward(weight)
        ctx.trace, ctx.relu = trace, relu
        trace.states = states
        return states[:, 1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (outputs,) = gradients
        (weight,) = ctx.saved_tensors
        after = ctx.trace.states[:, 1:]
        gates = (after > 0).to(after.dtype) if ctx.relu else 1 - after.square()
        times = gates.shape[1]
        hidden = outputs[:, times - 1]
        for time in reversed(range(times)):
            gates[:, time].mul_(hidden)
            if time:
                with rounding_of_layers():
                    hidden = torch.baddbmm(outputs[:, time - 1], gates[:, time], weight)
        ctx.trace.hidden_gates = gates
        weight_gradient = hidden_weight_gradient(ctx.trace) if ctx.needs_input_grad[1] else None
        first = torch.bmm(gates[:, 0], weight) if ctx.needs_input_grad[2] else None
        return gates, weight_gradient, first, None, None
