"""Verifies and reads the files of a checkpoint."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..cpu_group import CpuGroup
from ..errors import RunError, first_line
from ..files import read_file
from ..state import TrainState
from .format import FORMAT, MANIFEST, DamagedError, digest_of_file, digest_of_json


class Reader:
    """A checkpoint folder. Raises DamagedError for a missing or altered manifest, RunError if it cannot be read."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.content = json.loads(read_file(folder / MANIFEST))
            expected = self.content.pop("sha256")
        except OSError as error:
            raise _damage_or_failure(folder / MANIFEST, error) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DamagedError(f"{MANIFEST} cannot be read") from None
        if digest_of_json(self.content) != expected:
            raise DamagedError(f"{MANIFEST} was altered")
        if (known := self.content.get("format")) != FORMAT:
            raise DamagedError(
                f"{MANIFEST} has format {known}, expected {FORMAT}: resume with the version that wrote it"
            )
        try:
            _check(self.content)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise DamagedError(f"{MANIFEST} does not belong to a checkpoint ({first_line(error)})") from None
        self.tensors: dict[str, dict[str, Any]] = self.content["tensors"]
        self._files: dict[tuple[str, bool], Any] = {}

    def close(self) -> None:
        """Closes the files, so that they can be removed."""
        self._files.clear()

    @classmethod
    def open_verified(cls, folder: Path, group: CpuGroup) -> "Reader":
        """Opens and verifies a checkpoint; each process reads its share of the files. In all processes, raises
        DamagedError if a file was altered or is missing, RunError if one is unreadable, or was just removed."""
        reader, problem = None, None
        try:
            reader = cls(folder)
            for index, (name, expected) in enumerate(sorted(reader.content["files"].items())):
                reader._check_file(name, expected, index % group.size == group.rank)
        except (DamagedError, RunError) as error:
            problem = error
            if isinstance(error, DamagedError) and reader is not None and not folder.exists():
                problem = RunError(f"{folder} was removed while it was read: run the command again")
        found = [each for each in group.all_gather(problem) if each is not None]
        for each in sorted(found, key=lambda each: isinstance(each, DamagedError)):  # a RunError says more
            raise each
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
        found = [(part, overlap(offsets, sizes, part["offsets"], part["sizes"])) for part in entry["parts"]]
        pieces = [(part, both) for part, both in found if both is not None]
        if len(pieces) == 1 or not shape:
            return self._read(name, *pieces[0], maps)
        result = torch.empty(tuple(sizes), dtype=getattr(torch, entry["dtype"]))
        for part, (starts, ends) in pieces:
            into = tuple(slice(start - offset, end - offset) for start, end, offset in zip(starts, ends, offsets))
            result[into] = self._read(name, part, (starts, ends), maps)
        return result

    def _read(self, name: str, part: dict[str, Any], both: tuple[list[int], list[int]], maps: bool) -> Tensor:
        file, (starts, ends) = self._open(part["file"], maps), both
        local = tuple(slice(start - offset, end - offset) for start, end, offset in zip(starts, ends, part["offsets"]))
        return file.get_slice(name)[local] if starts else file.get_tensor(name)

    def _open(self, name: str, maps: bool) -> Any:
        """A file, open until `close`: it can be read to its end even if a run removes the checkpoint."""
        if (name, maps) not in self._files:  # reading takes less CPU time than copying from a mapped file
            self._files[name, maps] = safe_open(self.folder / name, "pt", backend="mmap" if maps else "pread")
        return self._files[name, maps]

    def _check_file(self, name: str, expected: dict[str, Any], reads: bool) -> None:
        path = self.folder / name
        try:
            if (size := path.stat().st_size) != expected["size"]:
                raise DamagedError(f"{name} has {size} bytes, expected {expected['size']}")
            if not reads:
                return
            if digest_of_file(path) != expected["xxh3_128"]:
                raise DamagedError(f"{name} was altered")
            file = self._open(name, maps=False)
            for tensor, part in ((key, part) for key, entry in self.tensors.items() for part in entry["parts"]):
                if part["file"] == name and file.get_slice(tensor).get_shape() != part["sizes"]:
                    raise DamagedError(f"{name} and the manifest differ in the shape of {tensor}")
        except OSError as error:
            raise _damage_or_failure(path, error) from None
        except SafetensorError as error:
            raise DamagedError(f"{name} is not a safetensors file of these tensors ({first_line(error)})") from None


def _check(content: dict[str, Any]) -> None:
    """Raises one of many errors unless a manifest has all that a run needs, and its files' parts cover each tensor."""
    files, tensors = content["files"], content["tensors"]
    if not files or not tensors:
        raise ValueError("it names no files")
    for name, file in files.items():
        if Path(name).name != name or not isinstance(file["size"], int) or not isinstance(file["xxh3_128"], str):
            raise ValueError(f"{name}is not one of its files")
    for name, tensor in tensors.items():
        if not isinstance(getattr(torch, tensor["dtype"]), torch.dtype):
            raise TypeError(f"{name} has no type")
        for part in tensor["parts"]:
            if part["file"] not in files or not len(part["offsets"]) == len(part["sizes"]) == len(tensor["shape"]):
                raise ValueError(f"a part of {name} is missing from its files")
        check_coverage(name, tensor)
    kinds = {"state": dict, "identity": dict, "unrecorded": dict, "trainer": dict, "own_flags": dict, "schedule": str}
    for name, kind in kinds.items():
        if not isinstance(content.get(name), kind):
            raise TypeError(f"it has no {name}")
    state, unrecorded = content["state"], content["unrecorded"]
    numbers = [state.get("step"), state.get("num_skipped"), unrecorded.get("num_taken")]
    is_known = isinstance(unrecorded.get("sums"), dict) and state.keys() <= asdict(TrainState()).keys()
    if not is_known or any(not isinstance(number, int) or number < 0 for number in numbers):
        raise ValueError("it has no state of a run, or no number of steps")


def _damage_or_failure(path: Path, error: OSError) -> DamagedError | RunError:
    """A missing file is damage. Any other error of the file system says nothing about the checkpoint."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return DamagedError(
            f"{path.name} cannot be read" if path.name == MANIFEST else f"{path.name}: {error.strerror}"
        )
    return RunError(f"{path} cannot be read ({error.strerror}): nothing was changed; try again")


def check_coverage(name: str, tensor: dict[str, Any]) -> None:
    """Raises ValueError unless the parts of a tensor cover its shape without overlap."""
    shape, parts = tensor["shape"], tensor["parts"]
    for part in parts:
        ends = [offset + size for offset, size in zip(part["offsets"], part["sizes"])]
        if not all(offset >= 0 and end <= size for offset, end, size in zip(part["offsets"], ends, shape)):
            raise ValueError(f"{name} has a part outside its shape")
    # A sweep along the dimension with the most distinct offsets compares the fewest parts.
    along = max(range(len(shape)), key=lambda axis: len({part["offsets"][axis] for part in parts}), default=None)
    reaching: list[dict[str, Any]] = []
    for part in sorted(parts, key=lambda part: part["offsets"][along]) if along is not None else []:
        start = part["offsets"][along]
        reaching = [other for other in reaching if other["offsets"][along] + other["sizes"][along] > start]
        for other in reaching:
            if overlap(other["offsets"], other["sizes"], part["offsets"], part["sizes"]) is not None:
                raise ValueError(f"{name} has parts that overlap")
        reaching.append(part)
    if sum(math.prod(part["sizes"]) for part in parts) != math.prod(shape) or not parts:
        raise ValueError(f"{name} is not complete")


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """(starts, ends) of the overlap of two ranges; None if there is none."""
    starts = [max(pair) for pair in zip(offsets, other_offsets)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes)]
    return (starts, ends) if all(start < end for start, end in zip(starts, ends)) else None
