"""What is published: the weights, how to rebuild the model, and the privacy statement.

`Predictor` takes records as users have them: tables, texts, images or arrays.

    model = dpsur.load("run")
    model.predict("new_patients.csv")          # classes, or numbers in their units
    model.predict_proba(frame)                 # a column for each of `model.classes`

Predictions are a post-processing of the release: they cost no privacy, whatever they are made for.

`export` makes it a program that needs no dpsur: `torch.export`, and ONNX where it is installed.

    dpsur.load("run").export("exported")

The program holds everything from numbers to probabilities: scaling and one-hot columns of a table,
the norm of word counts, the features of images, the network and the softmax. `signature.json` says
what it takes and returns. Strings cannot be in such a program: categories are given by their place
in the signature, and counts of words come from `words.py`, which is written beside it and needs
numpy alone.
"""

import copy
import json
import logging
import os
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from dpsur.errors import (
    CheckpointError,
    DpsurError,
    FileError,
    InvalidInputError,
    describe_os_error,
)
from dpsur.features import hashing
from dpsur.features.layers import WithFeatures, build_layers
from dpsur.functional.tree import Params, map_tensors
from dpsur.networks import build_network, parameter_count
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.statement import current, render_markdown, render_model_card
from dpsur.runs.data import as_examples
from dpsur.runs.evaluation import model_outputs
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
from dpsur.tasks import TASKS
from dpsur.tasks.raw_inputs import ImageInputs, RawRecords, TableInputs, TextInputs, raw_inputs
from dpsur.tasks.schema import Category, Number, Schema, Text, Values

FORMAT = "dpsur-release/1"
# Of the description of a network: values in it, and the largest of them.
MOST_VALUES, LARGEST_SIZE = 1000, 2**24
# Columns of a data set or a frame that hold what a network takes.
INPUTS = ("image", "img", "text")
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


class Predictor:
    """A released model, which predicts for records as they are.

    Records may be a file (CSV, Parquet, JSON Lines, images or a folder of them, `npz`), a data
    frame or columns by name, a list of texts, images of Pillow, arrays or a data set: what the
    model was trained on decides. Features are part of it.

    Attributes:
        module: the bare network in evaluation mode, behind the layers of its features.
        statement: the privacy statement of the release.
        schema: the declared columns of a table, or None.
        inputs: how records become what the network takes.
        predicts: "classes", "labels" or "numbers"; None where that is not known.
        classes: what `predict` chooses from, in the order of `predict_proba`; None for numbers.
    """

    def __init__(self, module: nn.Module, statement: Mapping[str, Any], origin: Origin) -> None:
        self.module = module.eval()
        self.statement = statement
        public = statement["public"]
        self.schema = Schema.from_json(public["schema"]) if "schema" in public else None
        known: dict[str, Any] = {}
        task = TASKS.get(origin.task or "")
        if task is not None and task.shape is not None and len(task.shape) == 3:
            known = {"kind": "images", "shape": task.shape}
            if task.pixel_scale is not None:
                known |= dict(zip(("mean", "deviation"), task.pixel_scale, strict=True))
        self.inputs = raw_inputs({"inputs": known, **public} if known else public)
        self.predicts = origin.predicts or (None if origin.network is None else CLASSES)
        if self.schema is not None:
            self.predicts = {"number": NUMBERS}.get(self.schema.kind, self.schema.kind)
        self._labels = public.get("labels")
        if self._labels is None and self.schema is not None and self.predicts == CLASSES:
            (column,) = self.schema.target.values()
            assert isinstance(column, Category)
            self._labels = list(column.values)

    def __repr__(self) -> str:
        classes = "" if self.classes is None else f", {len(self.classes)} classes"
        epsilon = self.statement["guarantee"]["epsilon"]
        shown = "no privacy" if epsilon is None else f"epsilon {epsilon:.3g}"
        return f"Predictor({type(self.module).__name__} for {self.inputs.kind}{classes}, {shown})"

    @property
    def classes(self) -> tuple[Any, ...] | None:
        """What `predict` chooses from: names that were declared, or numbers from 0 on."""
        if self.predicts != CLASSES:
            return None
        if self._labels is not None:
            return tuple(self._labels)
        # the last linear layer of a classifier has an output for each of its classes
        layers = [layer for layer in self.module.modules() if isinstance(layer, nn.Linear)]
        return tuple(range(layers[-1].out_features)) if layers else None

    def predict(self, records: Any) -> Values:
        """The most probable class of each record; for other targets numbers, or labels.

        Numbers of a table are in the units of its target. Of a model whose target is not known
        (one that a custom loop trained), the outputs.
        """
        return self._decoded(self.outputs(records))

    def predict_proba(self, records: Any) -> Values:
        """Probabilities: of each class, which sum to 1, or of each of several labels."""
        return self._probabilities(self.outputs(records))

    def predictions(self, records: Any) -> "Predictions":
        """Predictions with their probabilities and the names of files, computed once."""
        found = self._read(records)
        outputs = self._outputs(found)
        known = self.predicts in (CLASSES, LABELS)
        probabilities = self._probabilities(outputs) if known else None
        return Predictions(self._decoded(outputs), probabilities, found.names)

    def outputs(self, records: Any) -> Tensor:
        """What the network returns: a row of scores for each record."""
        return self._outputs(self._read(records))

    def export(
        self, folder: str | os.PathLike[str], *, example: Any = None, onnx: bool = False
    ) -> Path:
        """Write a program that needs no dpsur into a new folder: see `dpsur export`.

        `example` are records in memory, for a custom model whose inputs nothing describes.
        """
        return _export(self, Path(folder), example=example, onnx=onnx)

    def _read(self, records: Any) -> RawRecords:
        if isinstance(records, (str, os.PathLike)):
            path = Path(records).expanduser()
            if not path.exists():
                raise InvalidInputError(
                    f"there is no file {path} to predict for; name a file, or pass records: a list "
                    "of texts, a data frame or arrays"
                )
            return self.inputs.read(path)
        if isinstance(records, torch.utils.data.Dataset):
            return RawRecords(as_examples(records, "records").inputs)
        columns = getattr(records, "column_names", getattr(records, "columns", ()))
        for name in () if self.inputs.kind == "table" else INPUTS:
            if name in columns:
                records = list(records[name])
                break
        if hasattr(records, "to_list") and not hasattr(records, "columns"):  # a column of a frame
            records = records.to_list()
        return RawRecords(self.inputs.rows(records))

    def _outputs(self, found: RawRecords) -> Tensor:
        weight = next((p.dtype for p in self.module.parameters()), torch.float32)
        rows = map_tensors(lambda v: v.to(weight) if v.is_floating_point() else v, found.rows)
        try:
            outputs = model_outputs(self.module, rows)
        except InvalidInputError:
            raise
        except Exception as error:  # a model may raise anything about inputs it was not made for
            reason = " ".join(str(error).split()).partition(". ")[0]
            raise InvalidInputError(
                f"the model cannot be applied to these records ({reason}); pass records like those "
                "that it was trained on"
            ) from None
        if isinstance(outputs, Mapping):  # of a Hugging Face model
            outputs = outputs["logits"]
        assert isinstance(outputs, Tensor)
        return outputs.cpu()

    def _decoded(self, outputs: Tensor) -> Values:
        if self.schema is not None and self.predicts != CLASSES:
            return self.schema.decode(outputs)
        if self.predicts == CLASSES and outputs.dim() == 2:
            places: Values = outputs.argmax(1).numpy()
            return places if self._labels is None else np.array(self._labels)[places]
        if self.predicts == LABELS:
            return (outputs > 0).numpy()
        found: Values = outputs.numpy()
        return found

    def _probabilities(self, outputs: Tensor) -> Values:
        if self.predicts == CLASSES and outputs.dim() == 2:
            found: Values = outputs.double().softmax(1).numpy()
        elif self.predicts == LABELS:
            found = outputs.double().sigmoid().numpy()
        else:
            what = "numbers" if self.predicts == NUMBERS else "outputs of unknown meaning"
            raise InvalidInputError(
                f"this model predicts {what}, which have no probabilities; use predict"
            )
        return found


@dataclass(frozen=True)
class Predictions:
    """Predictions, their probabilities (None for numbers) and names of files (None for rows)."""

    values: Values
    probabilities: "Values | None"
    names: Sequence[str] | None


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> Predictor:
    """Load a release to predict with; `path` is a run folder, or the release folder in it.

    Pass a custom model as it was built for training: its weights are read, its features are added.
    The network alone is `load(path).module`.
    """
    return Predictor(*read_release(path, model))


PROGRAM, ONNX, SIGNATURE, WORDS = "model.pt2", "model.onnx", "signature.json", "words.py"
# Records that a program is traced with, and others that it is compared on.
TRACED, COMPARED = 4, 5
TOLERANCE = 1e-5


class SchemaRows(nn.Module):
    """The encoding of a schema, as `Schema.inputs` gives it: of values, places and word counts.

    NaN stands for a missing value, and so does any place that is none.
    """

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self._columns = list(schema.columns.values())

    def forward(self, values: Tensor) -> Tensor:
        parts = []
        spans = [one.dimension if isinstance(one, Text) else 1 for one in self._columns]
        for column, numbers in zip(self._columns, torch.split(values, spans, dim=1), strict=True):
            if isinstance(column, Text):
                parts.append(F.normalize(numbers.float()))
                continue
            found = numbers[:, 0]
            if isinstance(column, Number):
                missing = 0.0
                if column.missing is not None:
                    missing = (column.missing - column.middle) / column.half
                scaled = (found.clamp(column.low, column.high) - column.middle) / column.half
                parts.append(torch.where(found.isnan(), missing, scaled).float()[:, None])
                continue
            count = len(column.values)
            known = (found >= 0) & (found < count)
            other = count if column.other is None else column.values.index(column.other)
            places = torch.where(known, found, other).long()
            one_hot = places[:, None] == torch.arange(column.width, device=values.device)
            parts.append(one_hot.float())
        return torch.cat(parts, 1)


class UnitRows(nn.Module):
    """Brings rows of word counts to norm 1, as `dpsur.features.table` does."""

    def forward(self, counts: Tensor) -> Tensor:
        return F.normalize(counts)


class Standardised(nn.Module):
    """Shifts and scales channels of images in [0, 1]."""

    def __init__(self, mean: Any, deviation: Any) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("deviation", torch.tensor(deviation).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.get_buffer("mean")) / self.get_buffer("deviation")


class InUnits(nn.Module):
    """Numbers of a scaled target in its units."""

    def __init__(self, target: Number) -> None:
        super().__init__()
        self.factor, self.middle = target.half, target.middle

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs.double().flatten() * self.factor + self.middle


def _export(model: Predictor, folder: Path, *, example: Any, onnx: bool) -> Path:
    """Write a program into a new folder, and compare it with the model before it stays there."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(
            f"{folder} exists and is not empty; choose another folder", code="folder-not-empty"
        )
    if onnx:
        try:
            import onnx as _  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError:
            raise InvalidInputError(
                "ONNX needs the packages onnx and onnxscript; run: pip install 'dpsur[onnx]'"
            ) from None
    inputs, records = _inputs(model, example)
    # from numbers of records to probabilities, or to numbers in their units
    parts = {"inputs": inputs, "module": model.module, "outputs": _outputs(model)}
    whole = nn.Sequential(OrderedDict(parts)).cpu().eval()
    traced = _cut(records, TRACED)
    with _quiet(), torch.no_grad():
        try:
            dynamic = ({0: torch.export.Dim.DYNAMIC},)
            program = torch.export.export(whole, (traced,), dynamic_shapes=dynamic)
        except Exception as error:  # whatever a custom network makes torch.export raise
            reason = " ".join(str(error).split())[:200]
            raise InvalidInputError(
                f"torch.export cannot export this network ({reason}); export it with a fixed batch "
                "size from dpsur.load(RELEASE).module"
            ) from None
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _quiet(), torch.no_grad():
            torch.export.save(program, folder / PROGRAM)
            loaded = torch.export.load(folder / PROGRAM).module()
            for count in (1, COMPARED):
                some = _cut(records, count)
                _compare(loaded(some), whole(some), "program")
            if onnx:
                _export_onnx(whole, program, records, folder / ONNX)
        text = json.dumps(signature(model, traced), indent=2) + "\n"
        (folder / SIGNATURE).write_text(text, encoding="utf-8")
        columns = model.schema.columns.values() if model.schema else ()
        if isinstance(model.inputs, TextInputs) or any(isinstance(c, Text) for c in columns):
            shutil.copyfile(Path(hashing.__file__), folder / WORDS)
    except BaseException:
        for name in (PROGRAM, ONNX, SIGNATURE, WORDS):
            (folder / name).unlink(missing_ok=True)
        if made:
            folder.rmdir()
        raise
    return folder


def signature(model: Predictor, traced: Tensor) -> dict[str, Any]:
    kind = model.inputs
    takes: dict[str, Any] = {"shape": ["records", *traced.shape[1:]], "type": str(traced.dtype)[6:]}
    if isinstance(kind, TableInputs) and not kind.schema.is_text:
        takes["columns"] = {}
        for name, column in kind.schema.columns.items():
            if isinstance(column, Category):
                takes["columns"][name] = {"place_of": list(column.values)}
            elif isinstance(column, Text):
                takes["columns"][name] = {
                    "counts": f"words.hashed_counts(texts, {column.dimension})"
                }
            else:
                takes["columns"][name] = {"number_from": column.low, "to": column.high}
        takes["missing"] = "NaN; a value that is not listed has the place -1"
    elif isinstance(kind, ImageInputs):
        takes["images"] = "channels first, in [0, 1], resized bilinearly"
    elif isinstance(kind, (TableInputs, TextInputs)):
        takes["texts"] = f"words.hashed_counts(texts, {traced.shape[1]})"
    guarantee = model.statement["guarantee"]
    return {
        "format": "dpsur-export/1",
        "takes": takes,
        "returns": "probabilities" if model.predicts in (CLASSES, LABELS) else "numbers",
        "classes": None if model.classes is None else list(model.classes),
        "privacy": {name: guarantee[name] for name in ("epsilon", "delta", "proved")},
    }


def _inputs(model: Predictor, example: Any) -> tuple[nn.Module, Tensor]:
    """What goes before the network, and records in the form that it takes."""
    generator = torch.Generator().manual_seed(0)
    kind = model.inputs
    if isinstance(kind, TableInputs) and not kind.schema.is_text:
        return SchemaRows(kind.schema), _table_example(kind.schema, generator)
    if isinstance(kind, (TableInputs, TextInputs)):
        width = kind.schema.width if isinstance(kind, TableInputs) else kind.dimension
        return UnitRows(), torch.rand(COMPARED, width, generator=generator)
    if isinstance(kind, ImageInputs):
        images = torch.rand(COMPARED, *kind.shape, generator=generator)
        return nn.Identity() if kind.scale is None else Standardised(*kind.scale), images
    if example is not None:
        found = kind.rows(example)
        if isinstance(found, Tensor) and len(found):
            return nn.Identity(), found
        raise InvalidInputError("example must be one tensor or array with at least one record")
    first = next((one for one in model.module.modules() if isinstance(one, nn.Linear)), None)
    plain = all(
        isinstance(one, (nn.Sequential, nn.Flatten, nn.Linear, nn.Tanh, nn.ReLU))
        for one in model.module.modules()
    )
    if first is None or not plain:
        raise InvalidInputError(
            "the release does not say what its inputs look like; give some: "
            "dpsur.load(RELEASE).export(DIR, example=x)"
        )
    return nn.Identity(), torch.randn(COMPARED, first.in_features, generator=generator)


def _table_example(schema: Schema, generator: torch.Generator) -> Tensor:
    """Records in and beyond the declared ranges, with missing values."""
    columns = []
    for column in schema.columns.values():
        if isinstance(column, Text):
            shape = COMPARED, column.dimension
            columns.append(torch.rand(shape, generator=generator, dtype=torch.float64))
            continue
        if isinstance(column, Category):
            low, high = -1.0, float(len(column.values))
        else:
            low, high = column.low - column.half, column.high + column.half
        drawn = torch.rand(COMPARED, 1, generator=generator, dtype=torch.float64)
        values = low + drawn * (high - low)
        if isinstance(column, Category):
            values = values.round()
        values[COMPARED - 1] = torch.nan
        columns.append(values)
    return torch.cat(columns, 1)


def _outputs(model: Predictor) -> nn.Module:
    if model.predicts == CLASSES:
        return nn.Softmax(1)
    if model.predicts == LABELS:
        return nn.Sigmoid()
    if model.schema is not None:
        (target,) = model.schema.target.values()
        assert isinstance(target, Number)
        return InUnits(target)
    return nn.Identity()


def _cut(records: Tensor, count: int) -> Tensor:
    """This many records, repeated where there are fewer."""
    return records.repeat(-(-count // len(records)), *(1,) * (records.dim() - 1))[-count:]


def _compare(found: Any, expected: Tensor, what: str) -> None:
    """Refuse a program that computes something else than the model."""
    apart = float((torch.as_tensor(found).double() - expected.double()).abs().max())
    scale = max(1.0, float(expected.double().abs().max()))
    if not apart <= TOLERANCE * scale:
        raise DpsurError(
            f"the exported {what} differs from the model by {apart:.3g}; it was not written"
        )


def _export_onnx(whole: nn.Module, program: Any, records: Tensor, path: Path) -> None:
    try:
        written = torch.onnx.export(program, (), dynamo=True, verbose=False)
    except Exception as error:  # an operation that ONNX does not have
        reason = " ".join(str(error).split())[:200]
        raise InvalidInputError(
            f"this model cannot be written as ONNX ({reason}); leave out --onnx"
        ) from None
    assert written is not None
    written.save(path)
    try:
        import onnxruntime
    except ImportError:
        return
    running = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (name,) = (one.name for one in running.get_inputs())
    for count in (1, COMPARED):
        some = _cut(records, count)
        _compare(running.run(None, {name: some.numpy()})[0], whole(some), "ONNX file")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch.export prints and warns of on the way."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
