"""Pages, model cards and the files of a project, as templates of Jinja."""

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """A template of this folder, filled in. In `.html` text is escaped. Raises UndefinedError for a missing value."""
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
