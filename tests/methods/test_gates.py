"""A test of candidates in front of any method: what it keeps, what it charges, what it restores."""

import pytest
import torch

import dpsur
from dpsur.mechanism.streams import Streams
from dpsur.mechanism.trial import make_trial, start
from dpsur.methods import gradient_method
from dpsur.privacy.events import CoinTest, LossTest, SampledGaussian, Trial
from dpsur.runs.verification import verify
from reproduction import methods
from reproduction.loops import train
from tests.methods.problems import BUDGET, NOISE, SIZE, STEPS, assert_same, bound, fit
from tests.methods.test_contract import own_cache  # noqa: F401

COIN = {"gate": "coin", "accept_ratio": 1.2, "val_batch_size": 4, "updates": 4}
LOSS = {"gate": "loss", "val_noise_multiplier": 6.0, "val_batch_size": 4}
STEERED = {**NOISE, "refresh_every": 2, "norm_noise_multiplier": 20.0}
CASES = [
    ("proven", COIN),
    ("proven", {**LOSS, "updates": 4}),
    ("every-trial", {**LOSS, "trials": 8}),
]
STREAMS = Streams(0, torch.device("cpu"))
IDS = ["proven-coin", "proven-loss", "every-trial-loss"]


@pytest.fixture(scope="module")
def steered():
    """DPIS behind each gate, run once."""
    known = {}

    def run(accounting, options):
        key = (accounting, options["gate"])
        if key not in known:
            known[key] = fit(methods.Dpis(**STEERED, **options), accounting)
        return known[key]

    return run


@pytest.mark.parametrize(("accounting", "options"), CASES, ids=IDS)
@pytest.mark.parametrize("method", [methods.DpsgdTs, dpsur.DpsgdHf], ids=lambda m: m.name)
def test_a_gate_in_front_of_fixed_steps(method, accounting, options, tmp_path):
    run = fit(method(**NOISE, **options), accounting)
    ledger, key = run.private.ledger, accounting.replace("-", "_")
    assert run.epsilon[key] <= BUDGET.epsilon
    kind = CoinTest if options["gate"] == "coin" else LossTest
    assert isinstance(run.plan.typical.test, kind)
    if accounting == "proven":
        assert ledger.updates == 4 <= ledger.trials <= run.plan.trials
        assert run.statement["mechanism"]["trials"] is None
    else:
        assert ledger.trials == 8
    assert verify(run.save(tmp_path / "out"))[0] == []


@pytest.mark.parametrize(("accounting", "options"), CASES, ids=IDS)
def test_a_gate_in_front_of_steered_steps(accounting, options, steered, tmp_path):
    run = steered(accounting, options)
    plan, ledger = run.plan, run.private.ledger
    assert plan.filter is not None
    assert 0 < plan.epsilon() <= BUDGET.epsilon
    assert plan.divergence(ledger) <= plan.filter.allowance
    trials = [entry for entry in ledger.entries if isinstance(entry.step, Trial)]
    assert all(entry.step.gate == plan.typical.gate is not None for entry in trials)
    if accounting == "proven":
        assert ledger.updates == 4
        assert run.statement["accepted_updates"] == 4
        charged = [r["charged"] for r in run.statement["mechanism"]["filter"]["steps"]]
        assert sum(charged) == 4 + 2  # rejections are not told, releases of the norms are
    else:
        assert ledger.trials == 8
    assert verify(run.save(tmp_path / "out"))[0] == []


@pytest.mark.parametrize(("accounting", "options"), CASES, ids=IDS)
def test_releases_of_norms_are_charged_whatever_is_rejected(accounting, options, steered):
    run = steered(accounting, options)
    releases = [e for e in run.private.ledger.entries if isinstance(e.step, SampledGaussian)]
    assert len(releases) >= 1
    assert all(entry.trials == entry.updates == 1 for entry in releases)
    without = [e for e in run.private.ledger.entries if isinstance(e.step, Trial)]
    plan = run.plan
    assert plan.divergence(run.private.ledger) > plan.divergence(
        type(run.private.ledger)(run.private.ledger.setup, tuple(without))
    )


class Never:
    """A gate that rejects everything."""

    def decide(self, difference, generator):
        return torch.tensor(False)


@pytest.mark.parametrize("accounting", ["proven", "every-trial"])
def test_a_rejected_trial_leaves_the_state_as_it_was(accounting, monkeypatch):
    """Memory and all: only the released sum of norms changes it."""
    count = {"updates": 4} if accounting == "proven" else {"trials": 8}
    method = methods.Dpis(**STEERED, **LOSS, **count, average_decay=0.9)
    monkeypatch.setattr(gradient_method, "make_rule", lambda *_: Never())
    procedure, plan = bound(method, accounting)
    progress, verdict = make_trial(procedure, plan, STREAMS, start(procedure))
    assert bool(verdict.accept)  # the sum of norms, which no gate holds back
    assert float(progress.state.memory["norm_sum"]) > 0
    assert not isinstance(progress.ledger.entries[-1].step, Trial)
    known = progress.state
    for number in range(1, 4):
        progress, verdict = make_trial(procedure, plan, STREAMS, progress)
        assert not bool(verdict.accept)
        assert_same(progress.state, known)
        assert (progress.ledger.trials, progress.ledger.updates) == (number, 0)
    spent = plan.divergence(progress.ledger)
    charged = 0 if accounting == "proven" else 3
    price = plan.divergence(progress.ledger.record(procedure.step(known), updates=1)) - spent
    alone = plan.divergence(type(progress.ledger)((), progress.ledger.entries[:1]))
    assert spent == pytest.approx(alone + charged * price)


def test_nothing_is_released_when_the_cap_comes_first(monkeypatch):
    monkeypatch.setattr(gradient_method, "make_rule", lambda *_: Never())
    procedure, plan = bound(methods.Dpis(**STEERED, **COIN))
    with pytest.raises(dpsur.NothingReleasedError, match="trials came before 4 accepted updates"):
        train(procedure, plan, STREAMS)


@pytest.mark.parametrize("accounting", ["every-trial"])
def test_momentum_may_be_kept_where_every_trial_is_charged(accounting):
    options = {**STEERED, **LOSS, "trials": 8, "on_reject": "keep-momentum"}
    procedure, plan = bound(methods.Dpis(**options), accounting)
    assert plan.on_reject == "keep-momentum"
    assert train(procedure, plan, STREAMS).ledger.trials == 8
    with pytest.raises(dpsur.InvalidInputError, match="keep-momentum is not covered by the proven"):
        methods.Dpis(**{**options, "trials": None, "updates": 4}).resolve(SIZE, BUDGET, "proven")


def test_the_coin_is_refused_where_verdicts_are_outputs():
    for method in (methods.Dpis, methods.DpsgdTs, dpsur.DpsgdHf):
        with pytest.raises(dpsur.InvalidInputError, match="coin gate is not covered by the every"):
            method(**STEPS, gate="coin").resolve(SIZE, BUDGET, "every-trial")


def test_tests_that_spend_everything_are_refused_before_the_first_step():
    """They fit by themselves, but not beside the releases of the norms."""
    options = {"gate": "loss", "val_noise_multiplier": 1.4, "val_batch_size": 20}
    options = {**STEERED, **options, "norm_noise_multiplier": 2.5}
    with pytest.raises(dpsur.BudgetError, match="tests of candidates spend the whole budget"):
        bound(methods.Dpis(**options, trials=8), "every-trial")


def test_a_learning_rate_that_equals_the_default_is_tried_by_the_gate_block():
    """Unset is None: no number stands for it."""
    budget = dpsur.Budget(3.0, 1e-5)

    def settled(**options):
        return dpsur.Dpsgd(gate="block", **options).resolve(5000, budget, "every-trial")

    left_open, given = settled(), settled(learning_rate=4.0)
    assert given[1].blocks == settled(learning_rate=4.1)[1].blocks
    assert len(given[1].blocks) == len(left_open[1].blocks) + 1
    assert given[0].learning_rate == 4.0
    assert left_open[0].learning_rate is None
    assert settled(learning_rate="linear-head")[1].blocks == left_open[1].blocks
    plain, _ = dpsur.Dpsgd().resolve(5000, budget, "every-trial")
    assert plain.learning_rate == 4.0  # stated as a number


# --- gates and metrics as objects ----------------------------------------------------------------

OBJECTS = [
    (
        {"gate": dpsur.LossGate(val_batch_size=8, accept_threshold=0.0)},
        {"gate": "loss", "val_batch_size": 8, "accept_threshold": 0.0},
    ),
    ({"gate": dpsur.CoinGate(accept_ratio=1.5)}, {"gate": "coin", "accept_ratio": 1.5}),
    (
        {"gate": dpsur.BlockGate(blocks=4, learning_rate=4.0, schedule="cosine")},
        {"gate": "block", "blocks": 4, "learning_rate": 4.0, "schedule": "cosine"},
    ),
    (
        {"metrics": dpsur.Metrics(budget=0.02, patience=2)},
        {"metrics_budget": 0.02, "patience": 2},
    ),
]


@pytest.mark.parametrize(("objects", "options"), OBJECTS, ids=lambda one: str(next(iter(one))))
def test_an_object_holds_what_options_hold(objects, options):
    """So that a run of either is the same, and the statement and the files say the same."""
    budget = dpsur.Budget(5.0, 1e-4)
    one, other = dpsur.Dpsgd(**objects), dpsur.Dpsgd(**options)
    assert one == other
    assert one.resolve(1000, budget, "proven") == other.resolve(1000, budget, "proven")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gate": dpsur.BlockGate(losses=abs)}, "losses of a BlockGate is for a custom loop"),
        ({"gate": dpsur.LossGate(abs)}, "loss of a LossGate is for a custom loop"),
        ({"gate": dpsur.LossGate(loss_clip=2.0), "loss_clip": 1.0}, "give it once"),
        ({"gate": dpsur.LossGate(), "metrics": dpsur.Metrics()}, "needs the gate none or block"),
    ],
)
def test_objects_that_cannot_be(options, words):
    with pytest.raises(dpsur.InvalidInputError, match=words):
        dpsur.Dpsgd(**options)
