"""What every task promises, on the real records where they are there."""

import numpy as np
import pytest
import torch

from dpsur.errors import InvalidInputError
from dpsur.features.table import words
from dpsur.tasks import TASKS, task_named
from reproduction.datasets import DATA_SETS, load_arrays
from reproduction.datasets.store import MISSING, status_of
from reproduction.tasks.imdb import (
    FIRST_RANK,
    LAST_RANK,
    WORD_LIST,
    WORDS,
    spelled,
    token_ids,
    word_list,
    word_vectors,
)

# name -> training and test records, shape of one, classes
PROMISED = {
    "mnist-5k": (4_000, 1_000, (1, 28, 28), 10),
    "mnist": (60_000, 10_000, (1, 28, 28), 10),
    "fmnist": (60_000, 10_000, (1, 28, 28), 10),
    "cifar10": (50_000, 10_000, (3, 32, 32), 10),
    "imdb": (25_000, 25_000, (80,), 2),
    "imdb-words": (25_000, 25_000, (4951,), 2),
    "imdb-hashed": (25_000, 25_000, (8192,), 2),
}
# Tasks that make other records of the data of another.
DATA_OF = {name: name for name in DATA_SETS} | {"imdb-words": "imdb", "imdb-hashed": "imdb"}


def with_its_data(name):
    marks = [pytest.mark.data] if name in DATA_OF else []
    marks += [pytest.mark.slow] if name == "imdb-hashed" else []
    return pytest.param(name, marks=marks, id=name)


def skip_if_absent(name):
    if name in DATA_OF and status_of(DATA_SETS[DATA_OF[name]], None).state == MISSING:
        pytest.skip(f"the data of {name} are not in DPSUR_DATA")
    if name == "imdb-hashed":
        try:
            word_list()
        except InvalidInputError:
            pytest.skip("the list of words is not in DPSUR_DATA")


every_task = pytest.mark.parametrize("name", [with_its_data(name) for name in TASKS])


def test_every_task_is_promised_something():
    assert set(PROMISED) == set(TASKS)
    for name, task in TASKS.items():
        assert task.name == name
        assert task_named(name) is task
        assert task.default_features in task.networks
        assert all("name" in network for network in task.networks.values())
        if name in DATA_SETS:
            assert DATA_SETS[name].records == PROMISED[name][:2]


@every_task
def test_records_are_as_promised(name):
    skip_if_absent(name)
    train_records, test_records, shape, classes = PROMISED[name]
    train, test = TASKS[name].load(None)
    for part, records in ((train, train_records), (test, test_records)):
        assert part.inputs.shape == (records, *shape)
        assert part.targets.shape == (records,)
        assert part.targets.dtype == torch.int64
        assert part.targets.unique().tolist() == list(range(classes))
        assert part.inputs.is_contiguous()
        low, high = part.inputs.min().item(), part.inputs.max().item()
        if name == "imdb":
            assert part.inputs.dtype == torch.int64
            assert low == 0
            assert 19_900 < high < 20_000
            assert (part.inputs[:, 0] == 1).all()
        elif name in ("imdb-words", "imdb-hashed"):
            torch.testing.assert_close(part.inputs.norm(dim=1), torch.ones(records))
            assert low == 0 or name == "imdb-hashed"  # whose words have signs
        else:
            assert part.inputs.dtype == torch.float32
            black, white = (0.0, 1.0) if name != "cifar10" else (-0.485 / 0.229, 0.594 / 0.225)
            assert low == pytest.approx(black)
            assert high == pytest.approx(white)


@every_task
def test_loading_twice_gives_the_same_records(name):
    skip_if_absent(name)
    for first, second in zip(TASKS[name].load(None), TASKS[name].load(None), strict=True):
        assert torch.equal(first.inputs, second.inputs)
        assert torch.equal(first.targets, second.targets)


def pixels(name, *parts):
    arrays = load_arrays(DATA_SETS[name])
    return sum(int(arrays[part].sum(dtype=np.int64)) for part in parts)


@pytest.mark.data
def test_published_sums():
    assert pixels("mnist", "train_images") == 1_567_298_545
    assert pixels("fmnist", "train_images") == 3_431_114_169
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    arrays = load_arrays(DATA_SETS["cifar10"])
    labels = sum(int(arrays[name][:, 0].sum(dtype=np.int64)) for name in batches)
    assert pixels("cifar10", *batches) - labels == 18_540_682_003
    reviews = load_arrays(DATA_SETS["imdb"])
    assert len(reviews["train_tokens"]) == 5_942_841
    assert len(reviews["test_tokens"]) == 5_745_105


@pytest.mark.data
def test_reviews_are_in_the_order_of_keras():
    skip_if_absent("imdb")
    train, test = TASKS["imdb"].load(None)
    known = [1, 14, 22, 16, 43, 530, 973, 1622, 1385, 65]
    assert train.inputs[0, :10].tolist() == known
    assert train.targets[:10].tolist() == [1, 0, 0, 1, 0, 0, 1, 0, 1, 0]
    assert test.targets[:10].tolist() == [0, 1, 1, 0, 1, 1, 1, 0, 0, 1]


def keras_ids(review):
    """What Keras's load_data and a cut and padding at the end make of a review's ranks."""
    marked = [1, *(rank + 3 for rank in review)]
    known = [token if token < 20_000 else 2 for token in marked]
    return (known + [0] * 80)[:80]


def test_token_ids(reviews):
    for part in ("train", "test"):
        ids = token_ids(reviews.arrays[f"{part}_tokens"], reviews.arrays[f"{part}_offsets"])
        assert ids.dtype == np.int64
        assert ids.tolist() == [keras_ids(review) for review in reviews.lists[part]]


def counted(review):
    """The vector of one review, a word at a time."""
    vector = torch.zeros(WORDS)
    for rank in set(review) & set(range(FIRST_RANK, LAST_RANK + 1)):
        vector[rank - FIRST_RANK] = np.log(1 + review.count(rank)) * np.log(rank / 20)
    return vector / max(float(vector.norm()), 1e-12)


def test_reviews_become_counts_of_words():
    edges = [FIRST_RANK - 1, FIRST_RANK, LAST_RANK, LAST_RANK + 1]
    reviews = [[77, 77, 77, 900, 12], edges, [], [1, 2, 3, 88_000], [4000] * 50 + [60]]
    lengths = np.array([len(review) for review in reviews])
    tokens = np.array([rank for review in reviews for rank in review], dtype=np.int32)
    vectors = word_vectors(tokens, np.concatenate(([0], lengths.cumsum())))
    torch.testing.assert_close(vectors, torch.stack([counted(review) for review in reviews]))
    assert [int((vector > 0).sum()) for vector in vectors] == [2, 2, 0, 0, 2]


def test_the_row_of_a_review_depends_on_its_words_and_not_on_their_ranks():
    """Numbering the words in another order gives the same rows, as another count of ranks would."""
    spelling = ["", *(f"word{number}" for number in range(1, 40))]
    generator = np.random.default_rng(0)
    offsets = np.array([0, 30, 30, 100])
    tokens = generator.integers(1, 40, 100).astype(np.int32)
    order = generator.permutation(39) + 1
    renamed = [""] * 40
    for rank, new in enumerate(order, start=1):
        renamed[new] = spelling[rank]
    first, second = (
        words(spelled(some, offsets, names), 256)
        for some, names in ((tokens, spelling), (order[tokens - 1], renamed))
    )
    assert torch.equal(first, second)
    assert (first[1] == 0).all()
    counted_by_rank = [
        word_vectors((some + FIRST_RANK).astype(np.int32), offsets)
        for some in (tokens, order[tokens - 1])
    ]
    assert not torch.equal(*counted_by_rank)


def test_a_list_of_words_is_needed_and_checked(tmp_path):
    (tmp_path / "imdb").mkdir()
    with pytest.raises(InvalidInputError, match=f"needs the list of words: put https.*{WORD_LIST}"):
        word_list(tmp_path)
    (tmp_path / "imdb" / WORD_LIST).write_text('{"the": 1}')
    with pytest.raises(InvalidInputError, match="not the published list of words"):
        word_list(tmp_path)
