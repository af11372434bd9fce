"""The page on tables, from rows, and the models that make them."""

import numpy as np
import pytest

from dpsur.errors import InvalidInputError
from reproduction.base import Options
from reproduction.experiments import tables, tables_rule


def row(table, arm, epsilon, seed, auc, loss):
    figures = {"auc": auc, "loss": loss, "constant": 0.5, "accuracy": 0.8, "seconds": 1.0}
    cell = {"table": table, "arm": arm, "epsilon": epsilon, "seed": seed}
    return {**cell, "records": 1000, "classes": 2, **figures}


ROWS = [
    *(row("kernlab_ticdata", tables.DEFAULT, 1.0, s, 0.7 - s / 100, 0.4) for s in range(3)),
    row("kernlab_ticdata", tables.EBM, 1.0, 0, 0.65, 0.45),
    row("kernlab_ticdata", tables.LINEAR, 1.0, 0, 0.75, 0.45),
    row("kernlab_ticdata", tables.LOGISTIC, None, 0, 0.8, 0.35),
]


def test_medians_and_the_worst_seed():
    (record,) = tables.summary(ROWS)
    assert record["auc_default"] == pytest.approx(0.69)
    assert record["least_auc"] == pytest.approx(0.68)
    assert record["shown_logistic"] == "0.800 / 0.350"
    assert record["shown_opacus-mlp"] is None


def test_the_page_says_what_the_rows_say(tmp_path):
    page, data = tables.EXPERIMENT.render(ROWS)
    assert "| ticdata | 1,000 | 0.500 | 0.690 / 0.400 | 0.750 / 0.450 |" in page.text
    assert "relative to that of a constant, is 0.800 (ticdata, epsilon 1)" in page.text
    assert "is at most 0.010 below" in page.text
    assert "against DP-EBM the median AUC is higher in 1 and the log loss lower in 1 of 1" in (
        page.text
    )
    assert "against the linear model the median AUC is higher in 0" in page.text
    assert data.write(tmp_path)[0].read_text().startswith("table,epsilon,records")


def test_every_class_of_model_learns_the_made_up_table():
    data = tables.read_data(tables.HOSPITAL)
    few = tables.Data(data.train[:1500], data.test[:1000], data.schema)
    constant = None
    for arm in (tables.DEFAULT, tables.LINEAR, tables.LOGISTIC):
        found = tables.measured(few, arm, 3.0, 0)
        constant = found["constant"]
        assert found["auc"] > 0.55, arm
    assert 0.3 < constant < 0.6
    share = np.mean(data.train["back"] == "yes")
    assert 0.14 < share < 0.18


def test_a_missing_folder_is_named(monkeypatch):
    monkeypatch.delenv(tables.FOLDER, raising=False)
    with pytest.raises(InvalidInputError, match="set DPSUR_TABLES"):
        tables.read_data("no_such_table")


def test_leaving_a_table_out_chooses_by_the_others():
    rows = []
    for cell in tables_rule.EXPERIMENT.cells(Options()):
        better = cell["variant"] == "8 bins"
        rows.append({**cell, "auc": 0.8, "loss": 0.3 if better else 0.4, "constant": 0.5})
    found = {record["setting"]: record for record in tables_rule.summary(rows)}
    assert found["8 bins"]["chosen"] == len(tables_rule.CHOSEN_ON)
    assert found["as it is"]["ratio"] == pytest.approx(0.8)
