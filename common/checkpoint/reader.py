"""Verifies and reads the files of a checkpoint."""

import hashlib
import json
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..cpu_group import CpuGroup
from ..errors import RunError
from .format import ENTRIES, FORMAT, MANIFEST, DamagedError, digest_of_json, misfit


class Reader:
    """A checkpoint folder from `write`.

    Raises:
        DamagedError: the manifest is missing or altered.
        RunError: the file system cannot read it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.content = json.loads((folder / MANIFEST).read_text())
            expected = self.content.pop("sha256")
        except OSError as error:
            raise _damage_or_failure(folder / MANIFEST, error) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DamagedError(f"{MANIFEST} cannot be read") from None
        if digest_of_json(self.content) != expected:
            raise DamagedError(f"{MANIFEST} was altered")
        if (known := self.content.get("format")) != FORMAT:
            raise DamagedError(f"{MANIFEST} has the format {known}, expected {FORMAT}: resume with what wrote it")
        if name := misfit(self.content, ENTRIES):
            raise DamagedError(f"{name} is missing or not valid")
        self.tensors: dict[str, dict[str, Any]] = self.content["tensors"]
        self._files: dict[str, Any] = {}

    def close(self) -> None:
        """Closes the files, so that they can be removed."""
        self._files.clear()

    @classmethod
    def verified(cls, folder: Path, group: CpuGroup) -> "Reader":
        """Opens a checkpoint and verifies it. Each process reads its share of the files, and checks its share of the
        tensors.

        Raises:
            DamagedError: in all processes, if a file was altered or the files do not hold each tensor completely.
            RunError: in all processes, if a file cannot be read, or a run has just removed the checkpoint.
        """
        reader = reason = failure = None
        try:
            reader = cls(folder)
            for index, (name, expected) in enumerate(sorted(reader.content["files"].items())):
                reads = index % group.size == group.rank
                reader._check_file(name, expected, reads)
                if reads:
                    reader._check_names(name)
            for name, tensor in islice(reader.tensors.items(), group.rank, None, group.size):
                check_coverage(name, tensor, reader.content["files"])
        except DamagedError as error:
            reason = str(error)
            if reader is not None and not folder.exists():
                failure = f"{folder} was removed while it was read: type the command again"
        except RunError as error:
            failure = str(error)
        reasons, failures = zip(*group.all_gather((reason, failure)))
        for line in filter(None, failures):
            raise RunError(line)
        for line in filter(None, reasons):
            raise DamagedError(line)
        assert reader is not None
        return reader

    def tensor(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None, maps: bool = False
    ) -> Tensor:
        """Reads a tensor, or its range of `sizes` from `offsets`, onto the CPU. With `maps` it may share the memory of
        the mapped file with other reads: copy it before a change."""
        entry = self.tensors[name]
        shape = entry["shape"]
        offsets, sizes = offsets or [0] * len(shape), shape if sizes is None else sizes
        overlaps = [(part, _overlap(offsets, sizes, part["offsets"], part["sizes"])) for part in entry["parts"]]
        pieces = [(part, overlap) for part, overlap in overlaps if overlap is not None]
        if len(pieces) == 1 or not shape:
            mapped = self._mapped(name, *pieces[0])
            return mapped if maps else mapped.clone()
        result = torch.empty(tuple(sizes), dtype=getattr(torch, entry["dtype"]))
        for part, (starts, ends) in pieces:
            into = tuple(slice(start - offset, end - offset) for start, end, offset in zip(starts, ends, offsets))
            result[into] = self._mapped(name, part, (starts, ends))
        return result

    def _mapped(self, name: str, part: dict[str, Any], overlap: tuple[list[int], list[int]]) -> Tensor:
        file, (starts, ends) = self._opened(part["file"]), overlap
        local = tuple(slice(start - offset, end - offset) for start, end, offset in zip(starts, ends, part["offsets"]))
        return file.get_slice(name)[local] if starts else file.get_tensor(name)

    def _opened(self, name: str) -> Any:
        """A file, open until `close`: it can be read to its end even if a run removes the checkpoint."""
        if name not in self._files:
            self._files[name] = safe_open(self.folder / name, "pt")
        return self._files[name]

    def _check_file(self, name: str, expected: dict[str, Any], reads: bool) -> None:
        path = self.folder / name
        try:
            if (size := path.stat().st_size) != expected["size"]:
                raise DamagedError(f"{name} has {size} bytes, expected {expected['size']}")
            if reads:
                with path.open("rb") as file:
                    if hashlib.file_digest(file, xxhash.xxh3_128).hexdigest() != expected["xxh3_128"]:
                        raise DamagedError(f"{name} was altered")
        except OSError as error:
            raise _damage_or_failure(path, error) from None

    def _check_names(self, file: str) -> None:
        """Raises DamagedError unless a file holds exactly the parts that the manifest lists for it."""
        parts = [(name, tensor["dtype"], part) for name, tensor in self.tensors.items() for part in tensor["parts"]]
        said = {name: (dtype, part["sizes"]) for name, dtype, part in parts if part["file"] == file}
        try:
            opened = self._opened(file)
            for name in opened.keys():  # noqa: SIM118  # not a dict
                held = opened.get_slice(name)
                dtype = (held[:0] if held.get_shape() else opened.get_tensor(name)).dtype
                if said.pop(name, None) != (str(dtype).removeprefix("torch."), held.get_shape()):
                    raise DamagedError(f"{file} holds {name}, which does not match {MANIFEST}")
        except SafetensorError as error:
            raise DamagedError(f"{file}: {error}") from None
        for name in said:
            raise DamagedError(f"{file} does not hold {name}")


def _damage_or_failure(path: Path, error: OSError) -> Exception:
    """A missing file is damage. Any other error of the file system says nothing about the checkpoint."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return DamagedError(
            f"{path.name} cannot be read" if path.name == MANIFEST else f"{path.name}: {error.strerror}"
        )
    return RunError(f"{path} cannot be read ({error.strerror}): nothing was changed; try again")


def _overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """(starts, ends) of the overlap of two ranges; None if there is none."""
    starts = [max(pair) for pair in zip(offsets, other_offsets)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes)]
    return (starts, ends) if all(start < end for start, end in zip(starts, ends)) else None


def check_coverage(name: str, tensor: dict[str, Any], files: dict[str, Any]) -> None:
    """Raises DamagedError unless the parts of a tensor are in these files, and cover its shape without overlap."""
    shape, parts = tensor["shape"], tensor["parts"]
    whole = [0] * len(shape)
    for part in parts:
        if part["file"] not in files:
            raise DamagedError(f"{name}: {part['file']} is not in {MANIFEST}")
        ends = [offset + size for offset, size in zip(part["offsets"], part["sizes"])]
        inside = all(offset >= 0 and end <= size for offset, end, size in zip(part["offsets"], ends, shape))
        if not inside or not len(part["offsets"]) == len(part["sizes"]) == len(whole):
            raise DamagedError(f"{name} has a part outside its shape")
    # A sweep along the dimension with the most distinct offsets compares the fewest parts.
    along = max(range(len(shape)), key=lambda axis: len({part["offsets"][axis] for part in parts}), default=None)
    reaching: list[dict[str, Any]] = []
    for part in sorted(parts, key=lambda part: part["offsets"][along]) if along is not None else []:
        start = part["offsets"][along]
        reaching = [other for other in reaching if other["offsets"][along] + other["sizes"][along] > start]
        for other in reaching:
            if _overlap(other["offsets"], other["sizes"], part["offsets"], part["sizes"]) is not None:
                raise DamagedError(f"{name} has parts that overlap")
        reaching.append(part)
    if sum(math.prod(part["sizes"]) for part in parts) != math.prod(shape) or not parts:
        raise DamagedError(f"{name} is not complete")
