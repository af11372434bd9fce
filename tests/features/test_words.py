"""Texts as rows of words: each by itself, the same everywhere, and enough to train on."""

import numpy as np
import pytest
import torch

import dpsur
from dpsur.config import RunConfig
from dpsur.errors import InvalidInputError
from dpsur.features import words
from dpsur.features.hashing import _place
from dpsur.features.table import WORDS_DIMENSION
from dpsur.networks import linear_head
from dpsur.runs.fit import execute
from dpsur.runs.tasks import build_task_session

TEXTS = ["A quiet harbour, a QUIET sea.", "storms storms storms", "the and of", ""]


def test_a_row_depends_on_its_text_alone():
    rows = words(TEXTS)
    assert rows.shape == (4, WORDS_DIMENSION)
    torch.testing.assert_close(rows.norm(dim=1), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    for text, row in zip(TEXTS, rows, strict=True):
        assert torch.equal(words([text])[0], row)
    assert words([]).shape == (0, WORDS_DIMENSION)


def test_counts_are_dampened_and_case_is_ignored():
    row = words([TEXTS[0]])[0]
    values = {
        word: float(row[_place(word, WORDS_DIMENSION)[0]]) * _place(word, WORDS_DIMENSION)[1]
        for word in ("quiet", "harbour", "sea")
    }
    assert values["harbour"] == pytest.approx(values["sea"])
    assert values["quiet"] / values["sea"] == pytest.approx(np.log(3) / np.log(2), rel=1e-5)
    assert int((row != 0).sum()) == 3


def test_places_never_change():
    """A released model is used with the places that it was trained with."""
    assert _place("harbour", 8192) == (3661, -1.0)


@pytest.mark.parametrize(
    ("texts", "message"), [("one text", r"write \[text\]"), ([b"x"], "item 0 is of type bytes")]
)
def test_what_is_no_list_of_texts_is_refused(texts, message):
    with pytest.raises(InvalidInputError, match=message):
        words(texts)


def reviews(count):
    generator = np.random.default_rng(0)
    labels = np.arange(count) % 2
    kinds = (["dull", "flat", "weak"], ["bright", "warm", "clever"])
    every = ["film", "scene", "music", "plot", "the", "a"]
    return [
        " ".join([*generator.choice(every, 6), *generator.choice(kinds[label], 2)])
        for label in labels
    ], labels


def test_a_file_of_texts_trains_by_itself(tmp_path):
    texts, labels = reviews(500)
    path = tmp_path / "reviews.npz"
    np.savez(
        path,
        x=np.array(texts),
        y=labels,
        x_test=np.array(texts[:60]),
        y_test=labels[:60],
        classes=2,
    )
    values = {"task": f"npz:{path}", "epsilon": 3.0, "seed": 0, "device": "cpu"}
    config = RunConfig.from_names(values, auto=True, updates=60)
    session = build_task_session(config)
    with pytest.warns(dpsur.PrivacyWarning):
        run = execute(session)
    assert run.scores["accuracy"] > 0.9


def test_fit_by_itself_is_plain_for_rows_of_words_and_tests_blocks_otherwise(capsys):
    texts, labels = reviews(300)
    rows = words(texts)
    budget = dpsur.Budget(3.0, 1e-3)
    common = {"budget": budget, "max_updates": 3, "device": "cpu"}
    run = dpsur.fit(
        linear_head(WORDS_DIMENSION, 2),
        (rows, torch.from_numpy(labels)),
        features="words",
        **common,
    )
    assert (run.method.gate, run.method.batch_size, run.method.updates) == ("none", 32, 600)
    err = capsys.readouterr().err.splitlines()
    assert [line for line in err if line.startswith("dpsur: ")][:1] == [
        "dpsur: auto: settings chosen from public facts only: 300 records, no GPU, epsilon 3, "
        "delta 0.001"
    ]
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    own = (rows[:, :5], torch.from_numpy(labels))
    run = dpsur.fit(model, own, budget=budget, device="cpu")
    assert run.method.gate == "block"
    assert "your model: a good learning rate is not known" in capsys.readouterr().err
    run = dpsur.fit(model, own, **common)  # a short try, without room for a search
    assert (run.method.name, run.method.gate) == ("dpsgd", "none")
    assert "without a search" in capsys.readouterr().err
