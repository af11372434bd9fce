"""Checkpoints of Opacus: weights are read, what they say about privacy is only passed on."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpsur import checks
from dpsur.errors import CheckpointError, InvalidInputError
from dpsur.opacus.accounting import spent

_PREFIX = "_module."
_CELL = re.compile(r"(?<=\.)l(\d+(?:_reverse)?)\.(ih|hh)\.(weight|bias)$")
_PARTS = {"qlinear": "q", "klinear": "k", "vlinear": "v"}


@dataclass(frozen=True)
class ClaimedHistory:
    """Steps that a checkpoint says were made: claimed by Opacus, not verified.

    Nothing here knows whether batches were Poisson samples, gradients were clipped or noise was
    drawn as claimed. It never becomes part of a figure of this library.
    """

    steps: tuple[tuple[float, float, int], ...]
    mechanism: str

    def epsilon(self, delta: float) -> float:
        """Epsilon of the claimed steps, by privacy loss distributions: as good as the claim."""
        return spent(self.steps, delta)

    def __str__(self) -> str:
        each = (
            f"{count} steps with sample rate {rate:g} and noise multiplier {noise:g}"
            for noise, rate, count in self.steps
        )
        return f"claimed by Opacus, not verified: {', '.join(each) or 'no steps'}"


class OpacusCheckpoint(NamedTuple):
    """The model with the weights of a checkpoint, and the history, if it was asked for."""

    model: nn.Module
    claimed: ClaimedHistory | None


@checks.arguments
def from_opacus(
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    model: nn.Module,
    *,
    history: bool = False,
) -> OpacusCheckpoint:
    """Load the weights that were trained with Opacus into a plain model.

    Args:
        checkpoint: a file that `PrivacyEngine.save_checkpoint` of Opacus or `torch.save(
            model.state_dict())` wrote, or what was in it. Files are read with `weights_only=True`.
        model: the model as it was before Opacus wrapped it; its weights are replaced.
        history: whether to read the accountant's history as well. It is shown as claimed, and never
            part of a proven figure; that of the GDP accountant is refused.
    """
    held = checkpoint if isinstance(checkpoint, Mapping) else _load(Path(checkpoint))
    weights = held.get("module_state_dict", held)
    claimed = None
    if history:
        state = held.get("privacy_accountant_state_dict")
        if not isinstance(state, Mapping):
            raise CheckpointError(
                "the checkpoint holds no accountant's history; leave history out, or use a file "
                "that PrivacyEngine.save_checkpoint wrote"
            )
        claimed = _history(state)
    renamed = _rename(weights, set(model.state_dict()))
    missing, unexpected = model.load_state_dict(renamed, strict=False)
    if missing or unexpected:
        odd = (*missing, *unexpected)[0]
        raise CheckpointError(
            f"the checkpoint does not fit the model: {odd!r} is on one side only; build the model "
            "as it was before make_private"
        )
    return OpacusCheckpoint(model, claimed)


def _load(path: Path) -> Mapping[str, Any]:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except Exception as error:  # whatever a damaged or forged file makes torch raise
        raise CheckpointError(
            f"{path} cannot be read as weights ({type(error).__name__}); save the model's "
            "state_dict() with torch.save"
        ) from None
    if not isinstance(held, Mapping):
        raise CheckpointError(f"{path} holds a {type(held).__name__}, not a state_dict")
    return held


def _rename(weights: Any, wanted: set[str]) -> dict[str, Tensor]:
    """Names without the prefix of the wrapper, and attention in the layout of `torch.nn`."""
    if not isinstance(weights, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in weights.items()
    ):
        raise CheckpointError("the checkpoint holds no state_dict of tensors")
    plain = {key.removeprefix(_PREFIX): value for key, value in weights.items()}
    if set(plain) == wanted:
        return plain
    # recurrent layers name their weights twice: as parts of cells, and as `torch.nn` does
    plain = {_CELL.sub(r"\3_\2_l\1", key): value for key, value in plain.items()}
    for key in [key for key in plain if key.split(".")[-2:-1] == ["qlinear"]]:
        place, _, kind = key.rpartition(".qlinear.")
        each = [plain.pop(f"{place}.{part}.{kind}") for part in _PARTS]
        joined = f"{place}.in_proj_{kind}"
        if joined in wanted:
            plain[joined] = torch.cat(each)
        else:
            plain |= {
                f"{place}.{letter}_proj_weight": value
                for letter, value in zip(_PARTS.values(), each, strict=True)
            }
    for key in [key for key in plain if ".seq_bias_" in key]:
        place, _, letter = key.removesuffix(".bias").rpartition(".seq_bias_")
        plain[f"{place}.bias_{letter}"] = plain.pop(key).view(1, 1, -1)
    return plain


def _history(state: Mapping[str, Any]) -> ClaimedHistory:
    mechanism = state.get("mechanism")
    if mechanism == "gdp":
        raise InvalidInputError(
            "the history is that of Opacus's GDP accountant, which can report too low an epsilon "
            "and does not say which sampling it stands for; it is not read"
        )
    try:
        steps = tuple((float(noise), float(rate), int(n)) for noise, rate, n in state["history"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError("the accountant's history is damaged") from None
    for noise, rate, count in steps:
        if not (noise > 0 and 0 < rate <= 1 and count >= 0):
            raise CheckpointError(
                f"the accountant's history is damaged: noise multiplier {noise:g}, sample rate "
                f"{rate:g}, {count} steps"
            )
    return ClaimedHistory(steps, str(mechanism))
