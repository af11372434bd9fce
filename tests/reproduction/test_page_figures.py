"""Every figure on the pages of the reproduction is written from the rows."""

import re

import pytest

from reproduction.arms import ARMS
from reproduction.base import Options
from reproduction.experiments.accuracy import MAIN_ARMS
from reproduction.experiments.best import summary as best_summary
from reproduction.page_figures import pages as page_figures
from reproduction.page_figures.dpsur_claims import released_at_four
from reproduction.page_figures.pages import unchecked, written
from reproduction.page_figures.records import BUDGETS, FOUND, ROOT, best_of, fmnist, rows_of
from reproduction.registry import EXPERIMENTS, experiment_named


@pytest.fixture(scope="module")
def pages():
    return page_figures.pages()


def test_the_pages_are_those_of_the_rows(pages):
    assert written(pages) == pages, "run: python -m reproduction.page_figures --write"


def test_a_figure_that_differs_from_the_rows_is_written_anew(pages):
    in_prose, in_table = "reaches 86.13, 87.62", "| a coin | restored |"
    assert pages.count(in_prose) == pages.count(in_table) == 1
    wrong = pages.replace(in_prose, "reaches 86.13, 99.99")
    wrong = re.sub(re.escape(in_table) + ".*", f"{in_table} 1 | 2 | 3 | 4 |", wrong)
    assert wrong != pages
    assert written(wrong) == pages


def test_marked_tables_are_those_of_the_rows():
    texts = [page.read_text() for page in page_figures.MARKED]
    for text, line in zip(texts, ("| wrn-16-4, 512 | ", "| DPSGD-HF | "), strict=True):
        assert page_figures.written_tables(text) == text
        wrong = text.replace(line, f"{line}7")
        assert wrong != text
        assert page_figures.written_tables(wrong) == text
    assert all(f"<!-- {comment} -->" in "".join(texts) for comment in page_figures.marked_tables())


def test_a_sentence_that_is_gone_is_named(pages):
    with pytest.raises(AssertionError, match="should be said once, and is 0 times"):
        written(
            pages.replace("The published epsilon is too low", "x").replace("the paper says 3", "x")
        )


def test_no_figure_is_left_to_be_typed(pages):
    assert unchecked(pages) == []
    assert unchecked(pages + " It gains 3.1 points.") == ["3.1"]


def test_every_experiment_has_rows(pages):
    assert "Every experiment has rows;" in " ".join(pages.split())
    # drawings have none; heads is no experiment of the paper
    without = {"schematics", "heads"}
    assert all(rows_of(name) for name in EXPERIMENTS if name not in without)
    features = (ROOT / "docs" / "features.md").read_text()
    assert rows_of("heads") or "they are not made yet" in features
    for complete in ("robustness", "convergence"):
        experiment = experiment_named(complete)
        made = {experiment.key(row) for row in rows_of(complete)}
        assert made >= {experiment.key(cell) for cell in experiment.cells(Options())}


def test_what_is_said_in_words_holds():
    others = released_at_four()[1:]
    assert abs(sum(others) / len(others) - FOUND["fmnist", "released-code", 4]["paper"]) < 0.1
    made = [arm for arm in MAIN_ARMS if arm != "proven-pld"]  # which needs a GPU
    assert {r["seeds"] for arm in made for r in fmnist(arm)} == {5}
    best = best_summary(rows_of("best"))
    assert all(record["proven"] <= record["epsilon"] for record in best)
    above = [best_of("fmnist", "dpsgd", budget)["difference"] for budget in BUDGETS]
    assert [0 < gap < 0.2 for gap in above] == [True, False, True, False]
    assert [-0.3 < gap < 0 for gap in above] == [False, True, False, True]
    for row in rows_of("best"):
        photographs = row["config"]["task"] == "cifar10"
        assert row["device"] == ("NVIDIA H200" if photographs else "cpu")
    assert {row["device"] for row in rows_of("robustness")} == {"cpu", "NVIDIA H200"}


@pytest.mark.parametrize("name", ["accuracy", "ablation", "iterates", "convergence", "superseded"])
def test_what_is_no_method_has_no_proven_figure(name):
    faulty = [row for row in rows_of(name) if not ARMS[row["config"]["arm"]].sound]
    assert faulty
    for row in faulty:
        claimed = {key for key, figure in row["epsilon"].items() if figure is not None}
        assert claimed == {"published"}
