"""Records as users have them, made into what a released model takes.

    inputs = raw_inputs(statement["public"])     # what the release declares
    inputs.rows(records)                         # a data frame, texts, images or arrays
    inputs.read("new_patients.csv")              # the same from a file

New records become numbers exactly as those of the training did: by the schema of a table, by
hashing of texts, by the declared size of images. A row depends on its record alone.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.features import words
from dpsur.tasks.images import ENDINGS, images_in, read_images
from dpsur.tasks.npz import read_file
from dpsur.tasks.schema import Schema
from dpsur.tasks.tables import JSON_LINES, read_inputs, read_values

TABLE_FILES = (".csv", ".tsv", ".txt", ".parquet", *JSON_LINES)


@dataclass(frozen=True)
class RawRecords:
    """Inputs of a model, a row for each record, and the names of the files of the records."""

    rows: Any
    names: Sequence[str] | None = None


@dataclass(frozen=True)
class TableInputs:
    """Rows of a table, by its schema."""

    schema: Schema
    kind = "table"

    def rows(self, records: Any) -> Tensor:
        """Of a data frame, columns by name, a list of records, or numbers that are encoded."""
        if isinstance(records, (Tensor, np.ndarray)) and not _are_texts(records):
            found = as_tensor(records)
            if found.dim() != 2 or found.shape[1] != self.schema.width:
                shown = list(self.schema.columns)[:6]
                more = ", ..." if len(self.schema.columns) > len(shown) else ""
                raise InvalidInputError(
                    f"an array of encoded records must have the shape (n, {self.schema.width}), "
                    f"got {tuple(found.shape)}; pass a data frame or a file with the columns "
                    f"{', '.join(shown)}{more}"
                )
            return found
        if self.schema.is_text and _are_texts(records):
            (name,) = self.schema.columns
            records = {name: list(records)}
        elif isinstance(records, Mapping) and not any(map(_is_column, records.values())):
            records = {name: [records.get(name)] for name in self.schema.columns}  # one record
        elif isinstance(records, Sequence) and all(isinstance(one, Mapping) for one in records):
            names = self.schema.columns
            records = {name: [one.get(name) for one in records] for name in names}
        return self.schema.inputs(records)

    def read(self, path: Path) -> RawRecords:
        """Of a CSV, Parquet or JSON Lines file; of texts alone, also of lines of text."""
        _check_ending(path, TABLE_FILES, "a table")
        if path.suffix == ".txt" and self.schema.is_text:
            return RawRecords(self.rows(_text_lines(path)))
        return RawRecords(read_inputs(path, self.schema))


@dataclass(frozen=True)
class TextInputs:
    """Texts as rows of hashed words."""

    dimension: int
    kind = "texts"

    def rows(self, records: Any) -> Tensor:
        """Of a list of texts, or of rows that were hashed before."""
        if isinstance(records, (Tensor, np.ndarray)) and not _are_texts(records):
            return as_tensor(records)
        return words(list(records) if not isinstance(records, str) else records, self.dimension)

    def read(self, path: Path) -> RawRecords:
        """Of a file with a text in every line, of one with a column `text`, or of arrays."""
        if path.suffix == ".npz":
            return RawRecords(self.rows(_array(path)))
        _check_ending(path, TABLE_FILES, "texts")
        if path.suffix == ".txt":
            return RawRecords(self.rows(_text_lines(path)))
        texts = [text if isinstance(text, str) else "" for text in read_values(path, "text")]
        return RawRecords(self.rows(texts))


@dataclass(frozen=True)
class ImageInputs:
    """Images of one shape, in [0, 1], or standardised by `scale` (mean and deviation)."""

    shape: tuple[int, int, int]
    scale: tuple[Sequence[float], Sequence[float]] | None = None
    kind = "images"

    def rows(self, records: Any) -> Tensor:
        """Of arrays, or of a list of files or Pillow images.

        Bytes are divided by 255 and standardised; other numbers are used as they are.
        """
        if isinstance(records, (str, os.PathLike)) or hasattr(records, "convert"):
            records = [records]
        if isinstance(records, (Tensor, np.ndarray)):
            return self._arrays(as_tensor(records))
        listed = [self._checked(one) for one in records]
        if not listed:
            raise InvalidInputError("there is no image to predict for; name at least one")
        return self._scaled(read_images(listed, self.shape))

    @staticmethod
    def _checked(image: Any) -> Any:
        if hasattr(image, "convert"):
            return image
        if not isinstance(image, (str, os.PathLike)):
            raise InvalidInputError(
                f"images must be files, Pillow images or one array, got a list of "
                f"{type(image).__name__}; stack them into one array"
            )
        if not Path(image).is_file():
            raise InvalidInputError(f"there is no file {image}; name files of images")
        return Path(image)

    def _arrays(self, found: Tensor) -> Tensor:
        channels, *sides = self.shape
        if found.dim() == 3 and channels == 1:
            found = found.unsqueeze(1)
        shape = tuple(found.shape[1:])
        if shape == (*sides, channels) != self.shape:
            raise InvalidInputError(
                f"the images have the shape {shape}, with channels last; pass "
                "images.transpose(0, 3, 1, 2)"
            )
        if shape != self.shape:
            raise InvalidInputError(
                f"the images have the shape {shape}, and this model takes {self.shape}; resize "
                "them, or pass their files"
            )
        return self._scaled(found.float().div(255)) if found.dtype == torch.uint8 else found

    def _scaled(self, images: Tensor) -> Tensor:
        if self.scale is None:
            return images
        mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in self.scale)
        return (images - mean) / deviation

    def read(self, path: Path) -> RawRecords:
        """Of an image, of a folder of images, or of the array x of a file."""
        if path.is_dir():
            found = images_in(path)
            if not found:
                raise InvalidInputError(
                    f"{path} holds no images; files of images end in {', '.join(ENDINGS)}"
                )
            return RawRecords(self.rows(found), [str(one.relative_to(path)) for one in found])
        if path.suffix in (".npz", ".npy"):
            return RawRecords(self.rows(_array(path)))
        _check_ending(path, ENDINGS, "images, or a folder of them")
        return RawRecords(self.rows([path]), [path.name])


@dataclass(frozen=True)
class ArrayInputs:
    """What the model takes, as it is."""

    kind = "arrays"

    def rows(self, records: Any) -> Any:
        """Of tensors, arrays, or several of them by name."""
        if _are_texts(records) or hasattr(records, "columns"):
            what = "a data frame" if hasattr(records, "columns") else "texts"
            raise InvalidInputError(
                f"this model takes numbers, as it was trained on, and got {what}; convert them as "
                "for the training"
            )
        if isinstance(records, Mapping) or not isinstance(records, (Sequence, np.ndarray)):
            return records
        return as_tensor(records)

    def read(self, path: Path) -> RawRecords:
        _check_ending(path, (".npz", ".npy"), "arrays")
        return RawRecords(self.rows(_array(path)))


RawInputs = TableInputs | TextInputs | ImageInputs | ArrayInputs


def raw_inputs(public: Mapping[str, Any]) -> RawInputs:
    """What a release says about its inputs; without a word, they are arrays."""
    if "schema" in public:
        return TableInputs(Schema.from_json(public["schema"]))
    described = public.get("inputs", {})
    if described.get("kind") == ImageInputs.kind:
        scale = (described.get("mean"), described.get("deviation"))
        channels, height, width = described["shape"]
        return ImageInputs((channels, height, width), None if None in scale else scale)
    if described.get("kind") == TextInputs.kind:
        return TextInputs(described["dimension"])
    return ArrayInputs()


def as_tensor(values: Any) -> Tensor:
    """A tensor of an array or of lists; fractions become float32."""
    try:
        found = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            "the records cannot be made a tensor; convert them to numbers of one shape first",
            private=str(error),
        ) from None
    return found.float() if found.dtype == torch.float64 else found


def _is_column(values: Any) -> bool:
    return hasattr(values, "__len__") and not isinstance(values, (str, bytes))


def _are_texts(records: Any) -> bool:
    if isinstance(records, np.ndarray):
        return records.dtype.kind == "U" or (
            records.dtype == object and all(isinstance(one, str) for one in records.flat)
        )
    if isinstance(records, (str, bytes, Mapping)) or hasattr(records, "columns"):
        return False
    return isinstance(records, Sequence) and all(isinstance(one, str) for one in records)


def _check_ending(path: Path, endings: Sequence[str], what: str) -> None:
    if path.suffix.lower() not in endings:
        raise InvalidInputError(
            f"this model predicts for {what}, and {path} ends in none of {', '.join(endings)}"
        )


def _text_lines(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return [line.rstrip("\n") for line in file if line.strip()]


def _array(path: Path) -> Any:
    """The array x of a file of np.savez, or the one array of np.save."""
    remedy = "write it with np.savez(FILE, x=...)"
    if path.suffix == ".npy":
        try:
            return np.load(path, allow_pickle=False)
        except ValueError as error:
            raise InvalidInputError(
                f"{path} is damaged, or not a file of numpy; {remedy}", private=str(error)
            ) from None
    arrays = read_file(path, remedy)
    if "x" not in arrays:
        raise InvalidInputError(f"{path} holds no array x; {remedy}")
    return arrays["x"]
