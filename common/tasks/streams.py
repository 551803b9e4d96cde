"""Streams, which can only be read from front to back, as data sets on disk."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from ..environment import print_once
from ..errors import UsageError
from .mapped import BYTES_PER_BATCH, alone_in, first_process_first

BYTES_PER_FILE = 100_000_000  # a conversion that is killed loses at most so much
ROWS_OF_FIRST_BATCH, MAX_ROWS_PER_BATCH = 16, 1000


def convert_stream(
    stream: Iterable[dict[str, Any]],
    folder: str | Path,
    max_samples: int | None = None,
    bytes_per_file: int = BYTES_PER_FILE,
) -> Any:
    """Writes a stream to Arrow files, once, and returns it as a map-style data set for `fit`.

    Memory holds some megabytes at a time. The first process of each machine writes. A conversion that was killed goes
    on after its last complete file. A larger `max_samples` goes on after the last sample.

    Args:
        stream: gives dicts of numbers, strings, lists, tensors or images, the same in the same order each time: an
            `IterableDataset` of `datasets` or of torch, or any other iterable that can be read again. To go on, one of
            `datasets` jumps to where it was; the others, and shuffled ones, are read from the start.
        folder: for the files of this stream alone. Another stream needs another folder.
        max_samples: convert so many samples; None for all.
        bytes_per_file: about.

    Returns:
        A `datasets.Dataset`, memory-mapped. Its samples are dicts of strings and tensors: float32 or int64, uint8 for
        images.

    Raises:
        UsageError: the stream is empty, or its samples do not make one table.
    """
    import datasets  # not at the top: the import takes seconds

    folder = Path(folder)
    with first_process_first():
        if not _State.read(folder).has(max_samples):
            with alone_in(folder):
                _convert(stream, folder, max_samples, bytes_per_file)
    state = _State.read(folder)
    if state.num_samples == 0:
        raise UsageError(f"{folder}: the stream has no samples")
    files = [datasets.Dataset.from_file(str(_path(folder, number))) for number in range(state.num_files)]
    whole = datasets.concatenate_datasets(files).with_format("torch")
    return whole if max_samples is None else whole.select(range(min(max_samples, len(whole))))


@dataclass
class _State:
    """What is converted: `state.json`, replaced after each file.

    Attributes:
        position: what the stream needs to go on, if it can jump.
    """

    num_samples: int = 0
    num_files: int = 0
    is_complete: bool = False
    position: Any = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        try:
            return cls(**json.loads((folder / "state.json").read_text()))
        except FileNotFoundError:
            return cls()

    def write(self, folder: Path) -> None:
        unfinished = folder / "tmp_state.json"
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(folder / "state.json")

    def has(self, max_samples: int | None) -> bool:
        """Whether so many samples are converted, or all."""
        return self.is_complete or (max_samples is not None and self.num_samples >= max_samples)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.arrow"


def _convert(stream: Any, folder: Path, max_samples: int | None, bytes_per_file: int) -> None:
    state = _State.read(folder)  # again: another run may have written while this one waited
    there = f" ({state.num_samples:,} samples are there)" if state.num_samples else ""
    print_once(f"converting a stream to files in {folder}{there}; later runs read them")
    features = _features(stream, folder, state)
    stream = _undecoded(stream)
    samples = _from(stream, state)
    shows = os.environ.get("RANK", "0") == "0" and sys.stderr.isatty()
    with tqdm(total=max_samples, initial=state.num_samples, unit="sample", disable=not shows) as bar:
        while not state.has(max_samples):
            first = list(islice(samples, 1))
            if first:
                left = None if max_samples is None else max_samples - state.num_samples
                unfinished = folder / "tmp.arrow"
                file = _File(unfinished, features, state.num_samples)
                num_samples = file.write(islice(chain(first, samples), left), bytes_per_file, bar)
                unfinished.replace(_path(folder, state.num_files))
                features = file.features
                position = stream.state_dict() if _can_jump(stream) else None
                state = _State(state.num_samples + num_samples, state.num_files + 1, False, position)
            else:
                state.is_complete = True
            state.write(folder)


def _is_of_datasets(stream: Any) -> bool:
    import datasets

    return isinstance(stream, datasets.IterableDataset)


def _can_jump(stream: Any) -> bool:
    return _is_of_datasets(stream) and not _is_shuffled(getattr(stream, "_ex_iterable", None))


def _is_shuffled(iterable: Any) -> bool:
    """Whether a part of the stream keeps samples in a buffer: they would be lost."""
    parts = [getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", [])]
    return "Shuffled" in type(iterable).__name__ or any(_is_shuffled(part) for part in parts if part is not None)


def _undecoded(stream: Any) -> Any:
    """The stream with images as they are in their files: they are decoded when a sample is read."""
    return stream.decode(False) if _is_of_datasets(stream) and stream.features is not None else stream


def _from(stream: Any, state: _State) -> Iterator[dict[str, Any]]:
    """The samples that are not converted yet."""
    if _can_jump(stream):
        if state.position is not None:
            stream.load_state_dict(state.position)
        return iter(stream)
    return islice(iter(stream), state.num_samples, None)


def _features(stream: Any, folder: Path, state: _State) -> Any:
    """The columns and their types; None if only the first samples will tell."""
    import datasets

    if state.num_files:
        return datasets.Dataset.from_file(str(_path(folder, 0))).features
    return stream.features if _is_of_datasets(stream) else None


class _File:
    """An Arrow file to write.

    Args:
        path: of the file.
        features: the columns and their types; None takes those of the first samples.
        first: the number of the first sample, for messages.
    """

    def __init__(self, path: Path, features: Any, first: int):
        self.path, self.features, self.position = path, features, first

    def write(self, samples: Iterator[dict[str, Any]], num_bytes: int, bar: tqdm) -> int:
        """Writes samples until the file has so many bytes. Returns their number. Raises UsageError."""
        import pyarrow  # type: ignore[import-untyped]  # a dependency of `datasets`

        num_samples, size, writer = 0, ROWS_OF_FIRST_BATCH, None
        with pyarrow.OSFile(str(self.path), "wb") as file:
            while file.tell() < num_bytes and (batch := list(islice(samples, size))):
                table = self._table(batch)
                writer = writer or pyarrow.ipc.new_stream(file, table.schema)
                writer.write_table(table)
                num_samples += len(batch)
                self.position += len(batch)
                bar.update(len(batch))
                size = min(MAX_ROWS_PER_BATCH, max(1, BYTES_PER_BATCH * len(batch) // max(1, table.nbytes)))
            if writer is not None:
                writer.close()
        return num_samples

    def _table(self, batch: list[dict[str, Any]]) -> Any:
        import datasets
        from datasets.table import embed_table_storage

        if not all(isinstance(sample, dict) for sample in batch):
            raise UsageError(f"the stream gives samples of the type {type(batch[0]).__name__}: expected dicts")
        found = dict.fromkeys(name for sample in batch for name in sample)
        if self.features is not None and (strange := found.keys() - set(self.features)):
            raise UsageError(self._misfit(f"a column {min(strange)}, which is not in the first samples"))
        columns = {name: [sample.get(name) for sample in batch] for name in self.features or found}
        try:
            rows = datasets.Dataset.from_dict(columns, features=self.features)
            self.features = rows.features
            return embed_table_storage(rows.data.table)  # the bytes of files that a sample only names
        except (ValueError, TypeError, OverflowError) as error:  # also Arrow's errors
            raise UsageError(self._misfit(str(error).splitlines()[0])) from None

    def _misfit(self, reason: str) -> str:
        return f"the stream's samples from number {self.position} on do not fit the columns of the first: {reason}"
