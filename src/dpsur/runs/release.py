"""What is published: the weights, how to rebuild the model, and the privacy statement."""

import copy
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from dpsur.core.types import Params
from dpsur.errors import CheckpointError, FileError, InvalidInputError, describe_os_error
from dpsur.features import WithFeatures
from dpsur.privacy.page import render_markdown
from dpsur.privacy.wording import NO_GUARANTEE
from dpsur.runs.files import (
    PAGE,
    STATEMENT,
    WEIGHTS,
    finite,
    holds_release,
    partial_release,
    release_folder,
    sha256,
    sync_folder,
    to_json,
    write_atomically,
)
from dpsur.tasks.networks import build_network

FORMAT = "dpsur-release/1"


@dataclass(frozen=True)
class Origin:
    """Where a model comes from, as far as it can be rebuilt by name."""

    task: str | None = None
    network: Mapping[str, Any] | None = None


NO_ORIGIN = Origin()


def released_model(original: nn.Module, layers: nn.Sequential, released: Params) -> nn.Module:
    """The original network with the released weights, behind the layers that make its features.

    In evaluation mode: a user who predicts with it must not meet dropout.

    Not the network that was trained: that one may have kept something of the records it has seen,
    such as the last batch, in an attribute of its own.
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
    folder: Path, model: nn.Module, statement: Mapping[str, Any], origin: Origin
) -> None:
    """Write a release folder, whole or not at all; the same release is not written twice."""
    tensors = {name: t.detach().cpu().clone() for name, t in model.state_dict().items()}
    described = {
        "format": FORMAT,
        "task": origin.task,
        "network": None if origin.network is None else dict(origin.network),
        "model": type(model).__name__,
    }
    weights = save_tensors(tensors, {"dpsur": json.dumps(described)})
    statement = as_published(statement)
    statement = {**statement, "weights": {"file": WEIGHTS, "sha256": sha256(weights)}}
    if holds_release(folder) and (folder / WEIGHTS).read_bytes() == weights:
        return
    partial = partial_release(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write_atomically(partial / WEIGHTS, weights)
        write_atomically(partial / STATEMENT, to_json(statement))
        write_atomically(partial / PAGE, render_markdown(statement).encode())
        partial.rename(folder)  # takes the place of an empty folder, but of nothing else
        sync_folder(folder.parent)
    except OSError as error:
        raise FileError(
            f"the release cannot be written to {folder} ({describe_os_error(error)}); make room "
            "for it there, or choose another folder"
        ) from error


def as_published(statement: Mapping[str, Any]) -> dict[str, Any]:
    """A statement as its file holds it: an infinite epsilon is null, and said to be no guarantee.

    A reader of the file must not find the word "proved" beside an epsilon that is not there.
    """
    published: dict[str, Any] = finite(statement)
    if math.isinf(statement["guarantee"]["epsilon"]):
        nothing = {"definition": NO_GUARANTEE, "proved": False, "theorem": None, "assumes": None}
        published["guarantee"] = {**published["guarantee"], **nothing}
    return published


def read_release(
    path: str | os.PathLike[str], model: nn.Module | None = None
) -> tuple[nn.Module, dict[str, Any], Origin]:
    """Load a release: the model, its privacy statement and its origin.

    `path` is a run folder or the release folder in it. A model that is not one of this package's
    networks must be passed in, built as it was for training.
    """
    folder = release_folder(path)
    weights, statement_file = folder / WEIGHTS, folder / STATEMENT
    for file in (weights, statement_file):
        if not file.is_file():
            raise InvalidInputError(
                f"{folder} holds no release ({file.name} is missing); "
                "give the folder of a run that has finished"
            )
    try:
        content = weights.read_bytes()
        tensors = load_tensors(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        described = json.loads(header["__metadata__"]["dpsur"])
        statement: dict[str, Any] = json.loads(statement_file.read_text(encoding="utf-8"))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} holds a damaged release: {error}") from error
    if described.get("format") != FORMAT:
        raise CheckpointError(f"{weights} was not written by this program")
    origin = Origin(described["task"], described["network"])
    if model is None:
        if origin.network is None:
            raise InvalidInputError(
                f"{folder} holds weights of a model of its own ({described['model']}); "
                "build that model and pass it in: dpsur.load(folder, model)"
            )
        model = build_network(origin.network)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the weights in {folder} do not fit the model: {reason}") from error
    return model, statement, origin


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Load the model of a release, in evaluation mode; pass a custom model to load into."""
    return read_release(path, model)[0].eval()
