"""Work on data that one process of a machine does once, for all later runs, such as turning streams into data sets."""

import hashlib
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from textwrap import shorten
from typing import Any

from accelerate import PartialState
from filelock import FileLock
from torch import distributed as dist
from tqdm import tqdm

from ..environment import Environment, print_once, rank
from ..errors import UsageError
from ..files import replacing

FIRST_ROWS, MOST_ROWS, BYTES_PER_BATCH = 16, 1000, 1_000_000  # of a batch: memory holds one
_numbers = count()  # of the waits in this process; they are the same in all processes, as keys stay in the store


@contextmanager
def first_process_first() -> Iterator[None]:
    """The first process of each machine runs the body of `with`, then the others do: they find what it left on disk.

    The others wait without limit: a collective, as in Accelerate's `local_main_process_first`, would reach its timeout.
    """
    key = f"data/{socket.gethostname()}/{Environment.read().machine_rank}/{next(_numbers)}"  # for several launchers
    if PartialState().is_local_main_process:
        yield
        if dist.is_initialized():
            dist.distributed_c10d._get_default_store().set(key, "done")
        return
    store = dist.distributed_c10d._get_default_store()
    while not store.check([key]):  # the launcher ends this process if the first one fails
        time.sleep(0.1)
    yield


def cache_folder(*facts: object) -> Path:
    """The folder for the result that depends on these facts, in the cache of `datasets` (HF_DATASETS_CACHE)."""
    import datasets  # not at the top: the import takes seconds

    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    return Path(datasets.config.HF_DATASETS_CACHE) / "accelerate_recipes" / digest


def write_once(folder: Path, title: str, write: Callable[[Path], None]) -> None:
    """Prints a title and calls `write` with an empty folder, in the first process of each machine, unless an earlier
    run did. The folder gets its name when it is complete."""
    with first_process_first():
        if folder.exists():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # another run may write it
            if folder.exists():
                return
            print_once(f"{title}; later runs read the result from {folder}")
            with replacing(folder) as unfinished:
                write(unfinished)


def progress_bar(total: int | None, unit: str) -> tqdm:
    """A progress bar, in a terminal: of the first process only."""
    return tqdm(total=total, unit=unit, unit_scale=True, disable=not (rank() == 0 and sys.stderr.isatty()))


def convert_stream(stream: Iterable[dict[str, Any]], folder: str | Path, max_samples: int | None = None) -> Any:
    """Writes a stream to an Arrow file, once, and returns it as a map-style dataset for `fit`: a `datasets.Dataset`,
    memory-mapped, whose samples are dicts of strings and tensors: float32 or int64, uint8 for images.

    Memory holds some megabytes at a time. The first process of each machine writes. A conversion that was killed starts
    again. Raises UsageError if the stream is empty, or its samples do not make one table.

    Args:
        stream: gives dicts of numbers, strings, lists, tensors or images: an `IterableDataset` of `datasets` or of
            torch, or any other iterable.
        folder: only for the files of this stream. Another stream needs another folder.
        max_samples: convert at most this many samples, into a separate file; None for all.
    """
    import datasets  # not at the top: the import takes seconds

    features = None
    if isinstance(stream, datasets.IterableDataset) and stream.features is not None:
        features, stream = stream.features, stream.decode(False)  # keeps images as in their files
    part = Path(folder) / ("all" if max_samples is None else str(max_samples))
    return rows_on_disk(part, "converting a stream to files", stream, features, max_samples).with_format("torch")


def rows_on_disk(folder: Path, title: str, rows: Iterable[dict[str, Any]], features: Any, num_rows: int | None) -> Any:
    """Writes rows to an Arrow file, unless an earlier run did. Raises UsageError like `convert_stream`.

    Args:
        folder: only for this file.
        title: a line to print before the work.
        rows: dicts with the same names.
        features: the columns and their types; None: as in the first rows.
        num_rows: the most rows to write; None for all.
    """
    import datasets

    def write(folder: Path) -> None:
        import pyarrow  # type: ignore[import-untyped]  # a dependency of `datasets`

        left, size, position, writer, schema = islice(rows, num_rows), FIRST_ROWS, 0, None, None
        with pyarrow.OSFile(str(folder / "rows.arrow"), "wb") as file, progress_bar(num_rows, "row") as bar:
            while batch := list(islice(left, size)):
                table = _table(batch, features, schema, position)
                schema = schema or table.schema
                writer = writer or pyarrow.ipc.new_stream(file, schema)
                writer.write_table(table)
                bar.update(len(batch))
                position += len(batch)
                size = min(MOST_ROWS, max(1, BYTES_PER_BATCH * len(batch) // max(1, table.nbytes)))
            if writer is None:
                raise UsageError(f"{folder.parent}: the stream has no samples")
            writer.close()

    write_once(folder, title, write)
    return datasets.Dataset.from_file(str(folder / "rows.arrow"))


def _table(batch: list[dict[str, Any]], features: Any, schema: Any, position: int) -> Any:
    """An Arrow table of these samples. `features`: as in `rows_on_disk`; `schema`: of the first samples, None for them;
    `position`: the number of the first sample, for messages."""
    import datasets
    from datasets.table import embed_table_storage, table_cast

    if not all(isinstance(sample, dict) for sample in batch):
        raise UsageError(f"the stream gives samples of the type {type(batch[0]).__name__}: expected dicts")
    misfit = f"samples {position} and later of the stream do not fit the columns of the first"
    found = dict.fromkeys(name for sample in batch for name in sample)
    known = schema.names if schema else features or found
    if strange := found.keys() - set(known):
        raise UsageError(f"{misfit}: a column {min(strange)}, which is not in the first samples")
    columns = {name: [sample.get(name) for sample in batch] for name in known}
    try:
        rows = datasets.Dataset.from_dict(columns, features=features)
        table = embed_table_storage(rows.data.table)  # the bytes of files that a sample only names
        return table_cast(table, schema) if schema else table  # features would cut 1.5 to 1
    except (ValueError, TypeError, OverflowError) as error:  # also Arrow's errors
        raise UsageError(f"{misfit}: {shorten(str(error), 200, placeholder=' ...')}") from None
