"""Linear layers, on single vectors and on sequences of them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsur.functional.process_settings import as_autocast_sees, widen
from dpsur.per_example.contributions import Outer, Output, Products, Rows, Shift
from dpsur.per_example.kernels import products
from dpsur.per_example.tape import Tape, Uses


def linear_map(
    tape: Tape,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    some: slice | None = None,
) -> Tensor:
    """A linear map by a weight and a bias, or by some of their rows: the others have no part in it.

    The gradient of the weight is a sum of outer products over positions.
    """
    input = as_autocast_sees(input)
    multiply = products.linear if input.device.type == products.DEVICE else F.linear
    if some is None:
        output = multiply(input, weight, bias)
    else:
        output = multiply(input, weight[some], None if bias is None else bias[some])
    return watch_linear(tape, output, input, weight, bias, some=some)


def watch_linear(
    tape: Tape,
    output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    some: slice | None = None,
    transposed: bool = False,
) -> Tensor:
    """The output of a linear map, watched.

    A weight that is `transposed` has the shape (in, out), as that of `Conv1D` of Hugging Face.
    """
    weight_slot, bias_slot = tape.slot(weight), tape.slot(bias)
    if weight_slot is None and bias_slot is None:  # not trained, as beside adapters
        return output
    layout = tape.examples_in(output)

    def record(gradient: Tensor) -> Uses:
        if some is not None:
            gradient = F.pad(gradient, (some.start, len(weight) - some.stop))
        rows, width = tape.examples, gradient.shape[-1]
        if gradient.numel() == rows * width and not transposed:  # a vector per example, anywhere
            output = Output(widen(gradient).reshape(rows, width))
            if weight_slot is not None:
                inputs = widen(input).detach().reshape(rows, input.shape[-1])
                yield weight_slot, Outer(inputs, output)
            if bias_slot is not None:
                yield bias_slot, Shift(output)
            return
        # What the layer saw under autocast stays in bfloat16; on a CPU nothing is gained by it.
        narrow = gradient.dtype == torch.bfloat16 and gradient.is_cuda
        seen = input.detach().to(torch.bfloat16) if narrow else widen(input.detach())
        outputs = layout.split(gradient if narrow else widen(gradient)).reshape(rows, -1, width)
        if weight_slot is not None:
            inputs = layout.split(seen).reshape(rows, -1, input.shape[-1])
            pair = (outputs, inputs) if transposed else (inputs, outputs)
            yield weight_slot, Products(*pair).cheapest()
        if bias_slot is not None:
            total = outputs.sum(1, dtype=torch.float32) if narrow else outputs.sum(1)
            yield bias_slot, Rows(total)

    return tape.watch(output, record)
