"""Jinja templates: pages, model cards and the files of a project."""

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """Renders a template of this folder. Escapes text in `.html`. Raises UndefinedError for a missing value."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape  # the import takes time

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)
