"""What figures look like as files."""

import re

from dpsur import figure_style as style
from reproduction.artifacts import Picture


def test_letters_in_an_svg_keep_their_digits(tmp_path):
    def draw():
        figure = style.new_figure(3.0, 2.0)
        axes = figure.subplots()
        axes.set_title("0.00123")
        axes.plot([0.123456789, 1.0], [0.0, 1.0])
        return figure

    (svg,) = Picture("picture", draw).write(tmp_path)
    assert "0.00123" in svg.read_text()
    assert not re.search(r'd="[^"]*\d\.\d{3}', svg.read_text())
