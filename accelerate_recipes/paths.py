"""Checks paths and numbers that a user types, before anything runs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from accelerate_recipes.common.errors import UsageError
from accelerate_recipes.common.files import replace_file


def check_new_folder(path: Path) -> None:
    """Raises UsageError unless the path is a writable empty folder, or absent in a place where one can be made."""
    check_folder(path)
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} is not empty: use the name of a new folder")


def check_folder(path: Path, name: str = "") -> None:
    """Raises UsageError unless files can be written into a folder, which may not exist yet. `name`: of the flag."""
    with _possible(path, name, "written"):
        if path.is_symlink() and not path.exists():
            raise UsageError(f"{_named(path, name)} is a broken link: use another")
        place = next(place for place in (path.absolute(), *path.absolute().parents) if _is_there(place))
        if not place.is_dir():
            what = "is a file" if place == path.absolute() else f"cannot be created: {place} is a file"
            raise UsageError(f"{_named(path, name)} {what}: use another")
        with TemporaryFile(dir=place):  # try it: more than file modes can forbid it
            return


def check_new_file(path: Path, name: str, mark: str = "") -> None:
    """Raises UsageError unless a file can be written there: its folder exists, and there is no file, or an empty one,
    or one that the same command has made: its first 1,000 bytes have this mark."""
    named = _named(path, name)
    with _possible(path, name, "written"):
        if path.is_dir():
            raise UsageError(f"{named} is a folder: use the name of a file in it")
        if _is_there(path) and not path.is_file():  # a device must not be replaced by a file
            raise UsageError(f"{named} is not a file: use the name of a file")
        if _is_there(path):
            with path.open("rb") as file:
                if (start := file.read(1000)) and mark.encode() not in start:
                    raise UsageError(f"{named} exists, and this command did not create it: use another name")
        if not path.parent.is_dir():
            raise UsageError(f"{named}: there is no folder {path.parent}; create it, or use another path")
    check_folder(path.parent, name)


def write_file(path: Path, text: str, name: str = "") -> None:
    """Writes a file, or replaces it as a whole. Raises UsageError if that is impossible. `name`: of the flag."""
    with _possible(path, name, "written"):
        replace_file(path, text.encode(errors="replace"))


def check_file(path: Path, name: str, advice: str) -> None:
    """Raises UsageError unless there is a file that can be read. `advice`: what to type instead."""
    with _possible(path, name, "read"):
        if path.is_file():
            with path.open("rb"):
                return
        what = " is a folder" if path.is_dir() else " is not a file" if _is_there(path) else ": no such file"
    raise UsageError(f"{_named(path, name)}{what}; {advice}")


def text_of(path: Path, name: str, advice: str) -> str:
    """The text of a file in UTF-8. Raises UsageError if there is none."""
    check_file(path, name, advice)
    try:
        with _possible(path, name, "read"):
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{_named(path, name)} is not text in UTF-8: {advice}") from None


def is_path(name: str) -> bool:
    """Whether there is a file of this name, or the name looks like a path; otherwise it names one of ours."""
    with suppress(OSError):
        return _is_there(Path(name)) and not Path(name).is_dir()
    return False


def check_number(value: float | None, name: str, above: float = 0, why: str = "") -> None:
    """Raises UsageError unless a number is finite and above a bound. None: it was not given. `why`: about the bound."""
    if value is not None and not (math.isfinite(value) and value > above):
        raise UsageError(f"{name} {value:g}: use a number above {above:g}{why}")


@contextmanager
def _possible(path: Path, name: str, what: str) -> Iterator[None]:
    """Turns an OSError in the `with` block into a UsageError: the path cannot be "read" or "written"."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{_named(path, name)} cannot be {what} ({error.strerror}): use another path") from None


def _named(path: Path, name: str) -> str:
    return f"{name} {path}".strip()


def _is_there(path: Path) -> bool:
    """Whether there is such a path. Raises OSError if it cannot be one, such as a name of 300 letters."""
    with suppress(FileNotFoundError, NotADirectoryError):
        path.stat()
        return True
    return False
