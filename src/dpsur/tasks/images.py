"""Your images: a folder with a folder of images for each class.

The names of the folders are the classes and count as public, as does the number of images; an empty
folder is a class too. Every image is brought to one declared size on its own.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples
from dpsur.tasks.base import Declared, Task, existing, image_shape, kept
from dpsur.tasks.npz import image_networks

PREFIX = "images:"
# Endings of files that are images; other files in a folder are ignored.
ENDINGS = (*(".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"),)
MODES = {1: "L", 3: "RGB"}
# Folders that hold records to test on, not a class.
PARTS = ("test", "val", "valid", "validation")
Shape = tuple[int, int, int]


def images_task(name: str, declared: Declared) -> Task:
    declared.refuse(name, "labels", "image_size", "test")
    folder = _folder(name)
    shape, labels = image_shape(declared.image_size), declared.names
    if not labels:
        labels = class_names(folder)
        _check_classes(folder, labels)
    train = labelled_images(folder, labels, shape)
    test = None
    if declared.test is not None:
        test = labelled_images(existing(declared.test), labels, shape)
    return Task(
        name=name,
        networks=image_networks(shape, len(labels)),
        load=lambda _: (train, test),
        public={"labels": list(labels), "inputs": {"kind": "images", "shape": list(shape)}},
        records=len(train),
        shape=shape,
        classes=len(labels),
    )


def images_to_test(name: str, public: Mapping[str, Any]) -> Examples:
    """All images of a folder, for a release that declares its classes and the size of images."""
    described = public.get("inputs", {})
    if described.get("kind") != "images" or "labels" not in public:
        raise InvalidInputError(
            f"the release does not take images of {name}: it was not trained on {PREFIX}DIR"
        )
    channels, height, width = described["shape"]
    return labelled_images(_folder(name), public["labels"], (channels, height, width))


def _folder(name: str) -> Path:
    folder = Path(name.removeprefix(PREFIX)).expanduser()
    if not folder.is_dir():
        raise InvalidInputError(f"task {name}: there is no folder {folder}; write {PREFIX}DIR")
    return folder


def class_names(folder: Path) -> tuple[str, ...]:
    names = sorted(
        path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not names:
        raise InvalidInputError(
            f"{folder} holds no folders; write a folder of images for each class: "
            f"{folder}/CLASS/IMAGE.png"
        )
    return tuple(names)


def _check_classes(folder: Path, names: Sequence[str]) -> None:
    """Refuse folders that hold parts of the data, unless they are declared to be classes."""
    if "train" in names:
        test = next((name for name in names if name in PARTS), None)
        more = "" if test is None else f", and --test {folder / test} if those images are public"
        raise InvalidInputError(
            f"{folder} holds the folder train, which seems to be a part, not a class; write "
            f"{PREFIX}{folder / 'train'}{more}"
        )
    if len(names) < 2:
        raise InvalidInputError(
            f"{folder} has one folder, {names[0]!r}; write a folder of images for each class, or "
            "name all classes with --labels"
        )


def labelled_images(folder: Path, labels: Sequence[str], shape: Shape) -> Examples:
    """The images of a folder with a folder for each class, and the numbers of their classes."""
    if not folder.is_dir():
        raise InvalidInputError(f"{folder} is no folder; write a folder of images for each class")
    undeclared = [name for name in class_names(folder) if name not in labels]
    if undeclared:
        raise InvalidInputError(
            f"{folder} holds a folder {undeclared[0]!r} that is no class; the classes are "
            f"{', '.join(labels)}: name it in --labels, or move it away"
        )
    found = [
        (path, place) for place, name in enumerate(labels) for path in images_in(folder / name)
    ]
    if not found:
        raise InvalidInputError(
            f"{folder} holds no images; files of images end in {', '.join(ENDINGS)}"
        )
    paths, classes = zip(*found, strict=True)
    return Examples(_read_files(paths, shape), torch.tensor(classes))


def images_in(folder: Path) -> list[Path]:
    """All files of images in a folder and the folders in it, in alphabetical order."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def read_images(images: Sequence[Any], shape: Shape) -> Tensor:
    """Files of images, or images of Pillow, as numbers in [0, 1] of one shape."""
    result = torch.empty(len(images), *shape)

    def fill(place: int) -> None:
        result[place] = torch.from_numpy(_pixels(images[place], shape))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, range(len(images))))
    return result.div_(255)


_read_files = kept(2)(read_images)


def _pixels(source: Any, shape: Shape) -> "np.ndarray[Any, np.dtype[np.float32]]":
    from PIL import Image

    channels, height, width = shape
    try:
        with source if isinstance(source, Image.Image) else Image.open(source) as image:
            picture = image.convert(MODES[channels])
            if picture.size != (width, height):
                picture = picture.resize((width, height), Image.Resampling.BILINEAR)
            pixels = np.asarray(picture, np.float32)
    except Exception as error:  # whatever a damaged file makes Pillow raise; it names the file
        raise InvalidInputError(
            "an image cannot be read; replace or remove the file",
            private=f"{source}: {error}",
        ) from None
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
