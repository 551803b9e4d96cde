"""Work on a data set that one process of each machine does, once: its result stays on disk for all later runs."""

import hashlib
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from accelerate import PartialState
from filelock import FileLock
from torch import distributed as dist
from tqdm import tqdm

from ..environment import Environment, print_once, rank
from ..files import replace_folder

_numbers = count()  # of the waits in this process; they are the same in all processes, as keys stay in the store


@contextmanager
def first_process_first() -> Iterator[None]:
    """The first process of each machine runs the body of `with`, then the others do: they find what it left on disk.

    The others wait for as long as it takes. A collective, as in Accelerate's `local_main_process_first`, would fail
    after the timeout of the process group.
    """
    machine = f"{socket.gethostname()}/{Environment.read().machine_rank}"  # a host may have several launchers
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


def cache_folder(*facts: object) -> Path:
    """The folder for the result that depends on these facts, in the cache of `datasets` (HF_DATASETS_CACHE)."""
    import datasets  # not at the top: the import takes seconds

    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    return Path(datasets.config.HF_DATASETS_CACHE) / "accelerate_recipes" / digest


def write_once(folder: Path, title: str, write: Callable[[Path], None]) -> None:
    """Calls `write` with an empty folder, in the first process of each machine, unless an earlier run did.

    The folder gets its name when it is complete. Work that was killed starts again.

    Args:
        folder: for the result.
        title: a line to print before the work.
        write: writes files into a folder.
    """
    with first_process_first():
        if folder.exists():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # another run may write it
            if folder.exists():
                return
            print_once(f"{title}; later runs read the result from {folder}")
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            write(unfinished)
            replace_folder(unfinished, folder)


def progress_bar(total: int | None, unit: str) -> tqdm:
    """A progress bar, in a terminal: of the first process only."""
    shows = rank() == 0 and sys.stderr.isatty()
    return tqdm(total=total, unit=unit, unit_scale=True, disable=not shows)
