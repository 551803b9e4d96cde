"""The format of a checkpoint: parts of tensors in safetensors files, and a manifest to verify them.

A folder holds `shard_<process>.safetensors` for each process that had something to write; its keys are
the names of the tensors. `manifest.json` is written last. It holds the size and digest of each file, the
shape and dtype of each tensor, and which range of the tensor each file holds.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import UsageError
from ..files import give_usual_mode
from ..weights.shards import checkpoint_tensors

FORMAT = "accelerate-recipes checkpoint, version 4"
MANIFEST = "manifest.json"
MODEL_FILES = "model_files"  # next to the checkpoints: the files of an exported model except its weights


class DamagedError(Exception):
    """The checkpoint differs from what was written; the message says how."""


class WriteError(Exception):
    """The checkpoint could not be written; the message is the reason, the same in all processes."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: dict[str, str] | None = None) -> None:
    """Writes tensors, contiguous and on the CPU, to a safetensors file, without flushing it; they may share memory.
    `facts`: its "__metadata__". Raises SafetensorError if it cannot be written, ValueError for types it cannot hold."""
    storages: set[int] = set()
    apart: dict[str, Tensor] = {}  # `save_file` refuses tensors that share memory, such as tied weights
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    try:
        save_file(apart, path, facts)
    except KeyError as error:
        raise ValueError(f"safetensors files cannot store {error}") from None
    give_usual_mode(path)


def digest_of_file(path: Path) -> str:
    """The xxh3-128 digest."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def digest_of_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_same_model(folder: Path, found: dict[str, tuple[list[int], torch.dtype]], model: nn.Module) -> None:
    """Raises UsageError unless the weights in a folder, given as {name: (shape, dtype)}, match `model`."""
    if found.keys() != (own := checkpoint_tensors(model)).keys():
        name = min(found.keys() ^ own.keys())
        raise UsageError(f"{folder} holds a different model: only one of the two has {name}")
    for name, (shape, dtype) in found.items():
        if not torch.can_cast(dtype, own[name].dtype):  # a buffer that has become a number with digits
            raise UsageError(
                f"{name} is {dtype} in {folder}, {own[name].dtype} in the model: keep its type in training"
            )
        if shape != list(own[name].shape):
            raise UsageError(f"{folder} holds a different model: {name} is {shape} there, {list(own[name].shape)} here")
