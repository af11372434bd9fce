"""The report of a table: names of the classes, figures beside a constant, settings in use."""

import numpy as np

import dpsur
from dpsur.reports.html import read_report, render_report


def test_a_report_of_a_table_names_its_classes_and_test_figures(tmp_path):
    x = np.arange(400) % 40
    data = {"x": x, "ill": np.where(x < 30, "never", "often")}
    schema = dpsur.Schema({"x": dpsur.Number(0, 40)}, {"ill": dpsur.Category(["never", "often"])})
    budget = dpsur.Budget(3.0, 1e-5)
    run = dpsur.fit(
        "auto", data, schema=schema, budget=budget, test_set=data, out=tmp_path / "run", seed=0
    )
    page = render_report(read_report(tmp_path / "run"))
    assert "400 public records" in page
    assert "most frequent class 75.00%" in page
    assert "log loss of a constant" in page
    assert "adam beta1" not in page
    file = tmp_path / "t.csv"
    rows = zip(data["x"], data["ill"], strict=True)
    file.write_text("\n".join(["x,ill", *(f"{value},{name}" for value, name in rows)]))
    page = render_report(read_report(tmp_path / "run", task=f"csv:{file}"))
    assert "<th>never</th><th>often</th>" in page
    assert run.statement["test"]["records"] == 400
