"""A release as a program that needs no dpsur: `torch.export`, and ONNX where it is installed.

    dpsur.load("run").export("exported")

The program holds everything from numbers to probabilities: scaling and one-hot columns of a table,
the norm of word counts, the features of images, the network and the softmax. `signature.json` says
what it takes and returns. Strings cannot be in such a program: categories are given by their place
in the signature, and counts of words come from `words.py`, which is written beside it and needs
numpy alone.
"""

import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsur.errors import DpsurError, InvalidInputError
from dpsur.features import hashing
from dpsur.runs.predictor import Predictor
from dpsur.runs.release import CLASSES, LABELS
from dpsur.tasks.columns import Category, Column, Number, Text
from dpsur.tasks.raw_inputs import ImageInputs, TableInputs, TextInputs
from dpsur.tasks.schema import Schema

PROGRAM, ONNX, SIGNATURE, WORDS = "model.pt2", "model.onnx", "signature.json", "words.py"
# Records that a program is traced with, and others that it is compared on.
TRACED, COMPARED = 4, 5
TOLERANCE = 1e-5


class ExportedModel(nn.Module):
    """What a program computes: `inputs` makes numbers of the model's, `outputs` probabilities."""

    def __init__(self, inputs: nn.Module, module: nn.Module, outputs: nn.Module) -> None:
        super().__init__()
        self.inputs, self.module, self.outputs = inputs, module, outputs

    def forward(self, records: Tensor) -> Tensor:
        """Probabilities, or numbers in their units, for records as the signature has them."""
        found: Tensor = self.outputs(self.module(self.inputs(records)))
        return found


class SchemaRows(nn.Module):
    """The encoding of a schema: of values, of places of categories, and of counts of words.

    NaN stands for a missing value, and so does any place that is none.
    """

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self._columns = list(schema.columns.values())

    def forward(self, values: Tensor) -> Tensor:
        """What `Schema.inputs` gives, for double precision numbers."""
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
    """Brings rows of word counts to norm 1."""

    def forward(self, counts: Tensor) -> Tensor:
        """What `dpsur.features.words` gives."""
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
        _check_onnx()
    inputs, records = _inputs(model, example)
    whole = ExportedModel(inputs, model.module, _outputs(model)).cpu().eval()
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
        takes["columns"] = {
            name: _described(column) for name, column in kind.schema.columns.items()
        }
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


def _described(column: Column) -> dict[str, Any]:
    if isinstance(column, Category):
        return {"place_of": list(column.values)}
    if isinstance(column, Text):
        return {"counts": f"words.hashed_counts(texts, {column.dimension})"}
    return {"number_from": column.low, "to": column.high}


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
    """So many records, repeated where there are fewer."""
    return records.repeat(-(-count // len(records)), *(1,) * (records.dim() - 1))[-count:]


def _compare(found: Any, expected: Tensor, what: str) -> None:
    """Refuse a program that computes something else than the model."""
    apart = float((torch.as_tensor(found).double() - expected.double()).abs().max())
    scale = max(1.0, float(expected.double().abs().max()))
    if not apart <= TOLERANCE * scale:
        raise DpsurError(
            f"the exported {what} differs from the model by {apart:.3g}; it was not written"
        )


def _check_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise InvalidInputError(
            "ONNX needs the packages onnx and onnxscript; run: pip install 'dpsur[onnx]'"
        ) from None


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
