"""The format of a checkpoint: parts of tensors in safetensors files, and a manifest to verify them.

A folder holds `shard_<process>.safetensors` for each process that had something to write; its keys are
the names of the tensors. `manifest.json` is written last. It holds the size and digest of each file, the
shape and dtype of each tensor, and which range of the tensor each file holds.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import UsageError
from ..files import give_usual_mode
from ..parallel.optimizer_state import NUMBERS
from ..parallel.parts import kept_tensors
from ..state import TrainState

FORMAT = "accelerate-recipes checkpoint, version 3"
MANIFEST = "manifest.json"
MODEL_FILES = "model_files"  # beside the checkpoints: what an exported model has beside its weights

# The entries of a manifest, in the words of `misfit`.
ENTRIES = {
    "layout": {"processes": int, "shares": int, "stages": int},
    "identity": {},
    "schedule": str,
    "own_flags": {str: str},
    "export_dtype": str,
    "state": get_type_hints(TrainState) | {"num_steps": int, "seconds": float},
    "trainer": {
        "num_averaged": int,
        "loss_scale": {str: float},
        "optimizer": {"groups": [{}], "numbers": {str: tuple(NUMBERS)}},
    },
    "has_state": bool,
    "files": {str: {"size": int, "xxh3_128": str}},  # the digest is as fast as memory, and finds accidents
    "tensors": {str: {"shape": [int], "dtype": str, "parts": [{"file": str, "offsets": [int], "sizes": [int]}]}},
}


class DamagedError(Exception):
    """The checkpoint differs from what was written; the message says how."""


class WriteError(Exception):
    """The checkpoint could not be written; the message is the reason, the same in all processes."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: dict[str, str] | None = None) -> str:
    """Writes tensors to a safetensors file, without flushing it.

    Args:
        path: of the file.
        tensors: contiguous and on the CPU; they may share memory.
        facts: the file's "__metadata__".

    Returns:
        The xxh3-128 digest of the file.

    Raises:
        SafetensorError: the file cannot be written.
        ValueError: safetensors files cannot hold a type.
    """
    storages: set[int] = set()
    apart: dict[str, Tensor] = {}  # `save_file` refuses tensors that share memory, such as tied weights
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    try:
        save_file(apart, path, facts)
    except KeyError as error:
        raise ValueError(f"safetensors files cannot hold {error}") from None
    give_usual_mode(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def digest_of_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def misfit(value: Any, kind: Any, name: str = MANIFEST) -> str | None:
    """The name of the first entry of a JSON value that has another type; None if there is none.

    Args:
        value: from JSON; its dicts may have more entries.
        kind: a type (an `int` is at least 0, a `float` may be an int), [kind of each item], {name: kind},
            {str: kind of each entry}, or a tuple of the possible values.
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
        entries = [(key, value.get(key), inner) for key, inner in kind.items()]
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
