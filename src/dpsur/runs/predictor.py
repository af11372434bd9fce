"""A released model that takes records as users have them: tables, texts, images or arrays.

    model = dpsur.load("run")
    model.predict("new_patients.csv")          # classes, or numbers in their units
    model.predict_proba(frame)                 # a column for each of `model.classes`

Predictions are a post-processing of the release: they cost no privacy, whatever they are made for.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsur.errors import InvalidInputError
from dpsur.functional.tree import map_tensors
from dpsur.runs.data import as_examples
from dpsur.runs.evaluation import model_outputs
from dpsur.runs.own_data import INPUTS as INPUT_COLUMNS
from dpsur.runs.release import CLASSES, LABELS, NUMBERS, Origin, read_release
from dpsur.tasks import TASKS
from dpsur.tasks.columns import Category, Values
from dpsur.tasks.raw_inputs import RawRecords, raw_inputs
from dpsur.tasks.schema import Schema


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
        self.inputs = raw_inputs({**_task_inputs(origin), **public})
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
        if self._labels is None:
            count = _last_width(self.module)
            return None if count is None else tuple(range(count))
        return tuple(self._labels)

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
        from dpsur.runs.export import export

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


def _task_inputs(origin: Origin) -> dict[str, Any]:
    """What is known about the inputs of a task by name: the shape and scale of its images."""
    task = TASKS.get(origin.task or "")
    if task is None or task.shape is None or len(task.shape) != 3:
        return {}
    described: dict[str, Any] = {"kind": "images", "shape": task.shape}
    if task.pixel_scale is not None:
        described |= dict(zip(("mean", "deviation"), task.pixel_scale, strict=True))
    return {"inputs": described}


def _last_width(module: nn.Module) -> int | None:
    """The outputs of the last linear layer, which of a classifier are its classes."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return layers[-1].out_features if layers else None
