"""metrics.jsonl: one record per line. If the disk is full, records wait in memory."""

import errno
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..files import flush


class MetricsFile:
    """Continues the metrics.jsonl of an output_dir. `keeps` tells which records stay in it; lines that are not records
    are removed. Raises OSError if the file cannot be written; then nothing has changed."""

    def __init__(self, output_dir: Path, keeps: Callable[[dict[str, Any]], bool]):
        self.path = output_dir / "metrics.jsonl"
        self._waiting: list[bytes] = []
        part, kept = self.path.with_name(f"{self.path.name}.part"), list[bytes]()
        for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
            # Skips lines that are not records, such as half a line after a power failure.
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                if keeps(json.loads(line)):
                    kept.append(line + b"\n")
        part.write_bytes(b"".join(kept))
        flush(part)
        part.rename(self.path)  # a rename, so that a kill loses no record
        flush(output_dir)
        self._file = self.path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record, after the waiting ones."""
        had_room = not self._waiting
        self._waiting.append(json.dumps(record).encode() + b"\n")
        try:
            self._write_waiting()
        except OSError as error:
            if had_room:
                line = f"{self.path} could not be written ({error.strerror}): records wait in memory until it can"
                print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Flushes the file to the disk, if it can be written."""
        with suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> int:
        """Writes the waiting records and closes the file. Returns the number of lost records."""
        with suppress(OSError):
            self._write_waiting()
        self._file.close()
        if self._waiting:
            print(f"{len(self._waiting)} records are lost: {self.path} could not be written", file=sys.stderr)
        return len(self._waiting)

    def _write_waiting(self) -> None:
        end, lines = self._file.seek(0, os.SEEK_END), b"".join(self._waiting)
        try:
            if self._file.write(lines) < len(lines):  # a partial write
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise
        self._waiting.clear()
