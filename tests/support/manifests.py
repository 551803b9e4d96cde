"""Changes manifests of checkpoints and gives them the right checksum."""

import json
from collections.abc import Callable
from pathlib import Path

from accelerate_recipes.common.checkpoint.format import digest_of_json


def rewrite(folder: Path, change: Callable[[dict], dict], manifest: dict | None = None) -> None:
    """Writes `change(manifest)` with its checksum. Without `manifest`, changes the one in the folder."""
    path = folder / "manifest.json"
    manifest = change(manifest or json.loads(path.read_text()))
    manifest.pop("sha256")
    path.write_text(json.dumps(manifest | {"sha256": digest_of_json(manifest)}))
