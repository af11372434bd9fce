"""A released model that takes records as users have them: tables, texts, images or arrays.

    model = dpsur.load("run")
    model.predict("new_patients.csv")          # classes, or numbers in their units
    model.predict_proba(frame)                 # a column for each of `model.classes`

Predictions are a post-processing of the release: they cost no privacy, whatever they are made for.

A release as a program that needs no dpsur: `torch.export`, and ONNX where it is installed.

    dpsur.load("run").export("exported")

The program holds everything from numbers to probabilities: scaling and one-hot columns of a table,
the norm of word counts, the features of images, the network and the softmax. `signature.json` says
what it takes and returns. Strings cannot be in such a program: categories are given by their place
in the signature, and counts of words come from `words.py`, which is written beside it and needs
numpy alone.
"""

import json
import logging
import os
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.errors import DpsurError, InvalidInputError
from dpsur.features import hashing
from dpsur.functional.tree import map_tensors
from dpsur.runs.data import as_examples
from dpsur.runs.evaluation import model_outputs
from dpsur.runs.release import CLASSES, LABELS, NUMBERS, Origin, read_release
from dpsur.runs.tasks import INPUTS as INPUT_COLUMNS
from dpsur.tasks import TASKS
from dpsur.tasks.raw_inputs import ImageInputs, RawRecords, TableInputs, TextInputs, raw_inputs
from dpsur.tasks.schema import Category, Number, Schema, Text, Values


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
        return export(self, Path(folder), example=example, onnx=onnx)

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
        for name in () if self.inputs.kind == "table" else INPUT_COLUMNS:
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


def export(model: Predictor, folder: Path, *, example: Any = None, onnx: bool = False) -> Path:
    """Write a program into a new folder, and compare it with the model before it stays there.

    `example` are records in memory, for a model whose inputs nothing describes.
    """
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
    """What a program takes and returns, in words and plain values."""
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
    """Write the ONNX file, and compare it where onnxruntime is installed."""
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
