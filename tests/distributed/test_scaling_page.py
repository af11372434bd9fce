from reproduction import scaling


def test_the_tables_of_the_page_are_those_of_the_rows():
    """docs/tables/scaling.md is rendered by `python -m reproduction.scaling --write`."""
    page = scaling.PAGE.read_text(encoding="utf-8")
    assert scaling.rendered(page) == page
