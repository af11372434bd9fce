"""Mutated inputs: each family damages one kind of input and runs a command on it.

A case is known by its family, the seed and its number, so that a failure can be repeated. Beside
crashes and tracebacks, which `harness.fault_of` finds, a family says when a guarantee is wrong: a
command ended well although what it printed or wrote is not true of what was there.
"""

import argparse
import gzip
import io
import json
import math
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

import dpsur.cli
from dpsur.cli.parser import Parser
from dpsur.privacy.statement import render_markdown, render_model_card
from reproduction.datasets import DATA_SETS, load_arrays
from reproduction.datasets import readers as cifar
from tests.reproduction.datasets.conftest import Digits, Photographs, Reviews
from tests.robustness.harness import WRONG, Fault, Outcome, command, fault_of
from tests.robustness.mutations import (
    ODD_TEXTS,
    clear,
    differing,
    mutate_bytes,
    mutate_file,
    mutate_json,
    mutate_npz,
    mutate_safetensors,
    to_json,
    with_network,
)

DELTA = "1e-3"
COMMON = ("train", "--quiet", "--seed", "0", "--epsilon", "3", "--delta", DELTA, "--device", "cpu",
          "--batch-size", "10", "--checkpoint-every", "3", "--evaluate-every", "4")  # fmt: skip
SELECTIVE = ("--method", "dpsur", "--updates", "8", "--noise-multiplier", "3",
             "--accept-ratio", "1.5", "--val-batch-size", "8")  # fmt: skip
PLAIN = ("--method", "dpsgd", "--updates", "4", "--noise-multiplier", "3")
RELEASES = {
    "coin": ("vectors", SELECTIVE),
    "plain": ("vectors", PLAIN),
    "published": ("vectors", (
        "--method", "dpsur", "--updates", "6", "--noise-multiplier", "3", "--val-batch-size", "8",
        "--val-noise-multiplier", "2", "--accept-threshold", "-1", "--accounting", "published")),
    "every-trial": ("vectors", (
        "--method", "dpsur", "--trials", "8", "--noise-multiplier", "6", "--val-batch-size", "8",
        "--val-noise-multiplier", "4", "--accounting", "every-trial")),
    "filter": ("vectors", ("--method", "dpagd", "--updates", "8")),
    "statistics": ("images", (
        "--method", "dpsgd", "--updates", "4", "--noise-multiplier", "4",
        "--features", "scattering", "--normalisation", "private")),
    "nonprivate": ("vectors", ("--method", "nonprivate", "--updates", "4")),
}  # fmt: skip
# What a statement says that follows from nothing else in a release, so that `verify` has nothing to
# hold it against (`dpsur verify --help` lists it). The rest must not change unnoticed.
UNCHECKED = (
    "versions.",  # which software it was made with
    "budget.epsilon",  # a larger budget than was spent
    "method",  # another one with the same settings
    "accepted_updates",  # of charged trials
    "mechanism.filter.steps",  # how many were made, within what the filter allows
    "public.",  # what the user declared
    "test.scores",  # figures on public records
    *(f"settings.{name}" for name in (
        "learning_rate", "schedule", "optimizer", "momentum", "adam_beta1", "adam_beta2",
        "adam_eps", "average_decay", "max_grad_norm", "loss_clip", "largest_step", "step_sizes",
        "raise_by",
    )),
)  # fmt: skip


@dataclass
class Release:
    """A release as it was written, to hold mutated ones against."""

    folder: Path
    task: str
    statement: dict[str, Any]

    @property
    def epsilon(self) -> float:
        """What it guarantees; infinite where it guarantees nothing."""
        epsilon = self.statement["guarantee"]["epsilon"]
        return math.inf if epsilon is None else float(epsilon)


@dataclass
class Site:
    """The genuine inputs that cases are made from, all below one folder."""

    root: Path
    data: dict[str, Path] = field(default_factory=dict)
    releases: dict[str, Release] = field(default_factory=dict)
    halted: Path = Path()  # a selective run that died in the middle
    whole: Path = Path()  # the same, finished

    def fresh(self, name: str) -> Path:
        """An empty folder for a case, deep enough that `../..` stays among ours."""
        folder = self.root / "cases" / name
        clear(folder)
        folder.mkdir(parents=True)
        return folder


def build_site(root: Path, names: tuple[str, ...] = tuple(RELEASES)) -> Site:
    """Write the data and make the genuine runs.

    They are made in this process, so that the accountings they need are known to every child.
    """
    site = Site(root)
    rng = np.random.default_rng(0)
    labels, test = np.arange(50) % 2, np.arange(10) % 2
    arrays = {
        "vectors": (rng.normal(size=(50, 4)) + labels[:, None], rng.normal(size=(10, 4))),
        "images": tuple(rng.integers(0, 256, (n, 8, 8)).astype(np.uint8) for n in (50, 10)),
    }
    for name, (x, x_test) in arrays.items():
        site.data[name] = root / f"{name}.npz"
        x, x_test = (a.astype(np.float32) if name == "vectors" else a for a in (x, x_test))
        np.savez(site.data[name], x=x, y=labels, x_test=x_test, y_test=test, classes=np.array(2))
    for name in names:
        data, options = RELEASES[name]
        task, folder = f"npz:{site.data[data]}", root / "genuine" / name
        _in_this_process(*COMMON, "--task", task, *options, "--out", str(folder))
        statement = json.loads((folder / "release" / "privacy.json").read_text())
        site.releases[name] = Release(folder / "release", task, statement)
        if name == "coin":
            _in_this_process("evaluate", str(folder), "--task", task)
        _in_this_process("verify", str(folder))
    site.whole = root / "genuine" / "coin"
    site.halted = root / "genuine" / "halted"
    died = command(
        *new_run(site, site.halted), cwd=root, before=lambda: _die_after_checkpoints(site, 3)
    )
    assert died.status == 77, died.stderr
    return site


def new_run(site: Site, folder: Path) -> tuple[str, ...]:
    """The command that starts the selective run."""
    return (*COMMON, "--task", f"npz:{site.data['vectors']}", *SELECTIVE, "--out", str(folder))


def _in_this_process(*arguments: str) -> None:
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        status = dpsur.cli.main(arguments)
    if status:
        raise RuntimeError(f"dpsur {' '.join(arguments)} failed: {output.getvalue()}")


def _die_after_checkpoints(site: Site, count: int) -> None:
    left = count
    replace = os.replace

    def counted(source: Any, target: Any, **more: Any) -> None:
        nonlocal left
        replace(source, target, **more)
        left -= str(target).endswith("checkpoint.safetensors")
        if left == 0:
            os._exit(77)

    os.replace = os.rename = counted


@dataclass(frozen=True)
class Report:
    """What became of a case."""

    what: str
    outcome: Outcome
    fault: Fault | None


Family = Callable[[Site, Random, Path], Report]


def _report(
    what: str, outcome: Outcome, wrong: Callable[[Outcome], str | None] = lambda _: None
) -> Report:
    fault = fault_of(outcome)
    if fault is None and (text := wrong(outcome)) is not None:
        fault = Fault(WRONG, text)
    return Report(what, outcome, fault)


# Statements: the weights are genuine, the statement is not.


def statement_case(site: Site, rng: Random, folder: Path) -> Report:
    """`verify` on a statement that was changed, mostly with a page that says the same."""
    name = rng.choice(list(site.releases))
    genuine = site.releases[name]
    copy = folder / "release"
    shutil.copytree(genuine.folder, copy)
    if rng.random() < 0.15:
        changed, what = _directed(genuine.statement, rng)
    else:
        changed, what = mutate_json(genuine.statement, rng)
    text = to_json(changed)
    if rng.random() < 0.1:
        content, more = mutate_bytes(text.encode(), rng)
        what += f"; {more}"
    else:
        content = text.encode()
    (copy / "privacy.json").write_bytes(content)
    what = f"{name}: {what}"
    if rng.random() < 0.8:
        with suppress(Exception):  # there are statements that no page can be made of
            (copy / "PRIVACY.md").write_text(render_markdown(json.loads(text)))
            (copy / "README.md").write_text(render_model_card(json.loads(text)))
            what += " (page to match)"
    outcome = command("verify", str(folder), *(["--json"] * rng.randrange(2)), cwd=folder)
    return _report(what, outcome, lambda o: _wrongly_verified(o, copy, genuine))


def _directed(statement: dict[str, Any], rng: Random) -> tuple[dict[str, Any], str]:
    """What somebody would change who wants the same run to look more private."""
    changed: dict[str, Any] = json.loads(json.dumps(statement))
    guarantee, mechanism = changed["guarantee"], changed["mechanism"]
    match rng.randrange(6):
        case 0 if guarantee["epsilon"] is not None:
            factor = rng.choice([0.5, 0.9, 0.99, 0.999])
            guarantee["epsilon"] *= factor
            for key, value in changed["epsilon"].items():
                changed["epsilon"][key] = None if value is None else value * factor
            return changed, f"every epsilon times {factor}"
        case 1:
            guarantee |= {"proved": True, "accounting": rng.choice(["proven", "every-trial"])}
            return changed, "called proved"
        case 2:
            mechanism["setup"] = []
            return changed, "setup events dropped"
        case 3:
            changed["method"] = rng.choice(["dpsgd", "dpsur", "perfect", "nonprivate"])
            return changed, f"method {changed['method']}"
        case 4:
            changed["warnings"] = []
            return changed, "no warnings"
        case _:
            changed["random"]["seeded"] = not changed["random"]["seeded"]
            return changed, "seeded or not"


def _wrongly_verified(outcome: Outcome, folder: Path, genuine: Release) -> str | None:
    if outcome.status != 0:
        return None
    found = json.loads((folder / "privacy.json").read_text())
    if math.isinf(genuine.epsilon):  # no guarantee, whatever else is said
        return None if found["guarantee"]["epsilon"] is None else "a guarantee out of nothing"
    paths = differing(genuine.statement, found)
    told = [path for path in paths if not path.startswith(UNCHECKED)]
    figures = [path for path in told if path.startswith(("guarantee.epsilon", "epsilon."))]
    if all(_close(genuine.statement, found, path) for path in figures):
        told = [path for path in told if path not in figures]
    if told:
        return f"verified although {', '.join(told)} changed"
    if _weights(folder) != _weights(genuine.folder):
        return "verified although the weights changed"
    return None


def _close(one: Any, other: Any, path: str) -> bool:
    """Whether a figure is the same but for its last digits, which `verify` allows."""
    for key in path.split("."):
        if not (isinstance(one, dict) and isinstance(other, dict) and key in one and key in other):
            return False
        one, other = one[key], other[key]
    numbers = isinstance(one, float) and isinstance(other, float)
    return numbers and math.isclose(one, other, rel_tol=1e-5)


def _weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


# Releases: any file of them.


def release_case(site: Site, rng: Random, folder: Path) -> Report:
    """`verify` or `evaluate` on a release of which one file was damaged."""
    name = rng.choice(list(site.releases))
    genuine = site.releases[name]
    copy = folder / "release"
    shutil.copytree(genuine.folder, copy)
    file = copy / rng.choice(
        ["model.safetensors", "model.safetensors", "privacy.json", "PRIVACY.md"]
    )
    kind = rng.random()
    if file.suffix == ".safetensors" and kind < 0.3:
        what = mutate_safetensors(file, rng)
    elif file.suffix == ".safetensors" and kind < 0.5:
        what = with_network(file, rng)
    elif file.suffix == ".json" and kind < 0.6:
        changed, what = mutate_json(genuine.statement, rng)
        file.write_text(to_json(changed), "utf-8", "surrogatepass")
    else:
        what = mutate_file(file, rng)
    if rng.random() < 0.4:
        outcome = command("verify", str(folder), cwd=folder)
        return _report(
            f"verify {name}: {what}", outcome, lambda o: _wrongly_verified(o, copy, genuine)
        )
    arguments = ("evaluate", str(folder), "--task", genuine.task, "--json")
    outcome = command(*arguments, cwd=folder)
    return _report(
        f"evaluate {name}: {what}", outcome, lambda o: _wrongly_evaluated(o, copy, genuine)
    )


def _wrongly_evaluated(outcome: Outcome, folder: Path, genuine: Release) -> str | None:
    """A guarantee was printed that is better than the genuine one, or beside other weights."""
    if outcome.status != 0:
        return None
    guarantee = json.loads(outcome.stdout)["guarantee"]
    if guarantee is None or guarantee.get("epsilon") is None:
        return None
    if not guarantee["epsilon"] >= genuine.epsilon * (1 - 1e-5):
        return f"printed epsilon {guarantee['epsilon']}, genuine is {genuine.epsilon}"
    if guarantee["delta"] != genuine.statement["guarantee"]["delta"]:
        return f"printed delta {guarantee['delta']}"
    if guarantee["proved"] and not genuine.statement["guarantee"]["proved"]:
        return "printed as proved what is not"
    if _weights(folder) != _weights(genuine.folder):
        return "printed a guarantee beside other weights"
    return None


# Folders of runs that died in the middle.


def run_folder_case(site: Site, rng: Random, folder: Path) -> Report:
    """`train --resume` on a damaged folder: refused, or the same release as without the damage."""
    run = folder / "run"
    shutil.copytree(site.halted, run)
    private = run / "private"
    must_finish = False
    match rng.choice(["config", "config", "checkpoint", "checkpoint", "metrics", "other"]):
        case "config" if rng.random() < 0.8:
            changed, what = mutate_json(json.loads((private / "config.json").read_text()), rng)
            text = to_json(changed)
            (private / "config.json").write_text(text, "utf-8", "surrogatepass")
            what = f"config.json: {what}"
        case "config":
            what = mutate_file(private / "config.json", rng)
        case "checkpoint" if rng.random() < 0.5:
            what = mutate_safetensors(private / "checkpoint.safetensors", rng)
        case "checkpoint":
            what = mutate_file(private / "checkpoint.safetensors", rng)
        case "metrics":
            what, must_finish = _damage_metrics(private / "metrics.jsonl", rng), True
        case _:
            what = _odd_entry(run, rng)
    outcome = command("train", "--resume", str(run), "--quiet", cwd=folder)
    return _report(what, outcome, lambda o: _wrongly_resumed(o, run, site, must_finish))


def _damage_metrics(path: Path, rng: Random) -> str:
    if rng.random() < 0.4:
        return mutate_file(path, rng)
    lines = path.read_text().splitlines()
    number = rng.randrange(len(lines))
    changed, what = mutate_json(json.loads(lines[number]), rng)
    lines[number] = to_json(changed).replace("\n", " ")
    path.write_text("\n".join(lines) + "\n", "utf-8", "surrogatepass")
    return f"metrics.jsonl line {number}: {what}"


def _odd_entry(run: Path, rng: Random) -> str:
    """Something in the folder that the program did not leave there."""
    inside = ("lock", "metrics.jsonl", "checkpoint.safetensors", "config.json",
              ".checkpoint.safetensors.abc", "surprise")  # fmt: skip
    name = rng.choice(
        ["release", ".release.partial", "private", *(f"private/{file}" for file in inside)]
    )
    kind = rng.choice(["file", "folder", "full folder", "loop", "missing"])
    path = run / name
    clear(path)
    match kind:
        case "file":
            path.write_bytes(rng.randbytes(20))
        case "folder":
            path.mkdir()
        case "full folder":
            path.mkdir()
            (path / "file").write_text("something")
        case "loop":
            path.symlink_to(path.name)
    return f"{name} is {kind}"


def _wrongly_resumed(outcome: Outcome, run: Path, site: Site, must_finish: bool) -> str | None:
    if outcome.status != 0:
        return f"diagnostics kept it from a release: {outcome.error}" if must_finish else None
    for file in ("model.safetensors", "privacy.json", "PRIVACY.md"):
        path = run / "release" / file
        if not path.is_file():
            return f"reported success, but there is no {file}"
        if path.read_bytes() != (site.whole / "release" / file).read_bytes():
            return f"resumed to another {file}"
    return None


# A user's records.


def npz_case(site: Site, rng: Random, folder: Path) -> Report:
    """`train` or `evaluate` on a damaged file of records."""
    name = rng.choice(["vectors", "vectors", "images"])
    path = folder / f"{name}.npz"
    shutil.copy(site.data[name], path)
    what = mutate_npz(path, rng)
    task = f"npz:{path}"
    if rng.random() < 0.2:
        genuine = site.releases["coin"]
        outcome = command("evaluate", str(site.whole), "--task", task, "--json", cwd=folder)
        return _report(
            f"evaluate {what}",
            outcome,
            lambda o: _wrongly_evaluated(o, genuine.folder, genuine),
        )
    out = folder / "run"
    outcome = command(*COMMON, "--task", task, *PLAIN, "--out", str(out), cwd=folder)
    return _report(f"train {what}", outcome, lambda o: _wrongly_trained(o, out, folder, path))


def _wrongly_trained(outcome: Outcome, out: Path, cwd: Path, data: Path | None) -> str | None:
    """A run ended well: its release must verify, and state no more than the budget."""
    if outcome.status != 0:
        return "refused, but there is a release" if (out / "release").exists() else None
    statement = json.loads((out / "release" / "privacy.json").read_text())
    if data is not None:
        with np.load(data) as arrays:
            size = len(arrays["x"])
        if statement["dataset_size"] != size:
            return f"{statement['dataset_size']} records stated, {size} in the file"
    epsilon, budget = statement["guarantee"]["epsilon"], statement["budget"]["epsilon"]
    if epsilon is not None and not 0 <= epsilon <= budget * (1 + 1e-5):
        return f"epsilon {epsilon} of a budget of {budget}"
    verified = command("verify", str(out), cwd=cwd)
    if verified.status != 0:
        return f"its release does not verify: {verified.stdout} {verified.stderr}"
    return None


# Public data sets, as small stand-ins in their published forms.


class StandIns:
    """A dozen records for each data set, and the files that they are published in."""

    def __init__(self) -> None:
        self.digits, self.photographs, self.reviews = Digits(), Photographs(), Reviews()

    def install(self) -> None:
        """Put them in the place of the data sets, in a forked child."""
        cifar.RECORDS = 12
        DATA_SETS["mnist"] = self.digits.data_set
        DATA_SETS["cifar10"] = self.photographs.data_set
        DATA_SETS["imdb"] = self.reviews.data_set

    def write(self, form: str, folder: Path) -> str:
        """Write one form of one data set; returns its name."""
        folder.mkdir()
        batches = self.photographs.arrays
        pickled = {
            name: pickle.dumps(
                {"labels": a[:, 0].tolist(), "data": a[:, 1:].copy()}, protocol=2 + i % 3
            )
            for i, (name, a) in enumerate(batches.items())
        }
        plain = {f"{name}.bin": array.tobytes() for name, array in batches.items()}
        match form:
            case "idx" | "idx.gz":
                self.digits.write(folder, packed=form == "idx.gz")
                return "mnist"
            case "bin" | "python":
                for name, content in (plain if form == "bin" else pickled).items():
                    (folder / name).write_bytes(content)
            case "bin.tar" | "python.tar":
                kind = form.removesuffix(".tar").replace("bin", "binary")
                files = plain if form == "bin.tar" else pickled
                _write_tar(folder / f"cifar-10-{kind}.tar.gz", files)
            case "keras":
                self.reviews.write_keras(folder / "imdb.npz")
                return "imdb"
            case _:
                np.savez(folder / "imdb_keras.npz", **self.reviews.arrays)
                return "imdb"
        return "cifar10"


FORMS = ("idx", "idx.gz", "bin", "python", "bin.tar", "python.tar", "keras", "reviews")


def _write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-10/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def data_case(site: Site, rng: Random, folder: Path) -> Report:
    """`data list --check` on a data set of which one file was damaged."""
    stand_ins = StandIns()
    form = rng.choice(FORMS)
    data = folder / "data"
    name = stand_ins.write(form, data)
    file = rng.choice(sorted(data.iterdir()))
    kind = rng.random()
    if kind < 0.25 and form.endswith(".tar"):
        what = _odd_tar(file, rng)
    elif kind < 0.5 and file.suffix == ".gz":
        what = _mutate_inside(file, rng)
    elif kind < 0.5 and form == "python":
        what = _odd_pickle(file, rng)
    elif kind < 0.5 and file.suffix == ".npz":
        what = mutate_npz(file, rng)
    else:
        what = mutate_file(file, rng)
    return _check_data(stand_ins, name, data, folder, f"{form} {what}")


def _check_data(stand_ins: StandIns, name: str, data: Path, folder: Path, what: str) -> Report:
    def before() -> None:
        os.environ["DPSUR_CACHE"] = str(folder / "cache")
        stand_ins.install()

    def after(status: int) -> int:
        """What was taken for the published records must be just that."""
        data_set = DATA_SETS[name]
        try:
            arrays = load_arrays(data_set, data)
        except dpsur.InvalidInputError:
            return status
        for owner in (stand_ins.digits, stand_ins.photographs, stand_ins.reviews):
            if owner.data_set is data_set:
                for key, array in owner.arrays.items():
                    if not np.array_equal(array, arrays[key]):
                        print("taken for the published records")
        return status

    arguments = ("data", "list", "--check", "--json", "--data-dir", str(data))
    outcome = command(*arguments, cwd=folder, before=before, after=after)

    def wrong(outcome: Outcome) -> str | None:
        return "damaged records were taken for the published ones" if (
            "taken for the published" in outcome.stdout
        ) else None  # fmt: skip

    return _report(what, outcome, wrong)


def _mutate_inside(path: Path, rng: Random) -> str:
    """Damage what a compressed file holds, and compress it again."""
    changed, what = mutate_bytes(gzip.decompress(path.read_bytes()), rng)
    path.write_bytes(gzip.compress(changed, mtime=0))
    return f"inside {path.name}: {what}"


def _odd_tar(path: Path, rng: Random) -> str:
    """Replace a member by something that is no file, or claims to be a large one."""
    with tarfile.open(path) as archive:
        files = {m.name: archive.extractfile(m).read() for m in archive}  # type: ignore[union-attr]
    odd, kind = rng.choice(list(files)), rng.choice(["link", "hard link", "folder", "pipe", "size"])
    types = {"link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE, "folder": tarfile.DIRTYPE,
             "pipe": tarfile.FIFOTYPE, "size": tarfile.REGTYPE}  # fmt: skip
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if name == odd:
                member.type = types[kind]
                member.linkname = rng.choice(["nowhere", name, "/etc/passwd", "../../x", ""])
                member.size = 2**50 if kind == "size" else 0
                archive.fileobj.write(member.tobuf())  # type: ignore[union-attr]
                archive.offset += tarfile.BLOCKSIZE
            else:
                archive.addfile(member, io.BytesIO(content))
    return f"{path.name}: {odd} is a {kind}"


def _odd_pickle(path: Path, rng: Random) -> str:
    """Instructions that nothing should follow for long."""
    depth = rng.choice([10, 1000, 100_000, 1_000_000])
    pixels = np.zeros((12, 3072), np.uint8)
    contents = {
        "nested tuples": b"\x80\x02" + b")" + b"\x85" * depth + b".",
        "nested lists": b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".",
        "nested dicts": b"\x80\x02" + b"}" + b"K\x00" + b"}" + b"s" + b".",
        "marks": b"\x80\x02" + b"(" * depth + b".",
        "itself": b"\x80\x02]q\x00h\x00a.",
        "a key of tuples": b"\x80\x02}(" + b")" + b"\x85" * depth + b"K\x01u.",
        "many keys": b"\x80\x02}(" + b"K\x05K\x01" * depth + b"u.",
        "long number": b"\x80\x02\x8b" + (2**31 - 1).to_bytes(4, "little") + b".",
        "long text": b"\x80\x02X" + (2**32 - 1).to_bytes(4, "little") + b"a.",
        "a call": b"cos\nsystem\n(S'true'\ntR.",
        "a text": pickle.dumps("x"),
        "other keys": pickle.dumps({"a": 1}),
        "labels of text": pickle.dumps({"labels": ["a"] * 12, "data": pixels}),
        "labels too large": pickle.dumps({"labels": [10**30] * 12, "data": pixels}),
    }  # fmt: skip
    what = rng.choice(list(contents))
    path.write_bytes(contents[what])
    return f"{path.name}: {what} ({depth})"


# Caches: damage costs time, never correctness.


def cache_case(site: Site, rng: Random, folder: Path) -> Report:
    """A damaged file in a copy of the cache: the same release, epsilon or records as without."""
    if rng.random() < 0.3:
        return _data_cache_case(rng, folder)
    cache = folder / "cache"
    shutil.copytree(site.root / "cache", cache)
    part = rng.choice(["features", "features", "accounting"])
    pattern = "features/*" if part == "features" else "selective-*.json"
    files = sorted(cache.glob(pattern))
    what = mutate_file(rng.choice(files), rng)

    def before() -> None:
        os.environ["DPSUR_CACHE"] = str(cache)

    name = "statistics" if part == "features" else "coin"
    data, options = RELEASES[name]
    out = folder / "run"
    arguments = (*COMMON, "--task", f"npz:{site.data[data]}", *options, "--out", str(out))
    outcome = command(*arguments, cwd=folder, before=before)

    def wrong(outcome: Outcome) -> str | None:
        if outcome.status != 0:
            return f"a damaged cache kept it from a release: {outcome.error}"
        for file in ("model.safetensors", "privacy.json"):
            written = (out / "release" / file).read_bytes()
            if written != (site.releases[name].folder / file).read_bytes():
                return f"a damaged cache led to another {file}"
        return None

    return _report(f"{part} {what}", outcome, wrong)


def _data_cache_case(rng: Random, folder: Path) -> Report:
    stand_ins = StandIns()
    data = folder / "data"
    name = stand_ins.write(rng.choice(["idx", "bin", "reviews"]), data)
    first = _check_data(stand_ins, name, data, folder, "decoding")
    if first.fault is not None:
        return first
    files = sorted(path for path in (folder / "cache").rglob("*") if path.is_file())
    what = mutate_file(rng.choice(files), rng)
    report = _check_data(stand_ins, name, data, folder, f"decoded {what}")
    if report.fault is None and report.outcome.status == 0:
        state = json.loads(report.outcome.stdout.splitlines()[0])[name]["state"]
        if state not in {"ready", "found"}:
            fault = Fault(WRONG, f"a damaged cache made {name} {state}")
            return Report(report.what, report.outcome, fault)
    return report


# Options: odd values for every option of every command.


def option_case(site: Site, rng: Random, folder: Path) -> Report:
    """One or two options of a command with values that nobody should give."""
    name = rng.choice([*SMALL, *(["train"] * 6), "account", "calibrate"])
    base = [
        text.format(root=site.root, data=site.data["vectors"], run=site.whole)
        for text in rng.choice(SMALL[name])
    ]
    arguments = list(base)
    for _ in range(rng.choice([1, 1, 2])):
        option = rng.choice(_options(base))
        value = rng.choice(ODD_TEXTS)
        if not option.option_strings:
            arguments.insert(rng.randrange(1, len(arguments) + 1), value)
        elif option.nargs == 0 and rng.random() < 0.7:
            arguments.append(option.option_strings[-1])
        else:
            arguments.append(f"{option.option_strings[-1]}={value}")
    if rng.random() < 0.05:
        arguments[rng.randrange(len(arguments))] = rng.choice(ODD_TEXTS)

    def before() -> None:
        if name in {"cache", "data"}:
            os.environ["DPSUR_CACHE"] = str(folder / "cache")

    work = folder / "a" / "b"
    work.mkdir(parents=True)
    outcome = command(*arguments, cwd=work, before=before, timeout=5.0)

    def wrong(outcome: Outcome) -> str | None:
        if arguments[0] == "verify" and outcome.status == 1:
            return "a genuine release does not verify"
        if arguments[0] == "train" and outcome.status == 0 and (work / "run").is_dir():
            return _wrongly_trained(outcome, work / "run", work, None)
        if arguments[0] in {"account", "calibrate"} and outcome.status == 0:
            return _odd_figures(outcome)
        return None

    shown = " ".join(a if len(a) < 60 else f"{a[:50]}...({len(a)})" for a in arguments)
    return _report(shown.encode("ascii", "backslashreplace").decode(), outcome, wrong)


def _odd_figures(outcome: Outcome) -> str | None:
    if not outcome.stdout.startswith("{"):
        return None
    figures = json.loads(outcome.stdout)
    for key, value in figures.items():
        if isinstance(value, float) and (math.isnan(value) or value < 0) and "threshold" not in key:
            return f"{key} is {value}"
    return None


_MECHANISM = ["--dataset-size", "1000", "--batch-size", "100", "--delta", "1e-5", "--json"]
# Commands that take a second at most, for each command. What an option adds may take longer.
SMALL: dict[str, list[list[str]]] = {
    "train": [
        [*COMMON, "--task", "npz:{data}", *PLAIN, "--out", "run"],
        [*COMMON, "--task", "npz:{data}", *SELECTIVE, "--out", "run"],
        ["train", "--resume", "{run}"],
    ],
    "evaluate": [["evaluate", "{run}", "--task", "npz:{data}"]],
    "verify": [["verify", "{run}"]],
    "sign": [["sign", "--new-key", "key.pem"], ["sign", "{run}", "--key", "{data}"]],
    "statement": [["statement", "{run}"]],
    "ledger": [["ledger", "create", "people.ledger", "--epsilon", "8", "--delta", "1e-5"]],
    "predict": [["predict", "{run}", "{data}"]],
    "export": [["export", "{run}", "--out", "exported"]],
    "compare": [["compare", "{run}", "{run}"]],
    "plan": [["plan", "--records", "500", "--width", "4", "--classes", "2"]],
    "report": [["report", "{run}", "--task", "npz:{data}"]],
    "plot": [["plot", "{run}", "--out", "plot.svg"]],
    "doctor": [["doctor"]],
    "completion": [["completion", "bash"]],
    "proof": [["proof"]],
    "account": [
        ["account", *_MECHANISM, "--noise-multiplier", "4", "--updates", "10"],
        ["account", *_MECHANISM, "--noise-multiplier", "4", "--trials", "10"],
    ],
    "calibrate": [
        ["calibrate", *_MECHANISM, "--epsilon", "3", "--updates", "10"],
        ["calibrate", *_MECHANISM, "--epsilon", "3", "--noise-multiplier", "4"],
    ],
    "attack": [
        ["attack", "--task", "npz:{data}", "--epochs", "1", "--attacks", "gap", "--device", "cpu"],
        ["attack", "--task", "npz:{data}", "--release", "{run}", "--attacks", "gap"],
    ],
    "audit": [["audit", "--count", "20", "--updates", "2", "--confidence", "0.9"]],
    "explain": [["explain", "--task", "npz:{data}", "--device", "cpu"]],
    "bench": [[
        "bench", "--model", "tests.robustness.cases:bench_model", "--batch-size", "4",
        "--repetitions", "1", "--device", "cpu",
    ]],
    "data": [["data", "schema", "{data}"]],
    "tasks": [["tasks"]],
    "methods": [["methods"]],
}  # fmt: skip


def bench_model(size: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """What `dpsur bench` measures here."""
    return nn.Linear(4, 2), torch.zeros(size, 4), torch.zeros(size, dtype=torch.long)


def _options(arguments: list[str]) -> list[argparse.Action]:
    """The options of a command, or of its action."""
    parser = Parser()
    dpsur.cli.set_up(arguments[0], parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parser = action.choices[arguments[1]]
    return [a for a in parser._actions if not isinstance(a, argparse._HelpAction)] or [
        argparse.Action(["--nothing"], "nothing")
    ]


FAMILIES: dict[str, Family] = {
    "statement": statement_case,
    "release": release_case,
    "run folder": run_folder_case,
    "records": npz_case,
    "data sets": data_case,
    "caches": cache_case,
    "options": option_case,
}


def run_case(site: Site, family: str, seed: int, number: int) -> Report:
    """One case, the same each time."""
    rng = Random(f"{seed} {family} {number}")
    folder = site.fresh(f"{family.replace(' ', '-')}-{number}")
    try:
        return FAMILIES[family](site, rng, folder)
    finally:
        clear(folder)
