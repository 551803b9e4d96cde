"""Images or recordings with classes: in folders, perhaps for training and evaluation; in tables, or on the Hub."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from ...data.facts import printable, say
from ...errors import UsageError
from .image_decoding import Opener
from .labelled import Labelled, flatten, say_classes, with_same_classes
from .rows import Row, Table, table_of, text_of_cell
from .sources import SPLITS, LeftOut, is_saved, load_tables, walk
from .text_files import local_path

# A folder with exactly one of these names is a part of the data, if all its siblings are; the first that exists counts.
TRAIN, EVALUATION = SPLITS["train"], SPLITS["test"] + SPLITS["validation"]
LABELS = "label", "labels", "fine_label"  # columns that may hold the class
METADATA, FILE_NAME = ("metadata.csv", "metadata.jsonl"), "file_name"  # the Hub's form of a folder of images
FORM = "expected a folder with a sub-folder for each class, such as cat/1.png and dog/2.png"

Files = list[tuple[str, Any]]  # (path, class), or (path, classes)
Beside = tuple[Path, list[Row], str]  # a table next to the files, its rows, and the column with the classes or texts


class Media(NamedTuple):
    """The kind of the files in a folder."""

    name: str  # with s: several of them
    endings: set[str]  # of their names
    columns: tuple[str, ...]  # of a table next to the files, that may hold classes or texts
    form: str  # of the folder, for messages
    has: str = "classes"  # which folders can name, too; or "texts"
    read: Callable[[Any], Any] = text_of_cell  # gives what a cell of the columns has


class ImageFiles:
    """Images, or what another opener opens, in files or in a column of a table. `data` is the source and `what` the
    word for one of them, for messages; `files` are paths, or what a table has in place of them."""

    def __init__(self, data: str, files: Any, opener: Callable[[Any, str], Any] | None = None, what: str = "image"):
        self.data, self.files, self.opener, self.what = data, files, opener or Opener(), what

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Image.Image:
        return self._open(self.files[index], index)

    def __iter__(self) -> Iterator[Image.Image]:
        for index, file in enumerate(self.files):  # a column reads rows of a table faster together
            yield self._open(file, index)

    def _open(self, file: Any, index: int) -> Any:
        if isinstance(file, dict) and not file.get("bytes") and isinstance(file.get("path"), str):
            file = file | {"path": str(local_path(file["path"], folder_of(self.data)))}
        return self.opener(file, self.name(index))

    def name(self, index: int) -> str:
        """The path of an image, or its row."""
        row = f"--data {self.data}: the {self.what} in row {index + 1}"
        return self.files[index] if isinstance(self.files, list) and isinstance(self.files[index], str) else row


def folder_of(data: str) -> Path:
    """Where relative paths in a table begin."""
    path = local_path(data).absolute()
    return path.parent if path.is_file() else path


def files_in(data: str, table: Table, column: str) -> Any:
    """The files in a column of `--data`, or paths from its folder. Raises UsageError if a cell names no file."""
    files, kind = table.values(column), table.kinds.get(column)
    if kind is not None and not _is_text(kind):
        return files
    folder, paths = folder_of(data), list[Any]()
    first = next((file for file in files if isinstance(file, str)), "")
    if not local_path(first, folder).exists() and (folder / "clips" / first).is_file():
        folder /= "clips"  # of Common Voice, whose tables leave it out
    for row, file in enumerate(files, start=1):
        paths.append(str(local_path(file, folder)) if isinstance(file, str) else file)
        is_there = Path(paths[-1]).is_file() if isinstance(file, str) else isinstance(file, bytes)
        if not (is_there or (isinstance(file, dict) and (file.get("bytes") or file.get("path")))):
            facts = f"names {file}: no such file in {folder}"
            if isinstance(file, dict) and {"bytes", "path"} & file.keys():
                facts = "has neither bytes nor a path: expected a file"
            elif isinstance(file, list | dict):
                facts = f"has an array, {printable(str(file)[:80])}: expected a file"
            raise UsageError(f"--data {table.name}: row {row} {facts}")
    return paths


def _is_text(kind: Any) -> bool:
    return getattr(kind, "dtype", None) in ("string", "large_string")


def load_image_splits(data: str, advice: str, max_samples: int | None = None) -> list[Labelled]:
    """The images for training and, if the source has some, for evaluation; both with the same classes. Raises
    UsageError if there are no data, images or classes.

    Args:
        data: a folder with one for each class, perhaps below "train" and "test"; or with parquet files; or a Hub id.
        advice: end of a message: what to type instead.
        max_samples: this many images of each part: the first ones of tables, a random choice of files.
    """
    path = local_path(data)
    if path.is_file() and path.suffix.lower() != ".parquet":
        raise UsageError(f"--data {data} is a file: {FORM}, or parquet files; {advice}")
    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    kind = Media("image", endings, LABELS, FORM, read=names_in)
    if path.is_dir() and not is_saved(path) and (folders := read_folder(data, path, advice, kind)):
        parts = [_of_folder(data, folder, max_samples) for folder in folders]
    else:
        tables = load_tables(data, advice, max_samples, lambda table: table.has_classes(_label_column(table)))
        parts = [_of_table(data, table) for table in tables]
    if parts[0].has_several != parts[-1].has_several:
        raise UsageError(f"--data {data}: one part has lists of classes, the other does not: use lists in both")
    parts = with_same_classes(data, parts, "image")
    tasks = ["training", "evaluation"] if len(parts) == 2 else ["training and evaluation"]
    facts = [f"{len(part.labels):,} images for {task}" for part, task in zip(parts, tasks)]
    say_classes(data, parts, "image", " and ".join(facts) + ", ", " (several of an image)" * parts[0].has_several)
    return parts


def _of_folder(data: str, files: Files, max_samples: int | None) -> Labelled:
    if max_samples is not None:  # the first ones would have one class
        chosen = torch.randperm(len(files), generator=torch.Generator().manual_seed(0))[:max_samples]
        files = [files[number] for number in chosen.sort().values.tolist()]
    paths, names = zip(*files)
    return Labelled.of_names(ImageFiles(data, list(paths)), names)


def _of_table(data: str, table: Table) -> Labelled:
    """The images and classes of a table. Raises UsageError."""

    def holds_image(kind: Any) -> bool:
        # Parquet files from other tools lack the Image type but have its layout.
        is_bytes = getattr(kind, "dtype", None) in ("binary", "large_binary")
        return type(kind).__name__ == "Image" or (isinstance(kind, dict) and "bytes" in kind) or is_bytes

    images, label = [name for name, kind in table.kinds.items() if holds_image(kind)], _label_column(table)
    images += [name for name in ("image", FILE_NAME) if _is_text(table.kinds.get(name))]  # paths
    if not images or label is None:
        advice = f"expected an image and a label column, found {', '.join(table.column_names)}"
        raise UsageError(f"--data {data} is not an image-classification dataset: {advice}")
    kind = getattr(table.kinds[label], "feature", table.kinds[label])  # of each in a list
    names = [*table.read(label, partial(names_in, kind=kind))]
    if empty := [row for row, name in enumerate(names, start=1) if {None, ""} & {*flatten([name])}]:
        raise UsageError(f"--data {table.name}: row {empty[0]} has no class in column {label}: fill or remove it")
    return Labelled.of_names(ImageFiles(data, files_in(data, table, images[0])), names, getattr(kind, "names", None))


def _label_column(table: Table) -> str | None:
    typed = [name for name, kind in table.kinds.items() if type(kind).__name__ == "ClassLabel"]
    return next(iter(typed + [name for name in LABELS if name in table.kinds]), None)


def read_folder(data: str, folder: Path, advice: str, kind: Media) -> list[Files]:
    """The files of a kind in a folder with their classes, in the order of names: for training and, if folders are
    called so, for evaluation; none if there are parquet files, which are the data then. Prints which folders are for
    training and evaluation, and what is left out. No file is opened. Raises UsageError if there are no files, files
    without classes, or a folder that cannot be read."""
    found, left_out = walk(folder, twice=True)
    files = [file for file in found if Path(file).suffix.lower() in kind.endings]
    if others := sorted({*found} - {*files}):
        left_out[f"files without the name of a{'n' * (kind.name[0] in 'aeiou')} {kind.name}"] = others
    if any(file.lower().endswith(".parquet") for file in others):
        return []  # their reader counts the other files
    if not files:
        facts = f" ({_counts(left_out)})" if left_out else ""
        raise UsageError(f"--data {data}: no data there{facts}; {kind.form}, or parquet files; {advice}")
    parts, places = [], {"", *(file[: file.index("/") + 1] for file in files if "/" in file)}
    tables = {below: table for below in places if (table := _table_in(folder / below, kind))}
    for below in _parts(data, files, left_out, kind, tables):
        own, table = [file for file in files if file.startswith(below)], tables.get(below, tables.get(""))
        parts.append(_by_table(folder, table, below, own, left_out, kind) if table else [])
        if not parts[-1] and kind.has == "classes":
            parts[-1] = _by_folder(below, own, left_out, kind)
        if not parts[-1]:
            names = METADATA if kind.has == "texts" else ()
            for path in filter(Path.is_file, (folder / below / name for name in names)):
                table_of(str(path), [path], None, {}).check_columns({"--text_column": kind.columns[0]})
            raise UsageError(f"--data {data}: the {kind.name}s in {folder / below} have no {kind.has}: {kind.form}")
    if facts := _counts(left_out):
        say(f"--data {data}: left out: {facts}")
    return [[(str(folder / file), name) for file, name in part] for part in parts]


def _counts(left_out: LeftOut) -> str:
    return "; ".join(f"{why}: {len(some):,}, such as {printable(some[0])}" for why, some in left_out.items() if some)


def _parts(data: str, files: list[str], left_out: LeftOut, kind: Media, tables: dict[str, Beside]) -> list[str]:
    """How the paths of the files of each part begin: [""] for a folder that is one part."""
    tops = {file.split("/")[0]: False for file in files if "/" in file}  # whether the images have classes there
    tops |= {file.split("/")[0]: True for file in files if file.count("/") > 1}
    whole = "" in tables
    tops |= {top: True for top in tops if whole or f"{top}/" in tables}
    train, evaluation = ([top for name in kind for top in tops if top.lower() == name] for kind in (TRAIN, EVALUATION))
    others = [top for top in tops if top not in (*train, *evaluation)]
    if not tops or others or (whole and not (train and evaluation)):
        if others and train and evaluation and all(tops[top] for top in (*train, *evaluation)):
            what = f"{train[0]} and {evaluation[0]} hold folders with {kind.name}s, like the splits of a dataset"
            raise UsageError(f"--data {data}: {what}, but {others[0]} is next to them: move it away")
        return [""]
    if not train:
        raise UsageError(f"--data {data} has a folder {evaluation[0]}, but none called train: {kind.form}")
    parts = [train[0], *[top for top in evaluation if tops[top]][:1]]
    names = [f"{part} for {task}" for part, task in zip(parts, ("training", "evaluation"))]
    say(f"--data {data}: {' and '.join(names)}: these folders are splits, not classes")
    left_out[f"{kind.name}s in other folders"] = [file for file in files if file.split("/")[0] not in parts]
    return [part + "/" for part in parts]


def _table_in(folder: Path, kind: Media) -> Beside | None:
    """The table in a folder with the classes or texts of its files; None without one."""
    for path in filter(Path.is_file, (folder / name for name in METADATA)):
        rows = [*table_of(str(path), [path], None, {})]
        for column in kind.columns:
            if rows and FILE_NAME in rows[0] and any(row.get(column) not in (None, "") for row in rows):
                return path, rows, column
    return None


def _by_folder(below: str, files: list[str], left_out: LeftOut, kind: Media) -> Files:
    """The class of each file: the first folder below the folder of the part."""
    ways = [(file, file[len(below) :].split("/")) for file in files]
    beside = left_out.setdefault(f"{kind.name}s next to the folders of classes", [])
    beside.extend(file for file, way in ways if len(way) < 2)
    if deep := [(file, way) for file, way in ways if len(way) > 2]:
        file, way = deep[0]
        example = f"{printable(file)}, whose class is {printable(way[0])}"
        say(f"{kind.name}s in deeper folders: {len(deep):,}, such as {example}")
    return [(file, way[0]) for file, way in ways if len(way) > 1]


def _by_table(folder: Path, table: Beside, below: str, files: list[str], left_out: LeftOut, kind: Media) -> Files:
    """The labels that a table gives the files below a folder."""
    path, rows, column = table
    found = list[tuple[str, Any]]()
    for number, row in enumerate(rows, start=1):
        try:
            file, label = text_of_cell(row[FILE_NAME]), kind.read(row[column])
        except UsageError as error:
            raise UsageError(f"{path}: row {number}: {error}") from None
        if not file or (kind.has == "classes" and {None, ""} & {*flatten([label])}):
            raise UsageError(f"{path}: row {number} lacks {FILE_NAME} or {column}: expected a text in each")
        if not (path.parent / file).is_file():
            raise UsageError(f"{path}: row {number} names {file}: no such file")
        found.append((os.path.relpath(path.parent / file, folder), label))
    if twice := [file for file, number in Counter(file for file, _ in {*found}).items() if number > 1]:
        raise UsageError(f"{path} names {twice[0]} twice, with two {column}s: keep one of the rows")
    found = [*dict.fromkeys(found)]
    known = {os.path.relpath(path, folder), *(file for file, _ in found)}
    left_out |= {why: [file for file in paths if file not in known] for why, paths in left_out.items()}
    left_out.setdefault(f"{kind.name}s that {path.name} does not name", []).extend(sorted({*files} - known))
    return [(file, name) for file, name in found if file.startswith(below)]


def names_in(cell: Any, kind: Any = None) -> str | tuple[str | None, ...] | None:
    """The class in a cell, or the classes if it is a list. `kind`: as in `text_of_cell`."""
    return tuple(text_of_cell(each, kind) for each in cell) if isinstance(cell, list) else text_of_cell(cell, kind)
