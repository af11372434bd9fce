"""A signature notices every change of a release, and names who signed."""

import json
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from dpsur.cli import main
from dpsur.errors import InvalidInputError
from dpsur.runs.files import SIGNATURE, new_key, sign, signature_faults

KEPT = Path(__file__).parents[1] / "fixtures" / "releases" / "coin"


@pytest.fixture
def run(tmp_path):
    return shutil.copytree(KEPT, tmp_path / "run")


@pytest.fixture
def keys(tmp_path):
    return tmp_path / "key.pem", new_key(tmp_path / "key.pem")


def test_a_signed_release_is_fine_as_it_is(run, keys):
    secret, public = keys
    assert signature_faults(run) == ([], None)
    written = sign(run, secret)
    faults, signer = signature_faults(run, public)
    assert (faults, written.name) == ([], SIGNATURE)
    assert signer == json.loads(written.read_text())["public_key"]
    assert signature_faults(run / "release") == ([], signer)
    sign(run, secret)  # anew
    assert signature_faults(run, public)[0] == []


def test_the_signed_bytes_are_those_of_the_documentation(run, keys):
    found = json.loads(sign(run, keys[0]).read_text())
    named = {"files": found["files"], "format": found["format"]}
    content = json.dumps(named, sort_keys=True, separators=(",", ":")).encode()
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(found["public_key"]))
    key.verify(bytes.fromhex(found["signature"]), content)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "model.safetensors is not the file that was signed"),
        ("privacy.json", "privacy.json is not the file that was signed"),
        ("PRIVACY.md", "PRIVACY.md is not the file that was signed"),
        ("more.txt", "more.txt is not among the signed files"),
        ("folder/more.txt", "folder/more.txt is not among the signed files"),
    ],
)
def test_every_changed_file_is_named(name, words, run, keys):
    sign(run, keys[0])
    path = run / "release" / name
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(b" ")
    assert signature_faults(run)[0] == [words]


def test_a_missing_file_is_named(run, keys):
    sign(run, keys[0])
    (run / "release" / "README.md").unlink()
    assert signature_faults(run)[0] == ["README.md was signed and is missing"]


def test_another_key_does_not_pass_for_the_expected_one(run, keys, tmp_path):
    other = new_key(tmp_path / "other.pem")
    (fault,) = signature_faults(run, other)[0]
    assert "not signed" in fault
    sign(run, keys[0])
    (fault,) = signature_faults(run, other)[0]
    assert "signed by another key" in fault


@pytest.mark.parametrize("part", ["files", "public_key", "signature", "format", "more"])
def test_every_part_of_a_signature_counts(part, run, keys, tmp_path):
    path = sign(run, keys[0])
    found = json.loads(path.read_text())
    other = json.loads(sign(shutil.copytree(KEPT, tmp_path / "twin"), _other(tmp_path)).read_text())
    # with its list of files changed too, the release would pass without the signature
    found[part] = {**found["files"], "README.md": "0" * 64} if part == "files" else other.get(part)
    if part == "format":
        found[part] = "dpsur-signature/2"
    path.write_text(json.dumps(found))
    assert signature_faults(run)[0]


def _other(folder):
    new_key(folder / "second.pem")
    return folder / "second.pem"


def test_no_key_is_overwritten(keys):
    before = [one.read_bytes() for one in keys]
    with pytest.raises(InvalidInputError, match="exists"):
        new_key(keys[0])
    assert [one.read_bytes() for one in keys] == before
    assert keys[0].stat().st_mode & 0o077 == 0


def test_the_commands(run, tmp_path, capsys):
    key = str(tmp_path / "hospital.pem")
    assert main(["sign", "--new-key", key]) == 0
    assert main(["sign", str(run), "--key", key]) == 0
    capsys.readouterr()
    assert main(["verify", str(run), "--key", f"{key}.pub"]) == 0
    assert "signed, by the given key" in capsys.readouterr().out
    assert main(["verify", str(run), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["signed_by"]) == 64
    for wrong in ([str(run), "--key", f"{key}.pub"], [str(run), "--new-key", key], ["--key", key]):
        assert main(["sign", *wrong]) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert main(["verify", str(run), "--key", key]) == 2
    assert "holds no public key" in capsys.readouterr().err
