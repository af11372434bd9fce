"""The person as the unit: sampled, clipped and tested as one, whatever their records are."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.cli import main
from dpsur.config import RunConfig
from dpsur.errors import InvalidInputError
from dpsur.features.statistics import private_levels
from dpsur.functional import persons
from dpsur.functional.persons import Groups, Persons, PersonTargets, choose_records, number_persons
from dpsur.functional.records import Examples
from dpsur.mechanism import block_tests
from dpsur.mechanism.proposer import Sampler
from dpsur.mechanism.streams import FEATURES, SETUP, Streams
from dpsur.per_example import clipped_sum
from dpsur.privacy.events import Gaussian
from dpsur.privacy.statement import TEXTS, guarantee_rows
from dpsur.runs import session as building
from dpsur.runs.session import build_session
from dpsur.runs.verification import statement_faults
from reproduction import methods
from tests.mutants import Mutant, law_tests

MOST, CLIP = 3, 0.5
UNITS = {unit: TEXTS[1][f"{unit} unit"] for unit in ("record", "person")}


class LastOutput(nn.Module):
    """A recurrent layer of which the last output is used."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, inputs):
        return self.head(self.layer(inputs)[0][:, -1])


MODELS = {
    "linear": (lambda: nn.Linear(6, 3), (6,)),
    "deep": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)),
        (6,),
    ),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)
        ),
        (1, 6, 6),
    ),
    "recurrent": (LastOutput, (5, 4)),
}


def records(shape=(6,), people=9, seed=0):
    """Records of people with one to seven each, in no order, some of them far out."""
    draw = torch.Generator().manual_seed(seed)
    names = torch.cat([torch.full((1 + place % 7,), place) for place in range(people)])
    names = names[torch.randperm(len(names), generator=draw)]
    inputs = 4 * torch.randn(len(names), *shape, generator=draw)
    return inputs, torch.randint(0, 3, (len(names),), generator=draw), names


def session_of(inputs, targets, names, model=None, **options):
    torch.manual_seed(0)
    method = options.pop("method", None) or dpsur.Dpsgd(updates=2, batch_size=4)
    config = RunConfig(
        task=None, method=method, budget=dpsur.Budget(8.0, 1e-3), device="cpu", **options
    )
    groups = Groups(number_persons(names, len(inputs)), MOST)
    model = MODELS["linear"][0]() if model is None else model
    return build_session(config, model, (inputs, targets), loss=F.cross_entropy, groups=groups)


def flat_sum(session):
    problem = session.problem
    total = clipped_sum(problem, problem.initial_params(), problem.train, CLIP)
    return torch.cat([total.params[name].flatten().double() for name in sorted(total.params)])


def moved_by_persons(model="linear"):
    """How far the clipped sum moves when a person is left out, for each of them."""
    make, shape = MODELS[model]
    inputs, targets, names = records(shape)
    torch.manual_seed(1)
    network = make()
    whole = flat_sum(session_of(inputs, targets, names, network))
    found = []
    for person in names.unique():
        left = names != person
        other = flat_sum(session_of(inputs[left], targets[left], names[left], network))
        found.append(float((whole - other).norm()))
    return found


def a_person_moves_the_sum_by_at_most_the_clip_norm():
    moved = moved_by_persons()
    assert max(moved) <= CLIP * (1 + 1e-5)
    assert max(moved) > 0.99 * CLIP  # some are clipped, or this would show nothing


def a_person_is_one_row_with_at_most_k_records():
    inputs, targets, names = records()
    problem = session_of(inputs, targets, names).problem
    assert len(problem.train) == len(names.unique())
    owner = {tuple(row.tolist()): int(name) for row, name in zip(inputs, names, strict=True)}
    seen = []
    for rows, present in zip(problem.train.inputs.rows, problem.train.targets.present, strict=True):
        owners = {owner[tuple(row.tolist())] for row in rows}
        assert len(owners) == 1  # padding is of the same person too
        (person,) = owners
        assert int(present.sum()) == min(MOST, int((names == person).sum()))
        kept = {tuple(row.tolist()) for row in rows[present]}
        assert len(kept) == int(present.sum())
        seen.append(person)
    assert sorted(seen) == names.unique().tolist()


def a_person_adds_a_row_of_norm_one_to_a_test():
    inputs, targets, names = records()
    problem = session_of(inputs, targets, names).problem
    assert block_tests.RecordTests(Sampler(problem), Gaussian(1.0)).classes == 3
    values = block_tests.class_metrics(problem, problem.initial_params(), problem.train)
    assert values.shape == (len(problem.train), 2)
    assert float(values.norm(dim=1).max()) <= 1 + 1e-9


def a_person_adds_one_to_every_histogram():
    inputs, targets, names = records()
    kept, people = choose_records(
        Examples(inputs, targets), Groups(number_persons(names, len(inputs)), MOST)
    )
    owner = {tuple(row.tolist()): int(name) for row, name in zip(inputs, names, strict=True)}
    share: dict[int, float] = {}
    for row, weight in zip(kept.inputs, people.weights.tolist(), strict=True):
        person = owner[tuple(row.tolist())]
        share[person] = share.get(person, 0.0) + weight
    assert max(share.values()) <= 1 + 1e-12
    assert float(people.means(F.normalize(kept.inputs)).norm(dim=1).max()) <= 1 + 1e-5


def person_sampled_twice(monkeypatch):
    real = persons.choose_records

    def split(examples, groups):
        twice = 2 * groups.person + torch.arange(len(groups.person)) % 2
        return real(examples, Groups(persons.numbered(twice), groups.records_each))

    monkeypatch.setattr(building, "choose_records", split)


def clipped_per_record(monkeypatch):
    real = persons.choose_records

    def alone(examples, groups):
        return real(examples, Groups(torch.arange(len(examples)), groups.records_each))

    monkeypatch.setattr(building, "choose_records", alone)


def records_not_limited(monkeypatch):
    real = persons.choose_records
    monkeypatch.setattr(
        building, "choose_records", lambda some, groups: real(some, Groups(groups.person, 10**6))
    )


def padding_of_another_person(monkeypatch):
    real = Persons.gather

    def shifted(self, examples):
        rows = torch.where(self.present, self.rows, self.rows.roll(1, 0)[:, :1])
        return real(Persons(rows, self.present), examples)

    monkeypatch.setattr(Persons, "gather", shifted)


def summed_over_records(monkeypatch):
    def total(self, values):
        shape = (*self.present.shape, *[1] * (values.dim() - 2))
        return values.masked_fill(~self.present.view(shape), 0.0).sum(1)

    monkeypatch.setattr(PersonTargets, "mean", total)


def every_record_counts(monkeypatch):
    monkeypatch.setattr(
        Persons, "weights", property(lambda self: torch.ones(int(self.present.sum())))
    )


def joining_one_by_one(most=MOST):
    """How far the clipped sum moves when a person is left out, whose records are drawn alone."""
    inputs, targets, names = records()
    given = {
        "sampling": "record",
        "records": 40,
        "method": dpsur.Dpsgd(updates=2, batch_size=4, noise_multiplier=20.0),
    }
    session = session_of(inputs, targets, names, **given)
    whole = flat_sum(session)
    assert session.plan.typical.update.records == most
    found = []
    for person in names.unique():
        left = names != person
        part = session_of(inputs[left], targets[left], names[left], **given)
        found.append(float((whole - flat_sum(part)).norm()))
    return found


def records_of_a_person_move_the_sum_by_at_most_k_norms():
    moved = joining_one_by_one()
    assert max(moved) <= MOST * CLIP * (1 + 1e-5)
    assert max(moved) > CLIP


MUTANTS = [
    Mutant(records_of_a_person_move_the_sum_by_at_most_k_norms, records_not_limited),
    Mutant(a_person_moves_the_sum_by_at_most_the_clip_norm, person_sampled_twice),
    Mutant(a_person_moves_the_sum_by_at_most_the_clip_norm, clipped_per_record),
    Mutant(a_person_is_one_row_with_at_most_k_records, person_sampled_twice),
    Mutant(a_person_is_one_row_with_at_most_k_records, records_not_limited),
    Mutant(a_person_is_one_row_with_at_most_k_records, padding_of_another_person),
    Mutant(a_person_adds_a_row_of_norm_one_to_a_test, summed_over_records),
    Mutant(a_person_adds_one_to_every_histogram, every_record_counts),
    Mutant(a_person_adds_one_to_every_histogram, summed_over_records),
]
test_law_holds, test_mutant_is_killed = law_tests(MUTANTS)


@pytest.mark.parametrize("model", MODELS)
def test_neighbouring_sets_of_persons_are_within_the_clip_norm(model):
    assert max(moved_by_persons(model)) <= CLIP * (1 + 1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_of_a_person_is_that_of_the_mean_loss(model):
    make, shape = MODELS[model]
    inputs, targets, names = records(shape)
    session = session_of(inputs, targets, names, make())
    problem, total = session.problem, 0.0
    network = session.original
    train = problem.train
    for place in range(len(train)):
        present = train.targets.present[place]
        loss = F.cross_entropy(
            network(train.inputs.rows[place][present]), train.targets.rows[place][present]
        )
        found = dict(
            zip(
                dict(network.named_parameters()),
                torch.autograd.grad(loss, list(network.parameters())),
                strict=True,
            )
        )
        flat = torch.cat([found[name].flatten().double() for name in sorted(found)])
        total = total + flat * min(1.0, CLIP / float(flat.norm()))
    assert torch.allclose(flat_sum(session), total, atol=1e-5)


def test_the_draw_depends_on_the_person_alone():
    inputs, targets, names = records()
    every = Groups(number_persons(names, len(inputs)), MOST)
    everyone = choose_records(Examples(inputs, targets), every)[0]
    for person in names.unique():
        own = names == person
        turned = Examples(inputs[own].flip(0), targets[own].flip(0))
        alone = choose_records(turned, Groups(torch.zeros(len(turned), dtype=torch.int64), MOST))[0]
        among = {tuple(row.tolist()) for row in everyone.inputs}
        kept = {tuple(row.tolist()) for row in alone.inputs}
        assert kept == among & {tuple(row.tolist()) for row in turned.inputs}


@pytest.mark.parametrize(
    "method",
    [
        dpsur.Dpsgd(updates=4, batch_size=4),
        dpsur.Dpsgd(updates=12, batch_size=4, gate="block"),
        dpsur.Dpsgd(updates=4, batch_size=4, metrics_budget=0.2),
        dpsur.Dpsur(),
    ],
    ids=["plain", "block", "metrics", "selective"],
)
def test_methods_state_the_person_as_their_unit(method, tmp_path, capsys):
    inputs, targets, names = records(people=60)
    run = dpsur.fit(
        nn.Linear(6, 3),
        (inputs, targets),
        budget=dpsur.Budget(4.0, 1e-3),
        method=method,
        groups=[f"person {name}" for name in names.tolist()],
        records_per_person=MOST,
        max_updates=2 if isinstance(method, dpsur.Dpsur) else None,
        out=tmp_path / "run",
        progress=False,
    )
    stated = run.statement
    assert stated["unit"] == UNITS["person"] == "one person (all of their records)"
    assert stated["dataset_size"] == 60
    assert stated["public"] == {"records_per_person": MOST}
    assert stated["independence"]["how"] == "by construction"
    assert statement_faults(stated)[0] == []
    assert main(["verify", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "release" / "PRIVACY.md").read_text()
    assert "one person (all of their records)" in page
    assert "Persons N (public)" in page
    assert "person 1" not in page
    capsys.readouterr()


def test_the_unit_of_a_statement_cannot_be_edited():
    inputs, targets, names = records(people=30)
    given = {"budget": dpsur.Budget(4.0, 1e-3), "method": dpsur.Dpsgd(updates=2, batch_size=4)}
    by_record = dpsur.fit(nn.Linear(6, 3), (inputs, targets), **given, progress=False)
    by_person = dpsur.fit(nn.Linear(6, 3), (inputs, targets), groups=names, **given, progress=False)
    assert by_record.statement["unit"] == UNITS["record"]
    assert statement_faults({**by_record.statement, "unit": UNITS["person"]})[0] != []
    assert statement_faults({**by_person.statement, "unit": UNITS["record"]})[0] != []
    none = {**by_person.statement["public"], "records_per_person": 0}
    assert statement_faults({**by_person.statement, "public": none})[0] != []


def test_a_seeded_run_is_resumed_with_the_same_records(tmp_path):
    inputs, targets, names = records(people=30)

    def run(out, **more):
        return dpsur.fit(
            nn.Linear(6, 3),
            (inputs, targets),
            budget=dpsur.Budget(4.0, 1e-3),
            method=dpsur.Dpsgd(updates=6, batch_size=4),
            groups=names,
            records_per_person=2,
            out=out,
            progress=False,
            **more,
        )

    torch.manual_seed(0)
    run(tmp_path / "one")
    for part in (tmp_path / "one" / "release").iterdir():
        part.unlink()
    (tmp_path / "one" / "release").rmdir()
    torch.manual_seed(0)
    assert run(tmp_path / "one", resume=True).statement["accepted_updates"] == 6


def write_table(path, people=40):
    rng = np.random.default_rng(0)
    lines = ["who,age,income,label"]
    for person in range(people):
        for _ in range(1 + person % 5):
            age, income = rng.uniform(18, 90), rng.uniform(0, 100)
            lines.append(f"p{person},{age:.2f},{income:.2f},{'yes' if age > 50 else 'no'}")
    path.write_text("\n".join(lines) + "\n")
    schema = {
        "columns": {
            "age": {"kind": "number", "low": 18, "high": 90},
            "income": {"kind": "number", "low": 0, "high": 100},
        },
        "target": {"label": {"kind": "category", "values": ["no", "yes"]}},
    }
    path.with_suffix(".json").write_text(json.dumps(schema))


def test_a_column_of_a_table_names_persons(tmp_path, capsys):
    table = tmp_path / "people.csv"
    write_table(table)
    command = ["train", "--task", f"csv:{table}", "--schema", str(table.with_suffix(".json"))]
    command += ["--group-by", "who", "--records-per-person", "3", "--epsilon", "2"]
    command += ["--delta", "1e-3", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main(command) == 0
    stated = json.loads((tmp_path / "run" / "release" / "privacy.json").read_text())
    assert stated["unit"] == UNITS["person"]
    assert stated["dataset_size"] == 40
    assert stated["public"]["records_per_person"] == 3
    assert main(["verify", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert "one person (all of their records)" in (tmp_path / "page.html").read_text()


def test_a_data_frame_has_a_column_of_persons(tmp_path):
    table = tmp_path / "people.csv"
    write_table(table)
    rows = [line.split(",") for line in table.read_text().split()[1:]]
    frame = {
        name: np.array(values, object)
        for name, values in zip(
            ("who", "age", "income", "label"), zip(*rows, strict=True), strict=True
        )
    }
    run = dpsur.fit(
        "auto",
        frame,
        schema=table.with_suffix(".json"),
        groups="who",
        budget=dpsur.Budget(2.0, 1e-3),
        progress=False,
    )
    assert run.statement["dataset_size"] == 40
    assert run.statement["public"]["records_per_person"] == persons.DEFAULT_RECORDS


def frame_of(table):
    rows = [line.split(",") for line in table.read_text().split()]
    columns = zip(*rows[1:], strict=True)
    return {name: np.array(values, object) for name, values in zip(rows[0], columns, strict=True)}


@pytest.mark.parametrize("kind", ["array", "column", "function"])
def test_persons_of_a_table_are_an_array_a_column_or_a_function(kind, tmp_path):
    write_table(tmp_path / "people.csv")
    frame = frame_of(tmp_path / "people.csv")
    groups = {"array": frame["who"], "column": "who", "function": lambda row: row["who"]}[kind]
    given = {"budget": dpsur.Budget(2.0, 1e-3), "groups": groups, "progress": False}
    run = dpsur.fit("auto", frame, schema=tmp_path / "people.json", **given)
    assert run.statement["dataset_size"] == 40


@pytest.mark.parametrize("kind", ["array", "column", "function"])
def test_persons_of_an_estimator_are_an_array_a_column_or_a_function(kind, tmp_path):
    estimators = pytest.importorskip("dpsur.sklearn")
    pandas = pytest.importorskip("pandas")
    write_table(tmp_path / "people.csv")
    frame = pandas.read_csv(tmp_path / "people.csv")
    groups = {"array": frame["who"], "column": "who", "function": lambda row: row["who"]}[kind]
    schema = dpsur.Schema.load(tmp_path / "people.json")
    model = estimators.DPClassifier(epsilon=2.0, delta=1e-3, schema=schema, device="cpu")
    model.fit(frame.drop(columns="label"), frame["label"], groups=groups, records_per_person=3)
    assert model.statement_["dataset_size"] == 40


@pytest.mark.parametrize("kind", ["pair", "data set", "texts"])
def test_a_function_names_persons_by_what_was_given(kind):
    inputs, targets, names = records(people=30)
    inputs[:, 0] = names
    budget, model = dpsur.Budget(4.0, 1e-3), nn.Linear(6, 3)
    data, options = (inputs, targets), {"method": dpsur.Dpsgd(updates=2, batch_size=4)}
    if kind == "data set":
        data = torch.utils.data.TensorDataset(*data)
    if kind == "texts":
        texts = [f"{name} said word{place}" for place, name in enumerate(names.tolist())]
        data, model, options = (texts, targets.tolist()), "auto", {"classes": 3, "max_updates": 1}
    run = dpsur.fit(
        model,
        data,
        budget=budget,
        groups=lambda x, _: x.split()[0] if kind == "texts" else int(x[0]),
        progress=False,
        **options,
    )
    assert run.statement["dataset_size"] == 30


def test_estimators_take_groups():
    estimators = pytest.importorskip("dpsur.sklearn")
    inputs, targets, names = records(people=40)
    model = estimators.DPClassifier(
        epsilon=4.0, delta=1e-3, classes=[0, 1, 2], bounds=(-20.0, 20.0), device="cpu"
    )
    model.fit(inputs.numpy(), targets.numpy(), groups=names.numpy(), records_per_person=2)
    assert model.statement_["unit"] == UNITS["person"]
    assert model.statement_["dataset_size"] == 40
    assert model.statement_["public"]["records_per_person"] == 2
    assert statement_faults(model.statement_)[0] == []


def test_histograms_of_persons_have_their_weights():
    values = torch.tensor([[-0.9], [-0.9], [-0.9], [0.9]]).double()
    streams = Streams(0, torch.device("cpu"))
    even, _ = private_levels(
        values, 1e-9, streams.at(SETUP)[FEATURES], torch.tensor([1 / 3, 1 / 3, 1 / 3, 1.0])
    )
    heavy, _ = private_levels(values, 1e-9, streams.at(SETUP)[FEATURES])
    middle = even.shape[1] // 2
    assert abs(float(even[0, middle])) < 0.05  # one person on either side
    assert float(heavy[0, middle]) > 0.4


def test_records_of_persons_are_drawn_one_by_one(tmp_path, capsys):
    inputs, targets, names = records(people=30)
    run = dpsur.fit(
        nn.Linear(6, 3),
        (inputs, targets),
        budget=dpsur.Budget(4.0, 1e-3),
        method=dpsur.Dpsgd(updates=4, batch_size=8, gate="none"),
        groups=names,
        records_per_person=MOST,
        sampling="record",
        records=70,
        out=tmp_path / "run",
        progress=False,
    )
    stated = run.statement
    assert stated["unit"] == UNITS["person"]
    assert stated["dataset_size"] == 70
    assert ("records", "70") in guarantee_rows(stated)  # of which the persons have so many
    assert stated["public"] == {
        "records_per_person": MOST,
        "sampled_by": "record",
        "declared_size": True,
    }
    update = stated["mechanism"]["trial"]["update"]
    assert update["records"] == MOST
    assert update["sample_rate"] == 8 / 70
    assert stated["guarantee"]["epsilon"] <= 4.0
    assert "a mixture of Gaussians" in stated["sampler"]
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert "confirmed by dp-accounting" in capsys.readouterr().out
    public = stated["public"]
    assert statement_faults({**stated, "public": {**public, "records_per_person": 1}})[0] != []
    assert statement_faults({**stated, "public": {"records_per_person": MOST}})[0] != []


def weights_of_ones(some, monkeypatch, declared=200, **options):
    """A run whose noisy sums are ones, so that its weights depend on their divisors alone."""
    seen = []

    def ones(total, multiplier, stream):
        seen.append((float(total.sensitivity), multiplier))
        return {name: torch.ones_like(value) for name, value in total.params.items()}

    monkeypatch.setattr("dpsur.mechanism.gaussian.add_noise", ones)
    torch.manual_seed(0)
    run = dpsur.fit(
        nn.Linear(6, 3),
        (some[0], some[1]),
        **{
            "budget": dpsur.Budget(4.0, 1e-3),
            "method": dpsur.Dpsgd(updates=4, batch_size=8, gate="none"),
            "records": declared,
            "progress": False,
            **options,
        },
    )
    return run, seen, [value.tolist() for value in run.model.parameters()]


BLOCK = dpsur.Dpsgd(updates=6, batch_size=8, gate="block", blocks=2, block_updates=3)
DECLARED = {
    "records": {},
    "block gate": {"method": BLOCK},
    "persons": {"groups": True},
    "persons, block gate": {"groups": True, "method": BLOCK},
    "records of persons": {"groups": True, "sampling": "record"},
}


@pytest.mark.parametrize("kind", DECLARED)
def test_a_declared_size_decides_everything_that_is_charged(kind, monkeypatch):
    """Opacus #819: neighbouring data sets of other sizes have noise of the same scale."""
    data, found = records(people=30), []
    options = dict(DECLARED[kind])
    left = data[2] != 3 if options.get("groups") else torch.arange(len(data[2])) > 0
    for some in (data, [value[left] for value in data]):
        if "groups" in options:
            options["groups"] = some[2]
        run, *seen = weights_of_ones(some, monkeypatch, **options)
        found.append((run.plan.to_json(), run.statement["dataset_size"], *seen))
        assert statement_faults(run.statement)[0] == []
    assert found[0] == found[1]
    assert run.statement["dataset_size"] == 200
    assert "need not be public" in run.statement["adjacency"]
    if options.get("sampling") != "record":  # what happens with the size of the data
        assert weights_of_ones(some, monkeypatch, None, **options)[1] != found[0][2]


BAD = [
    ({"groups": list(range(12)), "sampling": "record"}, "needs records"),
    (
        {
            "groups": list(range(12)),
            "sampling": "record",
            "records": 12,
            "method": dpsur.Dpsgd(updates=2, batch_size=4, gate="loss"),
        },
        "a gate or paid metrics",
    ),
    ({"sampling": "record"}, "needs groups"),
    ({"records": 20, "holdout": 0.5}, "true number of records"),
    ({"records": 20, "method": methods.Dpis(updates=2, batch_size=4)}, "true number of records"),
    ({"groups": [0, 1]}, "2 records"),
    ({"groups": "who"}, "groups must name"),
    ({"groups": lambda x: 1}, "called with an input and a target"),
    ({"groups": [None] * 12}, "belong to nobody"),
    ({"records_per_person": 3}, "needs groups"),
    ({"groups": [0] * 12, "records_per_person": 0}, "records_per_person"),
    ({"groups": list(range(12)), "augment": lambda x: x}, "augment works on records"),
    ({"groups": list(range(12)), "holdout": 0.5}, "holdout"),
]


@pytest.mark.parametrize(("given", "words"), BAD, ids=[words for _, words in BAD])
def test_what_is_not_bounded_for_a_person_is_refused(given, words):
    with pytest.raises(InvalidInputError, match=words):
        dpsur.fit(
            nn.Linear(6, 3),
            (torch.randn(12, 6), torch.arange(12) % 3),
            budget=dpsur.Budget(4.0, 1e-3),
            progress=False,
            **{"method": dpsur.Dpsgd(updates=2, batch_size=4), **given},
        )


def test_a_column_that_is_not_in_a_file_is_refused_by_name(tmp_path):
    write_table(tmp_path / "people.csv")
    given = {"schema": tmp_path / "people.json", "budget": dpsur.Budget(2.0, 1e-3)}
    with pytest.raises(InvalidInputError, match="no column 'whom' to name persons; it has who"):
        dpsur.fit(f"csv:{tmp_path / 'people.csv'}", groups="whom", **given)
    with pytest.raises(InvalidInputError, match="must be the name of a column"):
        dpsur.fit(f"csv:{tmp_path / 'people.csv'}", groups=lambda row: row["who"], **given)
    with pytest.raises(InvalidInputError, match="for records in memory"):
        dpsur.fit("auto", "images:photos", groups=lambda x, y: 1, budget=given["budget"])
