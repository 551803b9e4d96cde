"""Opens text files by their ending, unpacks and decodes them, and says in one line why one cannot be read."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from json import detect_encoding
from pathlib import Path, PurePath
from typing import Any

from ...data.facts import say
from ...errors import UsageError, first_line
from ...files import check_is_pulled

# {what a file is, and what to do: its first bytes}
OTHERS: Any = {
    "a workbook of Excel, or a zip archive: save it as CSV, or unpack it": (b"PK\3\4", b"\xd0\xcf\x11\xe0"),
    "a Parquet file: let its name end with .parquet": b"PAR1\x15",
}
Place = Path | str  # a file of this machine, or the address of one on the Hub
# {ending of a packed file's name: its first bytes}
PACKED = {".gz": b"\x1f\x8b", ".bz2": b"BZh", ".xz": b"\xfd7zX", ".zst": b"\x28\xb5\x2f\xfd"}


def local_path(data: str, folder: Path = Path()) -> Path:
    """The path that a user typed, which may begin at a folder: unchanged, or with ~ for the home folder if there is
    no such file. Raises UsageError for a name that no file can have."""
    path = folder / data
    if not data and folder == Path():  # otherwise the caller names the cell
        raise UsageError("a path is empty: use the path of a file or folder, or remove the flag")
    try:
        return path if path.exists() else folder / Path(data).expanduser()
    except RuntimeError:  # the home of an unknown user
        return path
    except OSError as error:
        raise UsageError(f"{data[:80]} cannot be read: {error.strerror}") from None


def ending_of(place: Place) -> str:
    """The ending of a file's name without its packing's, in lower case: ".csv" for "a.CSV.gz"."""
    return strip_packing(place).suffix.lower()


def strip_packing(place: Place) -> PurePath:
    """The name of a file without the ending of its packing: "x/a.CSV" for "x/a.CSV.gz"."""
    return PurePath(str(place)[: len(str(place)) - len(packing_of(place))])


def packing_of(place: Place) -> str:
    """The ending of a packed file's name, such as ".gz"; "" for others."""
    return next((ending for ending in PACKED if str(place).lower().endswith(ending)), "")


@contextmanager
def open_bytes(place: Place) -> Iterator[io.BufferedReader]:
    """A file's bytes, unpacked if its name says so. Raises UsageError, also in the block, if it is unreadable."""
    packing = packing_of(place)
    try:
        if isinstance(place, Path):
            check_is_pulled(place)
            raw: Any = place.open("rb")
            if packing not in ("", ".zst") and (start := raw.peek(9)) and not start.startswith(PACKED[packing]):
                raise UsageError(f"{place} is not a {packing} file: remove {packing} from its name, or copy it again")
        else:
            import fsspec  # type: ignore[import-untyped]  # a dependency of `datasets`

            raw = fsspec.open(place, "rb").open()
        if packing == ".zst":
            import pyarrow  # type: ignore[import-untyped]  # a dependency of `datasets`; Python 3.14 has a module

            raw = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
        elif packing:
            raw = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[packing].open(raw)
        with raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw) as file:
            yield file
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise UsageError(f"{place} is damaged ({first_line(error)}): copy or download it again") from None
    except OSError as error:
        raise UsageError(f"{place} cannot be read: {error.strerror or first_line(error)}") from None


@contextmanager
def open_text(place: Place, newline: str | None, says_encoding: bool = True) -> Iterator[io.TextIOWrapper]:
    """The text of a file in UTF-8, or in UTF-16 or UTF-32 if it begins with their mark, and says so. `newline` is
    as in `open`. Raises UsageError, also from the body of `with`, if the file cannot be read or is not text."""
    with open_bytes(place) as file:
        start = file.peek(9)
        if kind := next((kind for kind, first in OTHERS.items() if start.startswith(first)), ""):
            raise UsageError(f"{place} is {kind}")
        if ending := next((ending for ending, first in PACKED.items() if start.startswith(first)), ""):
            raise UsageError(f"{place} is compressed: rename it to {PurePath(place).name}{ending}, or unpack it")
        encoding = detect_encoding(start[:4])
        has_zeros = encoding == "utf-8" and start[:1].isascii() and b"\0" in start.partition(b"\n")[0]
        if has_zeros or encoding.endswith(("-le", "-be")):
            raise UsageError(f"{place} holds zero bytes: it is not UTF-8 text; run iconv -f UTF-16 -t UTF-8")
        if encoding in ("utf-16", "utf-32") and says_encoding:
            say(f"{place} is read as {encoding.upper()}, as its first bytes say")
        with io.TextIOWrapper(file, encoding=encoding, newline=newline) as text:
            try:
                yield text
            except UnicodeDecodeError as error:
                byte = file.tell() - len(error.object) + error.start
                name = encoding.upper().removesuffix("-SIG")
                what = "convert it, for example with iconv -f LATIN1 -t UTF-8"
                raise UsageError(f"{place} is not text in {name} ({error.reason} at byte {byte}): {what}") from None
