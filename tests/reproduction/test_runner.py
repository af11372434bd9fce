"""Grids that are filled cell by cell, kept, resumed and rendered."""

import json

import pytest

from dpsur.errors import InvalidInputError
from reproduction.artifacts import Column, Page, Table
from reproduction.base import OneByOne, Options
from reproduction.runner import fill, look_up, render, rows_file

EVERYTHING = Options()


class Squares(OneByOne):
    """Squares of numbers: the cell is the number and the seed."""

    name = "squares"
    identity = ("config", "seed")
    offset = 0

    def __init__(self, numbers=(1, 2, 3), fail_at=None):
        self.numbers, self.fail_at, self.measured = numbers, fail_at, []

    def cells(self, options):
        for number in self.numbers:
            for seed in options.seeds or (0,):
                yield {"config": {"number": number, "offset": self.offset}, "seed": seed}

    def measure(self, cell, options):
        number = cell["config"]["number"]
        if number == self.fail_at:
            raise KeyboardInterrupt
        self.measured.append(number)
        return {"square": number**2}

    def render(self, rows):
        return [Page("page.md", " ".join(str(row["square"]) for row in rows))]


class PartlyRendered(Squares):
    partial = True


def test_rows_are_appended_with_their_origin(tmp_path):
    assert fill(Squares(), tmp_path, EVERYTHING) == 3
    rows = [json.loads(line) for line in (tmp_path / "squares.jsonl").read_text().splitlines()]
    assert [row["square"] for row in rows] == [1, 4, 9]
    for row in rows:
        assert row["experiment"] == "squares"
        assert row["seed"] == 0
        assert {"commit", "versions", "made_at"} <= row.keys()


def test_an_interrupted_experiment_goes_on_where_it_stopped(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fill(Squares(fail_at=3), tmp_path, EVERYTHING)
    second = Squares()
    assert fill(second, tmp_path, EVERYTHING) == 1
    assert second.measured == [3]
    third = Squares()
    assert fill(third, tmp_path, EVERYTHING) == 0
    assert third.measured == []


def test_a_torn_line_is_dropped_and_made_again(tmp_path):
    fill(Squares(), tmp_path, EVERYTHING)
    path = rows_file(Squares(), tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    again = Squares()
    assert fill(again, tmp_path, EVERYTHING) == 1
    assert again.measured == [3]
    assert len(path.read_text().splitlines()) == 3


def test_a_changed_setting_is_measured_anew_and_old_rows_play_no_part(tmp_path):
    fill(Squares(), tmp_path, EVERYTHING)
    changed = Squares(numbers=(2,))
    changed.offset = 1
    assert fill(changed, tmp_path, EVERYTHING) == 1
    filled = look_up(changed, rows_file(changed, tmp_path), EVERYTHING)
    assert [row["config"] for row in filled.rows] == [{"number": 2, "offset": 1}]


def test_seeds_are_part_of_the_key(tmp_path):
    fill(Squares(), tmp_path, EVERYTHING)
    assert fill(Squares(), tmp_path, Options(seeds=(0, 1))) == 3


def test_rows_are_rendered_in_the_order_of_the_grid(tmp_path):
    fill(Squares(numbers=(3, 1)), tmp_path, EVERYTHING)
    fill(Squares(numbers=(1, 2, 3)), tmp_path, EVERYTHING)
    experiment = Squares()
    filled = look_up(experiment, rows_file(experiment, tmp_path), EVERYTHING)
    assert [path.read_text() for path in render(experiment, filled, tmp_path)] == ["1 4 9"]


def test_missing_rows_are_an_error_unless_a_part_is_worth_rendering(tmp_path):
    fill(Squares(numbers=(1, 2)), tmp_path, EVERYTHING)
    path = rows_file(Squares(), tmp_path)
    with pytest.raises(InvalidInputError, match="1 rows of squares are missing"):
        render(Squares(), look_up(Squares(), path, EVERYTHING), tmp_path)
    written = render(PartlyRendered(), look_up(PartlyRendered(), path, EVERYTHING), tmp_path)
    assert written[0].read_text() == "1 4"
    with pytest.raises(InvalidInputError, match="without --render-only"):
        render(PartlyRendered(), look_up(Squares(), tmp_path / "none", EVERYTHING), tmp_path)


def test_a_row_that_fills_no_cell_is_refused(tmp_path):
    class Astray(Squares):
        def measure(self, cell, options):
            return {"seed": 99}

    with pytest.raises(AssertionError, match="fills no cell"):
        fill(Astray(), tmp_path, EVERYTHING)
    assert not rows_file(Astray(), tmp_path).exists()


def test_a_table_as_page_and_as_data():
    table = Table(
        [Column("name", "name"), Column("value", "value", ".1f"), Column("seeds", "seeds")],
        [{"name": "a", "value": 1 / 3, "seeds": 5}, {"name": "b, c", "value": None, "seeds": 2}],
    )
    assert table.markdown().splitlines() == [
        "| name | value | seeds |",
        "| --- | --- | --- |",
        "| a | 0.3 | 5 |",
        "| b, c |  | 2 |",
    ]
    assert table.csv() == 'name,value,seeds\na,0.333333,5\n"b, c",,2\n'
