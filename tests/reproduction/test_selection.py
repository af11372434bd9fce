"""The tables of docs/selection.md are those of its rows."""

from reproduction.selection import PAGE, ROWS, mean, rendered, rows, select


def test_the_page_is_rendered_from_the_rows():
    assert rendered(PAGE.read_text(encoding="utf-8")) == PAGE.read_text(encoding="utf-8")


def test_rows_say_that_a_simulator_made_them():
    assert all(row["simulator"] is True for row in rows())
    assert ROWS.stat().st_size < 400_000


def test_runs_are_selected_by_form_start_and_clip():
    found = [row for row in rows() if (row["task"], row["epsilon"]) == ("mnist-lin", 1)]
    assert len(select(found, "short")) == 8
    assert mean(select(found, "short"), count=True) == "88.2 (8)"
    assert mean(select(found, "linear decay", 6)) == "82.5"
    assert mean([]) == "–"
