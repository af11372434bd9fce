"""What notebooks show: small tables as HTML, and one line of progress."""

import html
import sys
from collections.abc import Iterable
from typing import Any


def html_table(title: str, rows: Iterable[tuple[object, object]]) -> str:
    """A title and a table of two columns."""
    cells = "".join(
        f'<tr><th style="text-align:left">{html.escape(str(name))}</th>'
        f'<td style="text-align:left">{html.escape(str(value))}</td></tr>'
        for name, value in rows
    )
    return f"<b>{html.escape(title)}</b><table>{cells}</table>"


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook. IPython is not imported to find out."""
    found = sys.modules.get("IPython")
    shell = None if found is None else found.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class NotebookLine:
    """A bar with a line of text below a cell, which is replaced when it changes."""

    def __init__(self) -> None:
        from IPython import display  # there is a kernel, so it is installed

        shown: Any = display
        self._html = shown.HTML
        self._handle = shown.display(self._html(""), display_id=True)

    def show(self, done: int, total: int, text: str) -> None:
        bar = f'<progress value="{done}" max="{total}" style="width:16em"></progress>'
        self._handle.update(self._html(f"{bar} {html.escape(text)}"))
