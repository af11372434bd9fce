"""`dpsur account`, `calibrate` and `verify` as a person meets them."""

import json
import shutil

import pytest

from dpsur.cli import account, main
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.events import CoinTest, Gaussian, SampledGaussian, Trial
from dpsur.runs.input_features import InputFeatures
from tests.cli.test_commands import dpsur

FMNIST = ["--dataset-size", "60000", "--batch-size", "2048", "--val-batch-size", "256",
          "--delta", "1e-5"]  # fmt: skip
# N, B_t, sigma_t, B_v, sigma_v, T, then published, proven lower and upper as computed beforehand
REFERENCE = [
    (60000, 2048, 4.0, 1.3, 651, 0.999, 1.320, 1.322),
    (60000, 2048, 2.15, 0.8, 1076, 2.999, 4.271, 4.288),
    (50000, 8192, 5.67, 1.1, 493, 2.997, 4.042, 4.046),
]


@pytest.mark.parametrize(
    ("size", "batch", "noise", "val_noise", "updates", "published", "lower", "upper"), REFERENCE
)
def test_reference_table(size, batch, noise, val_noise, updates, published, lower, upper, capsys):
    status, out, _ = dpsur(
        "account", "--dataset-size", str(size), "--batch-size", str(batch),
        "--noise-multiplier", str(noise), "--val-batch-size", "256",
        "--val-noise-multiplier", str(val_noise), "--accept-threshold", "-1",
        "--updates", str(updates), "--delta", "1e-5", "--json", capsys=capsys,
    )  # fmt: skip
    assert status == 0
    found = json.loads(out)
    assert found.keys() == {"published", "proven", "proven_lower", "every_trial", "proven_pld"}
    assert 0.9 * found["proven"] < found["proven_pld"] < 0.96 * found["proven"]
    assert found["published"] == pytest.approx(published, abs=1e-3)
    assert found["proven_lower"] == pytest.approx(lower, rel=2e-3)
    assert found["proven_lower"] <= found["proven"] <= 1.01 * found["proven_lower"]
    assert lower <= found["proven"] <= upper
    assert found["every_trial"] is None


def test_account_of_a_coin_and_of_statistics(capsys):
    common = [*FMNIST, "--noise-multiplier", "2.15", "--updates", "500", "--json"]
    plain = json.loads(dpsur("account", *common, "--accept-ratio", "2", capsys=capsys)[1])
    with_statistics = json.loads(
        dpsur(
            "account", *common, "--accept-ratio", "2", "--feature-statistics", "8", capsys=capsys
        )[1]
    )
    assert plain["published"] is None
    assert with_statistics["proven"] > plain["proven"]


def statistics_cost_what_a_run_is_charged(capsys):
    """`account` charges feature statistics as a run with private normalisation does."""
    common = [*FMNIST, "--noise-multiplier", "2.15", "--accept-ratio", "2"]
    arguments = [*common, "--updates", "100", "--feature-statistics", "2", "--json"]
    found = json.loads(dpsur("account", *arguments, capsys=capsys)[1])
    setup = InputFeatures("scattering", "private", noise=2.0).setup
    assert len(setup) == 4
    trial = Trial(SampledGaussian(2048 / 60000, 2.15), CoinTest(256 / 60000, 2.0))
    planned = accounting_named("proven").planned(setup, trial, 100, 1e-5)
    assert found["proven"] == planned
    fewer = accounting_named("proven").planned(setup[2:], trial, 100, 1e-5)
    assert fewer < planned


def test_statistics_cost_what_a_run_is_charged(capsys, monkeypatch):
    statistics_cost_what_a_run_is_charged(capsys)
    monkeypatch.setattr(account, "feature_statistics", lambda noise: (Gaussian(noise),) * 2)
    with pytest.raises(AssertionError):
        statistics_cost_what_a_run_is_charged(capsys)


def test_account_without_a_test(capsys):
    arguments = ["--dataset-size", "1000", "--batch-size", "100", "--noise-multiplier", "2",
                 "--updates", "100", "--delta", "1e-5"]  # fmt: skip
    found = json.loads(dpsur("account", *arguments, "--json", capsys=capsys)[1])
    assert found["proven"] == found["every_trial"]
    text = dpsur("account", *arguments, capsys=capsys)[1]
    assert "published (a claim, not proved)" in text


PLAIN = ["--dataset-size", "1000", "--batch-size", "100", "--noise-multiplier", "2",
         "--updates", "100", "--delta", "1e-5"]  # fmt: skip
BLOCKS = ["--dataset-size", "1000", "--batch-size", "100", "--noise-multiplier", "2",
          "--block-sizes", "10,40", "--val-noise-multiplier", "30", "--delta", "1e-5"]  # fmt: skip


@pytest.mark.parametrize("arguments", [PLAIN, BLOCKS])
def test_account_is_confirmed_by_another_library(arguments, capsys):
    status, out, _ = dpsur("account", *arguments, capsys=capsys)
    assert status == 0
    assert "every_trial" in out.splitlines()[-1]
    assert " confirmed by dp-accounting 0.6" in out.splitlines()[-1]
    assert "dp-accounting" not in dpsur("account", *arguments, "--no-check", capsys=capsys)[1]
    found = json.loads(dpsur("account", *arguments, "--json", "--check", capsys=capsys)[1])
    assert found["independent"][0]["independent"] == pytest.approx(found["proven"], rel=1e-5)
    assert "independent" not in json.loads(dpsur("account", *arguments, "--json", capsys=capsys)[1])


def test_account_refuses_a_figure_that_the_other_library_refutes(capsys, monkeypatch):
    real = account.figures
    monkeypatch.setattr(
        account, "figures", lambda *a, **k: {**real(*a, **k), "every_trial": 1.0}
    )  # fmt: skip
    status, out, _ = dpsur("account", *PLAIN, capsys=capsys)
    assert status == 1
    assert "FAULT: epsilon 1.0000 (every_trial) is too low" in out


BAD = [
    (["account", *FMNIST, "--noise-multiplier", "2"], "give --updates T, --trials M"),
    (["account", *FMNIST, "--noise-multiplier", "2", "--updates", "5"], "needs either"),
    (["account", *FMNIST, "--noise-multiplier", "2", "--updates", "0", "--accept-ratio", "2"],
     "updates must be"),
    (["account", *FMNIST, "--noise-multiplier", "-2", "--updates", "5", "--accept-ratio", "2"],
     "noise_multiplier must be"),
    (["account", "--dataset-size", "10", "--batch-size", "20", "--noise-multiplier", "1",
      "--updates", "1", "--delta", "1e-5"], "batch_size 20 is larger"),
    (["account", "--dataset-size", "10", "--batch-size", "2", "--noise-multiplier", "1",
      "--updates", "1", "--delta", "2"], "delta must be in (0, 1)"),
    (["account", "--dataset-size", "10", "--batch-size", "2", "--noise-multiplier", "1",
      "--updates", "1", "--delta", "1e-5", "--accept-ratio", "2"], "needs --val-batch-size"),
    (["calibrate", *FMNIST, "--epsilon", "3", "--accept-ratio", "2"], "give --noise-multiplier"),
    (["calibrate", *FMNIST, "--epsilon", "3", "--accept-ratio", "2", "--trials", "9"],
     "the proven accounting fixes updates"),
    (["calibrate", *FMNIST, "--epsilon", "1e-4", "--accept-ratio", "50", "--updates", "9999"],
     "whatever the noise"),
    (["calibrate", *FMNIST, "--epsilon", "3", "--test-share", "0.3"], "--test-share needs"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input(arguments, message, capsys):
    status, out, err = dpsur(*arguments, capsys=capsys)
    assert status == 2
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def calibrated(*arguments, capsys):
    status, out, _ = dpsur("calibrate", *FMNIST, "--json", *arguments, capsys=capsys)
    assert status == 0
    return json.loads(out)


@pytest.mark.parametrize("accounting", ["proven", "published"])
def test_calibrate_round_trip(accounting, capsys):
    test = ["--val-noise-multiplier", "1.3", "--accept-threshold", "-1"]
    common = ["--epsilon", "2", "--accounting", accounting, *test]
    noise = calibrated(*common, "--updates", "400", capsys=capsys)
    assert noise["epsilon"] <= 2.0
    back = calibrated(*common, "--noise-multiplier", str(noise["noise_multiplier"]), capsys=capsys)
    assert back["updates"] in (400, 401)
    assert back["trial_cap"] > back["updates"]


def test_calibrate_a_share(capsys):
    found = calibrated("--epsilon", "3", "--updates", "300", "--test-share", "0.3", capsys=capsys)
    assert found["accept_ratio"] > 1.2
    assert 2.9 < found["epsilon"] <= 3.0
    arguments = [*FMNIST, "--epsilon", "3", "--updates", "300", "--test-share", "0.3"]
    _, out, _ = dpsur("calibrate", *arguments, capsys=capsys)
    assert "accept ratio" in out
    assert "None" not in out


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify") / "run"
    arguments = ["--updates", "3", "--batch-size", "64", "--noise-multiplier", "20"]
    gate = ["--method", "dpsur", "--gate", "coin"]
    assert main(["train", "--quiet", "--out", str(folder), *gate, *arguments]) == 0
    return folder


@pytest.fixture
def release(run_folder, tmp_path):
    shutil.copytree(run_folder / "release", tmp_path / "release")
    return tmp_path / "release"


def edit(release, change):
    path = release / "privacy.json"
    statement = json.loads(path.read_text())
    change(statement)
    path.write_text(json.dumps(statement))


def test_verify_passes_on_a_fresh_release(run_folder, release, capsys):
    for folder in (run_folder, release):
        status, out, _ = dpsur("verify", str(folder), capsys=capsys)
        assert status == 0
        assert "follows from its parameters" in out
    found = json.loads(dpsur("verify", str(release), "--json", capsys=capsys)[1])
    assert found["ok"] is True
    assert found["epsilon"]["proven"] > 0


EDITS = {
    "guarantee": lambda s: s["guarantee"].update(epsilon=s["guarantee"]["epsilon"] * 0.99),
    "figure": lambda s: s["epsilon"].update(proven=s["epsilon"]["proven"] - 0.01),
    "delta": lambda s: s["guarantee"].update(delta=1e-6),
    "updates": lambda s: s["mechanism"].update(updates=2),
    "noise": lambda s: s["mechanism"]["trial"]["update"].update(noise_multiplier=30.0),
    "ratio": lambda s: s["mechanism"]["trial"]["test"].update(accept_ratio=1.0),
    "batch": lambda s: s["settings"].update(batch_size=32),
    "size": lambda s: s.update(dataset_size=40_000),
    "proved": lambda s: s["guarantee"].update(proved=False),
    "budget": lambda s: s["budget"].update(epsilon=0.01),
    "cap": lambda s: s["mechanism"].update(trial_cap=3),
    "missing": lambda s: s.pop("mechanism"),
    "event": lambda s: s["mechanism"]["trial"]["update"].update(kind="Wish"),
}


@pytest.mark.parametrize("name", EDITS)
def test_verify_fails_on_an_edited_statement(name, release, capsys):
    edit(release, EDITS[name])
    status, out, _ = dpsur("verify", str(release), capsys=capsys)
    assert status == 1
    assert "FAULT" in out


def test_verify_fails_on_edited_weights(release, capsys):
    path = release / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    status, out, _ = dpsur("verify", str(release), capsys=capsys)
    assert status == 1
    assert "model.safetensors has the hash" in out


def test_verify_fails_on_an_edited_page(release, capsys):
    path = release / "PRIVACY.md"
    path.write_text(path.read_text().replace("add or remove", "replace"))
    status, out, _ = dpsur("verify", str(release), capsys=capsys)
    assert status == 1
    assert "PRIVACY.md" in out


def test_verify_of_nothing(tmp_path, capsys):
    status, _, err = dpsur("verify", str(tmp_path), capsys=capsys)
    assert status == 2
    assert "holds no release" in err
