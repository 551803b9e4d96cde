"""Text files: read as a whole, or in pieces."""

from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UsageError

BYTES_PER_PIECE = 100_000
BYTES_PER_LINE = 50_000  # a piece ends within a line that is longer


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, with "\\n" for each line end. Raises UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error, 0) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if not text.strip():
        raise UsageError(f"{path} is empty: expected text")
    return text


def pieces(files: list[Path]) -> dict[str, list[Any]]:
    """Cuts files into pieces of about 100 kB, at line ends.

    Returns:
        Columns, a row for each piece: its path, the position of its first byte and of the byte after its last, and what
        follows it: a newline after each file but the last.
    """
    columns: dict[str, list[Any]] = {"path": [], "start": [], "stop": [], "end": []}
    for path in files:
        cuts = _cuts(path)
        columns["path"] += [str(path)] * (len(cuts) - 1)
        columns["start"] += cuts[:-1]
        columns["stop"] += cuts[1:]
        columns["end"] += [""] * (len(cuts) - 2) + ["\n" if path is not files[-1] else ""]
    return columns


def read_pieces(rows: dict[str, list[Any]]) -> list[str]:
    """The texts of some rows of `pieces`. Joined, those of all rows are the text of the files. Raises UsageError."""
    texts = []
    for path, start, stop, end in zip(rows["path"], rows["start"], rows["stop"], rows["end"]):
        try:
            with Path(path).open("rb") as file:
                file.seek(start)
                text = file.read(stop - start).decode("utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error, start) from None
        except OSError as error:
            raise _unreadable(path, error) from None
        texts.append(text.replace("\r\n", "\n").replace("\r", "\n") + end)
    return texts


def _cuts(path: Path) -> list[int]:
    """The positions between the pieces of a file, with 0 and its size."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            cuts = [_cut(file, nominal) for nominal in range(BYTES_PER_PIECE, size, BYTES_PER_PIECE)]
    except OSError as error:
        raise _unreadable(path, error) from None
    if size == 0:
        raise UsageError(f"{path} is empty: expected text")
    return [0, *sorted({cut for cut in cuts if cut < size}), size]


def _cut(file: BinaryIO, position: int) -> int:
    """The end of the line at this position; in a long line, the start of the next character."""
    file.seek(position)
    following = file.read(BYTES_PER_LINE)
    if b"\n" in following:
        return position + following.index(b"\n") + 1
    return position + next((number for number, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


def _not_utf8(path: str | Path, error: UnicodeDecodeError, start: int) -> UsageError:
    return UsageError(f"{path} is not text in UTF-8 ({error.reason} at byte {start + error.start}): convert it")


def _unreadable(path: str | Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be read: {error.strerror}")
