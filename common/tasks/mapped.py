"""Work on a data set that one process of each machine does, once: its result is a memory-mapped file in the cache."""

import hashlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from accelerate import PartialState
from filelock import FileLock
from torch import distributed as dist

from ..environment import print_once

# Work that was killed goes on after its last complete file.
BYTES_PER_FILE = 2**30
BYTES_PER_BATCH = 1_000_000
_numbers = count()  # of the waits in this process; they are the same in all processes, as keys stay in the store


@contextmanager
def first_process_first() -> Iterator[None]:
    """The first process of each machine runs the body of `with`, then the others do: they find what it left on disk.

    The others wait for as long as it takes. A collective, as in Accelerate's `local_main_process_first`, would fail
    after the timeout of the process group.
    """
    machine = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', 0)}"  # a host may have several launchers
    key = f"data/{machine}/{next(_numbers)}"
    if PartialState().is_local_main_process:
        yield
        if dist.is_initialized():
            dist.distributed_c10d._get_default_store().set(key, "done")
        return
    store = dist.distributed_c10d._get_default_store()
    while not store.check([key]):  # the launcher ends this process if the first one fails
        time.sleep(0.1)
    yield


def cache_folder(kind: str) -> Path:
    """The folder for files of one kind, in the cache of `datasets` (the environment variable HF_DATASETS_CACHE)."""
    import datasets  # not at the top: the import takes seconds

    folder = Path(datasets.config.HF_DATASETS_CACHE) / f"accelerate_recipes_{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def progress(title: str) -> Iterator[None]:
    """Prints the title and, in a terminal, shows the progress bars of `datasets`: in the first process only."""
    import datasets

    print_once(title)
    shows = os.environ.get("RANK", "0") == "0" and sys.stderr.isatty()
    (datasets.enable_progress_bars if shows else datasets.disable_progress_bars)()
    yield
    datasets.disable_progress_bars()


def map_once(
    source: Any,
    function: Callable[[dict[str, list[Any]], list[int]], Mapping[str, list[Any]]],
    features: Any,
    key: str,
    num_bytes: int,
    title: str,
) -> Any:
    """`source.map(function)`, done by the first process of each machine and kept on disk for all later runs.

    Memory holds a batch at a time. Work that was killed goes on after the last complete file.

    Args:
        source: a `datasets.Dataset`.
        function: ({column: values of some rows}, their numbers) -> {column: values of as many rows as it likes}.
        features: `datasets.Features` of the result.
        key: names all that the result depends on: the data (the `_fingerprint` of a set that `load_dataset` returned is
            the same in each run), the function, and what it uses, such as a tokenizer.
        num_bytes: the size of what `function` reads, for the sizes of batches and files.
        title: a line to print before the work.

    Returns:
        A `datasets.Dataset`, memory-mapped.
    """
    import datasets

    facts = repr((len(source), key, features))
    folder = cache_folder("maps") / hashlib.sha256(facts.encode()).hexdigest()[:32]
    num_files = min(len(source), -(-num_bytes // BYTES_PER_FILE)) or 1
    bounds = [len(source) * number // num_files for number in range(num_files + 1)]
    paths = {folder / f"{number:05d}.arrow": range(*bounds[number : number + 2]) for number in range(num_files)}
    batch_size = max(1, BYTES_PER_BATCH * len(source) // max(1, num_bytes))
    with first_process_first():
        if not all(path.exists() for path in paths):
            with progress(title), alone_in(folder):
                for number, (path, rows) in enumerate(paths.items(), start=1):
                    _map_file(source, rows, function, features, batch_size, path, f"file {number} of {num_files}")
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(path)) for path in paths])


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Creates the folder, waits until no other run works in it, and removes what killed runs left unfinished."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        for unfinished in folder.glob("tmp*"):
            unfinished.unlink()
        yield


def _map_file(source: Any, rows: range, function: Any, features: Any, batch_size: int, path: Path, title: str) -> None:
    """Maps some rows into a file, which appears when it is complete."""
    source.select(rows).map(
        lambda batch, ids: function(batch, [rows.start + number for number in ids]),
        batched=True,
        with_indices=True,
        batch_size=batch_size,
        remove_columns=source.column_names,
        features=features,
        cache_file_name=str(path),
        load_from_cache_file=True,
        new_fingerprint=f"{path.parent.name}{path.stem}",  # by default a hash of the function, not stable between runs
        desc=title,
    )
