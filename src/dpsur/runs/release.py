"""What is published: the weights, how to rebuild the model, and the privacy statement."""

import copy
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from dpsur.errors import CheckpointError, FileError, InvalidInputError, describe_os_error
from dpsur.features.layers import WithFeatures, build_layers
from dpsur.functional.tree import Params
from dpsur.networks import build_network, parameter_count
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.page import render_markdown, render_model_card
from dpsur.privacy.statement import current
from dpsur.runs.files import (
    CARD,
    MALFORMED,
    PAGE,
    STATEMENT,
    WEIGHTS,
    check_release,
    finite,
    from_json,
    holds_release,
    partial_release,
    sha256,
    sync_folder,
    to_json,
    write_atomically,
)

FORMAT = "dpsur-release/1"
# Of the description of a network: values in it, and the largest of them.
MOST_VALUES, LARGEST_SIZE = 1000, 2**24
# What a model predicts: one of several classes, any number of labels, or numbers.
CLASSES, LABELS, NUMBERS = "classes", "labels", "numbers"


@dataclass(frozen=True)
class Origin:
    """Where a model comes from, as far as it can be rebuilt by name.

    `public` is what the user declared about the records, which the statement lists. `features` are
    the layers that a custom model was trained behind; a described network has its own. `predicts`
    is what the outputs mean, None where that is not known.
    """

    task: str | None = None
    network: Mapping[str, Any] | None = None
    public: Mapping[str, Any] = field(default_factory=dict)
    features: Sequence[Mapping[str, Any]] = ()
    predicts: str | None = None

    def behind(self, layers: Sequence[Mapping[str, Any]]) -> "Origin":
        """The same for a model that was trained behind layers of features."""
        if self.network is None:
            return replace(self, features=layers)
        if not layers:
            return self
        described = [dict(layer) for layer in layers]
        network = {"name": "with-features", "features": described, "network": self.network}
        return replace(self, network=network)


NO_ORIGIN = Origin()


def released_model(original: nn.Module, layers: nn.Sequential, released: Params) -> nn.Module:
    """The original network with the released weights, behind the layers that make its features.

    In evaluation mode: a user who predicts with it must not meet dropout.

    Not the network that was trained: that one may have kept something of the records it has seen,
    such as the last batch, in an attribute.
    """
    network = copy.deepcopy(original).cpu()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name in released:
                parameter.copy_(released[name])
    if not len(layers):
        return network.eval()
    return WithFeatures(layers.cpu(), network).eval()


def write_release(
    folder: Path,
    model: nn.Module,
    statement: Mapping[str, Any],
    origin: Origin,
    *,
    trained_only: bool = False,
) -> None:
    """Write a release folder, whole or not at all; the same release is not written twice.

    With `trained_only` it holds no frozen weights, which are public and may be many: who loads it
    brings a model that has them.
    """
    held = dict(model.state_dict())
    if trained_only:
        trained = [name for name, value in model.named_parameters() if value.requires_grad]
        held = {name: held[name] for name in trained}
    tensors = {name: value.detach().cpu().clone() for name, value in held.items()}
    described: dict[str, Any] = {
        "format": FORMAT,
        "task": origin.task,
        "network": None if origin.network is None else dict(origin.network),
        "model": type(model).__name__,
    }
    if trained_only:
        described["trained_only"] = True
    if origin.features:
        described["features"] = [dict(layer) for layer in origin.features]
    if origin.predicts is not None:
        described["predicts"] = origin.predicts
    weights = save_tensors(tensors, {"dpsur": json.dumps(described)})
    statement = {**finite(statement), "weights": {"file": WEIGHTS, "sha256": sha256(weights)}}
    if holds_release(folder) and (folder / WEIGHTS).read_bytes() == weights:
        return
    partial = partial_release(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write_atomically(partial / WEIGHTS, weights)
        write_atomically(partial / STATEMENT, to_json(statement))
        write_atomically(partial / PAGE, render_markdown(statement).encode())
        write_atomically(partial / CARD, render_model_card(statement).encode())
        partial.rename(folder)  # takes the place of an empty folder, but of nothing else
        sync_folder(folder.parent)
    except OSError as error:
        raise FileError(
            f"the release cannot be written to {folder} ({describe_os_error(error)}); make room "
            "for it there, or choose another folder"
        ) from error


def read_release(
    path: str | os.PathLike[str], model: nn.Module | None = None
) -> tuple[nn.Module, dict[str, Any], Origin]:
    """Load a release: the model, its privacy statement and its origin.

    `path` is a run folder or the release folder in it. A model that is not one of this package's
    networks must be passed in, built as it was for training; the layers of its features are added.
    """
    folder = check_release(path)
    weights, statement_file = folder / WEIGHTS, folder / STATEMENT
    try:
        content = weights.read_bytes()
        statement = current(from_json(statement_file.read_bytes()))
        guarantee, weights_of = statement["guarantee"], statement["weights"]
        accounting_named(guarantee["accounting"])
        numbers = [guarantee["epsilon"], statement["epsilon"]["proven"], guarantee["delta"]]
        if not (
            all(type(x) in (int, float) and 0 <= x < 1e300 for x in numbers if x is not None)
            and guarantee["delta"] is not None
            and isinstance(guarantee["proved"], bool)
            and isinstance(weights_of["sha256"], str)
            and isinstance(statement["public"], dict)
        ):
            raise ValueError(f"{STATEMENT} holds a value of the wrong type")
        tensors = load_tensors(content)
        header = from_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
        described = from_json(header["__metadata__"]["dpsur"].encode())
        features, predicts = described.get("features", []), described.get("predicts")
        if described["format"] != FORMAT:
            raise ValueError(f"{WEIGHTS} was not written by this program")
        if not (
            isinstance(described["task"], (str, type(None)))
            and isinstance(described["network"], (dict, type(None)))
            and isinstance(features, list)
            and all(isinstance(one, dict) for one in features)
            and predicts in (None, CLASSES, LABELS, NUMBERS)
        ):
            raise ValueError(f"{WEIGHTS} says in an unknown way where its model comes from")
        origin = Origin(
            described["task"], described["network"], features=features, predicts=predicts
        )
    except (OSError, SafetensorError, *MALFORMED) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder} holds a damaged release: {reason or type(error).__name__}",
            code="damaged-release",
        ) from error
    if sha256(content) != weights_of["sha256"]:
        raise CheckpointError(
            f"{weights} are not the weights that {statement_file.name} was written for (their "
            "SHA-256 differs), so its guarantee does not hold for them; restore both files",
            code="other-weights",
        )
    if model is None:
        if origin.network is None:
            raise InvalidInputError(
                f"{folder} holds weights of a custom model ({described.get('model')}); "
                "build that model and pass it in: dpsur.load(folder, model)",
                code="custom-model",
            )
        with _built_from(folder, "network", origin.network):
            held, count = sum(v.numel() for v in tensors.values()), parameter_count(origin.network)
            if count > held:
                raise ValueError(f"it has {count} parameters, and the file holds {held} numbers")
            model = build_network(origin.network)
    elif origin.features and not isinstance(model, WithFeatures):
        with _built_from(folder, "features", list(origin.features)):
            model = WithFeatures(build_layers(origin.features), model)
    try:
        others = model.load_state_dict(tensors, strict=not described.get("trained_only"))
        if others.unexpected_keys:
            raise RuntimeError(f"it has no {others.unexpected_keys[0]}")
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the weights in {folder} do not fit the model: {reason}") from error
    return model, statement, origin


@contextmanager
def _built_from(folder: Path, what: str, description: Any) -> Iterator[None]:
    """Build what a release describes; a description that no network has is refused before."""
    try:
        values, count = [description], 0
        while values:
            value, count = values.pop(), count + 1
            if count > MOST_VALUES or (isinstance(value, int) and abs(value) > LARGEST_SIZE):
                raise ValueError("its description holds too many or too large numbers")
            if isinstance(value, Mapping):
                values += value.values()
            elif isinstance(value, list):
                values += value
        yield
    except (*MALFORMED, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"the {what} that the weights in {folder} name cannot be built: {reason}"
        ) from error
