"""What auto reaches: pages from rows, and what they say."""

import pytest

from reproduction.experiments import heads, unseen
from reproduction.experiments.accuracy import paper_accuracy
from reproduction.rows import read_rows
from tests.reproduction.made_up import check_every_part_renders, made_up

PAPER_NAMES = {"imdb-words": "imdb", "imdb-hashed": "imdb"}


def test_every_part_renders(tmp_path):
    rows = made_up(heads.EXPERIMENT, lambda _, seed: 0.9 + seed / 1000)
    assert len(rows) == 5 * 5 * 5
    check_every_part_renders(heads.EXPERIMENT, rows, tmp_path)


def test_auto_is_above_the_papers_dpsur_in_all_sixteen_cells():
    rows = read_rows(heads.RESULTS / "heads.jsonl")
    found = heads.of_auto(rows)
    made = {(row["config"]["task"], row["config"]["epsilon"]) for row in rows}
    cells = 0
    for task in heads.TASKS:
        for point in found[heads.DATA_SETS[task], heads.AUTO_ON.get(task, "auto")]:
            assert point.seeds == 5
            if point.value <= 4:
                stated = paper_accuracy()[PAPER_NAMES.get(task, task), "dpsur", point.value]
                assert point.mean > stated
                cells += 1
    assert cells == len([epsilon for _, epsilon in made if epsilon <= 4])
    assert {(task, 1) for task in heads.TASKS} < made


def test_the_rows_spent_their_epsilon_and_were_made_by_the_preset():
    for row in read_rows(heads.RESULTS / "heads.jsonl"):
        asked = row["config"]["epsilon"]
        assert asked - 0.01 < row["epsilon"]["proven"] <= asked
        assert row["config"]["tried"] == {}


def test_what_the_page_on_unseen_data_says_is_what_the_rows_say():
    records = {r["data"]: r for r in unseen.summary(read_rows(heads.RESULTS / "unseen.jsonl"))}
    assert list(records) == list(unseen.DATA)
    assert records["digits"]["difference"] > 0
    for data in ("table", "passages"):
        auto, median = (float(records[data][name].split()[0]) for name in ("auto", "median"))
        assert records[data]["difference"] < 0
        assert auto > median


@pytest.mark.parametrize("data", unseen.DATA)
def test_unseen_data_are_the_same_every_time(data):
    arrays = unseen.DATA[data]()
    assert len(arrays["x"]) == {"digits": 1437, "table": 8000, "passages": 4000}[data]
    assert set(arrays["y"]) == set(range(arrays["classes"]))


def test_what_rests_on_word_ranks_says_so():
    """Every line of the results on IMDb that is said to be proved names the assumption or none."""
    found = heads.of_auto(read_rows(heads.RESULTS / "heads.jsonl"))
    names = {name for data, name in found if data == "IMDb"}
    assert names == {"auto, word ranks taken as public", "auto, words hashed, no ranks"}


def test_algorithm_1_has_its_best_accountant_where_that_was_run():
    rows = read_rows(heads.RESULTS / "accuracy.jsonl")
    by_pld = [
        100 * row["accuracy"]
        for row in rows
        if (row["config"]["task"], row["config"]["arm"]) == ("mnist", "proven-pld")
        and row["config"]["epsilon"] == 1
    ]
    shown = {point.value: point.mean for point in heads.of_others()["MNIST", "Algorithm 1"]}
    assert shown[1] == pytest.approx(sum(by_pld) / len(by_pld))
    assert sorted(shown) == [1, 2, 3, 4]
