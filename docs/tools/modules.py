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


def layers() -> Iterator[Path]:
    """The rooms and single modules, in the order of imports: each imports only what is below it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    for layer in settings["contracts"][0]["layers"]:
        yield COMMON / layer if (COMMON / layer).is_dir() else (COMMON / layer).with_suffix(".py")


def modules_of(layer: Path) -> list[Path]:
    """The modules of a room, or the module itself."""
    return sorted(path for path in layer.rglob("*.py") if path.name != "__init__.py") if layer.is_dir() else [layer]


def table() -> str:
    """The table as Markdown."""
    lines = ["| room or module | job | modules |", "| --- | --- | --- |"]
    for layer in layers():
        path = layer / "__init__.py" if layer.is_dir() else layer
        what = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        job = " ".join(what.split()).rstrip(".").replace("|", "/")
        inside = [path.relative_to(layer).as_posix() for path in modules_of(layer)] if layer.is_dir() else []
        links = [f"[{name.removesuffix('.py')}](../common/{layer.name}/{name})" for name in inside]
        name = layer.name + "/" * layer.is_dir()
        lines.append(f"| [{name}](../common/{name}) | {job} | {', '.join(links)} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with this table in it."""
    return page[: page.index(BEGIN)] + BEGIN + table() + page[page.index(END) :]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
