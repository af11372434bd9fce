"""What LSTM and GRU have in common: layers, directions and where their parameters' gradients are.

The recurrence runs for all examples and both directions at once and loops over time only. Its
backward pass leaves the gradients of all gates before their activation, for all times, and with
them every weight is used as by a linear layer on a sequence.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.core.gradients.layout import Layout, NotSupportedError, Slot
from dpsur.core.gradients.tape import Tape
from dpsur.core.gradients.uses import Products, Rows, Use, wide


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
    if not isinstance(input, Tensor) or input.dim() != 3 or module.proj_size:
        raise NotSupportedError("packed or unbatched sequences, or projections")
    layout = tape.examples_in(input, axis=0 if module.batch_first else 1)
    # Rounding would add up over the times of a sequence: a recurrence keeps its precision.
    with torch.autocast(input.device.type, enabled=False):
        return _layers(
            module, tape, layout, wide(input), [wide(one) for one in initial], recurrence
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
) -> Callable[[Tensor], Iterable[tuple[Slot, Use]]]:
    layout = Layout(1, fold)

    def by_example(values: Tensor) -> Tensor:
        rows = layout.by_example(values).reshape(tape.examples, -1, values.shape[-1])
        return rows.contiguous()  # used several times, and slow to read across times

    slots = [
        [tape.slot(value) for value in values]
        for values in (weights.inputs, weights.hidden, weights.input_bias, weights.hidden_bias)
    ]

    def record(gradient: Tensor) -> Iterable[tuple[Slot, Use]]:
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
