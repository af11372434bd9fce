"""A replayable run commits to its steps, and whoever has the records makes them again."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dpsur
from dpsur.cli import main
from dpsur.errors import CheckpointError, InterruptedRunError, InvalidInputError, ReplayError
from dpsur.mechanism.streams import Key
from dpsur.runs import replay as module
from dpsur.runs.checkpoint import _parse, save_tensors
from dpsur.runs.files import RunFolder
from dpsur.runs.replay import _salt, merkle_root
from reproduction.methods import Dpagd, Dpis

RECORDS = 200
METHODS = {
    "sgd": dpsur.Dpsgd(updates=12, batch_size=20),
    "adam": dpsur.Dpsgd(updates=12, batch_size=20, optimizer="adam", average_decay=0.9),
    "gate": dpsur.Dpsur(updates=5, batch_size=20),
    "every trial": dpsur.Dpsur(trials=12, batch_size=20),
    "norms": Dpis(updates=6),
    "choice": Dpagd(updates=4),
    "blocks": dpsur.Dpsgd(gate="block", updates=6, blocks=2, block_updates=3),
    "metrics": dpsur.Dpsgd(updates=12, batch_size=20, metrics_budget=0.01),
}


def records():
    x = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(1) > 0).long()


def fit(out, kind="sgd", data=None, network=0, **more):
    if isinstance(network, int):
        torch.manual_seed(network)
        network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    settings = {"intervals": dpsur.Intervals(replayable=True), "device": "cpu", **more}
    if kind == "every trial":
        settings["accounting"] = "every-trial"
    return dpsur.fit(
        network,
        records() if data is None else data,
        budget=dpsur.Budget(3.0, 1e-3),
        method=METHODS[kind],
        progress=False,
        out=out,
        **settings,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay") / "run"
    fit(folder)
    return folder


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


@pytest.mark.parametrize("kind", METHODS)
def test_every_step_of_an_honest_run_is_made_again(kind, tmp_path, capsys):
    fit(tmp_path / "run", kind)
    assert dpsur.verify(tmp_path / "run")[0] == []
    again = fit(tmp_path / "run", kind, replay=10_000)
    assert "steps recomputed from the records, the same bits" in capsys.readouterr().err
    weights = load_file(tmp_path / "run" / "release" / "model.safetensors")
    assert all(
        torch.equal(value, weights[name]) for name, value in again.model.state_dict().items()
    )


class StopAt:
    def __init__(self, trials):
        self.number = trials

    def started(self, *_):
        if self.number == 0:
            raise InterruptedRunError("now")

    def evaluated(self, *_):
        pass

    def trials(self, progress, verdicts):
        if progress.ledger.trials == self.number:
            raise InterruptedRunError("now")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["sgd", "gate", "blocks"])
def test_on_cuda_bits_are_the_same_and_on_a_cpu_close(kind, tmp_path, capsys):
    x = torch.randn(RECORDS, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = x, (x.sum((1, 2, 3)) > 0).long()
    network = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(144, 2))
    )
    fit(tmp_path / "run", kind, data, network, device="cuda")
    fit(tmp_path / "run", kind, data, network, device="cuda", replay=1000)
    assert "the same bits" in capsys.readouterr().err
    fit(tmp_path / "run", kind, data, network, device="cpu", replay=1000)
    assert "of a clip norm" in capsys.readouterr().err


def test_a_run_that_was_interrupted_is_made_again(tmp_path):
    intervals = dpsur.Intervals(replayable=True, checkpoint_every=3)
    with pytest.raises(InterruptedRunError):
        fit(tmp_path / "run", observers=[StopAt(7)], intervals=intervals)
    fit(tmp_path / "run", resume=True)
    fit(tmp_path / "run", replay=100)


def test_a_run_that_began_without_it_cannot_become_replayable(tmp_path):
    with pytest.raises(InterruptedRunError):
        fit(tmp_path / "run", observers=[StopAt(0)], intervals=dpsur.Intervals())
    with pytest.raises(InvalidInputError, match="did not begin as a replayable one"):
        fit(tmp_path / "run", resume=True)


def test_other_records_network_or_method_are_found(run):
    x, y = records()
    x[7] += 1
    with pytest.raises(ReplayError, match=r"replay\.records"):
        fit(run, data=(x, y), replay=1)
    with pytest.raises(ReplayError, match="not that of the untrained network"):
        fit(run, network=1, replay=1)
    with pytest.raises((ReplayError, CheckpointError), match=r"method|does not fit"):
        fit(run, "adam", replay=1)


def test_weights_that_the_last_step_did_not_give_are_found(run):
    state = load_file(run / "release" / "model.safetensors")
    state["0.bias"][0] += 1e-6
    content = (run / "release" / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    changed = save_tensors(state, header["__metadata__"])
    (run / "release" / "model.safetensors").write_bytes(changed)
    statement = json.loads((run / "release" / "privacy.json").read_text())
    statement["weights"]["sha256"] = module.sha256(changed)
    (run / "release" / "privacy.json").write_text(json.dumps(statement))
    with pytest.raises(ReplayError, match="other weights than those after the last step"):
        fit(run, replay=1)


def rewrite(path, change):
    """Change tensors and facts of a kept state, with a digest that fits."""
    tensors, facts = _parse(path, path.read_bytes())
    change(tensors, facts)
    text = json.dumps(facts, sort_keys=True)
    digest = module.digest_of(tensors, text)
    path.write_bytes(save_tensors(tensors, {"dpsur": text, "digest": digest}))


def test_a_kept_state_that_was_changed_later_breaks_the_chain(run):
    rewrite(RunFolder(run).update(5), lambda tensors, _: tensors["state/params/0.bias"].add_(1e-6))
    with pytest.raises(ReplayError, match=r"replay\.chain"):
        fit(run, replay=1)


def test_random_numbers_that_serve_two_steps_are_found(run):
    def earlier(_, facts):
        facts["ledger"]["entries"][0] |= {"trials": 5, "updates": 5}

    rewrite(RunFolder(run).update(6), earlier)
    with pytest.raises(ReplayError, match="same random numbers"):
        fit(run, replay=1)


def test_rejections_are_in_no_commitment(tmp_path, monkeypatch):
    """The chain follows from kept states and the key, however many trials lay between them."""
    fit(tmp_path / "run", "gate")
    folder = RunFolder(tmp_path / "run")
    stated = json.loads((folder.release / "privacy.json").read_text())["replay"]
    for number in range(6):

        def more(_, facts, number=number):
            for entry in facts["ledger"]["entries"]:
                entry["trials"] += number

        rewrite(folder.update(number), more)
    found = {}

    def seen(*args):
        found.update(commitments(*args)[0])
        return commitments(*args)

    commitments = module.commitments
    monkeypatch.setattr(module, "commitments", seen)
    with pytest.raises(ReplayError):  # the trials are not those of the run
        fit(tmp_path / "run", "gate", replay=10)
    assert found == stated


def under_two_keys(monkeypatch, run):
    """Everything that a run commits to follows from its key too."""
    found = []
    commitments = module.commitments

    def seen(session, *args):
        own = session.streams.key
        for key in (own, Key(bytes(32))):
            session.streams.key = key
            found.append(commitments(session, *args)[0])
        session.streams.key = own
        return commitments(session, *args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "commitments", seen)
        fit(run, replay=1)
    one, other = found
    assert set(one) == {"chain", "records", "key", "device"}
    for name in ("chain", "records", "key"):
        assert one[name] != other[name], name


def test_commitments_say_nothing_without_the_key(run, monkeypatch):
    under_two_keys(monkeypatch, run)
    assert _salt(Key(bytes(32)), "record", 1) != _salt(Key(bytes(32)), "state", 1)


@pytest.mark.parametrize("unsalted", ["record", "state", "key"])
def test_a_hash_without_its_salt_is_noticed(unsalted, run, monkeypatch):
    salt = module._salt
    monkeypatch.setattr(
        module, "_salt", lambda key, *words: "" if words[0] == unsalted else salt(key, *words)
    )
    fit(run.parent / "mutant")
    with pytest.raises(AssertionError, match=r"chain|records|key"):
        under_two_keys(monkeypatch, run.parent / "mutant")


def test_steps_are_made_again_with_the_key_that_was_committed_to(run):
    for number in range(13):
        rewrite(RunFolder(run).update(number), lambda tensors, _: tensors["stream/key"].add_(1))
    fit(run, replay=100)
    rewrite(RunFolder(run).checkpoint, lambda tensors, _: tensors["stream/key"].add_(1))
    with pytest.raises(ReplayError, match=r"replay\.key"):
        fit(run, replay=100)


def test_the_root_names_every_leaf():
    leaves = [module.sha256(bytes([n])) for n in range(7)]
    roots = {merkle_root(leaves[:n]) for n in range(1, 8)}
    roots |= {merkle_root([*leaves[:n], leaves[0], *leaves[n + 1 :]]) for n in range(1, 7)}
    assert len(roots) == 13
    both = module.sha256((leaves[0] + leaves[1]).encode())
    assert merkle_root(leaves[:3]) == module.sha256((both + leaves[2]).encode())


def test_elsewhere_a_step_may_differ_by_rounding(run, monkeypatch):
    """With other kernels a sum has other last bits: up to a tenth of a clip norm is let pass."""
    monkeypatch.setattr(module, "_device", lambda _: "cpu: another, 8 threads")
    fit(run, replay=100)
    kept = module._kept
    for by, found in ((1e-6, False), (1e-2, True)):

        def moved(*args, by=by):
            for progress in kept(*args):
                state = replace(progress.state, params=dict(progress.state.params))
                if progress.ledger.steps == 4:
                    state.params["0.bias"] = state.params["0.bias"] + by
                yield replace(progress, state=state)

        monkeypatch.setattr(module, "_kept", moved)
        with pytest.raises(ReplayError) as error:
            fit(run, replay=100)
        assert "replay.chain" in str(error.value)
        assert ("clip norms" in str(error.value)) == found


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"seed": 3}, "leave out seed 3 or replayable"),
        ({"out": None}, "set out"),
        ({"replay": 0}, "replay must be"),
    ],
)
def test_odd_calls(more, words, tmp_path):
    with pytest.raises(InvalidInputError, match=words):
        fit(**{"out": tmp_path / "run", **more})


def test_a_release_without_commitments_is_refused_by_name(tmp_path):
    fit(tmp_path / "run", intervals=dpsur.Intervals())
    with pytest.raises(InvalidInputError, match="commits to no steps") as error:
        fit(tmp_path / "run", replay=1)
    assert error.value.code == "not-replayable"


def test_the_commands(tmp_path, capsys):
    x, y = (value.numpy() for value in records())
    np.savez(tmp_path / "own.npz", x=x, y=y, x_test=x, y_test=y)
    out = str(tmp_path / "run")
    train = [
        "train",
        "--task",
        f"npz:{tmp_path / 'own.npz'}",
        "--classes",
        "2",
        "--method",
        "dpsgd",
    ]
    train += ["--epsilon", "3", "--delta", "1e-3", "--updates", "8", "--batch-size", "20"]
    assert main([*train, "--replayable", "--out", out, "--quiet", "--device", "cpu"]) == 0
    capsys.readouterr()
    assert main(["verify", out, "--replay", "3"]) == 0
    assert "3 of 8 steps recomputed from the records, the same bits" in capsys.readouterr().out
    (tmp_path / "own.npz").rename(tmp_path / "moved.npz")
    data = ["--data", str(tmp_path / "moved.npz")]
    assert main(["verify", f"{out}/release", "--replay", "3", *data, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["replay"]
    assert found["exact"]
    assert set(found["steps"].values()) == {0.0}
    x[3] += 1
    np.savez(tmp_path / "moved.npz", x=x, y=y, x_test=x, y_test=y)
    assert main(["verify", out, "--replay", "3", *data]) == 1
    assert "replay.records" in capsys.readouterr().out
    shutil.move(tmp_path / "run" / "private", tmp_path / "kept")
    assert main(["verify", out, "--replay", "3"]) == 2
    assert "is no private folder" in capsys.readouterr().err
    assert main(["verify", out, "--replay", "3", "--private", str(tmp_path / "kept"), *data]) == 1
    assert "replay.records" in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage",
    [
        {"chain": "0" * 63},
        {"records": None},
        {"key": "x" * 64},
        {"device": "cpu"},
        {"device": 3},
        {"salt": "0" * 64},
        None,
        [],
    ],
)
def test_damaged_commitments_are_faults(damage, run):
    path = run / "release" / "privacy.json"
    statement = json.loads(path.read_text())
    whole = isinstance(damage, dict)
    statement["replay"] = {**statement["replay"], **damage} if whole else damage
    path.write_text(json.dumps(statement))
    assert dpsur.verify(run)[0]
