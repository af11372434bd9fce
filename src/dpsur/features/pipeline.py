"""A network together with the features that it was trained on."""

from torch import Tensor, nn

from dpsur.errors import InvalidInputError


class WithFeatures(nn.Module):
    """Takes raw inputs: `network(features(inputs))`.

    Training sees the features only, computed once. What is released is this, so that whoever has
    the model needs no other code to use it.
    """

    def __init__(self, features: nn.Sequential, network: nn.Module) -> None:
        super().__init__()
        trained = [name for name, value in features.named_parameters() if value.requires_grad]
        if trained:
            raise InvalidInputError(
                f"features must have nothing to train, but {trained[0]} has; "
                "put layers with weights into the network"
            )
        self.features = features
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        """The network's outputs for raw inputs."""
        outputs: Tensor = self.network(self.features(inputs))
        return outputs
