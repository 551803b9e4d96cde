"""Promise: written tensors can be read whole or in ranges; altered files are detected and never executed."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accelerate_recipes.common.checkpoint.format import (
    DamagedError,
    WriteError,
    check_same_model,
    digest_of_file,
    write_tensors,
)
from accelerate_recipes.common.checkpoint.reader import Reader, check_coverage
from accelerate_recipes.common.checkpoint.resume import newest
from accelerate_recipes.common.checkpoint.writer import collect_shards, remove, write
from accelerate_recipes.common.cpu_group import CpuGroup
from accelerate_recipes.common.errors import RunError, UsageError
from accelerate_recipes.common.records.output_dir import checkpoint_name
from accelerate_recipes.common.step.guards import freeze_what_is_not_trained
from accelerate_recipes.common.weights.shards import Shard
from support.manifests import rewrite

SHARD = "shard_00000.safetensors"
CONTENT = {
    "state": {"step": 3, "num_skipped": 0},
    "own_flags": {"model": "cnn"},
    "unrecorded": {"num_taken": 0, "sums": {}},
    "identity": {},
    "trainer": {},
    "schedule": "",
}


def tensors() -> dict[str, Tensor]:
    weight = torch.arange(30.0).view(5, 6)
    return {
        "float": weight,
        "same memory": weight.view(30),
        "transposed": weight.t(),
        "bf16": weight.bfloat16(),
        "integers": torch.arange(4),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    parts = [Shard.whole(*item, (0,)) for item in tensors().items()]
    write(tmp_path / "step", collect_shards(parts, 0), CONTENT, CpuGroup())
    return tmp_path / "step"


def test_what_was_written_is_read_back(folder: Path) -> None:
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step"]
    reader = Reader.open_verified(folder, CpuGroup())
    assert reader.content.items() >= CONTENT.items() and reader.tensors.keys() == tensors().keys()
    for name, expected in tensors().items():
        assert torch.equal(reader.tensor(name), expected) and reader.tensor(name).dtype == expected.dtype
        reader.tensor(name).zero_()  # each read returns a copy
        assert torch.equal(reader.tensor(name), expected)
    assert torch.equal(reader.tensor("float", (1, 2), (3, 4)), tensors()["float"][1:4, 2:6])


def in_parts(folder: Path, rows: list[tuple[int, int]]) -> None:
    """Writes one file for each range of rows of the 5 x 6 tensor, as processes that shard it do."""
    weight = tensors()["float"]
    (folder / "parts").mkdir()
    content: dict = {"files": {}, "tensors": {}}
    for number, (start, end) in enumerate(rows):
        part = Shard.whole("float", weight[start:end], (0,))
        write(folder / "one", collect_shards([part], 0), CONTENT, CpuGroup())
        name = f"shard_{number:05d}.safetensors"
        (folder / "one" / SHARD).rename(folder / "parts" / name)
        one = json.loads((folder / "one" / "manifest.json").read_text())
        content["files"][name] = one["files"][SHARD]
        position = {"file": name, "offsets": [start, 0], "sizes": [end - start, 6]}
        whole = one["tensors"]["float"] | {"shape": [5, 6], "parts": []}
        content["tensors"].setdefault("float", whole)["parts"].append(position)
    rewrite(folder / "parts", lambda manifest: manifest | content, one)


def test_ranges_are_put_together_from_parts(tmp_path: Path) -> None:
    in_parts(tmp_path, [(0, 2), (2, 3), (3, 5)])
    reader = Reader.open_verified(tmp_path / "parts", CpuGroup())
    assert torch.equal(reader.tensor("float"), tensors()["float"])
    for start, end in ((0, 1), (1, 4), (2, 3), (4, 5)):
        assert torch.equal(reader.tensor("float", (start, 1), (end - start, 3)), tensors()["float"][start:end, 1:4])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0, 2), (3, 5)], "float is not complete"),
        ([(0, 3), (2, 5)], "float has parts that overlap"),
        ([(0, 3), (2, 4)], "float has parts that overlap"),
        ([(0, 3), (3, 6)], "float has a part outside its shape"),
    ],
)
def test_ranges_that_do_not_make_the_whole(rows: list, expected: str) -> None:
    parts = [{"offsets": [start, 0], "sizes": [end - start, 6]} for start, end in rows]
    with pytest.raises(ValueError, match=expected):
        check_coverage("float", {"shape": [5, 6], "parts": parts})


@pytest.mark.parametrize("grid", [(1024, 1), (1, 1024), (32, 32)])
def test_many_parts_are_checked_one_by_one(grid: tuple[int, int]) -> None:
    sizes = [1024 // grid[0], 1024 // grid[1]]
    parts = [
        {"offsets": [row * sizes[0], column * sizes[1]], "sizes": sizes}
        for row in range(grid[0])
        for column in range(grid[1])
    ]
    check_coverage("float", {"shape": [1024, 1024], "parts": parts})
    parts[-1] = parts[0]
    with pytest.raises(ValueError, match="overlap"):
        check_coverage("float", {"shape": [1024, 1024], "parts": parts})


class Payload:
    def __reduce__(self) -> tuple:
        return Path.touch, (Path("/tmp/accelerate_recipes_payload_ran"),)


def bit_flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", [SHARD, "manifest.json"])
@pytest.mark.parametrize("kind", ["truncated", "flipped early", "flipped late", "deleted", "pickle", "empty"])
def test_altered_file_is_found_and_never_run(folder: Path, file: str, kind: str) -> None:
    path, ran = folder / file, Path("/tmp/accelerate_recipes_payload_ran")
    size = path.stat().st_size
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[: size // 2])
    elif kind.startswith("flipped"):
        bit_flip(path, 0.01 if "early" in kind else 0.9)
    elif kind == "deleted":
        path.unlink()
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Payload()))
    else:
        path.write_bytes(b"")
    with pytest.raises(DamagedError, match=file):
        Reader.open_verified(folder, CpuGroup())
    assert not ran.exists()


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "[]", '{"sha256": 1}', "\x00"])
def test_manifest_that_is_none(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(DamagedError, match=r"manifest\.json"):
        Reader.open_verified(folder, CpuGroup())


@pytest.mark.parametrize(
    "change",
    [
        {"files": {}},
        {"files": []},
        {"files": {SHARD: 3}},
        {"files": {"../" + SHARD: {"size": 1, "xxh3_128": ""}}},
        {"tensors": {}},
        {"tensors": {"float": {"shape": [5, 6], "dtype": "float32", "parts": []}}},
        {"tensors": {"float": {"shape": [5, 6], "dtype": "nn", "parts": []}}},
        {"tensors": {"float": {"shape": 5, "dtype": "float32", "parts": [{}]}}},
        {"tensors": [1]},
    ],
)
def test_manifest_of_other_content(folder: Path, change: dict) -> None:
    rewrite(folder, lambda manifest: manifest | change)
    with pytest.raises(DamagedError, match=r"manifest\.json does not belong to a checkpoint"):
        Reader.open_verified(folder, CpuGroup())


def test_shard_that_its_writer_made_wrong(folder: Path) -> None:
    """Its digest is right: the memory of the machine that wrote it was bad."""
    (folder / SHARD).write_bytes(b"no safetensors")
    rewrite(folder, lambda manifest: manifest | {"files": {SHARD: _facts(folder / SHARD)}})
    with pytest.raises(DamagedError, match="is not a safetensors file"):
        Reader.open_verified(folder, CpuGroup())
    others = {**tensors(), "float": torch.zeros(6, 5)}
    write_tensors(folder / SHARD, {name: tensor.contiguous() for name, tensor in others.items()})
    rewrite(folder, lambda manifest: manifest | {"files": {SHARD: _facts(folder / SHARD)}})
    with pytest.raises(DamagedError, match="and the manifest differ in the shape of float"):
        Reader.open_verified(folder, CpuGroup())


def _facts(path: Path) -> dict:
    return {"size": path.stat().st_size, "xxh3_128": digest_of_file(path)}


def test_pipe_in_place_of_a_manifest_is_not_waited_for(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(DamagedError, match=r"manifest\.json cannot be read"):
        Reader.open_verified(folder, CpuGroup())


def test_what_cannot_be_read_gives_way_to_the_checkpoint_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(1, 4):
        parts = [Shard.whole(*item, (0,)) for item in tensors().items()]
        write(tmp_path / "checkpoints" / checkpoint_name(step), collect_shards(parts, 0), CONTENT, CpuGroup())

    def newest_step() -> str:
        found = newest(tmp_path, Reader.open_verified, CpuGroup())
        assert found is not None
        return found.folder.name

    for step, link in ((3, "/proc/self/mem"), (2, "manifest.json")):  # Input/output error, and a link to itself
        manifest = tmp_path / "checkpoints" / checkpoint_name(step) / "manifest.json"
        manifest.unlink()
        manifest.symlink_to(link)
        assert newest_step() == checkpoint_name(step - 1)
    assert "using the checkpoint before it" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "checkpoints" / checkpoint_name(1))
    with pytest.raises(RunError, match="nothing was changed; try again"):  # no reason to start over
        newest_step()


def test_another_format_is_named(folder: Path) -> None:
    rewrite(folder, lambda manifest: manifest | {"format": "something else"})
    with pytest.raises(DamagedError, match="has format something else"):
        Reader.open_verified(folder, CpuGroup())


def test_checkpoint_that_its_run_removes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run keeps few checkpoints. An export reads one that it has verified to its end."""
    reader, check = Reader.open_verified(folder, CpuGroup()), Reader._check_file
    monkeypatch.setattr(Reader, "_check_file", lambda *arguments: remove(folder) or check(*arguments))
    with pytest.raises(RunError, match=f"{folder} was removed while it was read: run the command again"):
        Reader.open_verified(folder, CpuGroup())
    assert all(torch.equal(reader.tensor(name), expected) for name, expected in tensors().items())


def test_what_cannot_be_written_leaves_what_was_there(folder: Path) -> None:
    part = Shard.whole("float", torch.zeros(1), (0,))
    with pytest.raises(WriteError, match="File name too long"):
        write(folder.with_name("x" * 250), collect_shards([part], 0), {}, CpuGroup())
    assert Reader.open_verified(folder, CpuGroup()).tensors.keys() == tensors().keys()


def test_parts_that_do_not_make_the_whole_are_not_published(folder: Path) -> None:
    half = Shard("float", (5, 6), (0, 0), (3, 6), lambda: torch.zeros(3, 6), (0,))
    with pytest.raises(WriteError, match="float is not complete"):
        write(folder, collect_shards([half], 0), CONTENT, CpuGroup())
    assert Reader.open_verified(folder, CpuGroup()).tensors.keys() == tensors().keys()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step"]


def test_type_that_files_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"safetensors files cannot store torch\.complex128"):
        write_tensors(tmp_path / "file", {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.complex128)})


def test_a_buffer_that_has_become_another_kind_of_number_is_not_cut(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    for dtype in (torch.int64, torch.int32, torch.bool):
        check_same_model(tmp_path, {"count": ([], dtype)}, model)
    line = r"count is torch.float32 in .*, torch.int64 in the model: keep its type in training"
    with pytest.raises(UsageError, match=line):
        check_same_model(tmp_path, {"count": ([], torch.float32)}, model)


class LeavesOut(nn.Linear):
    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict(*arguments, **options).items() if name != "bias"}


def test_a_trained_weight_that_no_checkpoint_would_hold_is_refused() -> None:
    model = LeavesOut(2, 2)
    with pytest.raises(UsageError, match=r"the model's own state_dict\(\) leaves bias out, and checkpoints would"):
        freeze_what_is_not_trained(Accelerator(cpu=True), model, torch.optim.SGD(model.parameters()))
    freeze_what_is_not_trained(Accelerator(cpu=True), model, torch.optim.SGD([model.weight]))  # it is frozen
