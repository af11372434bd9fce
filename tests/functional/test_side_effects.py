"""A forward pass that changes weights or buffers carries private records into the release."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpsur
from dpsur.errors import UnsupportedModelError
from dpsur.functional.problem import Problem, without_side_effects
from dpsur.functional.records import Examples
from dpsur.per_example import check_model, clipped_norms, clipped_sum
from tests.conftest import blobs, small_model

SIZE, WORDS = 12, 20


class Sentences(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.head = table, nn.Linear(8, 2)

    def forward(self, words):
        read = self.table(words)
        return self.head(read.mean(1) if read.dim() == 3 else read)


class Shortening(nn.Module):
    """The same by hand, so that no name gives it away."""

    def __init__(self, *, large=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, 8))
        self.large = large

    def forward(self, words):
        if not self.large or words.unique().numel() > 3:
            return F.embedding(words, self.weight, max_norm=0.5)
        return F.embedding(words, self.weight)


def sentences():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(2, WORDS, (SIZE, 6), generator=generator)
    return Examples(words, torch.randint(0, 2, (SIZE,), generator=generator))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_that_shortens_its_rows_is_refused_by_name(kind):
    model = Sentences(kind(WORDS, 8, max_norm=0.5))
    with pytest.raises(UnsupportedModelError, match=rf"table \({kind.__name__}\).*max_norm=None"):
        check_model(model, sentences())
    check_model(Sentences(kind(WORDS, 8)), sentences())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(kind):
    with pytest.raises(UnsupportedModelError, match=rf"{kind.__name__}.*sparse=False"):
        check_model(Sentences(kind(WORDS, 8, sparse=True)), sentences())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("use", ["sum", "norms", "losses"])
def test_weights_that_change_while_training_are_noticed(kind, use):
    problem = Problem(Sentences(kind(WORDS, 8, max_norm=0.5)), F.cross_entropy, sentences())
    params = problem.initial_params()
    uses = {
        "sum": lambda: clipped_sum(problem, params, problem.train, 0.1),
        "norms": lambda: clipped_norms(problem, params, problem.train, 0.1),
        "losses": lambda: problem.losses(params, problem.train),
    }
    said = {"losses": r"parameter table\.weight changes"}
    before = {name: value.clone() for name, value in params.items()}
    own = {name: value.clone() for name, value in problem.model.state_dict().items()}
    with pytest.raises(UnsupportedModelError, match=said.get(use, r"table .*max_norm=None")):
        uses[use]()
    if use != "losses":  # it is refused before it has shortened anything
        assert all(torch.equal(value, before[name]) for name, value in params.items())
        state = problem.model.state_dict()
        assert all(torch.equal(value, own[name]) for name, value in state.items())


def test_a_change_that_only_some_records_make_is_noticed_when_they_come():
    records = sentences()
    records.inputs[:2] = 1
    problem = Problem(Sentences(Shortening(large=True)), F.cross_entropy, records)
    params = problem.initial_params()
    check_model(problem.model, problem.train)
    harmless = Examples(torch.ones_like(problem.train.inputs), problem.train.targets)
    problem.losses(params, harmless)
    with pytest.raises(UnsupportedModelError, match="changes|max_norm"):
        clipped_sum(problem, params, problem.train, 0.1)


class Counting(nn.Module):
    def __init__(self, *, frozen):
        super().__init__()
        self.head = nn.Linear(2, 3)
        if frozen:
            self.seen = nn.Parameter(torch.zeros(2), requires_grad=False)
        else:
            self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().sum(0)
        return self.head(x)


@pytest.mark.parametrize(
    ("frozen", "name"),
    [
        (True, "parameter seen"),
        (False, "buffer seen"),
    ],
)
def test_what_is_not_trained_is_watched_too(frozen, name):
    problem = Problem(Counting(frozen=frozen), F.cross_entropy, blobs())
    with pytest.raises(UnsupportedModelError, match=name):
        clipped_sum(problem, problem.initial_params(), problem.train, 0.1)
    problem.losses(problem.initial_params(), problem.train)  # it counts in training mode alone


class WritesData(nn.Module):
    """Through `.data`."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 3)
        self.seen = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, x):
        self.seen.data.add_(1e-9 * x.detach().sum(0))
        return self.head(x + 0 * self.seen)


def test_what_was_written_through_data_is_not_released(tmp_path):
    records = blobs()
    with pytest.raises(UnsupportedModelError, match="parameter seen changes"):
        dpsur.fit(
            WritesData(),
            (records.inputs, records.targets),
            budget=dpsur.Budget(epsilon=3.0, delta=1e-4),
            method=dpsur.Dpsgd(updates=2),
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run" / "release").exists()


def test_a_model_without_side_effects_is_left_in_peace():
    problem = Problem(small_model(), F.cross_entropy, blobs())
    params = problem.initial_params()
    with without_side_effects((problem.model,), params):
        problem.outputs(params, problem.train.inputs)
    params["0.weight"].mul_(2.0)  # between passes weights may change: this is how they are trained
    clipped_sum(problem, params, problem.train, 0.1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_part_in_torchscript_is_watched_too():
    scripted = torch.jit.script(Counting(frozen=False))
    model = nn.Sequential(scripted.eval())
    with without_side_effects((model,)) as changed:
        model(blobs().inputs)
    assert not changed
    model.train()
    with pytest.raises(UnsupportedModelError, match="seen changes"), without_side_effects((model,)):
        model(blobs().inputs)
