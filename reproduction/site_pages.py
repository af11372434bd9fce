"""Pages of the documentation that are made when it is built: notebooks and examples.

`mkdocs.yml` names this file under `hooks`. A notebook becomes a page with its stored outputs, so
that nothing is run and nothing is loaded from elsewhere; `tests/test_site.py` runs the notebooks.
"""

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {
    "tutorial.md": ROOT / "docs" / "tutorial.ipynb",
    "afternoon_in_python.md": ROOT / "docs" / "afternoon.ipynb",
    "paper_in_python.md": ROOT / "docs" / "paper.ipynb",
}
EXAMPLES = ROOT / "examples"


def notebook_page(path: Path) -> str:
    """The cells of a notebook and their outputs, as Markdown."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts: list[str] = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source.strip():
            parts += [f"```python\n{source}\n```", *_outputs(cell["outputs"])]
    note = f"This page is the notebook [`{path.name}`]({path.name}), which you can run."
    parts.insert(1, note)
    return "\n\n".join(parts) + "\n"


def _outputs(outputs: list[Mapping[str, Any]]) -> Iterator[str]:
    """Tables and pictures as they are, everything else as text; progress is left out."""
    for output in outputs:
        data = output.get("data", {})
        if "image/png" in data:
            encoded = "".join(data["image/png"]).replace("\n", "")
            yield f'<img alt="output" src="data:image/png;base64,{encoded}">'
        elif output["output_type"] == "display_data":
            continue
        elif "text/html" in data:
            table = "".join(data["text/html"]).replace("\n\n", "\n")
            yield table.replace('<table border="1" class="dataframe">', "<table>")
        else:
            text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
            if text and output.get("name") != "stderr":
                yield f'<pre class="output">{escape(text)}</pre>'


def examples_page() -> str:
    """The examples' own page, and the files."""
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = [path.name for path in sorted(EXAMPLES.glob("*.py"))]
    for name in named:
        text = text.replace(f"[{name}]({name})", f"[{name}](#{name.replace('.', '')})")
    text = text.replace("[distributed/](distributed)", "`examples/distributed/`")
    codes = [
        f"## {name}\n\n```python\n{(EXAMPLES / name).read_text(encoding='utf-8').rstrip()}\n```"
        for name in named
    ]
    return "\n\n".join([text.rstrip(), *codes]) + "\n"


def pages() -> dict[str, str]:
    """Every page that is made, by its name."""
    made = {name: notebook_page(path) for name, path in NOTEBOOKS.items()}
    return {**made, "examples.md": examples_page()}


def on_files(files: Any, config: Any) -> Any:
    """Called by MkDocs with the files of the site."""
    from mkdocs.structure.files import File

    for name, content in pages().items():
        files.append(File.generated(config, name, content=content))
    return files
