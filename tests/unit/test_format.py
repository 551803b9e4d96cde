"""Promise: written tensors can be read whole or in ranges; altered files are detected and never executed."""

import json
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.checkpoint.format import DamagedError, WriteError, write_tensors
from common.checkpoint.reader import Reader, check_coverage
from common.checkpoint.writer import own_shard, remove, write
from common.cpu_group import CpuGroup
from common.errors import RunError
from common.parallel.parts import Part
from common.records.unrecorded import Unrecorded
from common.state import TrainState
from support.manifests import changed, rewrite, without

SHARD = "shard_00000.safetensors"
CONTENT = {
    "layout": {"processes": 2, "shares": 1, "stages": 1},
    "identity": {"data": "digits"},
    "schedule": "6a26979296161271",
    "own_flags": {"model": "cnn"},
    "export_dtype": "kept",
    "state": TrainState(step=3, best=0.1, best_metric="loss").state_dict() | Unrecorded().state_dict(),
    "trainer": {
        "num_averaged": 3,
        "loss_scale": {"scale": 2.0},
        "optimizer": {"groups": [{}], "numbers": {"k": "int"}},
    },
    "has_state": True,
}
# Names that the run or the recipe chooses.
FREE = [("identity", "data"), ("own_flags", "model")]
FREE += [("trainer", "loss_scale", "scale"), ("trainer", "optimizer", "numbers", "k")]
MAY_BE_NONE = [("state", "best"), ("state", "best_metric")]


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
    parts = [Part.whole(*item, (0,)) for item in tensors().items()]
    write(tmp_path / "step", own_shard(parts, 0), CONTENT, CpuGroup())
    return tmp_path / "step"


def test_what_was_written_is_read_back(folder: Path) -> None:
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step"]
    reader = Reader.verified(folder, CpuGroup())
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
        part = Part.whole("float", weight[start:end], (0,))
        write(folder / "one", own_shard([part], 0), CONTENT, CpuGroup())
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
    reader = Reader.verified(tmp_path / "parts", CpuGroup())
    assert torch.equal(reader.tensor("float"), tensors()["float"])
    for start, end in ((0, 1), (1, 4), (2, 3), (4, 5)):
        assert torch.equal(reader.tensor("float", (start, 1), (end - start, 3)), tensors()["float"][start:end, 1:4])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(0, 2), (3, 5)], "float is not complete"),
        ([(0, 3), (2, 5)], "float has parts that overlap"),
        ([(0, 3), (2, 4)], "float has parts that overlap"),
    ],
)
def test_ranges_that_do_not_make_the_whole(tmp_path: Path, rows: list, expected: str) -> None:
    in_parts(tmp_path, rows)
    with pytest.raises(DamagedError, match=expected):
        Reader.verified(tmp_path / "parts", CpuGroup())


@pytest.mark.parametrize("grid", [(1024, 1), (1, 1024), (32, 32)])
def test_many_parts_are_checked_one_by_one(grid: tuple[int, int]) -> None:
    sizes = [1024 // grid[0], 1024 // grid[1]]
    parts = [
        {"file": SHARD, "offsets": [row * sizes[0], column * sizes[1]], "sizes": sizes}
        for row in range(grid[0])
        for column in range(grid[1])
    ]
    check_coverage("float", {"shape": [1024, 1024], "parts": parts}, {SHARD: {}})
    parts[-1] = parts[0]
    with pytest.raises(DamagedError, match="overlap"):
        check_coverage("float", {"shape": [1024, 1024], "parts": parts}, {SHARD: {}})


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
        Reader.verified(folder, CpuGroup())
    assert not ran.exists()


def test_replaced_tensor_is_found(folder: Path) -> None:
    def grow(manifest: dict) -> dict:
        manifest["tensors"]["float"]["shape"] = [6, 6]
        return manifest

    rewrite(folder, grow)
    with pytest.raises(DamagedError, match="float is not complete"):
        Reader.verified(folder, CpuGroup())


def places(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """(path, value) of each entry in nested dicts and lists."""
    yield path, value
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []:
        yield from places(item, (*path, key))


def test_manifest_with_an_entry_of_another_type_is_damaged(folder: Path) -> None:
    """Each entry in turn gets each wrong type; the manifest has the right checksum."""
    text = (folder / "manifest.json").read_text()
    wrong = [None, "text", -1, 1.5, True, [], [None], [[1]], {}, {"a": [None]}]
    for path, right in [*places(json.loads(text))][1:]:
        fits = [type(right)] + [int] * (type(right) is float) + [type(None)] * (path in MAY_BE_NONE)
        values = [value for value in wrong if type(value) not in fits or value in ([None], [[1]])]
        for value in values + [-1] * (type(right) is int):
            if path[0] not in ("sha256", "format") and path != ("identity", "data"):
                rewrite(folder, partial(changed, path=path, value=value), json.loads(text))
                with pytest.raises(DamagedError):
                    Reader.verified(folder, CpuGroup())


def test_manifest_that_lacks_an_entry_is_damaged(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    for path, _ in [*places(json.loads(text))][1:]:
        if isinstance(path[-1], str) and path not in (("sha256",), *FREE, *MAY_BE_NONE):
            rewrite(folder, partial(without, path=path), json.loads(text))
            with pytest.raises(DamagedError):
                Reader.verified(folder, CpuGroup())


def test_damaged_manifest_names_the_entry(folder: Path) -> None:
    rewrite(folder, lambda manifest: changed(manifest, ("tensors", "float", "parts", 0, "sizes", 1), "6"))
    expected = "manifest.json: tensors: float: parts: 0: sizes: 1 is missing or not valid"
    with pytest.raises(DamagedError, match=expected):
        Reader.verified(folder, CpuGroup())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensors: tensors.pop("float"), "holds float, which does not match manifest.json"),
        (lambda tensors: tensors.update(other=tensors["float"]), "does not hold other"),
        (lambda tensors: tensors["float"].update(dtype="int32"), "holds float, which does not"),
        (lambda tensors: resize(tensors["float"], [6, 5]), "holds float, which does not"),
        (lambda tensors: resize(tensors["float"], [10**15, 10**15]), "holds float, which does not"),
        (lambda tensors: resize(tensors["empty"], [0, 10**15]), "holds empty, which does not"),
    ],
)
def test_manifest_that_tells_of_other_tensors_than_the_files_hold(
    folder: Path, change: Callable, expected: str
) -> None:
    def apply(manifest: dict) -> dict:
        change(manifest["tensors"])
        return manifest

    rewrite(folder, apply)
    with pytest.raises(DamagedError, match=expected):
        Reader.verified(folder, CpuGroup())


def resize(tensor: dict, shape: list[int]) -> None:
    tensor["shape"] = tensor["parts"][0]["sizes"] = shape


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "[]", '{"sha256": 1}', "\x00"])
def test_manifest_that_is_none(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(DamagedError, match=r"manifest\.json"):
        Reader.verified(folder, CpuGroup())


def test_another_format_is_named(folder: Path) -> None:
    rewrite(folder, lambda manifest: manifest | {"format": "something else"})
    with pytest.raises(DamagedError, match="has the format something else"):
        Reader.verified(folder, CpuGroup())


def test_checkpoint_that_its_run_removes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run keeps few checkpoints. An export reads one that it has verified to its end."""
    reader, check = Reader.verified(folder, CpuGroup()), Reader._check_file
    monkeypatch.setattr(Reader, "_check_file", lambda *arguments: remove(folder) or check(*arguments))
    with pytest.raises(RunError, match=f"{folder} was removed while it was read: type the command again"):
        Reader.verified(folder, CpuGroup())
    assert all(torch.equal(reader.tensor(name), expected) for name, expected in tensors().items())


def test_what_cannot_be_written_leaves_what_was_there(folder: Path) -> None:
    part = Part.whole("float", torch.zeros(1), (0,))
    with pytest.raises(WriteError, match="File name too long"):
        write(folder.with_name("x" * 250), own_shard([part], 0), {}, CpuGroup())
    assert Reader.verified(folder, CpuGroup()).tensors.keys() == tensors().keys()


def test_parts_that_do_not_make_the_whole_are_not_published(folder: Path) -> None:
    half = Part("float", (5, 6), (0, 0), (3, 6), lambda: torch.zeros(3, 6), (0,))
    with pytest.raises(WriteError, match="float is not complete"):
        write(folder, own_shard([half], 0), CONTENT, CpuGroup())
    assert Reader.verified(folder, CpuGroup()).tensors.keys() == tensors().keys()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["step"]


def test_type_that_files_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"safetensors files cannot hold torch\.complex128"):
        write_tensors(tmp_path / "file", {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.complex128)})
