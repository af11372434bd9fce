"""Tables inside the pages are those of the rows, and rows claim no more than is proved."""

import pytest

from reproduction import page_tables
from reproduction.arms import ARMS
from reproduction.base import Options
from reproduction.experiments.best import summary as best_summary
from reproduction.page_tables import rows_of
from reproduction.registry import EXPERIMENTS, experiment_named


@pytest.mark.parametrize("page", page_tables.PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_the_rows(page, tmp_path):
    text = page.read_text()
    assert page_tables.written(page) == text, "run: python -m reproduction.page_tables --write"
    first = (
        "| a coin |",
        "| MNIST | 97",
        "| logistic",
        "| scattering-28",
        "| CIFAR-10 |",
        "| `--seed`",
    )
    line = next(line for line in text.splitlines() if line.startswith(first))
    wrong = tmp_path / page.name
    wrong.write_text(text.replace(line, f"{line}7"))
    assert page_tables.written(wrong) == text


def test_every_experiment_has_rows():
    # drawings have none; heads is no experiment of the paper
    without = {"schematics", "heads"}
    assert all(rows_of(name) for name in EXPERIMENTS if name not in without)
    for complete in ("robustness", "convergence"):
        experiment = experiment_named(complete)
        made = {experiment.key(row) for row in rows_of(complete)}
        assert made >= {experiment.key(cell) for cell in experiment.cells(Options())}


def test_the_best_settings_keep_to_their_budgets():
    assert all(record["proven"] <= record["epsilon"] for record in best_summary(rows_of("best")))


@pytest.mark.parametrize("name", ["accuracy", "ablation", "iterates", "convergence"])
def test_what_is_no_method_has_no_proven_figure(name):
    faulty = [row for row in rows_of(name) if not ARMS[row["config"]["arm"]].sound]
    assert faulty
    for row in faulty:
        claimed = {key for key, figure in row["epsilon"].items() if figure is not None}
        assert claimed == {"published"}
