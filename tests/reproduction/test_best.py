"""The table of best accuracies: what it compares, and that every part of it renders."""

from reproduction.experiments import best
from reproduction.experiments.accuracy import paper_accuracy
from tests.reproduction.made_up import check_every_part_renders, made_up


def test_every_part_renders(tmp_path):
    rows = made_up(best.EXPERIMENT, lambda _, seed: 0.9 + seed / 1000)
    check_every_part_renders(best.EXPERIMENT, rows, tmp_path)


def test_figures_stand_beside_the_papers_dpsur_on_the_same_data():
    rows = made_up(best.EXPERIMENT, lambda config, _: 0.5 + config["epsilon"] / 100)
    records = best.summary(rows)
    assert len(records) == 4 * 4 * 2
    for record in records:
        data = {"imdb-words": "imdb"}.get(record["task"], record["task"])
        assert record["paper"] == paper_accuracy()[data, "dpsur", record["epsilon"]]
        assert abs(record["mean"] - 50 - record["epsilon"]) < 1e-9
        assert record["difference"] == record["mean"] - record["paper"]
        assert record["seeds"] == 5
