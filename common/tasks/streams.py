"""Streams, which can only be read from front to back, as data sets on disk."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .cache import progress_bar, write_once

FIRST_ROWS, MOST_ROWS, BYTES_PER_BATCH = 16, 1000, 1_000_000  # of a batch: memory holds one


def convert_stream(stream: Iterable[dict[str, Any]], folder: str | Path, max_samples: int | None = None) -> Any:
    """Writes a stream to an Arrow file, once, and returns it as a map-style data set for `fit`.

    Memory holds some megabytes at a time. The first process of each machine writes. A conversion that was killed starts
    again.

    Args:
        stream: gives dicts of numbers, strings, lists, tensors or images: an `IterableDataset` of `datasets` or of
            torch, or any other iterable.
        folder: for the files of this stream alone. Another stream needs another folder.
        max_samples: convert so many samples, into a file of their own; None for all.

    Returns:
        A `datasets.Dataset`, memory-mapped. Its samples are dicts of strings and tensors: float32 or int64, uint8 for
        images.

    Raises:
        UsageError: the stream is empty, or its samples do not make one table.
    """
    import datasets  # not at the top: the import takes seconds

    features = None
    if isinstance(stream, datasets.IterableDataset) and stream.features is not None:
        features, stream = stream.features, stream.decode(False)  # images are kept as they are in their files
    part = Path(folder) / ("all" if max_samples is None else str(max_samples))
    return rows_on_disk(part, "converting a stream to files", stream, features, max_samples).with_format("torch")


def rows_on_disk(folder: Path, title: str, rows: Iterable[dict[str, Any]], features: Any, num_rows: int | None) -> Any:
    """Writes rows to an Arrow file, unless an earlier run did. Raises UsageError like `convert_stream`.

    Args:
        folder: for this file alone.
        title: a line to print before the work.
        rows: dicts with the same names.
        features: the columns and their types; None takes those of the first rows.
        num_rows: at most so many; None for all.
    """
    import datasets

    def write(folder: Path) -> None:
        import pyarrow  # type: ignore[import-untyped]  # a dependency of `datasets`

        nonlocal features
        left, size, position, writer = islice(rows, num_rows), FIRST_ROWS, 0, None
        with pyarrow.OSFile(str(folder / "rows.arrow"), "wb") as file, progress_bar(num_rows, "row") as bar:
            while batch := list(islice(left, size)):
                table, features = _table(batch, features, position)
                writer = writer or pyarrow.ipc.new_stream(file, table.schema)
                writer.write_table(table)
                bar.update(len(batch))
                position += len(batch)
                size = min(MOST_ROWS, max(1, BYTES_PER_BATCH * len(batch) // max(1, table.nbytes)))
            if writer is None:
                raise UsageError(f"{folder.parent}: the stream has no samples")
            writer.close()

    write_once(folder, title, write)
    return datasets.Dataset.from_file(str(folder / "rows.arrow"))


def _table(batch: list[dict[str, Any]], features: Any, position: int) -> tuple[Any, Any]:
    """(an Arrow table of these samples, its features). `position`: the number of the first sample, for messages."""
    import datasets
    from datasets.table import embed_table_storage

    if not all(isinstance(sample, dict) for sample in batch):
        raise UsageError(f"the stream gives samples of the type {type(batch[0]).__name__}: expected dicts")
    misfit = f"the stream's samples from number {position} on do not fit the columns of the first"
    found = dict.fromkeys(name for sample in batch for name in sample)
    if features is not None and (strange := found.keys() - set(features)):
        raise UsageError(f"{misfit}: a column {min(strange)}, which is not in the first samples")
    columns = {name: [sample.get(name) for sample in batch] for name in features or found}
    try:
        rows = datasets.Dataset.from_dict(columns, features=features)
        return embed_table_storage(rows.data.table), rows.features  # the bytes of files that a sample only names
    except (ValueError, TypeError, OverflowError) as error:  # also Arrow's errors
        raise UsageError(f"{misfit}: {str(error).splitlines()[0]}") from None
