"""How good a model is on public records."""

import torch

from dpsur.core.problem import Problem, example_losses
from dpsur.core.types import Examples, Params


def evaluate(problem: Problem, params: Params, examples: Examples) -> dict[str, float]:
    """Mean loss and, where targets are class indices, accuracy."""
    outputs = problem.outputs(params, examples.inputs)
    scores = {"loss": float(example_losses(problem.loss, outputs, examples.targets).mean())}
    if outputs.dim() == 2 and not examples.targets.dtype.is_floating_point:
        right = outputs.argmax(dim=1) == examples.targets
        scores["accuracy"] = float(right.to(torch.float64).mean())
    return scores
