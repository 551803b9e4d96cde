"""How checkpoints lie on disk: parts of tensors in safetensors files, and a manifest that tells whether all is there.

A folder holds a file `shard_<process>.safetensors` for each process that had something to write,
whose keys are the names of the tensors, and `manifest.json`, written last: size and SHA-256 of each
file, shape and dtype of each tensor, and the ranges of it that the files hold.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.cpu_group import CpuGroup
from common.parallel.parts import Part

FORMAT = "accelerate-recipes checkpoint, version 2"
MANIFEST = "manifest.json"
UNFINISHED = "unfinished_"
FILE_NAME = re.compile(r"shard_\d{5,}\.safetensors")


class DamagedError(Exception):
    """A checkpoint that is not what was written; its message says in which way."""


class WriteError(Exception):
    """A checkpoint that could not be written; its message is the reason, the same in all processes."""


Shard = list[tuple[Part, Tensor]]


def own_shard(parts: Sequence[Part], group: CpuGroup, buffers: dict[str, Tensor] | None = None) -> Shard:
    """Chooses the parts that this process writes. Exactly one of the processes that hold a part writes it.

    Args:
        parts: of this process.
        group: of all processes.
        buffers: {name: tensor} for copies, kept for the next time; filled where there is none yet.
            Without it the shard may share memory with the parts, which must not change until it is written.

    Returns:
        The parts with their tensors, on the CPU.
    """
    mine, shard, storages = _assigned(parts, group), [], set()
    for part in parts:
        tensor = part.get()
        if part.name not in mine:
            continue
        tensor = tensor.detach()
        if buffers is not None:
            tensor = _copied(tensor, buffers, part.name)
        else:
            tensor = tensor.cpu().contiguous()
            if tensor.numel() and tensor.untyped_storage().data_ptr() in storages:
                tensor = tensor.clone()  # safetensors takes no tensors that share memory, as tied weights do
            storages.add(tensor.untyped_storage().data_ptr())
        shard.append((part, tensor))
    return shard


def write(folder: Path, shard: Shard, content: dict[str, Any], group: CpuGroup) -> None:
    """Writes a folder with the shards of all processes.

    It appears under its name when everything is on the disk, or not at all.

    Args:
        folder: that shall be; its parent exists.
        shard: of this process, from `own_shard`.
        content: JSON of the first process, which `Reader.content` gives back.
        group: of all processes; they see the same file system.

    Raises:
        WriteError: a file could not be written; what was there before is as it was.
    """
    # A name of its own for each: a network file system may lead to what had the same name a moment ago.
    aside = folder.with_name(f"{UNFINISHED}{folder.name}")
    try:
        _write_aside(aside, folder, shard, content, group)
    except WriteError:
        if group.rank == 0:  # the next one needs the room
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _write_aside(aside: Path, folder: Path, shard: Shard, content: dict[str, Any], group: CpuGroup) -> None:
    _together(group, lambda: _make_empty(aside) if group.rank == 0 else None)
    file = aside / f"shard_{group.rank:05d}.safetensors"
    written = _together(group, lambda: _write_shard(file, shard))
    if group.rank == 0:
        content = {"format": FORMAT, **content, "files": {}, "tensors": {}}
        for one in written:
            content["files"] |= one["files"]
            for name, tensor in one["tensors"].items():
                known = content["tensors"].setdefault(name, tensor | {"parts": []})
                known["parts"] += tensor["parts"]
    _together(group, lambda: _publish(aside, folder, content) if group.rank == 0 else None)


def remove(folder: Path) -> None:
    """Removes a folder, which from the first moment is not there under its name any more. Raises OSError."""
    aside = folder.with_name("removed")
    if aside.exists():  # of a process that was killed meanwhile
        shutil.rmtree(aside)
    folder.rename(aside)
    shutil.rmtree(aside)


class Reader:
    """A folder that `write` made.

    Raises:
        DamagedError: no manifest, or one that is not what was written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.content = json.loads((folder / MANIFEST).read_text())
            expected = self.content.pop("sha256")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DamagedError(f"{MANIFEST} cannot be read") from None
        if _digest_of_json(self.content) != expected:
            raise DamagedError(f"{MANIFEST} was altered")
        if self.content.get("format") != FORMAT:
            raise DamagedError(f"{MANIFEST} is of the format {self.content.get('format')}, not {FORMAT}")
        if not _is_well_formed(self.content):
            raise DamagedError(f"{MANIFEST} is not what a checkpoint has")
        self.tensors: dict[str, dict[str, Any]] = self.content["tensors"]
        self._files: dict[str, Any] = {}

    def close(self) -> None:
        """Lets go of the files, which could not be removed otherwise."""
        self._files.clear()

    @classmethod
    def verified(cls, folder: Path, group: CpuGroup) -> "Reader":
        """Raises DamagedError, in all processes alike, unless all files are what was written and together
        hold all of each tensor. Each process reads its share of the files."""
        reader = reason = None
        try:
            reader = cls(folder)
            for index, (name, expected) in enumerate(sorted(reader.content["files"].items())):
                reads = index % group.size == group.rank
                reader._check_file(name, expected, reads)
                if reads:
                    reader._check_names(name)
            for name, tensor in reader.tensors.items():
                _check_coverage(name, tensor, reader.content["files"])
        except DamagedError as error:
            reason = str(error)
        if found := [reason for reason in group.all_gather(reason) if reason]:
            raise DamagedError(found[0])
        assert reader is not None
        return reader

    def tensor(self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """A tensor on the CPU, or of it the range of `sizes` from `offsets`."""
        entry = self.tensors[name]
        shape = entry["shape"]
        offsets, sizes = offsets or [0] * len(shape), shape if sizes is None else sizes
        overlaps = [(part, _overlap(offsets, sizes, part["offsets"], part["sizes"])) for part in entry["parts"]]
        pieces = [(part, overlap) for part, overlap in overlaps if overlap is not None]
        if len(pieces) == 1 or not shape:
            part, overlap = pieces[0]
            return self._read(name, part, overlap)
        result = torch.empty(tuple(sizes), dtype=getattr(torch, entry["dtype"]))
        for part, (starts, ends) in pieces:
            into = tuple(slice(start - offset, end - offset) for start, end, offset in zip(starts, ends, offsets))
            result[into] = self._read(name, part, (starts, ends))
        return result

    def _read(self, name: str, part: dict[str, Any], overlap: tuple[list[int], list[int]]) -> Tensor:
        if part["file"] not in self._files:
            self._files[part["file"]] = safe_open(self.folder / part["file"], "pt")
        file, (starts, ends) = self._files[part["file"]], overlap
        local = tuple(slice(start - offset, end - offset) for start, end, offset in zip(starts, ends, part["offsets"]))
        tensor = file.get_slice(name)[local] if starts else file.get_tensor(name)
        return tensor.clone()  # what is read twice would share memory, that of the mapped file

    def _check_file(self, name: str, expected: dict[str, Any], reads: bool) -> None:
        # A name with a path in it, or a link, would lead out of the folder.
        if not FILE_NAME.fullmatch(name):
            raise DamagedError(f"{MANIFEST} names {name}, which is no file of a checkpoint")
        path = self.folder / name
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError(f"{name} is not a file")
            if status.st_size != expected["size"]:
                raise DamagedError(f"{name} has {status.st_size} bytes, {expected['size']} were written")
            if reads and _digest_of_file(path) != expected["sha256"]:
                raise DamagedError(f"{name} was altered")
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror}") from None

    def _check_names(self, file: str) -> None:
        """Raises DamagedError unless a file holds the parts of tensors that it is said to hold."""
        parts = [(name, tensor["dtype"], part) for name, tensor in self.tensors.items() for part in tensor["parts"]]
        said = {name: (dtype, part["sizes"]) for name, dtype, part in parts if part["file"] == file}
        try:
            with safe_open(self.folder / file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # it is no dict
                    held = opened.get_slice(name)
                    dtype = (held[:0] if held.get_shape() else opened.get_tensor(name)).dtype
                    if said.pop(name, None) != (str(dtype).removeprefix("torch."), held.get_shape()):
                        raise DamagedError(f"{file} holds {name}, of which {MANIFEST} says something else")
        except SafetensorError as error:
            raise DamagedError(f"{file}: {error}") from None
        for name in said:
            raise DamagedError(f"{file} does not hold {name}")


def flush(path: Path) -> None:
    """Returns when a file, or what a folder lists, is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot do that for folders
            raise
    finally:
        os.close(descriptor)


def _assigned(parts: Sequence[Part], group: CpuGroup) -> set[str]:
    """Names of those that this process writes: each part is written once, and the bytes are spread evenly."""
    everybody = group.all_gather([(part.name, part.offsets, part.sizes, part.of_first) for part in parts])
    holders: dict[tuple, list[int]] = {}
    for rank, held in enumerate(everybody):
        for key in held:
            holders.setdefault(key, []).append(rank)
    load, mine = [0] * group.size, set()
    for key, ranks in sorted(holders.items()):
        writer = ranks[0] if key[3] else min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += math.prod(key[2])
        if writer == group.rank:
            mine.add(key[0])
    return mine


def _together(group: CpuGroup, do: Callable[[], Any]) -> list[Any]:
    """What `do` returned in each process. Raises WriteError in all if it failed in one."""
    result, reason = None, None
    try:
        result = do()
    except Exception as error:  # safetensors has kinds of its own
        reason = str(error) or type(error).__name__
    outcomes = group.all_gather((result, reason))
    reasons = [reason for _, reason in outcomes if reason]
    if reasons:
        raise WriteError(reasons[0])
    return [result for result, _ in outcomes]


def _make_empty(folder: Path) -> None:
    for left in folder.parent.glob(f"{UNFINISHED}*"):  # by a process that was killed
        shutil.rmtree(left)
    folder.mkdir()


def _copied(tensor: Tensor, buffers: dict[str, Tensor], name: str) -> Tensor:
    """A copy on the CPU. Fresh memory costs as much as the copy itself, hence the buffers."""
    buffer = buffers.get(name)
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        buffers[name] = buffer
    return buffer.copy_(tensor)


def _write_shard(path: Path, shard: Shard) -> dict[str, Any]:
    if not shard:
        return {"files": {}, "tensors": {}}
    entries: dict[str, Any] = {}
    for part, tensor in shard:
        position = {"file": path.name, "offsets": part.offsets, "sizes": part.sizes}
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[part.name] = {"shape": part.shape, "dtype": dtype, "parts": [position]}
    save_file({part.name: tensor for part, tensor in shard}, path)
    flush(path)
    file = {"size": path.stat().st_size, "sha256": _digest_of_file(path)}
    return {"files": {path.name: file}, "tensors": entries}


def _publish(aside: Path, folder: Path, content: dict[str, Any]) -> None:
    for name, file in content["files"].items():
        if (aside / name).stat().st_size != file["size"]:  # it went elsewhere
            raise OSError(f"{name} has another size here than where it was written")
    content = json.loads(json.dumps(content))  # as a reader will see it
    text = json.dumps(content | {"sha256": _digest_of_json(content)}, indent=1)
    (aside / MANIFEST).write_text(text + "\n")
    flush(aside / MANIFEST)
    flush(aside)
    if folder.exists():  # of an earlier run, or damaged
        remove(folder)
    aside.rename(folder)
    flush(folder.parent)


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_well_formed(content: dict[str, Any]) -> bool:
    """Whether files and tensors have what `write` says of them."""
    files: Any = content.get("files")
    tensors: Any = content.get("tensors")
    if not _are_dicts(files) or not _are_dicts(tensors):
        return False
    parts = [tensor.get("parts") for tensor in tensors.values()]
    if not all(isinstance(some, list) and _are_dicts(dict(enumerate(some))) for some in parts):
        return False
    return (
        all(_are_sizes([file.get("size")]) and isinstance(file.get("sha256"), str) for file in files.values())
        and all(_are_sizes(tensor.get("shape")) for tensor in tensors.values())
        and all(isinstance(getattr(torch, str(tensor.get("dtype")), None), torch.dtype) for tensor in tensors.values())
        and all(isinstance(part.get("file"), str) for some in parts for part in some)
        and all(_are_sizes(part.get(key)) for some in parts for part in some for key in ("offsets", "sizes"))
    )


def _are_dicts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, dict) for one in value.values())


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def _overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """(starts, ends) of what two ranges share; None if nothing."""
    starts = [max(pair) for pair in zip(offsets, other_offsets)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes)]
    return (starts, ends) if all(start < end for start, end in zip(starts, ends)) else None


def _check_coverage(name: str, tensor: dict[str, Any], files: dict[str, Any]) -> None:
    shape, parts = tensor["shape"], tensor["parts"]
    whole = [0] * len(shape)
    for part in parts:
        if part["file"] not in files:
            raise DamagedError(f"{name}: {part['file']} is not in {MANIFEST}")
        ends = [offset + size for offset, size in zip(part["offsets"], part["sizes"])]
        inside = all(offset >= 0 and end <= size for offset, end, size in zip(part["offsets"], ends, shape))
        if not inside or not len(part["offsets"]) == len(part["sizes"]) == len(whole):
            raise DamagedError(f"{name} has a part outside of it")
    # From part to part along the dimension that is divided most, so that few are compared.
    along = max(range(len(shape)), key=lambda one: len({part["offsets"][one] for part in parts}), default=None)
    reaching: list[dict[str, Any]] = []
    for part in sorted(parts, key=lambda part: part["offsets"][along]) if along is not None else []:
        start = part["offsets"][along]
        reaching = [one for one in reaching if one["offsets"][along] + one["sizes"][along] > start]
        for one in reaching:
            if _overlap(one["offsets"], one["sizes"], part["offsets"], part["sizes"]) is not None:
                raise DamagedError(f"{name} has parts that overlap")
        reaching.append(part)
    if sum(math.prod(part["sizes"]) for part in parts) != math.prod(shape) or not parts:
        raise DamagedError(f"{name} is not there as a whole")
