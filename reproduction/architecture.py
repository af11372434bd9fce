"""The table of packages in docs/architecture.md, made from the imports.

    python -m reproduction.architecture --write

A package imports packages of lower levels only. An import that follows from others is left out.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "dpsur"
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"(<!-- made from the imports -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Graph = dict[str, set[str]]


def packages() -> list[str]:
    """The packages of the library."""
    return sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def imports() -> Graph:
    """Which package imports which, anywhere in its files."""
    names = set(packages())
    found: Graph = {name: set() for name in names}
    for path in SOURCE.glob("*/**/*.py"):
        package = path.relative_to(SOURCE).parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for module in _modules(node):
                parts = module.split(".")
                if parts[0] == "dpsur" and len(parts) > 1 and parts[1] in names - {package}:
                    found[package].add(parts[1])
    return found


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module == "dpsur":
        return [f"dpsur.{alias.name}" for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def reduced(graph: Graph) -> Graph:
    """The graph without imports that follow from others."""

    def reach(start: str, seen: set[str]) -> set[str]:
        for following in graph[start] - seen:
            seen.add(following)
            reach(following, seen)
        return seen

    return {
        name: {
            target
            for target in targets
            if not any(target in reach(other, set()) for other in targets - {target})
        }
        for name, targets in graph.items()
    }


def levels() -> str:
    """Packages from the top to the bottom, each with what it imports."""
    graph = reduced(imports())

    def level(name: str) -> int:
        return max((1 + level(below) for below in graph[name]), default=0)

    lines = ["| level | package | imports |", "|--:|---|---|"]
    for name in sorted(graph, key=lambda one: (-level(one), one)):
        below = ", ".join(f"`{one}`" for one in sorted(graph[name]))
        lines.append(f"| {level(name)} | `{name}` | {below} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Print the table, or write it into the page."""
    if "--write" in sys.argv[1:]:
        text = PAGE.read_text(encoding="utf-8")
        page = BLOCK.sub(lambda found: found[1] + levels() + found[3], text)
        PAGE.write_text(page, encoding="utf-8")
    else:
        print(levels())


if __name__ == "__main__":
    main()
