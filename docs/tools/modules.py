"""Writes the table of the modules in `common/` into docs/architecture.md, from their docstrings.

python docs/tools/modules.py
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMON, PAGE = ROOT / "common", ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- Written by docs/tools/modules.py -->\n", "<!-- End of the modules -->\n"


def modules() -> Iterator[Path]:
    """All modules, in the order of imports: each imports only modules of the rows below its room."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    for layer in settings["contracts"][0]["layers"]:
        path = COMMON / layer
        if path.is_dir():
            yield from sorted(each for each in path.rglob("*.py") if each.name != "__init__.py")
        else:
            yield path.with_suffix(".py")


def table() -> str:
    """The table as Markdown."""
    lines = ["| module | job |", "| --- | --- |"]
    for path in modules():
        name = path.relative_to(COMMON).as_posix()
        what = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        lines.append(f"| [{name}](../common/{name}) | {' '.join(what.split()).rstrip('.').replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with this table in it."""
    return page[: page.index(BEGIN)] + BEGIN + table() + page[page.index(END) :]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
