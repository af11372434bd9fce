"""Reports hold what is public, all of it readable, and nothing else."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from dpsur.cli import main
from dpsur.privacy.statement import plan_from_statement
from dpsur.reports import html
from dpsur.runs.result import Curve, RunCurves, guess_bound, plot_runs, tradeoff

VOID = {"meta", "link", "br", "circle", "line", "path"}


class Checker(HTMLParser):
    """Notes what a page refers to, and whether its tags match."""

    def __init__(self):
        super().__init__()
        self.open, self.references, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [value for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def page_of(folder, *options):
    assert main(["report", str(folder), "--quiet", *options]) == 0
    return folder / ("private" if "--private" in options else ".") / "report.html"


def test_the_page_is_whole_and_needs_no_network(trained):
    text = page_of(trained).read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.references == ["data:,"]
    assert "script" not in checker.tags
    assert not re.search(r"https?://|url\(|@import", text)


def test_it_says_what_the_statement_says(trained):
    text = page_of(trained).read_text()
    statement = json.loads((trained / "release" / "privacy.json").read_text())
    assert f"{statement['guarantee']['epsilon']:.4f}" in text
    assert f"{math.exp(statement['guarantee']['epsilon']):.3g} times as likely" in text
    assert statement["weights"]["sha256"] in text
    for item in (statement["tuning"], *statement["not_covered"]):
        assert item.replace("'", "&#x27;") in text
    for title in ("The guarantee", "Epsilon by update", "Confusion matrix", "Engine", "Settings"):
        assert title in text


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("dpsur", {"gate": "none"}, "dpsgd"),
        ("dpsur", {"gate": "loss"}, "dpsur, gate loss"),
        ("dpis", {"gate": "none"}, "dpis"),
        ("dpagd", {}, "dpagd"),
    ],
)
def test_it_says_whether_updates_are_tested(method, settings, said):
    assert html._method({"method": method, "settings": settings}) == said


def private_values(folder):
    """Everything in the record of a run that epsilon does not cover, as it would be printed."""
    rows = [
        json.loads(line) for line in (folder / "private" / "metrics.jsonl").read_text().splitlines()
    ]
    trials = [row for row in rows if row["kind"] == "trial"]
    found = {
        f"{row[name]:.{digits}g}"
        for row in trials
        for name in row
        for digits in (4, 6, 17)
        if isinstance(row[name], float)
    }
    return {value for value in found if len(value) > 5}


def test_nothing_private_is_in_the_public_page(trained):
    values = private_values(trained)
    assert len(values) > 20
    text = page_of(trained).read_text()
    assert not [value for value in values if value in text]
    assert "accepted updates" not in text
    assert "loss difference" not in text


def test_the_private_page_says_that_it_is_private(trained):
    """The search above would find private values: it finds them here."""
    place = page_of(trained, "--private")
    text = place.read_text()
    assert place.stat().st_mode & 0o077 == 0
    assert text.count("Do not publish or share this page") == 1
    assert "loss difference" in text
    assert "accepted updates" in text


def test_the_private_part_needs_the_run_folder(trained, capsys):
    out = ["--out", str(trained / "report.html")]
    assert main(["report", str(trained / "release"), "--private", *out]) == 2
    assert "holds no private diagnostics" in capsys.readouterr().err


def test_an_edited_statement_gets_no_report(trained, tmp_path, capsys):
    import shutil

    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    path = folder / "release" / "privacy.json"
    path.write_text(path.read_text().replace('"epsilon": 2.9', '"epsilon": 1.9'))
    assert main(["report", str(folder)]) != 0
    assert "no report is written" in capsys.readouterr().err


def test_the_bound_on_attacks_follows_from_the_guarantee(trained):
    """At every false positive rate it is at most what (epsilon, delta) allows, and not below it."""
    statement = json.loads((trained / "release" / "privacy.json").read_text())
    plan = plan_from_statement(statement)
    curve = tradeoff(plan)
    epsilon, delta = plan.epsilon(), plan.budget.delta
    for rate, bound in zip(curve.x, curve.y, strict=True):
        assert rate <= bound <= min(1, math.exp(epsilon) * rate + delta) + 1e-12
    assert list(curve.y) == sorted(curve.y)
    assert 0.5 < guess_bound(curve) < (math.exp(epsilon) + delta) / (1 + math.exp(epsilon))


def test_guessing_is_right_half_of_the_time_where_nothing_is_told():
    assert guess_bound(Curve("", [0.0, 0.5, 1.0], [0.0, 0.5, 1.0])) == 0.5


@pytest.mark.parametrize("kind", ["epsilon", "accuracy", "tradeoff", "acceptance"])
def test_plots_of_every_kind_are_written(kind, trained, tmp_path, capsys):
    out = tmp_path / "plot.svg"
    assert main(["plot", str(trained), "--kind", kind, "--out", str(out)]) == 0
    assert out.read_text().startswith("<?xml")
    assert ("private" in capsys.readouterr().out) == (kind == "acceptance")


def test_several_runs_share_a_plot(trained, tmp_path):
    out = tmp_path / "plot.png"
    assert main(["plot", str(trained), str(trained), "--out", str(out), "--quiet"]) == 0
    assert out.stat().st_size > 5000


def test_a_plot_of_a_run_in_python(fitted):
    figure = fitted.plot()
    (axes,) = figure.axes
    assert axes.get_xlabel() == "updates"
    assert {line.get_label() for line in axes.lines} >= {"proven"}
    assert max(axes.lines[0].get_ydata()) == pytest.approx(fitted.epsilon["proven"])


@pytest.mark.parametrize("score", ["accuracy", "micro_f1", "r2", "loss"])
def test_every_score_on_public_records_is_plotted(fitted, score):
    rows = [{"kind": "evaluation", "epsilon": n / 2, score: 0.5} for n in (1, 2)]
    (axes,) = plot_runs([RunCurves("run", fitted.plan, rows)], "accuracy").axes
    assert axes.get_ylabel() == f"test {score}"


def test_an_unknown_kind_or_format_is_refused(fitted, trained, capsys):
    with pytest.raises(ValueError, match="kind"):
        fitted.plot("loss")
    with pytest.raises(SystemExit, match="2"):
        main(["plot", str(trained), "--out", "plot.txt"])
    assert "must end in .svg" in capsys.readouterr().err


def test_doctor_lists_versions_and_optional_packages(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"]
    assert "cpu" in found["devices"]
    assert "transformers" in found["optional"]
    assert main(["doctor"]) == 0
    assert "problems: none" in capsys.readouterr().out


def test_a_release_has_a_model_card(trained):
    text = (trained / "release" / "README.md").read_text()
    head = text.split("---\n")[1]
    statement = json.loads((trained / "release" / "privacy.json").read_text())
    assert f"epsilon: {statement['guarantee']['epsilon']:.6g}" in head
    assert "library_name: dpsur" in head
    assert "differential-privacy" in head
