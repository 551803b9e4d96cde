"""Writes the files of a checkpoint: each process its shards, the first process the manifest."""

import heapq
import json
import math
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cpu_group import CpuGroup
from ..files import flush
from ..weights.shards import Shard
from .format import FORMAT, MANIFEST, WriteError, digest_of_file, digest_of_json, write_tensors
from .reader import check_coverage

UNFINISHED = "unfinished_"

OwnShards = list[tuple[Shard, Tensor]]


def collect_shards(held: Sequence[Shard], rank: int, buffers: dict[str, Tensor] | None = None) -> OwnShards:
    """The shards that this process writes, of those that it holds, with their tensors on the CPU. Exactly one of the
    processes that hold a shard writes it; all know which one, without asking the others. `buffers`: {name: tensor} for
    copies, kept for the next save; missing buffers are added. Without it, the result may share memory with the weights:
    they must not change until it is written."""
    mine, own = assign(held, rank), []
    for shard in held:
        tensor = shard.get()
        if shard.name not in mine:
            continue
        tensor = tensor.detach()
        own.append((shard, tensor.cpu().contiguous() if buffers is None else _copy(tensor, buffers, shard.name)))
    return own


def assign(held: Sequence[Shard], rank: int) -> set[str]:
    """Names of the shards that a process writes: each shard is written once, and the load is spread evenly."""
    shared: dict[Sequence[int], list[Shard]] = {}
    for shard in held:
        shared.setdefault(shard.writers, []).append(shard)
    mine = set()
    for writers, alike in shared.items():
        loads = [(0, writer) for writer in writers[: len(alike)]]
        for size, name in sorted((-math.prod(shard.sizes), shard.name) for shard in alike):
            load, writer = loads[0]
            heapq.heapreplace(loads, (load - size, writer))
            if writer == rank:
                mine.add(name)
    return mine


def write(folder: Path, shards: OwnShards, content: dict[str, Any], group: CpuGroup) -> None:
    """Writes a folder, and its parent if it is missing, with the shards of all processes, which share the file system.
    Each process writes the shards from its own `collect_shards`. The folder gets its name only when everything is on
    the disk. Raises WriteError if a file could not be written; then an earlier checkpoint is unchanged. `content`: the
    first process's JSON for the manifest; `Reader.content` returns it."""
    # A different name for each: a network file system may return an earlier folder of the same name.
    aside, is_first = folder.with_name(f"{UNFINISHED}{folder.name}"), group.rank == 0
    file = aside / f"shard_{group.rank:05d}.safetensors"
    try:
        _together(group, lambda: _make_empty(aside) if is_first else None)
        manifests = group.gather(_together(group, lambda: _write_shards(file, shards)))
        _together(group, lambda: _publish(aside, folder, content, manifests) if is_first else None)
    except WriteError:
        if is_first:  # the next checkpoint needs the disk space
            shutil.rmtree(aside, ignore_errors=True)
        raise


def remove(folder: Path) -> None:
    """Renames a folder, then removes it: no half-removed folder has its name. Raises OSError."""
    if (aside := folder.with_name("removed")).exists():  # left by a process that was killed
        shutil.rmtree(aside)
    folder.rename(aside)
    shutil.rmtree(aside)


def _together(group: CpuGroup, do: Callable[[], Any]) -> Any:
    """Calls `do` in each process; returns its result. Raises WriteError in all processes if one fails."""
    result, reason = None, None
    try:
        result = do()
    except Exception as error:  # any: the others wait for this process
        reason = str(error) or type(error).__name__
    for found in filter(None, group.all_gather(reason)):
        raise WriteError(found)
    return result


def _make_empty(folder: Path) -> None:
    if not folder.parent.exists():
        folder.parent.mkdir()  # without parents: an output_dir that was removed stays removed
        flush(folder.parent.parent)
    for left in folder.parent.glob(f"{UNFINISHED}*"):  # left by a killed process
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()
    folder.mkdir()


def _copy(tensor: Tensor, buffers: dict[str, Tensor], name: str) -> Tensor:
    """A copy on the CPU. Fresh memory costs as much as the copy itself, hence the buffers."""
    buffer = buffers.get(name)
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        buffer = buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return buffer.copy_(tensor)


def _write_shards(path: Path, shards: OwnShards) -> dict[str, Any]:
    if not shards:
        return {"files": {}, "tensors": {}}
    entries: dict[str, Any] = {}
    for shard, tensor in shards:
        position = {"file": path.name, "offsets": shard.offsets, "sizes": shard.sizes}
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[shard.name] = {"shape": shard.shape, "dtype": dtype, "parts": [position]}
    write_tensors(path, {shard.name: tensor for shard, tensor in shards})
    with ThreadPoolExecutor(1) as thread:
        flushed = thread.submit(flush, path)  # meanwhile the digest is computed
        file = {"size": path.stat().st_size, "xxh3_128": digest_of_file(path)}
        flushed.result()
    return {"files": {path.name: file}, "tensors": entries}


def _publish(aside: Path, folder: Path, content: dict[str, Any], manifests: list[dict[str, Any]]) -> None:
    files, tensors = dict[str, Any](), dict[str, Any]()
    for own in manifests:
        files |= own["files"]
        for name, tensor in own["tensors"].items():
            tensors.setdefault(name, tensor | {"parts": []})["parts"] += tensor["parts"]
    for name, file in files.items():
        if (aside / name).stat().st_size != file["size"]:  # the processes do not share this folder
            raise OSError(f"{name} has a different size in process 0 than in the process that wrote it")
    for name, tensor in tensors.items():
        check_coverage(name, tensor)
    # The content as a reader will load it.
    content = json.loads(json.dumps({"format": FORMAT, **content, "files": files, "tensors": tensors}))
    # No indent: it would take five times as long.
    (aside / MANIFEST).write_text(json.dumps(content | {"sha256": digest_of_json(content)}) + "\n", encoding="utf-8")
    flush(aside / MANIFEST)
    flush(aside)
    if folder.exists():  # of an earlier run, or damaged
        remove(folder)
    aside.rename(folder)
    flush(folder.parent)
