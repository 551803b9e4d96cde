"""Datasets of the Hub or in files: their training split and their evaluation split."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import RunError, UsageError, first_line
from .cache import cache_folder, first_process_first
from .mixture import weights_of
from .streams import convert_stream

# {end of a file's name: its kind for `datasets`}
KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def hold_out(num_samples: int, one_in: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids of the rest, ids of the held-out samples, one in so many): a random order that is the same in each run."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(0))
    num_held_out = max(1, num_samples // one_in)
    return order[num_held_out:], order[:num_held_out]


def load_splits(data: str, advice: str, max_samples: int | None = None) -> list[Any]:
    """The training split and, if there is one, the evaluation split of a dataset, each a `datasets.Dataset`.

    Args:
        data: Hub id, or a folder in the Hub's layout, or a .csv, .jsonl or .parquet file.
        advice: end of the error message: what to type instead.
        max_samples: read so many rows of each split as a stream, without downloading the rest, and keep them on disk.

    Raises:
        UsageError: no data, no network, no training split, or a split without rows.
    """
    import datasets  # not at the top: the import takes seconds

    if weights_of(data) is not None:
        raise UsageError(f"--data {data}: this recipe takes one source: type it without a weight")
    path = Path(data).expanduser()
    if path.suffix in KINDS and not path.is_file():
        raise UsageError(f"--data {data}: no such file; {advice}")
    where: tuple[str, str | None] = str(path) if path.is_dir() else data, None
    if path.is_file():
        if path.stat().st_size == 0:
            raise UsageError(f"--data {data} is empty: expected rows")
        where = KINDS.get(path.suffix, "json"), str(path)
    with _errors_in_one_line(data, advice):
        if max_samples is None:
            # The first process of each machine downloads and converts. The others then read the cache.
            with first_process_first():
                splits = datasets.load_dataset(where[0], data_files=where[1])
        else:
            builder = datasets.load_dataset_builder(where[0], data_files=where[1])
            streams = builder.as_streaming_dataset()
            splits = {
                name: convert_stream(streams[name], cache_folder(builder.cache_dir, name), max_samples)
                for name in _names(data, streams)
            }
    names = _names(data, splits)
    for name in names:
        if len(splits[name]) == 0:
            raise UsageError(f"--data {data}: the {name} split has no rows")
    return [splits[name].with_format(None) for name in names]


def check_columns(data: str, split: Any, columns: dict[str, str]) -> None:
    """Raises UsageError unless the split has these columns, {flag that names a column: its name}."""
    for flag, name in columns.items():
        if name not in split.column_names:
            raise UsageError(
                f"--data {data} has no column {name}: type {flag} with one of {', '.join(split.column_names)}"
            )


def check_not_streamed(max_samples: int | None) -> None:
    """Raises UsageError if embedded data are to be read as a stream."""
    if max_samples is not None:
        raise UsageError("--max_samples reads a data set of the Hub or a file: type --data, too")


def _names(data: str, splits: Iterable[str]) -> list[str]:
    """The names of the training split and, if there is one, of the evaluation split. Raises UsageError."""
    names = list(splits)
    if "train" not in names:
        raise UsageError(f"--data {data}: expected a train split, found {', '.join(names)}")
    return ["train", *[name for name in ("test", "validation", "valid") if name in names][:1]]


@contextmanager
def _errors_in_one_line(data: str, advice: str) -> Iterator[None]:
    """Makes one UsageError of what `datasets` raises and logs."""
    import datasets

    datasets.disable_progress_bars()
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    except RunError:
        raise
    except Exception as error:  # the library and its network stack raise dozens of types
        reason = first_line(error.__cause__ or error)
        if Path(data).expanduser().exists():
            raise UsageError(f"--data {data}: the files cannot be read ({reason})") from None
        raise UsageError(
            f"--data {data}: no such folder, and loading from the Hub failed ({reason}); {advice}"
        ) from None
    finally:
        datasets.logging.set_verbosity(verbosity)
