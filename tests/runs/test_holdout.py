"""Noisy figures of private records that were held out, and what they cost."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.cli import main
from dpsur.errors import InvalidInputError
from dpsur.functional.records import Examples
from dpsur.mechanism import gaussian
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.events import Gaussian
from dpsur.runs import evaluation as holdout
from dpsur.runs.evaluation import noisy_figures, split_off
from dpsur.runs.verification import verify
from dpsur.tasks.schema import RangeLoss
from tests.conftest import blobs, small_model, stream
from tests.mutants import Mutant, law_tests
from tests.statistics import assert_standard_deviation

DELTA = 1e-5


def records(count=600, classes=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return Examples(inputs, (inputs[:, 0] > 0).long() + (classes > 2) * (inputs[:, 1] > 0))


def weights(classes=2):
    model = nn.Linear(4, classes)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
        model.weight[1, 0] = 3.0
    return model


def figures(held, epsilon=1.0, model=None, loss=F.cross_entropy, drawn=None):
    return noisy_figures(
        weights() if model is None else model,
        held,
        loss,
        fraction=0.1,
        target=(epsilon, DELTA),
        stream=stream() if drawn is None else drawn,
    )


# --- laws ---------------------------------------------------------------------------------------


def figures_are_charged_for_what_a_record_moves():
    """The noise of the sum, over what one record can move it by, costs the stated epsilon."""
    sums, real = [], gaussian.add_noise

    def spy(total, noise, drawn):
        noisy = real(total, noise, drawn)
        sums.append((total.params["sum"].clone(), noisy["sum"]))
        return noisy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "add_noise", spy)
        all_of_them = records(400)
        most = 0.0
        for left_out in range(3):
            kept = torch.arange(400) != left_out
            found = [figures(part) for part in (all_of_them, all_of_them.select(kept))]
            most = max(most, float((sums[-2][0] - sums[-1][0]).norm()))
    drawn = np.concatenate([(noisy - exact).numpy() for exact, noisy in sums])
    noise = found[0]["event"]["noise_multiplier"]
    cost = accounting_named("every-trial").epsilon([(Gaussian(noise), 1)], DELTA)
    assert cost <= found[0]["epsilon"] <= 1.0
    # a record that is right and has the largest loss does not exist; the bound is for any
    assert most <= math.sqrt(3)
    assert_standard_deviation(drawn, noise * math.sqrt(3))


def a_record_is_in_one_part_by_its_own_values():
    everything = records(300)
    train, held = split_off(everything, 0.3)
    assert len(train) + len(held) == 300
    without = everything.select(torch.arange(300) != 7)
    gone = everything.inputs[7]
    for before, after in zip((train, held), split_off(without, 0.3), strict=True):
        others = before.inputs[(before.inputs != gone).any(1)]
        assert torch.equal(others, after.inputs)


def noise_for_one_value(patch):
    real = holdout.ClippedSum
    patch.setattr(holdout, "ClippedSum", lambda params, _: real(params, 1.0))


def half_the_noise(patch):
    real = gaussian.add_noise
    patch.setattr(gaussian, "add_noise", lambda t, noise, drawn: real(t, noise / 2, drawn))


def drawn_by_the_place(patch):
    def draws(rows, _):
        return [(n * 0.618) % 1 for n in range(len(rows), 0, -1)]

    patch.setattr(holdout, "keyed_draws", draws)


test_law_holds, test_mutant_is_killed = law_tests(
    [
        Mutant(figures_are_charged_for_what_a_record_moves, noise_for_one_value),
        Mutant(figures_are_charged_for_what_a_record_moves, half_the_noise),
        Mutant(a_record_is_in_one_part_by_its_own_values, drawn_by_the_place),
    ]
)


# --- figures ------------------------------------------------------------------------------------


def by_name(found):
    return {row["quantity"]: row for row in found["figures"]}


def test_figures_are_right_within_their_error():
    held = records(20_000)
    found = by_name(figures(held, epsilon=3.0))
    assert found["accuracy"]["value"] == pytest.approx(1, abs=0.01)
    assert found["AUC, in bins"]["value"] == pytest.approx(1, abs=0.02)
    share = found["share of the most frequent class"]
    assert share["value"] == pytest.approx(0.5, abs=5 * share["standard_error"] + 0.01)
    (loss,) = (row for name, row in found.items() if name.startswith("log loss, clipped at 1.386"))
    exact = F.cross_entropy(weights()(held.inputs), held.targets).item()
    assert loss["value"] == pytest.approx(exact, abs=5 * loss["standard_error"] + 1e-6)


def test_outputs_that_are_not_finite_are_wrong():
    model = weights()
    with torch.no_grad():
        model.bias.fill_(math.nan)
    found = by_name(figures(records(5000), model=model))
    assert found["accuracy"]["value"] < 0.05


def test_numbers_have_an_error_in_their_units():
    held = Examples(torch.zeros(4000, 4), torch.full((4000, 1), 0.5))
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.bias)
    (row,) = figures(held, loss=RangeLoss(10.0), model=model)["figures"]
    assert row["value"] == pytest.approx(5.0, abs=5 * row["standard_error"])


def test_more_classes_have_no_area():
    found = by_name(figures(records(classes=3), model=weights(3)))
    assert not any("AUC" in name for name in found)


@pytest.mark.parametrize(
    ("share", "accuracy", "said"),
    [(0.99, 0.99, "spelling of the other classes"), (0.8, 0.8, "not above"), (0.8, 0.9, None)],
)
def test_doubts_follow_from_the_noisy_figures(share, accuracy, said):
    rows = [
        {"quantity": name, "value": value, "standard_error": 0.01}
        for name, value in ((holdout.BASE_RATE, share), ("accuracy", accuracy))
    ]
    found = holdout.doubts(rows)
    assert found == [] if said is None else said in found[0]
    assert holdout.doubts([]) == []


# --- runs ---------------------------------------------------------------------------------------


def test_a_run_states_its_figures_and_they_verify(tmp_path):
    data = blobs()
    method = dpsur.Dpsgd(updates=3, batch_size=20, learning_rate=0.5)
    budget = dpsur.Budget(2.0, DELTA)
    run = dpsur.fit(
        small_model(),
        (data.inputs, data.targets),
        budget=budget,
        method=method,
        holdout=0.3,
        seed=0,
    )
    held = run.statement["holdout"]
    assert run.statement["dataset_size"] + held["records"] == len(data)
    assert held["epsilon"] <= run.statement["guarantee"]["epsilon"]
    folder = run.save(tmp_path / "run")
    assert verify(folder)[0] == []
    assert "held-out records" in (folder / "PRIVACY.md").read_text()
    stated = json.loads((folder / "privacy.json").read_text())
    stated["holdout"]["event"]["noise_multiplier"] /= 2
    (folder / "privacy.json").write_text(json.dumps(stated))
    assert any("more than the guarantee" in fault for fault in verify(folder)[0])


def test_the_command_prints_noisy_figures(tmp_path, capsys):
    lines = ["x,y", *(f"{n % 97},{'no' if n % 97 < 60 else 'yes'}" for n in range(2000))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    schema = dpsur.Schema({"x": dpsur.Number(0, 100)}, {"y": dpsur.Category(["no", "yes"])})
    schema.save(tmp_path / "s.json")
    arguments = ["train", "--task", f"csv:{tmp_path / 't.csv'}", "--schema"]
    arguments += [str(tmp_path / "s.json"), "--holdout", "0.2", "--quiet", "--max-updates", "2"]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "held-out records (" in shown
    assert "noisy): accuracy" in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"holdout": 1.5}, "holdout"),
        ({"holdout": 0.1, "method": dpsur.Nonprivate(updates=1)}, "for private runs"),
        ({"holdout": 0.1, "loss": nn.MSELoss()}, "holdout has figures for classes"),
    ],
)
def test_what_cannot_be_held_out_is_refused(change, message):
    data = blobs()
    given = {"budget": dpsur.Budget(2.0, DELTA), "method": dpsur.Dpsgd(updates=1), **change}
    with pytest.raises(InvalidInputError, match=message):
        dpsur.fit(small_model(), (data.inputs, data.targets), **given)
