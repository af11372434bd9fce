"""How the gradients of a watched call are found: once for every shape of its arguments."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpsur.engine.sharding import Sharding
from dpsur.errors import StepError, UnsupportedModelError
from dpsur.functional.call import Arguments, every_module
from dpsur.functional.problem import Objective
from dpsur.functional.records import Examples
from dpsur.functional.tree import describe_rows, flatten, signature, slice_rows, tensors_of
from dpsur.per_example.engine_choice import Engine, Plan, fault_of_copies, plan_for
from dpsur.per_example.memory_budget import GradientBudget
from dpsur.per_example.model_check import check_model


class Plans:
    """The plans of a module, and whether one was made for bfloat16. `trained` are names."""

    def __init__(self, module: nn.Module, trained: list[str], sharding: Sharding | None) -> None:
        self._module, self._trained, self._sharding = module, trained, sharding
        self._known: dict[object, Plan] = {}
        self._lengths: dict[object, list[Plan]] = {}
        self.rounded = False

    def __len__(self) -> int:
        return len(self._known)

    def values(self) -> list[Plan]:
        """All plans so far."""
        return list(self._known.values())

    def find(self, inputs: Arguments) -> Plan:
        """The plan for a call with arguments like these."""
        kind = next(self._module.parameters()).device.type
        bf16 = torch.is_autocast_enabled(kind)
        if bf16 and torch.get_autocast_dtype(kind) is torch.float16:
            raise StepError(
                "autocast in float16 needs a GradScaler, which a private step cannot have; use "
                "torch.autocast(..., dtype=torch.bfloat16)"
            )
        self.rounded = self.rounded or bf16
        key = (signature(inputs), self._without_sizes(inputs, bf16))
        if key not in self._known:
            plan = self._of_other_lengths(inputs, bf16)
            if plan is None:
                with torch.autocast(kind, enabled=False):
                    plan = self._make(inputs, bf16)
                self._lengths.setdefault(self._without_sizes(inputs, bf16), []).append(plan)
            self._known[key] = plan
        return self._known[key]

    def _of_other_lengths(self, inputs: Arguments, bf16: bool) -> Plan | None:
        """The plan of two other lengths of the same inputs, if it is the same for both.

        Texts that are padded to the longest of a batch come in hundreds of lengths.
        """
        tried = self._lengths.get(self._without_sizes(inputs, bf16), [])
        if len(tried) < 2 or tried[0].assignment is None:
            return None
        first, second = tried[:2]
        same = first.layouts == second.layouts and first.assignment == second.assignment
        return first if same else None

    def _without_sizes(self, inputs: Arguments, bf16: bool) -> object:
        """What calls share that differ in nothing but the sizes of their records."""
        kinds = tuple((name, value.dim(), value.dtype) for name, value in flatten(inputs).items())
        layers = tuple(map(type, every_module(self._module)))  # one may have been replaced
        return kinds, inputs.constants, bf16, layers

    def _make(self, inputs: Arguments, bf16: bool) -> Plan:
        module = self._module if self._sharding is None else self._sharding.plain_copy()
        if self._without_sizes(inputs, bf16) not in self._lengths:  # other arguments, other code
            check_model(module, Examples(slice_rows(inputs, slice(1)), None))
        named = dict(module.named_parameters())
        params = {name: named[name].detach() for name in self._trained}
        objective = Objective(module, _no_loss, bf16=bf16)
        plan = plan_for(objective, params, inputs, GradientBudget())
        if plan.engine is Engine.BATCHED:
            fault = fault_of_copies(objective, params, inputs)
            if fault is not None:
                plan = replace(plan, engine=Engine.ONE_BY_ONE, failed=(*plan.failed, fault))
        if self._sharding is not None:
            self._sharding.check_plan(plan)
        return plan


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    raise NotImplementedError("the loss of a custom loop is custom")


def row_count_of(inputs: Arguments) -> int:
    """How many records a call is for; refuses arguments that do not agree."""
    found = tensors_of(inputs)
    if not found:
        raise UnsupportedModelError("the model was called without a tensor; pass it the records")
    if any(value.layout is not torch.strided or value.is_nested for value in found):
        raise UnsupportedModelError(
            "the model was called with a sparse or nested tensor, whose records cannot be told "
            "apart; pass dense tensors, with records padded to one length"
        )
    rows = len(found[0]) if found[0].dim() else 0
    for value in found:
        if not value.dim() or len(value) != rows:
            raise UnsupportedModelError(
                f"the model was called with tensors of {describe_rows(inputs)}, of which one has "
                f"the shape {tuple(value.shape)} and another {rows} rows; every tensor must have a "
                "row per record in its first dimension (batch_first=True)"
            )
    return rows
