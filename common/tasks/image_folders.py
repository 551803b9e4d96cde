"""Local folders of images: a sub-folder for each class, perhaps below folders for training and evaluation."""

import os
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from ..data.facts import printable, say
from ..errors import UsageError
from .labelled import flatten
from .rows import table_of, text_of_cell
from .sources import SPLITS, LeftOut, walk

# A folder with one of these whole names is a part of the data, if all its siblings are, too; the first that is there.
TRAIN, EVALUATION = SPLITS["train"], SPLITS["test"] + SPLITS["validation"]
LABELS = "label", "labels", "fine_label"  # columns that may hold the class
METADATA, FILE_NAME = ("metadata.csv", "metadata.jsonl"), "file_name"  # the Hub's form of a folder of images
NO_IMAGE = "no images by their names"
FORM = "expected a folder with a sub-folder for each class, such as cat/1.png and dog/2.png"

Files = list[tuple[str, Any]]  # (path, class), or (path, classes)


def read_folder(data: str, folder: Path, advice: str) -> list[Files]:
    """The images of a folder with their classes, in the order of their names: those for training and, if folders are
    called so, those for evaluation. A line says which folders are, and what is left out. No image is opened.

    Returns:
        an empty list if there are parquet files, which are the data then.

    Raises:
        UsageError: no images, images without classes, or a folder that cannot be read.
    """
    found, left_out = walk(folder, twice=True)
    files = [file for file in found if Path(file).suffix.lower() in _endings()]
    if others := sorted({*found} - {*files}):
        left_out[NO_IMAGE] = others
    if any(file.lower().endswith(".parquet") for file in left_out.get(NO_IMAGE, [])):
        return []  # whoever reads these counts what is beside them
    if not files:
        facts = f" ({_counts(left_out)})" if left_out else ""
        raise UsageError(f"--data {data}: no data there{facts}; {FORM}, or parquet files; {advice}")
    parts = []
    for below in _parts(data, folder, files, left_out):
        own = [file for file in files if file.startswith(below)]
        parts.append(_by_table(folder, below, own, left_out) or _by_folder(below, own, left_out))
        if not parts[-1]:
            raise UsageError(f"--data {data}: the images in {folder / below} have no classes: {FORM}")
    if facts := _counts(left_out):
        say(f"--data {data}: left out: {facts}")
    return [[(str(folder / file), name) for file, name in part] for part in parts]


def _counts(left_out: LeftOut) -> str:
    facts = [f"{why}: {len(paths):,}, such as {printable(paths[0])}" for why, paths in left_out.items() if paths]
    return "; ".join(facts)


@cache
def _endings() -> set[str]:
    Image.init()
    return {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}


def _parts(data: str, folder: Path, files: list[str], left_out: LeftOut) -> list[str]:
    """How the paths of the images of each part begin: [""] for a folder that is one part."""
    tops = {file.split("/")[0]: False for file in files if "/" in file}  # whether the images have classes there
    tops |= {file.split("/")[0]: True for file in files if file.count("/") > 1}
    tops |= {top: True for top in tops if any((folder / top / name).is_file() for name in METADATA)}
    train, evaluation = ([top for name in kind for top in tops if top.lower() == name] for kind in (TRAIN, EVALUATION))
    others = [top for top in tops if top not in (*train, *evaluation)]
    if not tops or others or any((folder / name).is_file() for name in METADATA):
        if train and evaluation and all(tops[top] for top in (*train, *evaluation)):
            raise UsageError(
                f"--data {data}: {train[0]} and {evaluation[0]} hold folders with images, as parts of a data set do, "
                f"but {others[0]} is beside them: move it away"
            )
        return [""]
    if not train:
        raise UsageError(f"--data {data} has a folder {evaluation[0]}, but none called train: {FORM}")
    parts = [train[0], *[top for top in evaluation if tops[top]][:1]]
    names = [f"{part} for {task}" for part, task in zip(parts, ("training", "evaluation"))]
    say(f"--data {data}: {' and '.join(names)}, by the names of the folders, so they are not classes")
    left_out["images in other folders"] = [file for file in files if file.split("/")[0] not in parts]
    return [part + "/" for part in parts]


def _by_folder(below: str, files: list[str], left_out: LeftOut) -> Files:
    """The class of each image: its folder, the first below the folder of the part."""
    ways = [(file, file[len(below) :].split("/")) for file in files]
    left_out.setdefault("images beside the folders of classes", []).extend(file for file, way in ways if len(way) < 2)
    if deep := [(file, way) for file, way in ways if len(way) > 2]:
        file, way = deep[0]
        example = f"{printable(file)}, whose class is {printable(way[0])}"
        say(f"images in deeper folders: {len(deep):,}, such as {example}")
    return [(file, way[0]) for file, way in ways if len(way) > 1]


def _by_table(folder: Path, below: str, files: list[str], left_out: LeftOut) -> Files:
    """The classes that a table in the folder gives its images; [] without a table that has classes."""
    for name in METADATA:
        path = folder / below / name
        rows = [*table_of(str(path), [path], None, {})] if path.is_file() else []
        column = next((column for column in LABELS if rows and column in rows[0]), None)
        if column is None or FILE_NAME not in rows[0]:
            continue
        for number, row in enumerate(rows, start=1):
            if not text_of_cell(row[FILE_NAME]) or {None, ""} & {*flatten([names_in(row[column])])}:
                raise UsageError(f"{path}: row {number} lacks {FILE_NAME} or {column}: expected a text in each")
            if not (path.parent / row[FILE_NAME]).is_file():
                raise UsageError(f"{path}: row {number} names {row[FILE_NAME]}: no such file")
        found = [(below + os.path.normpath(row[FILE_NAME]), names_in(row[column])) for row in rows]
        known = {below + name, *(file for file, _ in found)}
        left_out[NO_IMAGE] = [file for file in left_out[NO_IMAGE] if file not in known]
        rest = [file for file in files if file not in known]
        left_out.setdefault(f"images that {name} does not name", []).extend(rest)
        return found
    return []


def names_in(cell: Any, kind: Any = None) -> str | tuple[str | None, ...] | None:
    """The class that a cell names; its classes if it holds a list. `kind`: as in `text_of_cell`."""
    return tuple(text_of_cell(each, kind) for each in cell) if isinstance(cell, list) else text_of_cell(cell, kind)
