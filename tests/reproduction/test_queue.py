"""Lists of rows that several processes make in limited time."""

import pytest

from dpsur.errors import InvalidInputError
from reproduction.command import main
from reproduction.queue import missing_work, read_list
from reproduction.rows import read_rows
from tests.reproduction.test_registered import RESULTS, ROOT

LIST = """
# the most important first
30 accuracy --tasks mnist --arms proven dpsgd --epsilons 1 --seeds 0-1
accuracy --tasks mnist --arms proven --epsilons 1 --seeds 1-2   # one seed is named above
gate-density
"""


def test_a_list_is_read_in_its_order_and_each_cell_once(tmp_path):
    works = list(missing_work(read_list(LIST), (tmp_path,)))
    named = [(work.experiment, work.seconds, len(work.cells)) for work in works]
    assert named[:3] == [("accuracy", 30, 2), ("accuracy", 30, 2), ("accuracy", 0, 1)]
    assert works[2].describe() == "accuracy mnist proven 1 seed 2"
    assert {name for name, *_ in named[3:]} == {"gate-density"}


@pytest.mark.parametrize("line", ["5 accuracy gate-density", "5", "nothing-of-the-kind"])
def test_a_line_that_names_no_experiment_is_refused(line):
    with pytest.raises(InvalidInputError):
        read_list(line)


def test_rows_are_made_in_a_folder_of_their_own_and_once(tmp_path, capsys):
    wanted, out, results = tmp_path / "list", tmp_path / "out", tmp_path / "results"
    wanted.write_text("trajectory --seeds 3,5\ngate-density\n")
    given = ["queue", str(wanted), "--jobs", "2", "--results", str(results), "--out", str(out)]
    assert main([*given, "--limit", "0"]) == 0  # nothing is begun
    assert not list(out.glob("*.jsonl"))
    assert main([*given, "--limit", "300"]) == 0
    assert "9 rows made" in capsys.readouterr().out
    rows = [row for path in out.glob("*.jsonl") for row in read_rows(path)]
    assert {row["experiment"] for row in rows} == {"trajectory", "gate-density"}
    assert all("commit" in row for row in rows)
    results.mkdir()
    (out / "gate-density.jsonl").rename(results / "gate-density.jsonl")
    assert main(given) == 0
    assert "0 rows are missing" in capsys.readouterr().out


def test_what_fails_does_not_stop_the_rest(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DPSUR_DATA", str(tmp_path / "no-data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    wanted, out = tmp_path / "list", tmp_path / "out"
    wanted.write_text(
        "accuracy --tasks cifar10 --arms dpsgd --epsilons 1 --seeds 0\ngate-density\n"
    )
    assert main(["queue", str(wanted), "--results", str(tmp_path), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "3 rows made" in shown
    assert "cifar10 dpsgd 1" in shown


def test_the_lists_of_this_repository_can_be_read():
    lists = sorted((ROOT / "reproduction" / "queues").glob("*.txt"))
    assert lists
    for path in lists:
        list(missing_work(read_list(path.read_text()), (RESULTS,)))
