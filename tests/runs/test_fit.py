import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpsur
from dpsur.config import Intervals
from dpsur.functional.records import Examples
from dpsur.runs import fit
from dpsur.runs.release import read_release
from tests.conftest import blobs, small_model

BUDGET = dpsur.Budget(epsilon=3.0, delta=1e-4)
QUICK = {"noise_multiplier": 20.0, "learning_rate": 1.0}
COIN = {**QUICK, "accept_ratio": 1.5}
LOSS = {**QUICK, "val_noise_multiplier": 4.0}


def quick_fit(**changes):
    arguments = {
        "model": small_model(),
        "train_set": blobs(),
        "budget": BUDGET,
        "method": dpsur.Dpsur(**COIN, updates=15),
        "seed": 0,
        **changes,
    }
    model, data = arguments.pop("model"), arguments.pop("train_set")
    return dpsur.fit(model, data, **arguments)


def test_finds_its_settings_under_its_budget():
    run = dpsur.fit(small_model(), blobs(1000), budget=BUDGET, test_set=blobs(300, seed=9), seed=0)
    assert run.scores["accuracy"] > 0.9
    assert run.epsilon["proven"] == pytest.approx(3.0, rel=1e-2)
    assert (run.method.name, run.method.gate) == ("dpsgd", "block")


def test_learns_under_its_budget():
    method = dpsur.Dpsur()
    run = dpsur.fit(
        small_model(),
        blobs(1000),
        budget=BUDGET,
        method=method,
        test_set=blobs(300, seed=9),
        seed=0,
    )
    assert run.scores["accuracy"] > 0.9
    assert run.epsilon["proven_lower"] <= run.epsilon["proven"]
    assert run.epsilon["proven_pld"] < run.epsilon["proven"]  # the tighter one is the default
    assert run.epsilon["proven_pld"] == pytest.approx(3.0, rel=1e-2)
    assert run.epsilon["proven_pld"] <= 3.0
    assert run.statement["guarantee"]["accounting"] == "proven-pld"
    assert run.get_epsilon(1e-4) == pytest.approx(run.epsilon["proven_pld"])
    assert run.get_epsilon(1e-3) < run.epsilon["proven_pld"]
    with pytest.raises(
        dpsur.InvalidInputError, match="cap on trials of this run was made for delta 0.0001"
    ):
        run.get_epsilon(1e-7)


def test_every_trial_charged():
    run = quick_fit(method=dpsur.Dpsur(**LOSS, trials=15), accounting="every-trial")
    assert run.private.ledger.trials == run.statement["mechanism"]["trials"] == 15
    assert run.epsilon["every_trial"] <= 3.0
    assert run.epsilon["proven"] is run.epsilon["published"] is None
    assert run.get_epsilon(1e-7) > run.epsilon["every_trial"]
    assert run.statement["accepted_updates"] == run.private.ledger.updates


def test_the_model_passed_in_is_left_alone():
    model = small_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = quick_fit(model=model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(run.model[0].weight, model[0].weight)


def weights(run):
    return torch.cat([value.flatten() for value in run.model.state_dict().values()])


def test_a_seed_repeats_a_run_and_no_seed_does_not():
    assert torch.equal(weights(quick_fit()), weights(quick_fit()))
    assert not torch.equal(weights(quick_fit()), weights(quick_fit(seed=1)))
    assert not torch.equal(weights(quick_fit(seed=None)), weights(quick_fit(seed=None)))


def test_pairs_and_data_sets_are_the_same():
    data = blobs()
    from_pair = quick_fit(train_set=(data.inputs, data.targets))
    from_set = quick_fit(train_set=TensorDataset(data.inputs, data.targets))
    assert torch.equal(weights(from_pair), weights(quick_fit()))
    assert torch.equal(weights(from_set), weights(quick_fit()))


def test_a_regression_with_a_loss_of_ones_own():
    x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([[1.0], [-2.0]])
    run = dpsur.fit(
        nn.Linear(2, 1),
        (x, y),
        loss=lambda out, target: F.mse_loss(out, target, reduction="sum"),
        budget=BUDGET,
        method=dpsur.Dpsgd(updates=60, learning_rate=0.5, max_grad_norm=1.0),
        test_set=(x, y),
        seed=0,
    )
    assert run.scores["loss"] < 1.0
    assert "accuracy" not in run.scores


def test_frozen_layers_and_buffers_are_released_as_they_were():
    model = nn.Sequential(nn.Linear(2, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 3))
    run = quick_fit(model=model)
    assert torch.equal(run.model[0].weight, model[0].weight)
    assert not torch.equal(run.model[2].weight, model[2].weight)


def test_averaged_weights_are_what_is_released():
    plain = quick_fit()
    averaged = quick_fit(method=dpsur.Dpsur(**COIN, updates=15, average_decay=0.9))
    assert not torch.equal(weights(plain), weights(averaged))
    assert averaged.statement["released"] == ["the average of the weights"]


def test_published_warns_and_gives_the_proven_figure_beside(tmp_path):
    with pytest.warns(dpsur.PrivacyWarning, match=r"not proved.*proven: \d"):
        run = quick_fit(accounting="published", method=dpsur.Dpsur(**LOSS, updates=5))
    assert run.private.ledger.updates == 5
    assert run.statement["guarantee"]["proved"] is False
    assert run.epsilon["every_trial"] is None
    assert run.epsilon["proven"] > 0
    page = (run.save(tmp_path / "out") / "PRIVACY.md").read_text()
    assert "not proved" in page
    assert "that satisfies" not in page
    assert f"Epsilon, proven for selective release | {run.epsilon['proven']:.2f}"[:-1] in page


@pytest.mark.parametrize("accounting", ["proven", "published"])
def test_momentum_is_not_kept_unless_every_trial_is_charged(accounting):
    method = dpsur.Dpsur(**LOSS, updates=5, on_reject="keep-momentum")
    with pytest.raises(dpsur.InvalidInputError, match="keep-momentum is not covered"):
        quick_fit(accounting=accounting, method=method)


def test_momentum_kept_where_every_trial_is_charged():
    options = {**LOSS, "trials": 15, "accept_threshold": -1.0}
    kept = quick_fit(
        accounting="every-trial", method=dpsur.Dpsur(**options, on_reject="keep-momentum")
    )
    restored = quick_fit(accounting="every-trial", method=dpsur.Dpsur(**options))
    assert not torch.equal(weights(kept), weights(restored))
    assert kept.epsilon == {**restored.epsilon, "published": None, "proven": None}


@pytest.mark.parametrize("accounting", ["every-trial", "published"])
def test_the_coin_is_refused_where_it_is_not_covered(accounting):
    with pytest.raises(dpsur.InvalidInputError, match="coin gate is not covered"):
        quick_fit(accounting=accounting, method=dpsur.Dpsur(gate="coin"))


def test_the_gate_follows_from_what_is_given():
    def gate(accounting, **options):
        count = "trials" if accounting == "every-trial" else "updates"
        method = dpsur.Dpsur(noise_multiplier=20.0, **{count: 3}, **options)  # nothing to search
        return method.resolve(4000, BUDGET, accounting)[0].gate

    assert gate("proven") == gate("every-trial") == gate("published") == "loss"
    assert gate("proven", accept_ratio=1.5) == "coin"
    assert gate("proven", accept_threshold=-1.0) == "loss"
    assert gate("proven", gate="loss", val_noise_multiplier=1.0) == "loss"
    with pytest.raises(dpsur.InvalidInputError, match="accept_ratio 2.0 belongs to the gate coin"):
        dpsur.Dpsur(accept_ratio=2.0, val_noise_multiplier=1.0)
    with pytest.raises(dpsur.InvalidInputError, match="val_noise_multiplier.*gate loss"):
        dpsur.Dpsur(gate="coin", val_noise_multiplier=1.0)


def test_warns_when_delta_is_above_one_over_n():
    with pytest.warns(dpsur.PrivacyWarning, match="above 1/N"):
        quick_fit(budget=dpsur.Budget(3.0, 0.1))


def test_a_proved_run_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick_fit(seed=None)


def test_a_seeded_run_warns_as_its_statement_does():
    with pytest.warns(dpsur.PrivacyWarning, match="this run was seeded") as caught:
        run = quick_fit()
    assert [str(warning.message) for warning in caught] == run.statement["warnings"]
    assert caught[0].filename == __file__


def test_a_release_holds_nothing_private(tmp_path):
    with pytest.warns(dpsur.PrivacyWarning):
        run = quick_fit(
            seed=987654321,
            accounting="published",
            method=dpsur.Dpsur(**LOSS, updates=5, accept_threshold=-1.0),
            test_set=blobs(50, seed=3),
        )
    release = run.save(tmp_path / "out")
    trials = run.private.ledger.trials
    assert trials > 5
    statement = json.loads((release / "privacy.json").read_text())
    assert statement["mechanism"]["trials"] is None
    assert statement["accepted_updates"] == 5
    assert statement["random"] == {"seeded": True}
    everything = b"".join(file.read_bytes() for file in release.iterdir())
    for secret in (b"987654321", b"loss_difference", b"seconds", f": {trials}".encode()):
        assert secret not in everything
    assert {file.name for file in release.iterdir()} == {
        "model.safetensors",
        "privacy.json",
        "PRIVACY.md",
        "README.md",
    }
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["release"]


def test_save_and_load_round_trip(tmp_path):
    run = quick_fit()
    run.save(tmp_path / "out")
    loaded = dpsur.load(tmp_path / "out", small_model(seed=5)).module
    x = torch.randn(4, 2)
    assert torch.equal(loaded(x), run.model(x))
    with pytest.raises(dpsur.InvalidInputError, match="pass it in"):
        dpsur.load(tmp_path / "out")
    with pytest.raises(dpsur.CheckpointError, match="do not fit"):
        dpsur.load(tmp_path / "out", nn.Linear(2, 3))
    _, statement, _ = read_release(tmp_path / "out", small_model())
    assert statement["guarantee"]["epsilon"] == run.epsilon["proven_pld"]


def test_an_existing_folder_is_not_overwritten(tmp_path):
    run = quick_fit()
    first = run.save(tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}
    assert run.save(tmp_path / "out").parent == tmp_path / "out-2"
    assert {path.name: path.stat().st_mtime_ns for path in first.iterdir()} == before


def test_a_folder_in_which_another_run_has_begun_is_left_alone(tmp_path, monkeypatch):
    build = fit.build_session

    def slowly(*args, **settings):
        monkeypatch.setattr(fit, "build_session", build)
        quick_fit(out=tmp_path / "out", seed=1)
        return build(*args, **settings)

    monkeypatch.setattr(fit, "build_session", slowly)
    with pytest.raises(dpsur.InvalidInputError, match="another run has started in the folder"):
        quick_fit(out=tmp_path / "out")
    read_release(tmp_path / "out" / "release", small_model())


@pytest.mark.parametrize("name", ["checkpoint_every", "evaluate_every"])
def test_a_pace_without_steps_is_refused(name):
    with pytest.raises(dpsur.InvalidInputError, match=f"{name} must be .* got 0"):
        Intervals(**{name: 0})


def nan_row():
    inputs = blobs().inputs.clone()
    inputs[17, 1] = math.nan
    return Examples(inputs, blobs().targets)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_set": (torch.zeros(0, 2), torch.zeros(0).long())}, "train_set is empty"),
        ({"train_set": nan_row()}, "train_set hold NaN or infinity"),
        ({"train_set": (torch.zeros(3, 2), torch.zeros(2).long())}, "3 inputs but 2 targets"),
        (
            {"train_set": (torch.zeros(3, 2), torch.tensor([0, 1, 3]))},
            "it has 3 outputs, for the labels 0 to 2",
        ),
        (
            {"train_set": (torch.zeros(3, 2), torch.tensor([0, -1, 2]))},
            "train_set holds a label that the model has no output for",
        ),
        ({"train_set": iter([])}, "map-style data set"),
        ({"train_set": [1, 2, 3]}, "a record of train_set is not a pair"),
        ({"accounting": "guess"}, "unknown accounting 'guess'"),
        ({"device": "warp"}, "unknown device 'warp'"),
        ({"method": dpsur.Dpsur(batch_size=201)}, "batch_size 201 is larger.*sample rate of 1"),
        ({"method": dpsur.Dpsur(val_batch_size=999)}, "val_batch_size 999 is larger"),
        (
            {"method": dpsur.Dpsur(updates=5), "accounting": "every-trial"},
            "updates 5 cannot be fixed.*give trials",
        ),
        ({"method": dpsur.Dpsur(trials=5)}, "trials 5 cannot be fixed.*give updates"),
        (
            {"budget": dpsur.Budget(1e-3, 1e-4), "method": dpsur.Dpsgd(noise_multiplier=1.0)},
            "too small for a single update",
        ),
    ],
)
def test_bad_input_is_refused_before_training(changes, message):
    with pytest.raises(dpsur.InvalidInputError, match=message):
        quick_fit(**changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate must be a finite number above 0, got -1.0"),
        ({"learning_rate": math.nan}, "learning_rate.*nan"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"noise_multiplier": math.inf}, "noise_multiplier.*inf"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"trials": -3}, "trials"),
        ({"loss_clip": 0.0}, "loss_clip"),
        ({"val_noise_multiplier": -1.0}, "val_noise_multiplier"),
        ({"accept_threshold": math.nan}, "accept_threshold.*nan"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd, adam; got 'lion'"),
        ({"schedule": "step"}, "schedule must be one of"),
        ({"momentum": 1.0}, "momentum"),
        ({"accept_ratio": 0.5}, "accept_ratio.*0.5"),
        ({"gate": "door"}, "gate must be one of loss, coin, block, none; got 'door'"),
        ({"on_reject": "forget"}, "on_reject must be one of"),
        ({"average_decay": 1.5}, "average_decay"),
        ({"adam_eps": 0.0, "optimizer": "adam"}, "adam_eps"),
    ],
)
def test_bad_hyper_parameters_name_the_value(options, message):
    with pytest.raises(dpsur.InvalidInputError, match=message):
        dpsur.Dpsur(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_asked_for_and_absent():
    with pytest.raises(dpsur.InvalidInputError, match="no usable CUDA device.*--device cpu"):
        quick_fit(device="cuda")


@pytest.mark.gpu
def test_trains_on_cuda():
    run = quick_fit(device="cuda")
    assert run.epsilon["proven"] <= 3.0


@pytest.mark.parametrize(
    "size", [1, 60_000, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 7, 100, 4000))]
)
def test_defaults_suit_any_size(size):
    for accounting in ("proven", "every-trial"):
        method, plan = dpsur.Dpsur().resolve(size, BUDGET, accounting)
        assert 1 <= method.val_batch_size <= method.batch_size <= size
        assert plan.epsilon() <= BUDGET.epsilon
        assert plan.length == (method.trials or method.updates)


def test_defaults_at_the_sizes_of_the_paper():
    sizes = {4000: (512, 64), 60_000: (2048, 256), 25_000: (1024, 128)}
    for size, (batch, val_batch) in sizes.items():
        method, _ = dpsur.Dpsur().resolve(size, BUDGET, "every-trial")
        assert (method.batch_size, method.val_batch_size) == (batch, val_batch)
