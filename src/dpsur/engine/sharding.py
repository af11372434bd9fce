"""Modules that `torch.distributed.fsdp.fully_shard` has split over the ranks (FSDP2).

FSDP gathers the weights of a layer for its forward and its backward pass. Per-example norms come
from activations and output gradients, which each rank has for its own records; so only the weighted
sum of one parameter at a time exists as a whole, is added up over the ranks and split again. Noise
is drawn for each shard at the offset that its numbers have in the whole vector.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dpsur.distributed import Ranks
from dpsur.errors import UnsupportedModelError
from dpsur.functional.problem import every_module
from dpsur.functional.tree import Params
from dpsur.per_example.tape import Tape


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(value, DTensor) for value in module.parameters())


class Sharding:
    """The shards of a module's parameters, by name."""

    def __init__(self, module: nn.Module, trained: dict[str, nn.Parameter], ranks: Ranks) -> None:
        self.module, self.trained = module, cast(dict[str, DTensor], trained)
        self._parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._check(ranks)
        self._buffers = dict(module.named_buffers())

    def _check(self, ranks: Ranks) -> None:
        if not isinstance(self.module, FSDPModule):
            raise UnsupportedModelError(
                "the module holds distributed parameters, but fully_shard was not called on it; "
                "tensor parallelism is not supported, because no rank sees a whole layer: call "
                "fully_shard on the blocks and then on the module itself"
            )
        for name, value in self.module.named_parameters():
            if not isinstance(value, DTensor):
                raise UnsupportedModelError(
                    f"parameter {name} is not sharded; call fully_shard on the module itself, last"
                )
            shards = [place for place in value.placements if isinstance(place, Shard)]
            plain = len(shards) == 1 and type(shards[0]) is Shard and shards[0].dim == 0
            if not plain or value.device_mesh.size() != ranks.size:
                raise UnsupportedModelError(
                    f"parameter {name} is split as {tuple(value.placements)} over "
                    f"{value.device_mesh.size()} of {ranks.size} ranks; tensor, pipeline and "
                    "expert parallelism are not supported: use fully_shard over all ranks"
                )
        for part in self._parts:
            policy = part._get_fsdp_state()._mp_policy
            if policy.param_dtype is not None or policy.reduce_dtype is not None:
                raise UnsupportedModelError(
                    "fully_shard with a MixedPrecisionPolicy is not supported: clipped sums must "
                    "not be rounded after clipping; use torch.autocast(dtype=torch.bfloat16) "
                    "around the forward pass"
                )

    # --- the forward pass -------------------------------------------------------------------------

    def tape(self, records: int) -> Tape:
        """A tape that knows whole parameters by their shapes alone."""
        shapes = {
            name: torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
            for name, value in self.trained.items()
        }
        return _ShardedTape(self.module, shapes, records)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Weights require no gradient while the model is called, and buffers do not change."""
        versions = {name: value._version for name, value in self._buffers.items()}
        for value in self.trained.values():
            value.requires_grad_(False)
        # the backward pass needs the weights, and FSDP cannot see it begin
        for part in self._parts:
            part.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for value in self.trained.values():
                value.requires_grad_(True)
            for part in self._parts:
                part.set_reshard_after_forward(True, recurse=False)
        for name, buffer in self.module.named_buffers():
            if buffer is not self._buffers.get(name) or buffer._version != versions[name]:
                raise UnsupportedModelError(
                    f"buffer {name} changes during a forward pass and would carry private records "
                    "into the release; make the forward pass free of side effects"
                )

    def reshard(self) -> None:
        for part in self._parts:
            part.reshard()

    # --- sums, noise and gradients ----------------------------------------------------------------

    def reduce(self, name: str, value: Tensor) -> Tensor:
        like = self.trained[name]
        mesh = like.device_mesh
        whole = DTensor.from_local(value, mesh, [Partial("sum")] * mesh.ndim, run_check=False)
        return whole.redistribute(placements=like.placements).to_local()

    def offsets(self) -> dict[str, int]:
        """Where the first number of each shard stands in the whole vector.

        Each number has its own address then, so no two ranks draw the same noise.
        """
        found, start = {}, 0
        one_type = len({value.dtype for value in self.trained.values()}) == 1
        for name, like in self.trained.items():
            _, offsets = compute_local_shape_and_global_offset(
                like.shape, like.device_mesh, like.placements
            )
            row = like.numel() // like.shape[0] if like.shape and like.shape[0] else 1
            found[name] = start + (int(offsets[0]) * row if offsets else 0)  # it is split by rows
            start += like.numel()
            if not one_type:  # then parameters are drawn for one by one, in whole blocks
                start = -4 * (-start // 4)
        return found


class _ShardedTape(Tape):
    """Finds the parameter that a layer uses by its place: FSDP replaces the objects."""

    swaps_weights = False

    def __init__(self, module: nn.Module, params: Params, records: int) -> None:
        super().__init__(params, records)
        self._modules = every_module(module)

    def trains(self, module: nn.Module) -> bool:
        prefix = self._modules.get(module)
        return prefix is not None and any(
            (f"{prefix}.{key}" if prefix else key) in self.params for key in module._parameters
        )

    def follows(self, value: Tensor) -> bool:
        if isinstance(value, nn.Parameter) and self.slot(value) is not None:
            raise UnsupportedModelError(
                f"the model uses the weight {self.names[id(value)]} outside of a layer with a "
                "gradient rule, which cannot be sharded; train it without fully_shard, or freeze "
                "that layer (see dpsur.explain)"
            )
        return False

    def slot(self, parameter: Tensor | None) -> str | None:
        if not isinstance(parameter, nn.Parameter):
            return None
        if id(parameter) not in self.names:
            for module, prefix in self._modules.items():
                for key, value in module._parameters.items():
                    if value is parameter:
                        self.names[id(parameter)] = f"{prefix}.{key}" if prefix else key
        name = self.names.get(id(parameter))
        return name if name in self.params else None
