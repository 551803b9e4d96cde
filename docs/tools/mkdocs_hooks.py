"""Hooks of mkdocs: README.md is the first page, and links to the code lead to the repository.

In a GitHub workflow, GITHUB_REPOSITORY names the repository. Elsewhere such a link becomes the name of the file.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHOWN = (".md", ".png", ".svg")


def on_files(files: Files, config: Any) -> Files:
    """Adds README.md as index.md."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r'^<a href="\.\./\.\./actions.*\n', "", text, flags=re.MULTILINE)  # badges of GitHub
    text = re.sub(r"\]\((?!docs/|https?:|#)", "](../", text).replace("](docs/", "](").replace('src="docs/', 'src="')
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces links that leave docs/. Raises FileNotFoundError for one that leads nowhere."""
    folder = (DOCS / page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        label, target = match[1], match[2].partition("#")[0]
        path = (folder / target).resolve()
        if not target or ":" in target or (path.is_relative_to(DOCS) and path.suffix in SHOWN):
            return match[0]
        if not path.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which is not there")
        if repository := os.environ.get("GITHUB_REPOSITORY"):
            return f"[{label}](https://github.com/{repository}/blob/main/{path.relative_to(ROOT)})"
        name = f"`{path.relative_to(ROOT)}`"
        if label.strip("`") == path.name:
            return name
        return label if label.startswith("`") else f"{label} ({name})"

    blocks = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)  # code has brackets, too
    link = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
    return "".join(block if block.startswith("```") else link.sub(replaced, block) for block in blocks)
