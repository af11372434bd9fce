"""What can be said against a model before training: weights, layers and shapes.

That records are independent needs no check here: the record level keeps them apart.
"""

import torch
from torch import Tensor, nn

from dpsur.errors import ModelInputError, UnsupportedModelError, from_custom_code
from dpsur.functional.problem import call, mode, output_rows, same_bits, without_side_effects
from dpsur.functional.records import Examples
from dpsur.functional.tree import TensorTree, describe_rows, map_tensors, tensors_of
from dpsur.per_example.rules import layer_fault


def check_model(model: nn.Module, examples: Examples, *, tested: bool = True) -> TensorTree:
    """Check a model on two synthetic records, in evaluation mode: of the records only shapes count.

    `tested` says whether updates have to pass tests, which a model must not decide by chance.
    Returns the outputs, whose shape says what the model predicts.
    """
    _check_parameters(model)
    for name, module in model.named_modules():
        fault = layer_fault(module)
        if fault is not None:
            raise UnsupportedModelError(fault.describe(name, module))
    rows = map_tensors(synthetic, examples.inputs)
    before = map_tensors(torch.clone, rows)
    device = next(model.parameters()).device
    with torch.no_grad(), mode(model, training=False):
        state = generator_state(device)
        try:
            with without_side_effects((model,)):
                outputs = output_rows(call(model, rows))
        except UnsupportedModelError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            about = f"inputs of {describe_rows(rows, 2)}"
            if from_custom_code(error):  # which its author knows best how to read
                error.add_note(f"dpsur: raised when the model was tried on {about}")
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelInputError(f"the model cannot take {about}: {reason}") from error
        drew = not torch.equal(state, generator_state(device))
    if drew and tested:
        raise UnsupportedModelError(
            "the model draws random numbers in evaluation mode, so that the gate, which compares "
            "losses before and after an update, would decide by chance; draw only where "
            "`self.training` is set (for F.dropout: training=self.training), or train without a "
            'gate: method=dpsur.Dpsgd(gate="none")'
        )
    if not all(map(same_bits, tensors_of(rows), tensors_of(before))):
        raise UnsupportedModelError(
            "the model overwrites its inputs, and would overwrite the data sets it is given; set "
            "inplace=False in its first layer, or write to a copy"
        )
    found = tensors_of(outputs)
    if not found or any(not value.dim() or len(value) != 2 for value in found):
        shapes = ", ".join(str(tuple(value.shape)) for value in found) or "no tensor"
        raise UnsupportedModelError(
            f"the model returns {shapes} for a batch of 2 records; every output must have a row "
            "per record in its first dimension"
        )
    return outputs


def draws_randomness(model: nn.Module, examples: Examples) -> bool:
    where = next(model.parameters()).device  # not always where the records are
    rows = map_tensors(lambda value: synthetic(value).to(where), examples.inputs)
    with torch.random.fork_rng([where] if where.type == "cuda" else []):
        before = generator_state(where)
        with torch.no_grad(), mode(model, training=True):
            call(model, rows)
        return not torch.equal(before, generator_state(where))


def synthetic(like: Tensor, rows: int = 2) -> Tensor:
    """Rows that say nothing about the real ones: normal draws, or zeros and ones."""
    shape = (rows, *like.shape[1:])
    generator = torch.Generator().manual_seed(0)
    if like.dtype.is_floating_point:
        drawn = torch.randn(shape, generator=generator)
    else:
        drawn = torch.randint(0, 2, shape, generator=generator)
    return drawn.to(device=like.device, dtype=like.dtype)


def generator_state(device: torch.device) -> Tensor:
    """The states of the generators that a model can draw from: the host's, and a GPU's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def _check_parameters(model: nn.Module) -> None:
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise UnsupportedModelError(
            "the model has no parameter that requires a gradient; unfreeze the layers to train"
        )
    for name, value in trainable:
        refuse_complex(name, value)
        if value.dtype not in (torch.float32, torch.float64):
            raise UnsupportedModelError(
                f"parameter {name} is {value.dtype}; convert the model with model.float()"
            )
        if not value.isfinite().all():
            raise UnsupportedModelError(
                f"parameter {name} holds values that are not finite; initialise the model again"
            )


def refuse_complex(name: str, value: Tensor) -> None:
    """Norms are taken and noise is added in real numbers."""
    if value.is_complex():
        raise UnsupportedModelError(
            f"parameter {name} is complex; keep its real and imaginary parts as a real parameter "
            "and join them in forward by torch.view_as_complex"
        )
