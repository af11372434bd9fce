"""The short table, the agreement with the paper and the figure, of all rows and of some."""

import pytest

from reproduction.experiments import accuracy
from reproduction.experiments.accuracy_pages import NOT_RUN, TOLERANCE, agreement, short_table
from tests.reproduction.made_up import check_every_part_renders, made_up

EXPERIMENT = accuracy.EXPERIMENT
PAPER = accuracy.paper_accuracy()


def off_by(points):
    """Accuracies that miss the paper's by so many points, on average over seeds."""

    def accuracy_of(config, seed):
        figure = accuracy._paper_figure(config["task"], config["arm"], int(config["epsilon"]))
        return (
            figure + points + 0.1 * (seed - (2 if config["arm"] == "released-code" else 1))
        ) / 100

    return accuracy_of


def test_agreement_has_sixteen_cells_and_counts_those_that_are_near(tmp_path):
    for points, verdict in ((0.6, "yes"), (-0.6, "yes"), (0.8, "no"), (-0.8, "no")):
        rows = made_up(EXPERIMENT, off_by(points))
        cells = agreement(accuracy.summary(rows), PAPER)
        assert len(cells) == 16
        assert {cell["within"] for cell in cells} == {verdict}
        assert all(cell["difference"] == pytest.approx(points) for cell in cells)
    assert TOLERANCE == 0.7


def test_cells_without_rows_are_neither_near_nor_far(tmp_path):
    rows = [r for r in made_up(EXPERIMENT, off_by(0.1)) if r["config"]["task"] == "mnist"]
    written = [artifact.write(tmp_path)[0] for artifact in EXPERIMENT.render(rows)]
    page = next(path for path in written if path.name == "accuracy_agreement.md").read_text()
    assert "4 of 16 cells are within 0.7 points; 4 have rows." in " ".join(page.split())
    cells = agreement(accuracy.summary(rows), PAPER)
    assert [cell["task"] for cell in cells if cell["within"] == "yes"] == ["mnist"] * 4
    assert all(cell["within"] is None for cell in cells if cell["task"] != "mnist")


def test_the_short_table_shows_ours_and_the_papers():
    rows = made_up(EXPERIMENT, off_by(0.25))
    some = [row for row in rows if row["config"]["task"] != "cifar10"]
    lines = {line["line"]: line for line in short_table(accuracy.summary(some), PAPER).records}
    released = lines["DPSUR as its released code runs, claimed epsilon"]
    assert released["fmnist"] == "89.96 (89.71)"
    assert released["cifar10"] == f"{NOT_RUN} (70.83)"
    assert lines["DPSGD-HF"]["imdb"] == ""
    assert lines["without privacy"]["imdb"].endswith("(79.97)")


def test_a_part_of_the_rows_is_rendered(tmp_path):
    rows = [r for r in made_up(EXPERIMENT, off_by(0.0)) if r["config"]["epsilon"] in (1, 3)]
    check_every_part_renders(EXPERIMENT, rows, tmp_path)
