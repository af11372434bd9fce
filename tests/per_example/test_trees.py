"""Inputs, outputs and targets that are tuples, dicts and dataclasses of tensors."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpsur
from dpsur.errors import InvalidInputError, UnsupportedModelError
from dpsur.functional.problem import Objective, Problem, call_on
from dpsur.functional.records import Examples, HostExamples, place
from dpsur.functional.tree import map_tensors, split_rows, tensors_of, with_tensors
from dpsur.per_example import check_model, clipped_norms, clipped_sum
from dpsur.per_example.clipping import strategy_for
from dpsur.per_example.record_function import Way

ROWS, WIDTH, WORDS = 6, 5, 11
CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


@dataclass
class Output(OrderedDict):
    """Built like the outputs of Hugging Face models: a mapping and a dataclass at once."""

    logits: Tensor | None = None
    hidden: Tensor | None = None
    cache: object = None


class Texts(nn.Module):
    """Keyword arguments in, an object out, with something in it that is no tensor."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 3)

    def forward(self, *, words, mask, kind=None):
        read = self.table(words) * mask.unsqueeze(-1)
        hidden = torch.tanh(read.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))
        return Output(self.head(hidden), hidden, object() if kind is None else kind)


class Siamese(nn.Module):
    """Positional arguments in, a tuple out."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, left, right):
        return self.left(left), self.right(right)


class OneObject(nn.Module):
    """A named tuple, a list or a dataclass is one argument."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, pair):
        left, right = pair
        return {"sum": self.layer(left + right), "left": [left]}


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def texts():
    words = torch.randint(0, WORDS, (ROWS, 7), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(7) < torch.arange(1, ROWS + 1).unsqueeze(1)).float()
    return {"words": words, "mask": mask}


CLASSES = torch.arange(ROWS) % 3
CASES = {
    "dict": (
        Texts,
        texts(),
        CLASSES,
        lambda out, y: F.cross_entropy(out.logits, y) + out.hidden.square().mean(),
    ),
    "tuple": (
        Siamese,
        (drawn(ROWS, WIDTH), drawn(ROWS, WIDTH) + 1),
        {"class": CLASSES, "size": drawn(ROWS, 3)},
        lambda out, y: F.cross_entropy(out[0], y["class"]) + F.mse_loss(out[1], y["size"]),
    ),
    "named tuple": (
        OneObject,
        Pair(drawn(ROWS, WIDTH), drawn(ROWS, WIDTH)),
        CLASSES,
        lambda out, y: F.cross_entropy(out["sum"], y),
    ),
    "list": (
        OneObject,
        [drawn(ROWS, WIDTH), drawn(ROWS, WIDTH)],
        (CLASSES,),
        lambda out, y: F.cross_entropy(out["sum"], y[0]),
    ),
    "no targets": (
        OneObject,
        [drawn(ROWS, WIDTH), drawn(ROWS, WIDTH)],
        None,
        lambda out, _: out["sum"].square().mean(),
    ),
}


def problem_of(name):
    build, inputs, targets, loss = CASES[name]
    torch.manual_seed(0)
    return Problem(build(), loss, Examples(inputs, targets))


def alone(problem, params):
    """Every record's gradient by plain autograd on a batch of it alone."""
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    rows = []
    for inputs, targets in split_rows((problem.train.inputs, problem.train.targets), 1):
        loss = problem.loss(call_on(problem.model, leaves, inputs), targets)
        rows.append(
            torch.autograd.grad(
                loss, list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        )
    return {n: torch.stack(c) for n, c in zip(leaves, zip(*rows, strict=True), strict=True)}


def norms_of(gradients):
    return torch.cat([value.flatten(1) for value in gradients.values()], 1).norm(dim=1)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_trees_are_those_of_each_record_alone(name):
    problem = problem_of(name)
    params, bound = problem.initial_params(), 0.3
    check_model(problem.model, problem.train)
    plan = strategy_for(problem, params, problem.train.inputs)
    assert plan.reason is None
    expected = alone(problem, params)
    norms = norms_of(expected)
    assert (norms > bound).any()
    torch.testing.assert_close(
        clipped_norms(problem, params, problem.train, bound).float(), norms.clamp(max=bound)
    )
    picked = torch.tensor([4, 1, 1, 0])
    factors = (bound / norms).clamp(max=1)
    mask = torch.tensor([True, True, False, True])
    kept = picked[mask]
    found = clipped_sum(problem, params, problem.train, bound, rows=picked, mask=mask).params
    for key, gradient in expected.items():
        wanted = torch.tensordot(factors[kept], gradient[kept], 1)
        torch.testing.assert_close(found[key], wanted, atol=1e-6, rtol=1e-4)
    plan.records.ways.update(dict.fromkeys(plan.records.ways, Way.ALONE))
    slowly = clipped_sum(problem, params, problem.train, bound, rows=picked, mask=mask).params
    for key, value in found.items():
        torch.testing.assert_close(slowly[key], value, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_outputs_of_trees_come_in_parts(name, monkeypatch):
    problem = problem_of(name)
    params = problem.initial_params()
    whole = problem.losses(params, problem.train)
    outputs = tensors_of(problem.outputs(params, problem.train.inputs))
    monkeypatch.setattr("dpsur.functional.problem.EVALUATION_ROWS", 4)
    torch.testing.assert_close(problem.losses(params, problem.train), whole)
    parts = tensors_of(problem.outputs(params, problem.train.inputs))
    assert all(torch.allclose(one, other) for one, other in zip(outputs, parts, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_records_of_trees_are_selected_sliced_and_kept_on_the_host(name):
    examples = problem_of(name).train
    rows = torch.tensor([5, 0, 3])
    host = place(examples, CPU, limit=1)
    assert isinstance(host, HostExamples)
    chosen = (examples.select(rows), host.select(rows), host.fetch(rows, rows, "x").part(slice(3)))
    for some in chosen:
        assert len(some) == 3
        assert type(some.inputs) is type(examples.inputs)
        pairs = zip(tensors_of(some.inputs), tensors_of(examples.inputs), strict=True)
        assert all(torch.equal(one, other[rows]) for one, other in pairs)
    assert len(examples.part(slice(2, 4))) == 2
    assert examples.nbytes == sum(v.nbytes for v in tensors_of((examples.inputs, examples.targets)))
    assert str(len(examples)) in repr(examples)


class Coupled(nn.Module):
    """One of two outputs is normalised over the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x, other):
        return {"own": self.layer(x), "mixed": other - other.mean(0)}


class MeanLoss(Siamese):
    def forward(self, left, right):
        one, other = super().forward(left, right)
        return {"logits": one, "loss": other.mean()}


def test_what_couples_records_in_one_output_of_several_is_harmless():
    inputs = (drawn(ROWS, WIDTH), drawn(ROWS, WIDTH))

    def loss(outputs, targets):
        return F.cross_entropy(outputs["own"] * (2 + outputs["mixed"].sum()), targets)

    problem = Problem(Coupled(), loss, Examples(inputs, CLASSES))
    check_model(problem.model, problem.train)
    params = problem.initial_params()
    found = clipped_norms(problem, params, problem.train, 100.0).float()
    torch.testing.assert_close(found, norms_of(alone(problem, params)))


def test_an_output_without_a_row_per_record_is_refused():
    examples = Examples((drawn(ROWS, WIDTH), drawn(ROWS, WIDTH)), CLASSES)
    with pytest.raises(UnsupportedModelError, match=r"every output must have a row per record"):
        check_model(MeanLoss(), examples)


class CutToLongest(Texts):
    """Cuts a batch to its longest text, and reads on through the padding of the others."""

    def forward(self, *, words, mask):
        longest = int((mask > 0).sum(1).max())
        return self.head(self.table(words)[:, :longest].mean(1))


def test_a_batch_that_is_cut_to_its_longest_text_is_each_text_cut_to_its_own_end():
    problem = Problem(CutToLongest(), F.cross_entropy, Examples(texts(), CLASSES))
    params = problem.initial_params()
    expected = alone(problem, params)
    found = clipped_norms(problem, params, problem.train, 100.0).float()
    torch.testing.assert_close(found, norms_of(expected))
    together = F.cross_entropy(problem.model(**texts()), CLASSES, reduction="sum")
    (whole,) = torch.autograd.grad(together, problem.model.head.weight)
    assert not torch.allclose(whole, expected["head.weight"].sum(0), atol=1e-3)  # it does mix


class NoRule(nn.Module):
    """Takes a tensor by name, returns two."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, *, shift):
        return {"a": x * self.scale, "b": torch.tanh(shift * self.scale)}


class UsesNoRule(nn.Module):
    def __init__(self):
        super().__init__()
        self.odd, self.head = NoRule(), nn.Linear(WIDTH, 3)

    def forward(self, x, y):
        found = self.odd(x, shift=y)
        return self.head(found["a"] + found["b"])


def test_a_module_without_a_rule_takes_and_returns_trees():
    torch.manual_seed(0)
    inputs = (drawn(ROWS, WIDTH), drawn(ROWS, WIDTH) + 1)
    problem = Problem(UsesNoRule(), F.cross_entropy, Examples(inputs, CLASSES))
    params = problem.initial_params()
    plan = strategy_for(problem, params, inputs)
    assert plan.reason is None, plan.reason
    found = clipped_norms(problem, params, problem.train, 100.0).float()
    torch.testing.assert_close(found, norms_of(alone(problem, params)))


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        ({"a": drawn(3, 2), "b": drawn(4, 2)}, drawn(3), r"inputs\[b\] has 4 rows"),
        ({"a": drawn(3, 2)}, {"y": drawn(2)}, "3 inputs but 2 targets"),
        ({"a": torch.tensor(1.0)}, drawn(1), "row per record"),
        ({"a": "text"}, drawn(1), "must consist of tensors"),
        ({}, drawn(1), "no tensor"),
    ],
)
def test_trees_that_are_no_records_are_refused(inputs, targets, words):
    with pytest.raises(InvalidInputError, match=words):
        Examples(inputs, targets)


def test_objects_among_outputs_do_not_reach_the_loss():
    problem = problem_of("dict")
    outputs = Objective(problem.model, problem.loss).outputs(
        problem.initial_params(), problem.train.inputs
    )
    assert type(outputs) is Output
    assert outputs.cache is None
    doubled = map_tensors(lambda value: value * 2, outputs)
    assert torch.equal(doubled.logits, outputs.logits * 2)


@pytest.mark.parametrize("column", ["words", "mask"])
def test_what_a_masked_row_holds_in_any_input_does_not_matter(column):
    """Columns that are not blanked would reach a table or carry NaN into the sum."""
    problem = problem_of("dict")
    params = problem.initial_params()
    mask = torch.tensor([True] * (ROWS - 1) + [False])
    expected = clipped_sum(problem, params, problem.train.part(slice(ROWS - 1)), 0.3).params
    inputs = texts()
    inputs[column][-1] = WORDS + 5 if column == "words" else float("nan")
    targets = torch.cat([CLASSES[:-1], torch.tensor([99])])
    found = clipped_sum(problem, params, Examples(inputs, targets), 0.3, mask=mask).params
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_a_blank_that_forgets_a_column_is_seen(monkeypatch):
    def first_only(values, mask):
        tensors = tensors_of(values)
        keep = mask.view(-1, *[1] * (tensors[0].dim() - 1))
        return with_tensors(values, [torch.where(keep, tensors[0], 0), *tensors[1:]])

    monkeypatch.setattr("dpsur.per_example.clipping._blank", first_only)
    test_what_a_masked_row_holds_in_any_input_does_not_matter("words")
    problem = problem_of("tuple")
    params = problem.initial_params()
    targets = {"size": torch.ones(1, 3), "class": torch.tensor([99])}
    wrong = Examples(problem.train.part(slice(1)).inputs, targets)
    with pytest.raises(IndexError):  # on a GPU this would end the process
        clipped_sum(problem, params, wrong, 0.3, mask=torch.tensor([False]))


class CutToLengths(nn.Module):
    """Takes lengths beside the series, and cuts the batch to the longest."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x, lengths):
        longest = int(lengths.max().clamp(min=1))
        return self.head(x[:, :longest].mean(1))


class MaskedByLengths(CutToLengths):
    """Each record's own length decides about its own mean: other examples do not matter."""

    def forward(self, x, lengths):
        places = torch.arange(x.shape[1], device=x.device)
        inside = (places < lengths.clamp(min=1).unsqueeze(1)).unsqueeze(2)
        return self.head((x * inside).sum(1) / lengths.clamp(min=1).unsqueeze(1))


def series(size=6):
    x = torch.randn(size, 20, 3)
    return (x, torch.randint(1, 20, (size,))), torch.arange(size) % 2


@pytest.mark.parametrize("kind", [CutToLengths, MaskedByLengths])
def test_lengths_beside_a_series_are_those_of_each_record(kind):
    inputs, targets = series()
    problem = Problem(kind(), F.cross_entropy, Examples(inputs, targets))
    found = dpsur.per_example_gradients(problem.model, F.cross_entropy, inputs, targets)
    for name, rows in alone(problem, problem.initial_params()).items():
        torch.testing.assert_close(found[name], rows)
