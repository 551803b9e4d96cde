"""Images with boxes, each of a class: in COCO's JSON, in metadata.jsonl, in parquet files, or on the Hub."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from torch.utils.data import Dataset

from ...data.facts import printable, say, shorten
from ...errors import UsageError, first_line
from ..reading.labelled import in_order
from ..reading.labelled_images import FILE_NAME, ImageFiles, files_in
from ..reading.rows import table_of, text_of_cell
from ..reading.sources import SPLITS, hold_out, is_saved, labelled_splits, load_tables, names_of_splits, walk
from ..reading.text_files import local_path, open_text
from .augmentation import VaryingFlags, variation
from .cropped_images import Preprocessing, resize

ADVICE = "use --data digits for the embedded images, or a folder with COCO's JSON"
CATEGORIES = "category", "categories", "category_id", "label"  # possible names of an object's class
PADDING = -1  # in the place of a class
CROWDS = {None: False, 0: False, 1: True, "0": False, "1": True}  # {what "iscrowd" may be: whether it is one}

Object = tuple[str, list[float], bool]  # (class, [left, top, width, height] in pixels, whether it is a crowd)


@dataclass(frozen=True)
class Boxed:
    """Images, which are read one at a time, and their objects."""

    images: Any  # in mode L or RGB
    objects: list[list[Object]]  # of each image
    classes: list[str]
    rows: Sequence[int]  # the numbers of the images that belong to this part
    sizes: Sequence[tuple[float, float]] = ()  # width and height of each image by its table, perhaps 0; or of none


@dataclass(eq=False, repr=False)
class BoxedImages(Dataset):
    """Samples {"image": float32 of shape (3, size, size), normalised; "boxes": float32 of shape (most, 4), the centre,
    width and height of each as shares of the image; "label": int64 of shape (most,), with `PADDING`; "is_crowd": bool
    of shape (most,); "size": float32 of shape (2,), width and height of the image in pixels}."""

    source: Boxed
    names: list[str]  # of the classes, in the order of the model's outputs
    form: Preprocessing  # what the model expects
    most: int  # objects of an image
    flags: VaryingFlags | None = None  # how each image varies; None: the whole image, squeezed into the square

    def __len__(self) -> int:
        return len(self.source.rows)

    def _misfit(self, row: int, image: Any, what: str) -> UsageError:
        return UsageError(f"{self.source.images.name(row)} has {image.width} x {image.height} pixels, but {what}")

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.source.rows[index]
        image, objects = self.source.images[row], self.source.objects[row]
        if self.source.sizes and all(said := self.source.sizes[row]) and _differ(said, image.size):
            advice = "scale the boxes, or use an image of that size"
            if not _differ(said, image.size[::-1]):
                advice = "its orientation tag turns it: swap these numbers if the boxes fit the turned image, or else "
                advice += "turn the boxes, or remove the tag"
            raise self._misfit(row, image, f"its table says {said[0]:g} x {said[1]:g}: {advice}")
        cut, is_mirrored, colours = variation(image.width, image.height, self.flags)
        size, (start, end) = torch.tensor(image.size), torch.tensor(cut).view(2, 2)
        boxes = torch.tensor([box for _, box, _ in objects]).view(-1, 2, 2)  # left and top, width and height
        corners = torch.stack([boxes[:, 0], boxes.sum(1)], 1).clamp(min=0).minimum(size)
        if (corners[:, 0] >= corners[:, 1]).any():
            raise self._misfit(row, image, "a box is outside: expected left, top, width and height in pixels")
        stays = ((corners.mean(1) > start) & (corners.mean(1) < end)).all(1)  # by their centres, as in Liu et al. 2016
        corners = ((corners[stays] - start) / (end - start)).clamp(0, 1)
        if is_mirrored:
            corners[..., 0] = 1 - corners.flip(1)[..., 0]
        labels = torch.tensor([self.names.index(label) for label, _, _ in objects], dtype=torch.int64)[stays]
        crowds, missing = torch.tensor([is_crowd for *_, is_crowd in objects]).bool()[stays], self.most - len(corners)
        return {
            "image": resize(image, self.form, cut, is_mirrored, colours),
            "boxes": pad(torch.cat([corners.mean(1), corners[:, 1] - corners[:, 0]], 1), (0, 0, 0, missing)),
            "label": pad(labels, (0, missing), value=PADDING),
            "is_crowd": pad(crowds, (0, missing)),
            "size": size.float(),
        }


def load_boxed_images(data: str, image_column: str, objects_column: str) -> tuple[Boxed, Boxed]:
    """Loads images with boxes, for training and for evaluation; one in five is held out if the source has one part.

    Args:
        data: COCO's JSON, or a folder with one for each part, next to or above the images; a folder of images with a
            metadata.jsonl, perhaps below "train" and "test"; parquet files; or a Hub id.
        image_column, objects_column: names of the columns with the images, and with the "bbox" and "category" of each
            object. Raises UsageError for missing data or boxes, a missing image, or an invalid object.
    """
    path, parts = local_path(data).absolute(), list[Any]()
    if path.is_dir() and not is_saved(path):
        parts = _beside_images(data, path, [path / file for file in walk(path, twice=True)[0]], objects_column)
    elif path.is_file() and path.suffix.lower() == ".json":
        parts = _beside_images(data, path.parent, [path], objects_column)
    for table in [] if parts else load_tables(data, ADVICE, None, lambda table: table.has_classes(objects_column)):
        table.check_columns({"--image_column": image_column, "--objects_column": objects_column})
        names = _names_of_classes(table.kinds.get(objects_column))
        parts.append((files_in(data, table, image_column), table.values(objects_column), names, ()))
    for files in [files for files, *_ in parts if isinstance(files, list)]:
        named = Counter(file for file in files if isinstance(file, str))
        if twice := [file for file, number in named.items() if number > 1]:
            raise UsageError(f"--data {data} names {printable(twice[0])} twice: put its boxes into one row, of one id")
    images, objects = [ImageFiles(data, files) for files, *_ in parts], list[list[list[Object]]]()
    for part, (_, cells, names, _) in zip(images, parts):
        objects.append([_objects_in(cell, names, part.name(row)) for row, cell in enumerate(cells)])
    is_flat = [min(box[2:]) <= 0 for part in objects for found in part for _, box, _ in found]
    if any(is_flat):
        say(f"--data {data}: left out: {sum(is_flat):,} of {len(is_flat):,} boxes, without width or height")
        objects = [[[each for each in found if min(each[1][2:]) > 0] for found in part] for part in objects]
    labels = [label for part in objects for found in part for label, _, _ in found]
    if all(is_crowd for found in objects[0] for *_, is_crowd in found):
        what = "only boxes of crowds (iscrowd), which are not trained" if any(objects[0]) else "no boxes"
        raise UsageError(f"--data {data}: its images for training have {what}; {ADVICE}")
    if max(max(box) for part in objects for found in part for _, box, _ in found) <= 1:
        raise UsageError(f"--data {data}: no box has a number above 1: expected pixels, not fractions of the image")
    classes = [*dict.fromkeys([name for *_, names, _ in parts for name in (names or {}).values()] + in_order(labels))]
    sets = [Boxed(of, each, classes, range(len(each)), part[-1]) for of, each, part in zip(images, objects, parts)]
    if len(sets) == 1:
        sets = [replace(sets[0], rows=ids.tolist()) for ids in hold_out(len(sets[0].rows), one_in=5)]
    sizes = f"{len(sets[0].rows):,} images for training, {len(sets[1].rows):,} for evaluation"
    say(f"--data {data}: {sizes}; {len(labels):,} boxes of {len(classes):,} classes: {shorten(classes)}")
    return sets[0], sets[1]


def _beside_images(data: str, folder: Path, files: list[Path], objects_column: str) -> list[Any]:
    """(paths of the images, the objects of each, names of the classes, sizes of the images) for training and perhaps
    for evaluation, from the tables among these files; [] if there are none. Raises UsageError."""
    parts: dict[str, Any] = {}  # {split: (table, paths of images, other contents)}
    top = folder.parent if folder.name == "annotations" else folder
    for table in files:
        if (found := _read_table(table, objects_column)) is None:
            continue
        words = re.findall("[a-z]+", " ".join(reversed(table.relative_to(folder).parts)).lower()) * (len(files) > 1)
        split = next((split for word in words for split, names in SPLITS.items() if word in names), "train")
        if split in parts:
            raise UsageError(f"{table} and {parts[split][0]} both have boxes for {split}: use the path of one")
        places = table.parent, top, top / "images", top / table.stem.rpartition("_")[2]  # the last is COCO's own form
        ways = [[place / str(name) for place in places if (place / str(name)).is_file()] for name in found[0]]
        if [] in ways:
            name = printable(str([*found[0]][ways.index([])]))
            raise UsageError(f"{table}: no image {name} next to the table, in images or in {places[-1].name}")
        parts[split] = table, [str(way[0]) for way in ways], [*found[1]], *found[2:]
    chosen = labelled_splits(
        data,
        names_of_splits(data, parts),
        parts.__getitem__,
        lambda part: any(any(each.values()) if isinstance(each, dict) else each for each in part[2]),
    )
    named = {Path(path) for table, paths, *_ in chosen for path in [table, *paths]}
    if chosen and (others := [file for file in files if file not in named]):
        say(f"--data {data}: left out: {len(others):,} files that no table names, such as {printable(others[0].name)}")
    return [part for _, *part in chosen]


def _read_table(path: Path, objects_column: str) -> tuple[Iterable[Any], Iterable[Any], Any, list[Any]] | None:
    """(names of images, the objects of each, names of the classes, sizes) in a file, or None. Raises UsageError."""
    if path.name == "metadata.jsonl":
        table = table_of(str(path), [path], None, {})
        if FILE_NAME not in table.column_names:
            raise UsageError(f"{path} has no column {FILE_NAME}: name the file of each image there")
        table.check_columns({"--objects_column": objects_column})
        return table.values(FILE_NAME), table.values(objects_column), None, []
    if path.suffix.lower() != ".json":
        return None
    try:
        with open_text(path, None) as text:
            content = json.load(text)
        if not isinstance(content, dict) or not {"images", "annotations", "categories"} <= content.keys():
            return None
        files, kinds = {image["id"]: image["file_name"] for image in content["images"]}, content["categories"]
        names = {each["id"]: text_of_cell(each["name"]) for each in kinds}
        if len(files) < len(content["images"]) or len({*names.values()}) < len(kinds) or not all(names.values()):
            raise ValueError("an id or a category's name occurs twice, or a category has no name")
        objects: dict[Any, list[Any]] = {number: [] for number in files}
        for each in content["annotations"]:
            objects[each["image_id"]].append(each)
        sizes = [(float(image.get("width") or 0), float(image.get("height") or 0)) for image in content["images"]]
        return files.values(), objects.values(), names, sizes
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
        form = "images with id and file_name, annotations with image_id, category_id and bbox, and categories with id"
        raise UsageError(f"{path} is not COCO's JSON ({what}): expected {form} and name") from None


def _names_of_classes(kind: Any) -> dict[Any, str] | None:
    """The names of the classes in a column of objects; None if its type does not have them."""
    whole = getattr(kind, "feature", kind)  # of a list of objects; or a dict with lists
    kinds = [whole[name] for name in CATEGORIES if name in whole] if isinstance(whole, dict) else []
    names = getattr(getattr(kinds[0], "feature", kinds[0]), "names", None) if kinds else None
    return None if names is None else dict(enumerate(names))


def _objects_in(cell: Any, names: dict[Any, str] | None, image: str) -> list[Object]:
    """The objects in a cell: a list, or a dict of lists. `names`: of the classes, if the cell has none."""
    row, objects = cell, list[Object]()
    try:
        if isinstance(cell, str) or (isinstance(cell, dict) and cell and "bbox" not in cell):
            raise ValueError
        if isinstance(cell, dict):  # lists of the same length; its other entries may have different lengths
            cell = {name: cell[name] for name in (*CATEGORIES, "bbox", "iscrowd") if name in cell}
            cell = [dict(zip(cell, values)) for values in zip(*cell.values(), strict=True)]
        for row in cell or []:
            value, box = next(row[name] for name in CATEGORIES if name in row), row["bbox"]
            label = text_of_cell(value) if names is None else names[value]
            if label is None or len(box) != 4 or not math.isfinite(math.fsum(box)):
                raise ValueError
            objects.append((label, [*map(float, box)], CROWDS[row.get("iscrowd")]))
        return objects
    except Exception:  # any error: the cell may hold anything
        form = "a bbox of left, top, width and height in pixels, a known category, and perhaps an iscrowd of 0 or 1"
        raise UsageError(f"{image}: an object is {printable(repr(row)[:90])}: expected {form}") from None


def _differ(size: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two widths or two heights differ by more than a pixel."""
    return any(abs(own - found) > 1 for own, found in zip(size, other))
