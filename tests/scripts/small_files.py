"""recipes/transformer.py with exported files of 16 MB at most. Writes how much memory the export takes in process 0."""

import ctypes
import runpy
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

from accelerate_recipes import run
from accelerate_recipes.common.checkpoint import exported, save

M_MMAP_THRESHOLD = -3  # malloc.h
MAX_FILE_BYTES = 16_000_000
recipe = runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "transformer.py"))


def anonymous_bytes() -> int:
    """The memory of this process that is no mapped file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measured(engine: Any, folder: Path, *others: Any) -> int | None:
    done, most, before = Event(), [0], anonymous_bytes()

    def watch() -> None:
        while not done.is_set():
            most.append(max(most.pop(), anonymous_bytes()))
            time.sleep(1e-3)

    watcher = Thread(target=watch)
    watcher.start()
    checksum = exported.export_model(engine, folder, *others)
    done.set()
    watcher.join()
    if engine.accelerator.is_main_process:
        (folder.parent / "export_bytes.txt").write_text(str(most[0] - before))
    return checksum


if __name__ == "__main__":
    # As for tensors above 32 MB: what is freed goes back to the system at once. Else holes in the heap would count.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 100_000)
    exported.MAX_FILE_BYTES, save.export_model = MAX_FILE_BYTES, measured
    run(recipe["main"], recipe["Config"])
