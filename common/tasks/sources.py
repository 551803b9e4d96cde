"""Datasets of the Hub, and data files in the scikit-learn package."""

import hashlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError, first_line
from .mapped import cache_folder, first_process_first
from .streams import convert_stream

# {end of a file's name: its kind for `datasets`}
KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def sklearn_file(name: str) -> Path:
    """Path of a data file in the scikit-learn package: real data, no download, and no import of the package."""
    package = find_spec("sklearn")
    assert package is not None and package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0]) / "datasets" / "data" / name


def hold_out(num_samples: int, num_held_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids of the rest, ids of the held-out samples), in a random order that is the same in each run."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(0))
    return order[num_held_out:], order[:num_held_out]


def load_splits(data: str, advice: str, max_samples: int | None = None) -> list[Any]:
    """The training split and, if there is one, the evaluation split of a dataset, each a `datasets.Dataset`.

    Args:
        data: Hub id, or a folder in the Hub's layout, or a .csv, .jsonl or .parquet file.
        advice: end of the error message: what to type instead.
        max_samples: read so many rows of each split as a stream, without downloading the rest, and keep them on disk.

    Raises:
        UsageError: no data, no network, or no training split.
    """
    if max_samples is not None:
        splits = _streamed(data, advice, max_samples)
    else:
        # The first process of each machine downloads and converts. The others then read the cache.
        with first_process_first():
            splits = _loaded(data, advice, "load_dataset")
    return [splits[name] for name in _names(data, splits)]


def _names(data: str, splits: Iterable[str]) -> list[str]:
    """The names of the training split and, if there is one, of the evaluation split. Raises UsageError."""
    names = list(splits)
    if "train" not in names:
        raise UsageError(f"--data {data}: expected a train split, found {', '.join(names)}")
    return ["train", *[name for name in ("test", "validation", "valid") if name in names][:1]]


def _streamed(data: str, advice: str, max_samples: int) -> dict[str, Any]:
    builder = _loaded(data, advice, "load_dataset_builder")
    streams = builder.as_streaming_dataset()
    folder = cache_folder("streams") / hashlib.sha256(builder.cache_dir.encode()).hexdigest()[:32]
    return {
        name: convert_stream(streams[name], folder / name, max_samples).with_format(None)
        for name in _names(data, streams)
    }


def _loaded(data: str, advice: str, function: str) -> Any:
    """What this function of `datasets` returns for the data. Raises UsageError."""
    import datasets  # not at the top: the import takes seconds

    datasets.disable_progress_bars()
    path = Path(data).expanduser()
    if path.suffix in KINDS and not path.is_file():
        raise UsageError(f"--data {data}: no such file; {advice}")
    try:
        if path.is_file():
            return getattr(datasets, function)(KINDS.get(path.suffix, "json"), data_files=str(path))
        return getattr(datasets, function)(str(path) if path.is_dir() else data)
    except Exception as error:  # the library and its network stack raise dozens of types
        reason = first_line(error.__cause__ or error)
        if path.exists():
            raise UsageError(f"--data {data}: the files cannot be read ({reason})") from None
        raise UsageError(
            f"--data {data}: no such folder, and loading from the Hub failed ({reason}); {advice}"
        ) from None
