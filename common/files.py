"""Operations on files that a power loss or a kill cannot leave half done."""

import ctypes
import errno
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import UsageError

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def for_json(value: Any) -> Any:
    """Numbers, and lists and dicts of numbers, for JSON, which has no infinity or NaN: both become None."""
    if isinstance(value, dict):
        return {name: for_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [for_json(item) for item in value]
    return value if value is None or math.isfinite(value) else None


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file as a whole, or not at all: a reader never gets half of it. Raises OSError."""
    part = path.with_name(f"{path.name}.{os.getpid()}")  # several processes may write it
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def flush(path: Path) -> None:
    """Flushes a file, or the list of files in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot flush folders
            raise
    finally:
        os.close(descriptor)


def check_is_pulled(path: Path) -> None:
    """Raises UsageError for a Git LFS pointer in place of a file."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(23) == b"version https://git-lfs":
            raise UsageError(f"{path} is a Git LFS pointer, not the file itself: run git lfs pull in its folder")


def read_file(path: Path) -> str:
    """The text of a file in UTF-8. Raises OSError, also for a pipe or similar, where a read would wait."""
    if not path.is_file() and path.exists():
        raise IsADirectoryError(errno.EISDIR, "Not a file", str(path))
    return path.read_text(encoding="utf-8")


def give_usual_mode(path: Path) -> None:
    """Sets the mode that Python gives to new files: safetensors makes files that only their owner can read."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder to write into in the `with` block, which then gets the name of `folder`. If the file system can
    exchange names, one of the two has the name at every moment. Raises OSError."""
    aside = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    yield aside
    for path in (*sorted(aside.rglob("*"), reverse=True), aside):
        flush(path)
    if folder.exists() and not _exchange(aside, folder):
        shutil.rmtree(folder)
    if aside.exists() and not folder.exists():
        aside.rename(folder)
    flush(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two names. Returns whether the system can."""
    if sys.platform != "linux":
        return False
    with suppress(AttributeError):  # a C library without the call
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        return rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0
    return False
