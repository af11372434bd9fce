"""What can be said against a model before training, and what can be repaired.

`dpsur.check` lists it, `dpsur.fix` repairs it, `check_model` refuses at once. That records are
independent needs no check here: the record level keeps them apart.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from dpsur import checks
from dpsur.errors import (
    InvalidInputError,
    ModelInputError,
    UnsupportedModelError,
    from_custom_code,
)
from dpsur.functional.model_loss import split_labels
from dpsur.functional.problem import call, mode, output_rows, same_bits, without_side_effects
from dpsur.functional.records import Examples
from dpsur.functional.tree import TensorTree, describe_rows, keep, map_tensors, tensors_of
from dpsur.per_example.clipping import sum_of_outputs
from dpsur.per_example.record_function import RecordFunction
from dpsur.per_example.report import SMALL
from dpsur.per_example.rules import TABLES, LayerFault, layer_fault

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
# Norms are taken and noise is added in real numbers.
_REAL_PARTS = (
    "keep its real and imaginary parts as a real parameter and join them in forward by "
    "torch.view_as_complex"
)
# Groups of a GroupNorm in the place of a BatchNorm: at most so many, of two channels or more, since
# a group of a single number would be normalised to zero.
_MOST_GROUPS, _LEAST_CHANNELS = 32, 2


@dataclass(frozen=True)
class ModelProblem:
    """Something that keeps a model from being trained privately, or from being trained fast.

    `path` is that of the module or parameter, "" for the model itself. `fixable` tells whether
    `dpsur.fix` deals with it; `severity` is "error" or "slow".
    """

    path: str
    kind: str
    reason: str
    remedy: str
    fixable: bool = False
    severity: str = "error"

    def __str__(self) -> str:
        hint = " (dpsur.fix does this)" if self.fixable else ""
        return f"{self.path or '(root)'} ({self.kind}): {self.reason}; {self.remedy}{hint}"


@dataclass(frozen=True)
class ModelReport:
    """What `dpsur.check` found; `print` it. It is true if nothing keeps the model from training."""

    problems: tuple[ModelProblem, ...]

    def __bool__(self) -> bool:
        return not self.errors

    @property
    def errors(self) -> tuple[ModelProblem, ...]:
        """The problems that a model is refused for."""
        return tuple(one for one in self.problems if one.severity == "error")

    def __str__(self) -> str:
        if not self.problems:
            return "no problem found"
        return "\n".join(f"{one.severity}: {one}" for one in self.problems)


class FixedModel(NamedTuple):
    """A repaired copy of a model, and what was changed, one line each."""

    model: nn.Module
    changes: tuple[str, ...]


@checks.arguments
def check(
    subject: nn.Module | Callable[..., Any],
    sample_batch: Any = None,
    *,
    model: nn.Module | None = None,
) -> ModelReport:
    """List every problem that private training would have with a model, or with a private step.

    Args:
        subject: a model, or a private step, or a function of (model, batch) together with `model`.
            It is left as it is.
        sample_batch: a batch of public records as a loader yields it: inputs, a pair (inputs,
            targets), or a dict with or without labels. For a function, at least two records: it
            tells where they give another loss together than each alone, since training would then
            minimise something else than what is written.
        model: the model that a plain function is called with.

    Problems of single modules are all listed. What is found by calling the model is found one at a
    time, on a copy in which everything else has been fixed.
    """
    if isinstance(subject, nn.Module):
        problems = [*_module_problems(subject), *_parameter_problems(subject)]
        if sample_batch is None or not all(one.fixable for one in problems):
            return ModelReport(tuple(problems))
        repaired = fix(subject).model if problems else subject
        found = _problems_of_calls(_sum_of_outputs, repaired, _two_of(_inputs(sample_batch)))
        return ModelReport((*problems, *found))
    model = getattr(subject, "module", None) if model is None else model
    if not isinstance(model, nn.Module) or sample_batch is None:
        raise InvalidInputError(
            "to check a function of (model, batch), give a batch of public records, and model="
            "... unless it is a private step"
        )
    if any(not value.dim() or len(value) < 2 for value in tensors_of(sample_batch)):
        raise InvalidInputError("give at least two records, with a row each in every tensor")
    function = getattr(subject, "function", subject)
    found = _problems_of_calls(function, model, _two_of(sample_batch))
    return ModelReport((*_module_problems(model), *_parameter_problems(model), *found))


def _two_of(batch: Any) -> Any:
    """Two records of a batch; one that is alone stands for both."""
    if not all(value.dim() and len(value) for value in tensors_of(batch)):
        raise InvalidInputError("sample_batch is empty; pass at least one record")
    return map_tensors(lambda value: torch.cat([value[:1], value[:2][-1:]]), batch, otherwise=keep)


def _sum_of_outputs(model: nn.Module, inputs: TensorTree) -> Tensor:
    return sum_of_outputs(output_rows(call(model, inputs)), None)


def _module_problems(model: nn.Module) -> Iterator[ModelProblem]:
    for path, module in model.named_modules():
        kind = type(module).__name__
        fault = _fault(module)
        if fault is not None:
            yield ModelProblem(path, kind, *fault)
        if getattr(module, "inplace", False) is True:
            reason = (
                "overwrites its input, which a model's own inputs and saved activations do not "
                "survive"
            )
            yield ModelProblem(path, kind, reason, "set inplace=False", True, "slow")
        if isinstance(module, _WRAPPERS):
            reason = "wraps the model and splits or averages its batches"
            yield ModelProblem(path, kind, reason, "pass the module inside", fixable=not path)


def _parameter_problems(model: nn.Module) -> Iterator[ModelProblem]:
    if not any(p.requires_grad for p in model.parameters()):
        yield ModelProblem(
            "",
            type(model).__name__,
            "no parameter requires a gradient",
            "unfreeze the layers to train with requires_grad_(True)",
        )
    for path, value in model.named_parameters():
        if not value.requires_grad:
            continue
        if isinstance(value, nn.UninitializedParameter):
            yield ModelProblem(
                path, "parameter", "has no shape yet", "call the model once on a batch of zeros"
            )
        elif value.is_complex():
            yield ModelProblem(path, "parameter", "is complex", _REAL_PARTS)
        elif value.dtype not in (torch.float32, torch.float64):
            reason = f"is {value.dtype}, too coarse for clipped sums and noise"
            yield ModelProblem(path, "parameter", reason, "use model.float()", fixable=True)
        elif not value.isfinite().all():
            yield ModelProblem(
                path, "parameter", "holds values that are not finite", "initialise it again"
            )


def _fault(module: nn.Module) -> LayerFault | None:
    """Why a layer is refused, or what only tests and training find out about it."""
    fault = layer_fault(module)
    if fault is None and isinstance(module, TABLES) and module.scale_grad_by_freq:
        return LayerFault(
            "divides gradients by how often a token is in the batch, which couples its records",
            "set scale_grad_by_freq=False",
        )
    if fault is None and is_parametrized(module) and _spectral(module):
        return LayerFault(
            "spectral_norm changes its buffers in every forward pass",
            "remove the parametrization, or use weight_norm",
        )
    return fault


def _spectral(module: nn.Module) -> bool:
    held: Any = module.parametrizations
    return any(isinstance(one, _SpectralNorm) for several in held.values() for one in several)


def _problems_of_calls(
    function: Callable[..., Any], model: nn.Module, two: Any
) -> Iterator[ModelProblem]:
    """How a function takes two records together and each alone, in evaluation mode."""
    kind = type(model).__name__
    if function is not _sum_of_outputs:
        kind = getattr(function, "__name__", type(function).__name__)
    model = copy.deepcopy(model).eval()
    device = next(model.parameters()).device
    two = map_tensors(lambda value: value.to(device), two, otherwise=keep)
    trained = {n: value for n, value in model.named_parameters() if value.requires_grad}
    records = RecordFunction((model,), trained)
    alone = map_tensors(lambda value: value.unsqueeze(1), two, otherwise=keep)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            tape, losses, _ = records.tape(lambda one: function(model, one), alone, 2)
            found = function(model, two)
    except UnsupportedModelError as error:
        reason, _, remedy = str(error).partition("; ")
        yield ModelProblem("", kind, reason, remedy or "change the model")
        return
    together = float((found["loss"] if isinstance(found, Mapping) else found).detach().sum())
    mean, whole = float(losses.mean()), float(losses.sum())
    if not any(abs(together - one) <= 1e-3 * (abs(one) + 1e-6) for one in (mean, whole)):
        yield ModelProblem(
            "",
            kind,
            f"two records together have the loss {together:.4g}, and each alone {mean:.4g} on "
            "average: it relates records to each other, and private training computes it for each "
            "record alone",
            "write the loss of one record, or leave it if that is meant",
            severity="warning",
        )
    if not records.by_construction:
        yield ModelProblem(
            "",
            kind,
            f"runs one record at a time ({records.why_alone})",
            "nothing has to be done; to be faster, avoid what is named",
            severity="slow",
        )
    for path in sorted(tape.copied):
        if path in trained and trained[path].numel() > SMALL:
            yield ModelProblem(
                path,
                "parameter",
                "is used by an operation without a rule, with a gradient for every record",
                "nothing has to be done; layers of torch.nn take less memory",
                severity="slow",
            )


def _inputs(sample_batch: Any) -> TensorTree:
    if isinstance(sample_batch, Mapping):
        split = split_labels(sample_batch)
        return dict(sample_batch) if split is None else split[0]
    if isinstance(sample_batch, (tuple, list)) and len(sample_batch) == 2:
        return sample_batch[0]
    if not isinstance(sample_batch, Tensor) and not tensors_of(sample_batch):
        raise InvalidInputError(
            "sample_batch must be a batch as a loader yields it, such as (inputs, targets), "
            f"got {type(sample_batch).__name__}"
        )
    return sample_batch


@checks.arguments
def fix(model: nn.Module, *, batch_norm: str = "group") -> FixedModel:
    """Repair what can be repaired in a copy of a model, and say what was changed.

    Args:
        model: stays as it is; the result holds a repaired copy. Build optimizers for that one.
        batch_norm: "group" replaces BatchNorm by GroupNorm, with its scale and shift; "frozen"
            normalises by the running statistics as they are, so that a model that was pretrained
            on public data computes what it did in evaluation mode.

    Weights are kept wherever the new layer has a place for them.
    """
    checks.one_of("batch_norm", batch_norm, ("group", "frozen"))
    model, changes = copy.deepcopy(model), []
    while isinstance(model, _WRAPPERS):
        changes.append(f"(root) ({type(model).__name__}): unwrapped")
        model = model.module
    if any(
        p.requires_grad and p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()
    ):
        model = model.float()
        changes.append("(root): parameters converted to float32")
    replaced: dict[nn.Module, nn.Module] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module not in replaced:
            text, new = _repair(module, batch_norm)
            replaced[module] = new
            if text is not None:
                changes.append(f"{path or '(root)'} ({type(module).__name__}): {text}")
        new = replaced[module]
        if new is module:
            continue
        if not path:
            model = new
        else:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new)
    return FixedModel(model, tuple(changes))


def _repair(module: nn.Module, batch_norm: str) -> tuple[str | None, nn.Module]:
    if isinstance(module, _BatchNorm) and not isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return _replace_batch_norm(module, batch_norm)
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        module.track_running_stats = False
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            module.register_buffer(name, None)
        return "track_running_stats=False; its running statistics are gone", module
    if is_parametrized(module) and _spectral(module):
        for name in list(module.parametrizations):  # type: ignore[arg-type]
            remove_parametrizations(module, name, leave_parametrized=True)
        return "spectral_norm removed; the weight is trained from its present value", module
    changes: dict[str, Any] = {}
    if getattr(module, "inplace", False) is True:
        changes["inplace"] = False
    if isinstance(module, TABLES):
        wanted = {"max_norm": None, "sparse": False, "scale_grad_by_freq": False}
        changes |= {name: new for name, new in wanted.items() if getattr(module, name) != new}
    for name, new in changes.items():
        setattr(module, name, new)
    return ("; ".join(f"{name}={new}" for name, new in changes.items()) or None), module


def _replace_batch_norm(module: _BatchNorm, how: str) -> tuple[str, nn.Module]:
    channels = module.num_features
    if how == "frozen" and module.running_mean is not None:
        new: nn.Module = FrozenNorm(module)
        text = "normalises by its running statistics, which stay as they are"
    else:
        most = min(_MOST_GROUPS, max(1, channels // _LEAST_CHANNELS))
        groups = max(groups for groups in range(1, most + 1) if channels % groups == 0)
        new = nn.GroupNorm(groups, channels, module.eps, module.affine)
        text = f"replaced by GroupNorm({groups}, {channels}); its running statistics are gone"
    if module.affine:
        for name in ("weight", "bias"):
            own = getattr(module, name)
            with torch.no_grad():
                getattr(new, name).copy_(own)
            getattr(new, name).requires_grad_(own.requires_grad)
        text += ", scale and shift are kept"
        new = new.to(module.weight.device, module.weight.dtype)
    new.train(module.training)
    return text, new


class FrozenNorm(nn.Module):
    """A BatchNorm in evaluation mode for good: every record is treated by itself."""

    running_mean: Tensor
    running_var: Tensor
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.eps = norm.eps
        self.register_buffer("running_mean", norm.running_mean.detach().clone())
        self.register_buffer("running_var", norm.running_var.detach().clone())
        for name in ("weight", "bias"):
            value = getattr(norm, name) if norm.affine else None
            copied = None if value is None else nn.Parameter(value.detach().clone())
            self.register_parameter(name, copied)

    def forward(self, input: Tensor) -> Tensor:
        shape = (-1, *[1] * (input.dim() - 2))
        spread = (self.running_var + self.eps).sqrt()
        output = (input - self.running_mean.view(shape)) / spread.view(shape)
        if self.weight is None or self.bias is None:
            return output
        return output * self.weight.view(shape) + self.bias.view(shape)


# --- what a run checks --------------------------------------------------------------------------


def check_model(model: nn.Module, examples: Examples, *, tested: bool = True) -> TensorTree:
    """Check a model on two synthetic records, in evaluation mode: of the records only shapes count.

    `tested` says whether updates have to pass tests, which a model must not decide by chance.
    Returns the outputs, whose shape says what the model predicts.
    """
    for problem in _parameter_problems(model):
        raise UnsupportedModelError(str(problem))
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


def refuse_complex(name: str, value: Tensor) -> None:
    if value.is_complex():
        raise UnsupportedModelError(f"parameter {name} is complex; {_REAL_PARTS}")
