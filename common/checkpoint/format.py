"""The format of a checkpoint: parts of tensors in safetensors files, and a manifest to verify them.

A folder holds `shard_<process>.safetensors` for each process that had something to write; its keys are
the names of the tensors. `manifest.json` is written last. It holds the size and digest of each file, the
shape and dtype of each tensor, and which range of the tensor each file holds.
"""

import hashlib
import json
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import xxhash
from torch import nn

from ..errors import UsageError
from ..parallel.optimizer_state import NUMBERS
from ..parallel.parts import kept_tensors
from ..state import TrainState

FORMAT = "accelerate-recipes checkpoint, version 3"
# {format: the digest of a file in its manifest}. The newer one is as fast as memory; both find accidents.
DIGESTS: dict[str, Any] = {
    "accelerate-recipes checkpoint, version 2": ("sha256", hashlib.sha256),
    FORMAT: ("xxh3_128", xxhash.xxh3_128),
}
MANIFEST = "manifest.json"
MODEL_FILES = "model_files"  # beside the checkpoints: what an exported model has beside its weights

# The entries of a manifest, in the words of `misfit`. An older checkpoint may lack those with a question mark.
ENTRIES = {
    "layout": {"processes": int, "shares": int, "stages": int},
    "identity": {},
    "schedule?": str,
    "own_flags?": {str: str},
    "export_dtype?": str,
    "state": get_type_hints(TrainState) | {"num_steps": int, "seconds": float},
    "trainer": {
        "num_averaged": int,
        "loss_scale": {str: float},
        "optimizer?": {"groups?": [{}], "numbers?": {str: tuple(NUMBERS)}},
    },
    "has_state?": bool,
    "files": {str: {"size": int}},  # and the digest
    "tensors": {str: {"shape": [int], "dtype": str, "parts": [{"file": str, "offsets": [int], "sizes": [int]}]}},
}


class DamagedError(Exception):
    """The checkpoint differs from what was written; the message says how."""


class WriteError(Exception):
    """The checkpoint could not be written; the message is the reason, the same in all processes."""


def digest_of_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def misfit(value: Any, kind: Any, name: str = MANIFEST) -> str | None:
    """The name of the first entry of a JSON value that has another type; None if there is none.

    Args:
        value: from JSON; its dicts may have more entries.
        kind: a type (an `int` is at least 0, a `float` may be an int), [kind of each item], {name: kind},
            {str: kind of each entry}, or a tuple of the possible values. An entry "name?" may be missing.
        name: of the value.
    """
    if isinstance(kind, UnionType):
        return name if all(misfit(value, choice) for choice in get_args(kind)) else None
    if isinstance(kind, tuple):
        return None if value in kind else name
    if isinstance(kind, type):
        fits = type(value) is kind or (kind is float and type(value) is int)
        return None if fits and not (kind is int and value < 0) else name
    if type(value) is not type(kind):
        return name
    if isinstance(kind, list):
        entries = [(index, item, kind[0]) for index, item in enumerate(value)]
    elif str in kind:
        entries = [(key, item, kind[str]) for key, item in value.items()]
    else:
        required = {key.removesuffix("?"): inner for key, inner in kind.items() if key[-1] != "?" or key[:-1] in value}
        entries = [(key, value.get(key), inner) for key, inner in required.items()]
    return next(filter(None, (misfit(item, inner, f"{name}: {key}") for key, item, inner in entries)), None)


def check_same_model(folder: Path, shapes: dict[str, list[int]], model: nn.Module) -> None:
    """Raises UsageError unless the weights in a folder, given as {name: shape}, are those of `model`."""
    own = kept_tensors(model)
    if shapes.keys() != own.keys():
        name = min(shapes.keys() ^ own.keys())
        raise UsageError(f"{folder} is of another model: only one of the two has {name}")
    for name, shape in shapes.items():
        if shape != list(own[name].shape):
            raise UsageError(f"{folder} is of another model: {name} is {shape} there, {list(own[name].shape)} here")
