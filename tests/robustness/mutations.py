"""Seeded damage: to bytes, to JSON values, to safetensors, zip and npy files, to options."""

import copy
import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

Json = Any
DIGITS = "7" * 400
DEEP = "[" * 100_000 + "]" * 100_000


class Raw(str):
    """Text that goes into a JSON file as it is."""


# As text in a JSON file: what json.dumps writes, and what only json.loads accepts.
ODD_VALUES: list[Json] = [
    None, True, False, 0, -1, 1, 2, 0.5, -0.5, 1e-320, 1e308, -1e308, 10**30, -(10**30),
    float("nan"), float("inf"), float("-inf"), "", "x", "0", "3.0", "é\u0000", "a" * 300,
    [], {}, [[]], [None], {"": None}, {"kind": "None"}, int(DIGITS), Raw("1e400"), Raw(DEEP),
]  # fmt: skip


def mutate_bytes(content: bytes, rng: Random) -> tuple[bytes, str]:
    """Damage of the kind that disks, transfers and editors do."""
    size = len(content)
    at = rng.randrange(size) if size else 0
    length = min(rng.choice([1, 2, 8, 64, 1000]), max(1, size))
    kind = rng.choice(
        ["bit", "byte", "cut", "insert", "delete", "repeat", "zero", "empty", "append", "number"]
    )
    match kind:
        case "bit" if size:
            changed = (
                content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
            )
        case "byte" if size:
            changed = content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
        case "cut":
            changed = content[:at]
        case "insert":
            changed = content[:at] + rng.randbytes(length) + content[at:]
        case "delete":
            changed = content[:at] + content[at + length :]
        case "repeat":
            changed = content[: at + length] + content[at:]
        case "zero":
            changed = content[:at] + bytes(min(length, size - at)) + content[at + length :]
        case "number" if size > 8:  # lengths and offsets are often four or eight bytes
            at = rng.randrange(min(size - 8, 64)) if rng.random() < 0.5 else rng.randrange(size - 8)
            value = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
            changed = content[:at] + struct.pack("<Q", value) + content[at + 8 :]
        case "append":
            changed = content + rng.randbytes(length)
        case _:
            changed = b""
    return changed, f"{kind} at {at} ({length})"


def mutate_file(path: Path, rng: Random) -> str:
    """Damage one file in place, or put something else in its place."""
    if rng.random() < 0.12:
        return _replace(path, rng)
    changed, what = mutate_bytes(path.read_bytes(), rng)
    path.write_bytes(changed)
    return f"{path.name}: {what}"


def _replace(path: Path, rng: Random) -> str:
    kind = rng.choice(["missing", "folder", "loop", "dangling", "null"])
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("nowhere")
        case "null":
            path.symlink_to("/dev/null")
    return f"{path.name}: replaced by {kind}"


def to_json(value: Json) -> str:
    """JSON text, with `Raw` values as they are."""
    texts: dict[str, str] = {}

    def marked(value: Json) -> Json:
        if isinstance(value, Raw):
            mark = f"raw-value-{len(texts)}"
            texts[f'"{mark}"'] = str(value)
            return mark
        if isinstance(value, dict):
            return {key: marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(marked(value), indent=2)
    for mark, raw in texts.items():
        text = text.replace(mark, raw)
    return text


def mutate_json(value: Json, rng: Random) -> tuple[Json, str]:
    """A copy with one or two changes anywhere in it, and what they were."""
    changed, done = copy.deepcopy(value), []
    for _ in range(rng.choice([1, 1, 1, 2])):
        places = list(_places(changed))
        if not places:
            break
        path, holder, key = rng.choice(places)
        done.append(f"{path}: {_change(holder, key, rng)}")
    return changed, "; ".join(done)


def _places(value: Json, path: str = "") -> list[tuple[str, Any, Any]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    found = []
    for key, item in items:
        here = f"{path}.{key}" if path else str(key)
        found += [(here, value, key), *_places(item, here)]
    return found


def _change(holder: Any, key: Any, rng: Random) -> str:
    old = holder[key]
    kind = rng.choice(["odd", "odd", "nearby", "nearby", "delete", "add", "rename", "sibling"])
    match kind:
        case "delete":
            del holder[key]
            return "deleted"
        case "add" if isinstance(holder, dict):
            holder["added"] = rng.choice(ODD_VALUES)
            return "a key added beside it"
        case "add":
            holder.append(copy.deepcopy(old))
            return "an item repeated"
        case "rename" if isinstance(holder, dict):
            holder[f"{key}_"] = holder.pop(key)
            return "renamed"
        case "sibling" if isinstance(holder, dict) and len(holder) > 1:
            holder[key] = copy.deepcopy(holder[rng.choice([k for k in holder if k != key])])
            return f"replaced by its sibling's {_shown(holder[key])}"
        case "nearby":
            holder[key] = _nearby(old, rng)
        case _:
            holder[key] = rng.choice(ODD_VALUES)
    return f"{_shown(old)} -> {_shown(holder[key])}"


def _nearby(value: Json, rng: Random) -> Json:
    """A value of the same kind: the damage that is hardest to see."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, 2 * value, value // 2, -value, float(value)])
    if isinstance(value, float):
        return value * rng.choice([0.5, 0.9, 0.999, 1.001, 1.1, 2.0, -1.0])
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice("aZ09 -") + value[at + 1 :]
    if isinstance(value, list):
        return value[:-1] if value else [0]
    if isinstance(value, dict):
        return dict(list(value.items())[:-1]) if value else {"a": 0}
    return rng.choice([0, 1.0, "a"])


def _shown(value: Json) -> str:
    text = f"{value!r}"
    return text if len(text) < 60 else f"{text[:60]}..."


def differing(one: Json, other: Json, path: str = "") -> list[str]:
    """The paths at which two JSON values differ. 1 and 1.0 do not; 1 and true do."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = {*one, *other}
        return [
            found
            for key in sorted(keys)
            for found in (
                differing(one[key], other[key], f"{path}.{key}" if path else key)
                if key in one and key in other
                else [f"{path}.{key}" if path else key]
            )
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for i, (a, b) in pairs for found in differing(a, b, f"{path}.{i}")]
    same_kind = isinstance(one, bool) == isinstance(other, bool)
    return [] if same_kind and one == other else [path]


def mutate_safetensors(path: Path, rng: Random) -> str:
    """Change the header of a safetensors file: shapes, offsets, types, or what we put there."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    if "dpsur" in metadata and rng.random() < 0.6:
        inner, what = mutate_json(json.loads(metadata["dpsur"]), rng)
        metadata["dpsur"] = to_json(inner)
    else:
        header, what = mutate_json(header, rng)
    text = to_json(header).encode("utf-8", "surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return f"{path.name} header: {what}"


def with_network(path: Path, rng: Random) -> str:
    """Have the weights file name a network that nobody can build, or another one."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    described = json.loads(header["__metadata__"]["dpsur"])
    network = described["network"]
    if not isinstance(network, dict):
        return mutate_safetensors(path, rng)
    key = rng.choice([*network, "added"])
    network[key] = rng.choice([*ODD_VALUES, 10**18, 10**9, 10**6, "mlp", "small-cnn", "linear"])
    if isinstance(network[key], Raw):
        network[key] = 10**18
    header["__metadata__"]["dpsur"] = json.dumps(described)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return f"{path.name}: network.{key} -> {_shown(network[key])}"


# Arrays that a user may save by mistake, or somebody on purpose.
def _odd_arrays(rng: Random) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    number = rng.choice([np.nan, np.inf, -np.inf, 3.4e38, 1e-45, -1.0, 1e300])

    def put(array: np.ndarray) -> np.ndarray:
        changed = array.astype(np.float64)
        changed.reshape(-1)[rng.randrange(changed.size)] = number
        return changed

    def label(array: np.ndarray) -> np.ndarray:
        changed = array.astype(np.int64)
        value = rng.choice([-1, 2, 3, 99_999, 100_000, 2**31, 2**62, -(2**63)])
        changed.reshape(-1)[rng.randrange(changed.size)] = value
        return changed

    return {
        f"{number} in it": put,
        "another label": label,
        "one record fewer": lambda a: a[:-1],
        "one record": lambda a: a[:1],
        "no records": lambda a: a[:0],
        "a scalar": lambda a: a.reshape(-1)[0],
        "one axis more": lambda a: a[..., None],
        "two axes more": lambda a: a[..., None, None],
        "images": lambda a: np.zeros((len(a), 9, 9), np.uint8),
        "many axes": lambda a: a.reshape(a.shape + (1,) * 20),
        "one axis": lambda a: a.reshape(-1),
        "complex": lambda a: a.astype(np.complex64),
        "text": lambda a: a.astype("U8"),
        "bytes": lambda a: a.astype("S4"),
        "float16": lambda a: a.astype(np.float16),
        "longdouble": lambda a: a.astype(np.longdouble),
        "unsigned": lambda a: a.astype(np.uint64),
        "booleans": lambda a: a.astype(bool),
        "dates": lambda a: a.astype(np.int64).astype("datetime64[s]"),
        "fields": lambda a: np.zeros(len(a), [("a", "f4"), ("b", "i4")]),
        "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
        "fortran": lambda a: np.asfortranarray(a),
        "constant": lambda a: np.zeros_like(a),
        "huge": lambda a: (a * 1e37).astype(np.float32),
        "objects": lambda a: a.astype(object),
    }


_HEADERS = [
    "{'descr': '<f4', 'fortran_order': False, 'shape': (%s, 4), }" % ("9" * 30),
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-5, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (50, 4, 0), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': 5, }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 4), }",
    "{'descr': '<f4', 'fortran_order': 7, 'shape': (50, 4), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (50, 4), }",
    "{'descr': '<M8[%s]', 'fortran_order': False, 'shape': (50, 4), }" % ("9" * 400),
    "{'descr': [('a', '<f4')] , 'fortran_order': False, 'shape': (50, 4), }",
    "{'descr': '<f99999999999', 'fortran_order': False, 'shape': (50, 4), }",
    "{'descr': '<V2147483647', 'fortran_order': False, 'shape': (50, 4), }",
    "{'descr': 5, 'fortran_order': False, 'shape': (50, 4), }",
    "{'descr': ('<f4', (10**30,)), 'fortran_order': False, 'shape': (50, 4), }",
    "{'descr': '<f4', 'fortran_order': False}",
    "(" * 3000 + ")" * 3000,
    "{" * 200,
    "",
]


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), allow_pickle=True)
    return file.getvalue()


def mutate_npz(path: Path, rng: Random) -> str:
    """Damage a file of np.savez: its arrays, their headers, or the archive around them."""
    kind = rng.choice(["bytes", "array", "array", "array", "header", "member", "archive"])
    if kind == "bytes":
        return mutate_file(path, rng)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(members))
    what = ""
    if kind == "array":
        what, change = rng.choice(list(_odd_arrays(rng).items()))
        try:
            with np.errstate(all="ignore"):
                members[name] = _npy(change(np.load(io.BytesIO(members[name]))))
        except (ValueError, IndexError, TypeError, OverflowError):
            members[name] = _npy(np.array(rng.choice([0, -1, 1, 2**62, 1.5])))
    elif kind == "header":
        header = rng.choice(_HEADERS).encode() + b"\n"
        version = rng.choice([1, 1, 1, 2, 3, 9])
        size = struct.pack("<H" if version == 1 else "<I", len(header))
        body = rng.randbytes(rng.choice([0, 10, 800]))
        members[name] = b"\x93NUMPY" + bytes([version, 0]) + size + header + body
        what = f"version {version} {header[:60]!r}"
    elif kind == "member":
        what = rng.choice(["bytes", "missing", "renamed", "added", "nested", "plain"])
        content = members.pop(name)
        if what == "bytes":
            members[name], more = mutate_bytes(content, rng)
            what += f" {more}"
        elif what == "renamed":
            members[rng.choice(["X.npy", "x", "../x.npy", "x.npy/", "é.npy", ".npy"])] = content
        elif what == "nested":
            members[f"folder/{name}"] = content
        elif what == "plain":
            members[name.removesuffix(".npy")] = content
        elif what == "added":
            members |= {name: content, rng.choice(["extra.npy", "x.npy.npy", ""]): content}
    _write_zip(path, members, rng)
    if kind == "archive":
        what = _damage_zip(path, rng)
    return f"{path.name}: {kind} {name}: {what}"


def _write_zip(path: Path, members: dict[str, bytes], rng: Random) -> None:
    method = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name or "x", (1980, 1, 1, 0, 0, 0)), content, method)


def _damage_zip(path: Path, rng: Random) -> str:
    """Change a field of a header: flags, method, sizes, checksum, offsets."""
    content = bytearray(path.read_bytes())
    mark, fields = rng.choice(
        [
            (b"PK\x03\x04", {"version": 4, "flags": 6, "method": 8, "crc": 14, "size": 22}),
            (b"PK\x01\x02", {"version": 6, "flags": 8, "method": 10, "crc": 16, "packed": 20,
                             "size": 24, "name": 28, "extra": 30, "offset": 42}),
            (b"PK\x05\x06", {"disk": 4, "entries": 8, "length": 12, "start": 16, "comment": 20}),
        ]
    )  # fmt: skip
    places = [i for i in range(len(content) - 4) if content[i : i + 4] == mark]
    at, (field, offset) = rng.choice(places), rng.choice(list(fields.items()))
    value = rng.choice([1, 9, 12, 14, 93, 99, 0xFF, 0x0801, 0xFFFE, 0xFFFF])
    content[at + offset : at + offset + 2] = struct.pack("<H", value)
    if rng.random() < 0.3 and field in {"size", "packed", "crc", "start", "offset", "length"}:
        content[at + offset : at + offset + 4] = struct.pack(
            "<I", rng.choice([0, 2**31, 2**32 - 1])
        )
    path.write_bytes(bytes(content))
    return f"{field} of {mark!r} at {at}"


# What a user, or a script that went wrong, may give an option.
ODD_TEXTS = [
    "", " ", "0", "-0", "-1", "1", "2", "1.5", "0.5", "-0.5", "1e-320", "1e-9", "1e308", "1e400",
    "-1e400", "nan", "NaN", "inf", "-inf", "infinity", DIGITS, f"-{DIGITS}", f"0.{DIGITS}",
    f"1e{DIGITS}", "10" * 10, "9223372036854775808", "1_000", "0x10", "1,5", "٣", "None", "true",
    "a" * 300, "é" * 300, "\u202e", "a\nb", "{}", "%s", "%n", "--", "-", "~", "~nobody/x", ".",
    "..", "../..", "/proc/self/mem", "nowhere/file", "a/" * 2000, "npz:", "npz:.", "npz:/",
    "npz:nowhere.npz", "mnist", "dpsgd", "all", ",", ",,", "1-", "0-4", "5/3", "0/0", ":", "a:b",
    "os:getcwd", "nowhere:nothing", "json:loads", "gap", "cuda", "cuda:99", "cpu", "auto",
    "\udcff", "out.png", "out.pdf", "out.xyz",
]  # fmt: skip


def clear(path: Path) -> None:
    """Delete whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
