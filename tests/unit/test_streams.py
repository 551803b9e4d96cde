"""Promise: a stream becomes a data set on disk, once, in bounded memory."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import PIL.Image
import pytest
import torch
from datasets import Dataset, Image, load_dataset
from filelock import FileLock
from torch.utils.data import IterableDataset

from accelerate_recipes.common.data.batches import fetch
from accelerate_recipes.common.data.sets import check_datasets
from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.tasks.reading.sources import load_tables
from accelerate_recipes.common.tasks.streams import convert_stream
from support.launching import environment, until
from support.runs import ROOT

pytestmark = pytest.mark.xdist_group("streams")  # a group starts before single tests: these take 20 s


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
    converted = convert_stream(stream, tmp_path / "files")
    batch, expected = fetch(converted, [5, 2999]), list(stream)
    assert len(converted) == 3000
    assert torch.equal(batch["x"], torch.stack([expected[5]["x"], expected[2999]["x"]]))
    assert batch["x"].dtype == torch.float32 and batch["y"].tolist() == [5, 2999]
    assert batch["name"] == ["sample 5", "sample 2999"]
    assert check_datasets(converted, converted, None)[0] is converted


def test_second_conversion_reads_nothing(tmp_path: Path) -> None:
    stream = Numbers(3000)
    for _ in range(2):
        assert convert_stream(stream, tmp_path / "files", 700)["y"][:].tolist() == list(range(700))
        assert stream.num_read == 700
    assert convert_stream(stream, tmp_path / "files")["y"][:].tolist() == list(range(3000))


@pytest.mark.parametrize("shuffles", [False, True])
def test_a_stream_of_datasets(tmp_path: Path, parquet: Path, shuffles: bool) -> None:
    stream = load_dataset(str(parquet), streaming=True, cache_dir=str(tmp_path / "cache"))["train"]
    stream = stream.shuffle(seed=1, buffer_size=50) if shuffles else stream
    converted = convert_stream(stream.map(lambda row: row), tmp_path / "files", 1700)
    assert converted["id"][:].tolist() == [row["id"] for row in stream.take(1700)]


def test_images_are_kept_as_they_are_in_their_files(tmp_path: Path) -> None:
    (tmp_path / "set" / "cat").mkdir(parents=True)
    path = tmp_path / "set" / "cat" / "1.jpg"
    PIL.Image.effect_noise((20, 20), 50).save(path)
    stream = load_dataset(str(tmp_path / "set"), streaming=True, cache_dir=str(tmp_path / "cache"))["train"]
    converted = convert_stream(stream, tmp_path / "files")
    content = path.read_bytes()
    path.unlink()
    assert converted.cast_column("image", Image(decode=False))[0]["image"]["bytes"] == content
    assert fetch(converted, [0])["image"].dtype == torch.uint8


KILLED = """
import sys, time
from accelerate_recipes.common.tasks.streams import convert_stream
def slow():
    for number in range(300):
        time.sleep(0.01)
        yield {"id": number}
convert_stream(slow(), sys.argv[1])
"""


def test_killed_conversion_starts_again(tmp_path: Path) -> None:
    files = tmp_path / "files"
    command = [sys.executable, "-c", KILLED, str(files)]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL) as process:
        until(lambda: (files / "all.unfinished" / "rows.arrow").exists() or process.poll() is not None)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not (files / "all").exists()
    converted = convert_stream(({"id": number} for number in range(300)), files)
    assert converted["id"][:].tolist() == list(range(300))
    assert not (files / "all.unfinished").exists()


def test_max_samples_of_a_data_set(tmp_path: Path, parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    train, test = load_tables(str(parquet), "", max_samples=1200)
    assert [*train.values("id")] == list(range(1200)) and [*test.values("text")] == ["test"]
    assert train.key == load_tables(str(parquet), "", max_samples=1200)[0].key
    (alone,) = load_tables(str(parquet / "train-00001-of-00003.parquet"), "", max_samples=5)
    assert [*alone.values("id")] == list(range(1000, 1005))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], "the stream has no samples"),
        ([(1, 2)], "the stream gives samples of the type tuple: expected dicts"),
        ([{"a": 1}] * 20 + [{"a": "x"}], "samples 16 and later of the stream do not fit the columns of the first"),
        ([{"a": 1}] * 20 + [{"a": 1.5}], "samples 16 and later of the stream do not fit the columns of the first"),
        ([{"a": 1}] * 20 + [{"b": 1}], "a column b, which is not in the first samples"),
        ([{"a": 1}] * 20 + [{"a": 1, "b": 1}], "a column b, which is not in the first samples"),
    ],
)
def test_bad_streams(tmp_path: Path, samples: list[Any], expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        convert_stream(samples, tmp_path / "files")


def test_a_sample_may_lack_a_column(tmp_path: Path) -> None:
    converted = convert_stream([{"a": 1, "b": "x"}, {"a": 2}, *[{"a": 3.0}] * 20], tmp_path / "files")
    assert converted["a"][:].tolist() == [1, 2, *[3] * 20] and converted["b"][:2] == ["x", None]


def test_a_stream_in_fit_is_told_how_to_convert() -> None:
    with pytest.raises(
        UsageError,
        match=re.escape("type convert_stream(dataset, FOLDER), from accelerate_recipes.common.tasks.streams"),
    ):
        check_datasets(Numbers(5), Numbers(5), None)  # type: ignore[arg-type]  # that is the mistake


def test_a_run_waits_for_another_that_converts(tmp_path: Path) -> None:
    other = Thread(target=convert_stream, args=([{"a": 1}], tmp_path / "files"), daemon=True)
    (tmp_path / "files").mkdir()
    with FileLock(tmp_path / "files" / "all.lock"):
        other.start()
        other.join(0.5)
        assert other.is_alive() and not list(tmp_path.rglob("*.arrow"))
    other.join(30)
    assert len(convert_stream([], tmp_path / "files")) == 1
