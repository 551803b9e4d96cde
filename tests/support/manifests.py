"""Changes manifests of checkpoints and gives them the right checksum."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.checkpoint.format import digest_of_json


def rewrite(folder: Path, change: Callable[[dict], dict], manifest: dict | None = None) -> None:
    """Writes `change(manifest)` with its checksum. Without `manifest`, changes the one in the folder."""
    path = folder / "manifest.json"
    manifest = change(manifest or json.loads(path.read_text()))
    manifest.pop("sha256")
    path.write_text(json.dumps(manifest | {"sha256": digest_of_json(manifest)}))


def changed(manifest: dict, path: tuple, value: Any) -> dict:
    """Sets the value at a path of keys; returns the manifest."""
    *parents, last = path
    place: Any = manifest
    for key in parents:
        place = place[key]
    place[last] = value
    return manifest


def without(manifest: dict, path: tuple) -> dict:
    """Removes the entry at a path of keys; returns the manifest."""
    *parents, last = path
    place: Any = manifest
    for key in parents:
        place = place[key]
    del place[last]
    return manifest
