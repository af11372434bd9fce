"""DPSGD-TS (Papernot et al. 2021): DP-SGD on a network with tempered-sigmoid activations."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from dpsur import checks
from dpsur.errors import InvalidInputError
from dpsur.mechanism.gates import Metrics
from dpsur.methods.gradient_method import GradientMethod
from dpsur.options import option
from reproduction.networks import TemperedSigmoid

# Activations whose place a tempered sigmoid takes.
REPLACED = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, TemperedSigmoid)


@dataclass(frozen=True, repr=False)
class DpsgdTs(GradientMethod):
    """DP-SGD with bounded activations, scale * sigmoid(temperature * x) - offset.

    They keep gradients small, so that clipping loses less. The network is all that differs from
    DPSGD. Formal guarantee of one step: a sampled Gaussian mechanism at rate batch_size / N.
    """

    name = "dpsgd-ts"
    summary = "tempered sigmoids (Papernot et al. 2021): DP-SGD with bounded activations"

    activation_scale: float = option(
        2.0,
        "scale of the tempered sigmoid",
        group="method dpsgd-ts",
    )
    activation_temperature: float = option(
        2.0,
        "temperature of the tempered sigmoid",
        group="method dpsgd-ts",
    )
    activation_offset: float = option(
        1.0,
        "offset of the tempered sigmoid",
        group="method dpsgd-ts",
    )

    def __post_init__(self, metrics: Metrics | None) -> None:
        super().__post_init__(metrics)
        checks.positive("activation_scale", self.activation_scale)
        checks.positive("activation_temperature", self.activation_temperature)
        checks.finite("activation_offset", self.activation_offset)

    def adapt(self, model: nn.Module) -> nn.Module:
        """A copy of the model with tempered sigmoids in place of its activations."""
        model = copy.deepcopy(model)
        places = [
            (parent, name)
            for parent in model.modules()
            for name, child in parent.named_children()
            if isinstance(child, REPLACED)
        ]
        if not places:
            raise InvalidInputError(
                "the model has no activation layer (such as nn.ReLU or nn.Tanh) that method "
                f"{self.name} could replace; write its activations as layers, or use dpsgd"
            )
        for parent, name in places:
            setattr(parent, name, self._activation())
        return model

    def network_changes(self) -> Mapping[str, Any]:
        """The activation, for a network that is built by name."""
        return {
            "activation": {
                "name": "tempered-sigmoid",
                "scale": self.activation_scale,
                "temperature": self.activation_temperature,
                "offset": self.activation_offset,
            }
        }

    def _activation(self) -> TemperedSigmoid:
        return TemperedSigmoid(
            self.activation_scale, self.activation_temperature, self.activation_offset
        )
