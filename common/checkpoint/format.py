"""The format of a checkpoint: parts of tensors in safetensors files, and a manifest to verify them.

A folder holds `shard_<process>.safetensors` for each process that had something to write; its keys are
the names of the tensors. `manifest.json` is written last. It holds the size and SHA-256 of each file, the
shape and dtype of each tensor, and which range of the tensor each file holds.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import UsageError
from ..parallel.parts import kept_tensors

FORMAT = "accelerate-recipes checkpoint, version 2"
MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"shard_\d{5,}\.safetensors")


class DamagedError(Exception):
    """The checkpoint differs from what was written; the message says how."""


class WriteError(Exception):
    """The checkpoint could not be written; the message is the reason, the same in all processes."""


def digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_same_model(folder: Path, shapes: dict[str, list[int]], model: nn.Module) -> None:
    """Raises UsageError unless the weights in a folder, given as {name: shape}, are those of `model`."""
    own = kept_tensors(model)
    if shapes.keys() != own.keys():
        name = min(shapes.keys() ^ own.keys())
        raise UsageError(f"{folder} is of another model: only one of the two has {name}")
    for name, shape in shapes.items():
        if shape != list(own[name].shape):
            raise UsageError(f"{folder} is of another model: {name} is {shape} there, {list(own[name].shape)} here")
