"""Persons in a custom loop: drawn as one, clipped as one, tested as one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpsur
from dpsur.cli import main
from dpsur.distributed import Ranks
from dpsur.engine import model_tests
from dpsur.engine.loader import PoissonSampler
from dpsur.engine.procedure import Units, units_of
from dpsur.errors import CheckpointError, InvalidInputError, StepError
from dpsur.functional.persons import PersonRecords
from dpsur.mechanism.streams import Stream, Streams
from dpsur.privacy.accounting import accounting_named
from dpsur.privacy.events import SampledGaussian
from dpsur.runs.verification import statement_faults
from tests.engine.helpers import without_noise
from tests.mutants import Mutant, law_tests

PEOPLE, MOST, CLIP = 30, 3, 0.5
BLOCKS = {"blocks": 2, "block_updates": 3, "val_noise_multiplier": 4.0, "schedule": "constant"}
TESTED = {"val_batch_size": 10, "accept_threshold": 0.0}


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def people(count=PEOPLE, most=7):
    """Records of people with one to `most` each, in no order; the last ones are far out."""
    draw = torch.Generator().manual_seed(1)
    names = torch.cat([torch.full((1 + place % most,), place) for place in range(count)])
    names = names[torch.randperm(len(names), generator=draw)]
    inputs = torch.randn(len(names), 6, generator=draw, dtype=torch.float64)
    inputs = inputs * (1 + 20 * (names >= count - 3)).double()[:, None]
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long(), names


def mean_loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def made(data, *, batch_size=8, most=MOST, rate=0.3, **options):
    inputs, targets, names = data
    model, engine = network(), dpsur.PrivacyEngine()
    options = {"noise_multiplier": 1.0, "max_grad_norm": CLIP, "seed": 3, **options}
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate),
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=batch_size),
        criterion=nn.CrossEntropyLoss(),
        groups=names,
        records_per_person=most,
        **options,
    )
    return engine, model, optimizer, loader


def trained(data, **options):
    engine, model, _, loader = made(data, **options)
    step = engine.private_step(mean_loss)
    while not engine.finished():
        for batch in loader:
            step(batch)
    return engine, model


def sums_of_persons(data):
    """The clipped sum of a batch of everyone, by names of parameters."""
    engine, model, _, loader = made(
        data, batch_size=len(data[2].unique()), steps=1, max_physical_batch_size=10**6
    )
    step = engine.private_step(mean_loss)
    (batch,) = loader
    step.accumulate(batch)
    found = engine._watcher.take()
    return torch.cat([found[name].flatten() for name in sorted(found)]), model


def without(data, person):
    left = data[2] != person
    return tuple(value[left] for value in data)


def a_person_moves_the_sum_by_at_most_the_clip_norm():
    data = people(count=9, most=3)  # all records are used, so that draws are the same
    whole = sums_of_persons(data)[0]
    moved = [
        float((whole - sums_of_persons(without(data, person))[0]).norm())
        for person in data[2].unique()
    ]
    assert max(moved) <= CLIP * (1 + 1e-9)
    assert max(moved) > 0.99 * CLIP  # some are clipped, or this would show nothing


def every_person_joins_once_with_at_most_k_records():
    data = people()
    _, _, _, loader = made(data, steps=40)
    sampler, joined = loader.poisson, torch.zeros(PEOPLE)
    sampler.steps = range(1, 41)
    seen = set()
    for units in sampler:
        owners = [{int(data[2][row]) for row in rows} for rows in units]
        assert all(len(owner) == 1 for owner in owners)
        owners = [owner.pop() for owner in owners]
        assert len(owners) == len(set(owners))
        for owner, rows in zip(owners, units, strict=True):
            assert len(rows) == len(set(rows)) == min(MOST, 1 + owner % 7)
            joined[owner] += 1
            seen.update(rows)
    assert len(seen) == len(data[2])  # over time all records are used
    expected = 40 * loader.sample_rate
    spread = (40 * loader.sample_rate * (1 - loader.sample_rate)) ** 0.5
    assert float((joined - expected).abs().max()) < 4.5 * spread


def a_person_adds_a_row_of_norm_one_to_a_test():
    data = people()
    gate = dpsur.BlockGate(learning_rate=0.3, **BLOCKS)
    engine, *_ = made(data, steps=6, gate=gate)
    engine.private_step(mean_loss)
    tests, state = engine._procedure.tests, engine._at_hand()
    found = 0
    for count, batch in tests.loader.for_test(1, None):
        for quantity in ("score", "gradient_norm", "loss_scale"):
            values = tests._values(getattr(model_tests, quantity.upper()), batch, state, count)
            assert len(values) == count
            assert float(values.norm(dim=1).max()) <= 1 + 1e-9
        found += count
    assert found == PEOPLE == tests.records


def person_sampled_twice(monkeypatch):
    real = PersonRecords.draw

    def twice(self, persons, uniform):
        return [(row,) for rows in real(self, persons, uniform) for row in rows]

    monkeypatch.setattr(PersonRecords, "draw", twice)


def records_not_limited(monkeypatch):
    monkeypatch.setattr(
        PersonRecords,
        "draw",
        lambda self, persons, _: [tuple(self.own[one].tolist()) for one in persons.tolist()],
    )


def joins_by_record(monkeypatch):
    real = PoissonSampler.units

    def units(self, drawn, stream):
        return [(row,) for rows in real(self, drawn, stream) for row in rows]

    monkeypatch.setattr(PoissonSampler, "units", units)


def bounded_per_record(monkeypatch):
    monkeypatch.setattr(model_tests, "_unit_means", lambda values, _: values)


def summed_over_records(monkeypatch):
    def total(values, units):
        return values.reshape(units, -1, *values.shape[1:]).sum(1)

    monkeypatch.setattr(model_tests, "_unit_means", total)


def drawn_one_by_one(data, **options):
    return made(data, sampling="record", records=100, **options)


def at_most_k_records_of_a_person_join_one_by_one():
    """Where all that may join do: k of each person in every batch, in time all of them."""
    data = people()
    *_, loader = drawn_one_by_one(data, batch_size=100, steps=40)
    loader.poisson.steps, seen = range(1, 41), set()
    assert loader.sample_rate == 1
    for rows in loader.poisson:
        assert len(rows) == len(set(rows))
        joined = torch.bincount(data[2][torch.tensor(rows)], minlength=PEOPLE)
        assert torch.equal(joined, torch.bincount(data[2]).clamp(max=MOST))
        seen.update(rows)
    assert len(seen) == len(data[2])


def as_many_records_are_charged_as_may_join():
    engine, *_ = drawn_one_by_one(people(), steps=9)
    event = engine.accountant.plan.update
    rate = engine.expected_batch_size / 100
    assert event == SampledGaussian(rate, engine.noise_multiplier, MOST)
    theirs = accounting_named("every-trial").epsilon([(event, 9)], 1e-3)
    assert engine.guarantee(1e-3) == pytest.approx(theirs, rel=1e-9)


def a_person_moves_the_sum_by_at_most_k_norms():
    data = people(count=9, most=5)
    data[0][data[2] == 4], data[1][data[2] == 4] = 5.0, 0  # their gradients add up

    def total(data):
        engine, _, _, loader = drawn_one_by_one(data, batch_size=100, steps=1)
        step = engine.private_step(mean_loss)
        (batch,) = loader
        step.accumulate(batch)
        found = engine._watcher.take()
        return torch.cat([found[name].flatten() for name in sorted(found)])

    with pytest.MonkeyPatch.context() as patch:
        # the same records of others, who are drawn independently of who else is there
        patch.setattr(Stream, "uniform", lambda _, count: torch.arange(count) / 1e6)
        whole = total(data)
        moved = [float((whole - total(without(data, p))).norm()) for p in data[2].unique()]
    assert max(moved) <= MOST * CLIP * (1 + 1e-9)
    assert max(moved) > 0.9 * MOST * CLIP


def joining_records_not_limited(monkeypatch):
    monkeypatch.setattr(PersonRecords, "joining", property(lambda self: self.records))
    monkeypatch.setattr(PersonRecords, "draw_joining", lambda self, _: self._by_person)


def charged_for_one_record(monkeypatch):
    monkeypatch.setattr(Units, "joining", property(lambda _: 1))


def a_persons_records_are_on_one_rank():
    data = people()
    *_, loader = made(data, steps=1)
    everyone = torch.arange(PEOPLE)
    ranks = [loader.poisson.units(everyone, Drawn(rank)) for rank in range(3)]
    owners = [{int(data[2][row]) for rows in units for row in rows} for units in ranks]
    assert sum(map(len, owners)) == PEOPLE
    assert len(set.union(*owners)) == PEOPLE


class Drawn:
    """A stream of one of three ranks."""

    def __init__(self, rank):
        self.ranks, self.stream = Ranks(rank, 3), Streams(0, torch.device("cpu")).at(1)["batch"]

    def uniform(self, count):
        return self.stream.uniform(count)


def ranks_that_clip_apart(monkeypatch):
    def units(self, drawn, stream):
        rows = [row for rows in self.persons.draw(drawn, stream.uniform) for row in rows]
        return [(row,) for row in rows[stream.ranks.rank :: stream.ranks.size]]

    monkeypatch.setattr(PoissonSampler, "units", units)


MUTANTS = [
    Mutant(a_persons_records_are_on_one_rank, ranks_that_clip_apart),
    Mutant(at_most_k_records_of_a_person_join_one_by_one, joining_records_not_limited),
    Mutant(a_person_moves_the_sum_by_at_most_k_norms, joining_records_not_limited),
    Mutant(as_many_records_are_charged_as_may_join, charged_for_one_record),
    Mutant(a_person_moves_the_sum_by_at_most_the_clip_norm, person_sampled_twice),
    Mutant(a_person_moves_the_sum_by_at_most_the_clip_norm, joins_by_record),
    Mutant(every_person_joins_once_with_at_most_k_records, person_sampled_twice),
    Mutant(every_person_joins_once_with_at_most_k_records, records_not_limited),
    Mutant(a_person_adds_a_row_of_norm_one_to_a_test, bounded_per_record),
    Mutant(a_person_adds_a_row_of_norm_one_to_a_test, summed_over_records),
]
test_law_holds, test_mutant_is_killed = law_tests(MUTANTS)


def test_a_person_adds_the_gradient_of_the_mean_loss_clipped_once():
    data = people(count=9, most=3)
    found, model = sums_of_persons(data)
    total = torch.zeros_like(found)
    for person in data[2].unique():
        own = data[2] == person
        gradients = torch.autograd.grad(
            mean_loss(model, (data[0][own], data[1][own])), list(model.parameters())
        )
        named = dict(zip(dict(model.named_parameters()), gradients, strict=True))
        flat = torch.cat([named[name].flatten() for name in sorted(named)])
        total += flat * min(1.0, CLIP / float(flat.norm()))
    torch.testing.assert_close(found, total, rtol=1e-9, atol=1e-12)


GATES = {
    "plain": ({"updates": 9}, {}),
    "loss gate": (
        {"trials": 9},
        {"gate": dpsur.LossGate(val_noise_multiplier=0.8, loss_clip=0.5, **TESTED)},
    ),
    "coin gate": ({"updates": 9}, {"gate": dpsur.CoinGate(val_batch_size=10, accept_ratio=6.0)}),
    "block gate": ({"updates": 5}, {"gate": dpsur.BlockGate(learning_rate=0.3, **BLOCKS)}),
    "norm measured": ({"updates": 5}, {"gate": dpsur.BlockGate(**BLOCKS)}),
    "metrics": ({"updates": 9}, {"metrics": dpsur.Metrics(noise_multiplier=4.0)}),
}


@pytest.mark.filterwarnings("ignore::dpsur.PrivacyWarning")
@pytest.mark.parametrize("gate", GATES)
def test_one_seed_gives_the_run_of_fit(gate):
    """Nobody has more records than are used, so that both use the same."""
    counts, given = GATES[gate]
    data = people(most=3)
    searched = "block" in gate or "norm" in gate
    clip = {"clip_norm": "given"} if gate == "block gate" else {}
    run = dpsur.fit(
        network(),
        data[:2],
        loss=F.cross_entropy,
        groups=data[2],
        records_per_person=MOST,
        budget=dpsur.Budget(100.0, 1e-3),
        method=dpsur.Dpsgd(
            batch_size=10,
            noise_multiplier=1.0,
            max_grad_norm=CLIP,
            momentum=0.0,
            learning_rate=None if searched else 0.3,
            schedule="linear" if searched else "constant",
            **{**counts, **clip, **given},
        ),
        accounting="proven" if gate == "coin gate" else "every-trial",
        seed=3,
        device="cpu",
        progress=False,
    )
    engine, model = trained(
        data,
        batch_size=10,
        steps=next(iter(counts.values())),
        max_grad_norm=None if gate == "norm measured" else CLIP,
        **given,
    )
    assert [row["value"] for row in engine.metrics] == pytest.approx(
        [row["value"] for row in run.statement.get("metrics") or ()], rel=1e-12
    )
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-12, atol=1e-13)
    assert run.statement["guarantee"]["epsilon"] == pytest.approx(engine.guarantee(1e-3), rel=1e-9)


@pytest.mark.filterwarnings("ignore::dpsur.PrivacyWarning")
@pytest.mark.parametrize("opened", [False, True], ids=["private step", "backward"])
def test_records_are_drawn_as_by_fit(opened, tmp_path, capsys):
    """Nobody has more records than are used, so that both use the same."""
    data = people(most=3)
    run = dpsur.fit(
        network(),
        data[:2],
        loss=F.cross_entropy,
        groups=data[2],
        records_per_person=MOST,
        sampling="record",
        records=100,
        budget=dpsur.Budget(100.0, 1e-3),
        method=dpsur.Dpsgd(
            batch_size=10,
            noise_multiplier=1.0,
            max_grad_norm=CLIP,
            momentum=0.0,
            learning_rate=0.3,
            schedule="constant",
            gate="none",
            updates=9,
        ),
        seed=3,
        device="cpu",
        progress=False,
    )
    engine, model, optimizer, loader = drawn_one_by_one(data, batch_size=10, steps=9)
    step = None if opened else engine.private_step(mean_loss)
    for batch in loader:
        if step is not None:
            step(batch)
            continue
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        optimizer.step()
    for name, value in run.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-12, atol=1e-13)
    stated = engine.statement()
    assert stated["guarantee"]["epsilon"] == pytest.approx(engine.guarantee(), rel=1e-9)
    assert run.statement["guarantee"]["epsilon"] == pytest.approx(engine.guarantee(1e-3), rel=1e-9)
    for key in ("unit", "public", "sampler", "dataset_size", "adjacency"):
        assert stated[key] == run.statement[key]
    engine.save(tmp_path / "run")
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert "confirmed by dp-accounting" in capsys.readouterr().out


def test_the_least_noise_hides_as_many_records_as_may_join():
    data, noise = people(), []
    for more in ({}, {"groups": data[2], "sampling": "record", "records_per_person": MOST}):
        model, engine = network(), dpsur.PrivacyEngine()
        engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.3),
            data_loader=DataLoader(TensorDataset(*data[:2]), batch_size=10),
            target_epsilon=4.0,
            target_delta=1e-3,
            max_grad_norm=CLIP,
            steps=9,
            records=100,
            **more,
        )
        assert engine.guarantee(1e-3) <= 4.0
        noise.append(engine.noise_multiplier)
    assert noise[1] > 1.1 * noise[0]


def test_the_statement_speaks_of_persons(tmp_path, capsys):
    engine, _ = trained(people(), steps=4)
    stated = engine.statement()
    assert stated["unit"] == "one person (all of their records)"
    assert stated["dataset_size"] == PEOPLE
    assert stated["public"] == {"records_per_person": MOST}
    assert stated["independence"]["how"] == "by construction"
    assert statement_faults(stated)[0] == []
    engine.save(tmp_path / "run")
    assert main(["verify", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "release" / "PRIVACY.md").read_text()
    assert "at most 3 at a time, drawn anew" in page
    capsys.readouterr()


def test_a_checkpoint_continues_with_the_same_persons():
    data = people()
    whole = trained(data, steps=6)[1]
    engine, model, _, loader = made(data, steps=6)
    step = engine.private_step(mean_loss)
    for count, batch in enumerate(loader, start=1):
        step(batch)
        if count == 3:
            break
    state = {"engine": engine.state_dict(), "model": model.state_dict()}
    other, resumed, _, loader = made(data, steps=6)
    other.load_state_dict(state["engine"])
    resumed.load_state_dict(state["model"])
    step = other.private_step(mean_loss)
    while not other.finished():
        for batch in loader:
            step(batch)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value)
    with pytest.raises(CheckpointError, match="records_per_person"):
        made(data, steps=6, most=2)[0].load_state_dict(state["engine"])


def test_workers_and_microbatches_change_nothing():
    data = people()
    one, other = trained(data, steps=3)[1], trained(data, steps=3, max_physical_batch_size=7)[1]
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-9, atol=1e-12)


def test_groups_may_be_a_function_of_a_record(monkeypatch):
    without_noise(monkeypatch)
    data = people()
    known = {tuple(x.tolist()): int(name) for x, name in zip(data[0], data[2], strict=True)}
    other = trained((*data[:2], lambda record: known[tuple(record[0].tolist())]), steps=3)[1]
    for name, value in trained(data, steps=3)[1].state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_calls_in_the_opacus_form_are_refused():
    _, _, _, loader = made(people(), steps=3)
    with pytest.raises(StepError, match="cannot tell whose records") as caught:
        next(iter(loader))
    assert caught.value.code == "persons-need-private-step"
    with torch.no_grad(), pytest.raises(StepError, match="cannot tell whose records"):
        next(iter(loader))


def test_models_that_fully_shard_has_sharded_are_refused(monkeypatch):
    monkeypatch.setattr("dpsur.engine.privacy_engine.is_sharded", lambda _: True)
    with pytest.raises(InvalidInputError, match="fully_shard has sharded.*sampling='record'") as e:
        made(people(), steps=3)
    assert e.value.code == "persons-need-private-step"


def test_a_batch_that_the_loop_has_made_is_refused():
    data = people()
    engine, _, _, loader = made(data, steps=3)
    step = engine.private_step(mean_loss)
    next(iter(loader))
    with pytest.raises(StepError, match="as they are"):
        step((data[0][:4], data[1][:4]))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"most": 0}, "records_per_person"),
        ({"sampling": "person!"}, "sampling must be one of"),
        ({"sampling": "record"}, "needs records"),
        ({"sampling": "record", "records": 90, "metrics": dpsur.Metrics()}, "a gate or paid"),
    ],
)
def test_what_is_not_bounded_for_a_person_is_refused(given, words):
    with pytest.raises(InvalidInputError, match=words):
        made(people(), steps=3, **given)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (lambda x, y: 1, "called with a record"),
        ("who", "pass an array with one name"),
        ([0, 1], "persons of 2 records"),
        (torch.zeros(10, 2), "persons of 10 records"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups, words):
    with pytest.raises(InvalidInputError, match=words):
        made((*people()[:2], groups), steps=3)


def test_records_per_person_needs_groups():
    with pytest.raises(InvalidInputError, match="needs groups"):
        made((*people()[:2], None), steps=3)


# --- a number of records that is not public -------------------------------------------------------


def released(data, monkeypatch, **options):
    """What a training does with noisy sums of ones, and how much noise it asks for."""
    seen = []

    def ones(total, multiplier, stream):
        seen.append((float(total.sensitivity), multiplier))
        return {name: torch.ones_like(value) for name, value in total.params.items()}

    monkeypatch.setattr("dpsur.mechanism.gaussian.add_noise", ones)
    options = {"batch_size": 10, "steps": 6, "records": 100, **options}
    engine, model = trained(data, **options)
    scale = engine.expected_batch_size, engine.guarantee(), tuple(seen)
    return scale, engine.statement(), [value.tolist() for value in model.parameters()]


LOOPS = {
    "records": {"most": None},
    "block gate": {
        "most": None,
        "gate": dpsur.BlockGate(learning_rate=0.3, **BLOCKS),
    },
    "metrics": {"metrics": dpsur.Metrics(noise_multiplier=4.0)},
    "persons": {},
    "records of persons": {"sampling": "record"},
}


@pytest.mark.parametrize("loop", LOOPS)
def test_neighbouring_sets_of_other_sizes_have_the_same_noise(loop, monkeypatch):
    """Opacus #819: a normaliser of the private size tells neighbouring data sets apart."""
    data, options = people(), LOOPS[loop]
    fewer = without(data, 4)
    if "most" in options:  # without persons
        data, fewer = (*data[:2], None), (*(value[:-1] for value in data[:2]), None)
    whole = released(data, monkeypatch, **options)
    assert whole == released(fewer, monkeypatch, **options)
    stated = whole[1]
    assert stated["dataset_size"] == 100
    assert "need not be public" in stated["adjacency"]
    assert statement_faults(stated)[0] == []
    private = "dpsur.engine.privacy_engine.units_of"
    monkeypatch.setattr(private, lambda loader, *_, **__: units_of(loader))
    assert released(data, monkeypatch, **options)[0] != whole[0]  # by the size of the data
