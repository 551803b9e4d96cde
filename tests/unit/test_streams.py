"""Promise: a stream becomes a data set on disk, in bounded memory; a conversion that was killed goes on."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from datasets import Dataset, load_dataset
from torch.utils.data import IterableDataset

from common.data.batches import checked_datasets, fetch
from common.errors import UsageError
from common.tasks import mapped
from common.tasks.sources import load_splits
from common.tasks.streams import convert_stream
from support.launching import environment, until
from support.runs import ROOT

pytestmark = pytest.mark.xdist_group("streams")  # a group starts before single tests: these take 20 s

SMALL = 20_000  # bytes of a file


class Numbers(IterableDataset):
    """Samples with a tensor, a number and a name. Counts those that were read."""

    def __init__(self, size: int):
        self.size, self.num_read = size, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.size):
            self.num_read += 1
            yield {"x": torch.full((3, 2), number / 2), "y": number, "name": f"sample {number}"}


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """A folder in the Hub's layout: three training files and a test file."""
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(3):
        rows = range(1000 * number, 1000 * (number + 1))
        rows_of_file = Dataset.from_dict({"id": list(rows), "text": [f"row {row} " * 5 for row in rows]})
        rows_of_file.to_parquet(str(folder / f"train-{number:05d}-of-00003.parquet"))
    Dataset.from_dict({"id": [7], "text": ["test"]}).to_parquet(str(folder / "test-00000-of-00001.parquet"))
    return folder


def test_samples_are_those_of_the_stream(tmp_path: Path) -> None:
    stream = Numbers(3000)
    converted = convert_stream(stream, tmp_path / "files", bytes_per_file=SMALL)
    assert len(converted) == 3000 and len(list((tmp_path / "files").glob("*.arrow"))) > 2
    batch, expected = fetch(converted, [5, 2999]), list(stream)
    assert torch.equal(batch["x"], torch.stack([expected[5]["x"], expected[2999]["x"]]))
    assert batch["x"].dtype == torch.float32 and batch["y"].tolist() == [5, 2999]
    assert batch["name"] == ["sample 5", "sample 2999"]
    assert checked_datasets(converted, converted, None)[0] is converted


def test_second_conversion_reads_nothing_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    stream = Numbers(3000)
    assert len(convert_stream(stream, tmp_path / "files", 700, SMALL)) == 700
    assert stream.num_read == 700
    for size in (700, 20):
        assert convert_stream(stream, tmp_path / "files", size, SMALL)["y"][:].tolist() == list(range(size))
    assert stream.num_read == 700
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "files").glob("*.arrow")}
    assert convert_stream(stream, tmp_path / "files", None, SMALL)["y"][:].tolist() == list(range(3000))
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())


def test_a_stream_of_datasets_jumps_to_where_it_was(tmp_path: Path, parquet: Path) -> None:
    seen: list[int] = []
    for size in (400, 1700, None):
        stream = load_dataset(str(parquet), streaming=True, cache_dir=str(tmp_path / "cache"))["train"]
        stream = stream.map(lambda row: seen.append(row["id"]) or row)
        converted = convert_stream(stream, tmp_path / "files", size, SMALL)
        assert converted["id"][:].tolist() == list(range(size or 3000))
    assert seen == list(range(3000))


def test_a_shuffled_stream_loses_no_sample(tmp_path: Path, parquet: Path) -> None:
    """If it jumps, the samples in the buffer of the shuffle are lost."""
    for size in (400, None):
        stream = load_dataset(str(parquet), streaming=True, cache_dir=str(tmp_path / "cache"))["train"]
        stream = stream.shuffle(seed=1, buffer_size=50).map(lambda row: row)
        converted = convert_stream(stream, tmp_path / "files", size, SMALL)
    assert converted["id"][:].tolist() == [row["id"] for row in stream]


KILLED = """
import sys, time
from datasets import load_dataset
from common.tasks.streams import convert_stream
stream = load_dataset(sys.argv[1], streaming=True, cache_dir=sys.argv[2] + "/cache")["train"]
def slow(row):
    time.sleep(0.001)
    return row
convert_stream(stream.map(slow), sys.argv[2] + "/files", bytes_per_file=20_000)
"""


def test_killed_conversion_goes_on(tmp_path: Path, parquet: Path) -> None:
    files = tmp_path / "files"
    command = [sys.executable, "-c", KILLED, str(parquet), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL) as process:
        until(lambda: (files / "state.json").exists() or process.poll() is not None)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    state = json.loads((files / "state.json").read_text())
    assert 0 < state["num_samples"] < 3000 and not state["is_complete"]
    before = {number: (files / f"{number:05d}.arrow").stat().st_mtime_ns for number in range(state["num_files"])}
    stream = load_dataset(str(parquet), streaming=True, cache_dir=str(tmp_path / "cache"))["train"]
    seen = []
    converted = convert_stream(stream.map(lambda row: seen.append(row["id"]) or row), files, bytes_per_file=SMALL)
    assert converted["id"][:].tolist() == list(range(3000))
    assert seen == list(range(state["num_samples"], 3000))
    assert all((files / f"{number:05d}.arrow").stat().st_mtime_ns == time for number, time in before.items())
    assert not list(files.glob("tmp*"))


def test_max_samples_of_a_data_set(tmp_path: Path, parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.tasks.sources.cache_folder", lambda kind: tmp_path / kind)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    train, test = load_splits(str(parquet), "", max_samples=1200)
    assert train["id"][:] == list(range(1200)) and test["text"][:] == ["test"]
    assert train._fingerprint == load_splits(str(parquet), "", max_samples=1200)[0]._fingerprint
    (alone,) = load_splits(str(parquet / "train-00001-of-00003.parquet"), "", max_samples=5)
    assert alone["id"][:] == list(range(1000, 1005))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], "the stream has no samples"),
        ([(1, 2)], "the stream gives samples of the type tuple: expected dicts"),
        ([{"a": 1}] * 20 + [{"a": "x"}], "the stream's samples from number 16 on do not fit the columns of the first"),
        ([{"a": 1}] * 20 + [{"b": 1}], "a column b, which is not in the first samples"),
    ],
)
def test_bad_streams(tmp_path: Path, samples: list[Any], expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        convert_stream(samples, tmp_path / "files")


def test_a_stream_in_fit_is_told_how_to_convert() -> None:
    with pytest.raises(UsageError, match=re.escape("type convert_stream(dataset, FOLDER), from common.tasks.streams")):
        checked_datasets(Numbers(5), Numbers(5), None)  # type: ignore[arg-type]  # that is the mistake


def test_a_run_waits_for_another_that_converts(tmp_path: Path) -> None:
    other = Thread(target=convert_stream, args=([{"a": 1}], tmp_path / "files"), daemon=True)
    with mapped.alone_in(tmp_path / "files"):
        other.start()
        other.join(0.5)
        assert other.is_alive() and not list(tmp_path.rglob("*.arrow"))
    other.join(30)
    assert len(convert_stream([], tmp_path / "files")) == 1
