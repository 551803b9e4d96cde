"""Images with masks, which have a class for each pixel: in two folders, in parquet files, or on the Hub."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch.utils.data import Dataset

from ...data.facts import printable, say, shorten
from ...errors import UsageError
from ..reading.image_decoding import Opener
from ..reading.labelled_images import ImageFiles, files_in
from ..reading.rows import DECODER, text_of_cell
from ..reading.sources import hold_out, is_saved, labelled_splits, load_tables, names_of_splits, split_of, walk
from ..reading.text_files import local_path
from .augmentation import VaryingFlags, variation
from .cropped_images import Preprocessing, resize

IGNORED = -100  # the class of pixels that do not count, as in torch's losses
MOST = 1000  # classes; more cannot be classes
ADVICE = "use --data digits for the embedded images, or the path of a folder"


class MaskOpener(Opener):
    """Opens masks: int32 of shape (height, width), the numbers that the file has."""

    def _decode(self, image: Image.Image, name: str) -> Any:
        image.load()
        values = numpy.asarray(image)
        if values.ndim == 3 and (values == values[..., :1]).all():  # grey, saved as a colour
            values = values[..., 0]
        changes = image.format in ("JPEG", "WEBP")
        if values.ndim != 2 or values.dtype.kind == "f" or changes:
            kind = f"a {image.format} file, which changes numbers" if changes else f"in mode {image.mode}"
            raise UsageError(f"{name} is {kind}: expected a PNG in grey or with a palette, of class numbers")
        return values.astype(numpy.int32)


@dataclass(frozen=True)
class Masked:
    """Images and their masks, which are read one at a time."""

    images: Any  # in mode L or RGB
    masks: Any  # int32 of shape (height, width)
    classes: dict[int, str]  # {number in the masks: its name}, sorted by their numbers
    rows: Sequence[int]  # the numbers of the images in this part


@dataclass(eq=False, repr=False)
class MaskedImages(Dataset):
    """Samples {"image": float32 of shape (3, size, size), normalised; "mask": int64 of shape (size, size), with
    `IGNORED`; "weight": the number of pixels that count}."""

    source: Masked
    names: list[str]  # of the classes, in the order of the model's outputs
    form: Preprocessing  # what the model expects
    ignored: int  # number in the masks of pixels that do not count
    flags: VaryingFlags | None = None  # how each image varies; None: the whole image, squeezed into the square

    def __post_init__(self) -> None:
        outputs = {key: self.names.index(name) for key, name in self.source.classes.items()} | {self.ignored: IGNORED}
        self.numbers, self.outputs = (numpy.array(each) for each in zip(*sorted(outputs.items())))

    def __len__(self) -> int:
        return len(self.source.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        images, row, square = self.source.images, self.source.rows[index], (self.form.size, self.form.size)
        image, mask = images[row], Image.fromarray(self.source.masks[row])
        if image.size != mask.size:
            sizes = " and ".join(f"{width} x {height}" for width, height in (image.size, mask.size))
            raise UsageError(f"{images.name(row)} and its mask have {sizes} pixels: expected the same size")
        box, is_mirrored, colours = variation(image.width, image.height, self.flags)
        numbers = numpy.asarray(mask.resize(square, Image.Resampling.NEAREST, box))
        numbers = numbers[:, ::-1] if is_mirrored else numbers
        places = self.numbers.searchsorted(numbers).clip(max=len(self.numbers) - 1)
        if (wrong := numbers[self.numbers[places] != numbers]).size:
            raise UsageError(f"{images.name(row)}: its mask has the class {wrong[0]}: add it to --class_names")
        found, pixels = torch.from_numpy(self.outputs[places]), resize(image, self.form, box, is_mirrored, colours)
        return {"image": pixels, "mask": found, "weight": float((found != IGNORED).sum())}


def load_masked_images(
    data: str, image_column: str, mask_column: str, ignored: int, class_names: str | None
) -> tuple[Masked, Masked]:
    """Loads images with masks, for training and for evaluation; one in five is held out if the source has one part.
    Raises UsageError for missing data, missing masks, or fewer than two classes.

    Args:
        data: a folder with the folders images and masks, whose files have the same names up to their endings, perhaps
            below or above "train" and "test"; parquet files; or a Hub id.
        image_column, mask_column: names of the columns; or of the folders, without their s.
        ignored: number in the masks of pixels that do not count.
        class_names: path of a JSON file with {number in the masks: name}. None: the numbers that the masks have.
    """
    path, parts = local_path(data), list[Any]()
    if path.is_dir() and not is_saved(path):
        parts = _in_folders(data, path, image_column.lower(), mask_column.lower())
    for table in [] if parts else load_tables(data, ADVICE, None, lambda table: table.has_classes(mask_column)):
        table.check_columns({"--image_column": image_column, "--mask_column": mask_column})
        parts.append(tuple(files_in(data, table, column) for column in (image_column, mask_column)))
    masks: list[Any] = [ImageFiles(data, files, MaskOpener(), "mask") for _, files in parts]
    classes = _read_names(class_names) if class_names else {}
    seen = [{int(one) for mask in part for one in numpy.unique(mask)} for part in masks if not classes]  # reads all
    classes = classes or {number: str(number) for part in seen for number in part}
    if unseen := [str(one) for one in sorted({*chain(*seen[1:])} - {ignored, *chain(*seen[:1])})]:
        say(f"--data {data}: the evaluation has classes that no training mask has: {shorten(unseen)}")
    classes = {number: name for number, name in sorted(classes.items()) if number != ignored}
    if not 1 < len(classes) < MOST:
        what = f"the masks have {len(classes):,} classes besides --ignored_class {ignored}"
        raise UsageError(f"--data {data}: {what}: expected two or more (--ignored_class -1 ignores none)")
    if twice := [name for name, number in Counter(classes.values()).items() if number > 1]:
        raise UsageError(f"--class_names {class_names} has several classes called {twice[0]}: give each its own name")
    images = [ImageFiles(data, files) for files, _ in parts]
    sets = [Masked(*both, classes, range(len(both[1]))) for both in zip(images, masks)]
    if len(sets) == 1:
        sets = [replace(sets[0], rows=ids.tolist()) for ids in hold_out(len(masks[0]), one_in=5)]
    sizes, names = f"{len(sets[0].rows):,} images for training, {len(sets[1].rows):,} for evaluation", classes.values()
    say(f"--data {data}: {sizes}; {len(names):,} classes: {shorten([*names])}")
    spread = max(classes) - min(classes) - (min(classes) < ignored < max(classes))
    if not class_names and spread >= len(classes) > 2:
        say(f"--data {data}: the numbers of the classes have gaps, as in masks that were scaled with interpolation")
    return sets[0], sets[1]


def _in_folders(data: str, folder: Path, images: str, masks: str) -> list[Any]:
    """The paths of the images and of their masks, for training and perhaps for evaluation; [] if there are none."""
    kinds = {name: kind for kind in (images, masks) for name in (kind, f"{kind}s")}
    found: dict[str, dict[str, dict[str, str]]] = {}  # {split: {kind: {name: path}}}
    endings, files = Image.registered_extensions(), walk(folder, twice=True)[0]
    images_there = [file for file in files if Path(file).suffix.lower() in endings]
    if 0 < len(images_there) < len(files):
        say(f"--data {data}: left out: {len(files) - len(images_there):,} files without the name of an image")
    for file in images_there:
        parents = Path(file).parts[:-1]
        if kind := next((kinds[part.lower()] for part in parents if part.lower() in kinds), None):
            split = split_of(Path(file).parent) or "train"
            name = "/".join([part for part in parents if part.lower() not in kinds] + [Path(file).stem])
            path = found.setdefault(split, {}).setdefault(kind, {}).setdefault(name, str(folder / file))
            if path != str(folder / file):
                raise UsageError(f"--data {data}: {path} and {file} are called {name}, up to the ending: remove one")
    parts = []
    for split in labelled_splits(data, names_of_splits(data, found), found.__getitem__, lambda split: masks in split):
        pairs = [split.get(kind, {}) for kind in (images, masks)]
        if not (both := sorted(pairs[0].keys() & pairs[1].keys())):
            raise UsageError(f"--data {data}: no image in the folder {images}(s) has a mask of its name in {masks}(s)")
        if alone := sorted(pairs[0].keys() ^ pairs[1].keys()):
            say(f"--data {data}: left out: {len(alone):,} without image or mask, such as {printable(alone[0])}")
        parts.append(([pairs[0][name] for name in both], [pairs[1][name] for name in both]))
    return parts


def _read_names(path: str) -> dict[int, str]:
    """The classes that a JSON file names. Raises UsageError."""
    try:
        found = DECODER.decode(local_path(path).read_text(encoding="utf-8-sig"))
        names = {int(number): text_of_cell(name) or "" for number, name in found.items()}
        if len(names) == len(found) and all(names.values()):
            return names
        raise ValueError
    except (OSError, ValueError, AttributeError, UsageError):
        raise UsageError(f'--class_names {path}: expected a JSON file such as {{"0": "road", "1": "car"}}') from None
