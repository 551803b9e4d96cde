"""Images with a class each: in folders, in parquet files, or on the Hub."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy
import torch
from PIL import Image
from torch.utils.data import Subset

from ..data.facts import say
from ..errors import UsageError
from .image_decoding import Opener
from .image_folders import FORM, LABELS, Labelled, read_folder
from .lists import count_by_class, shorten
from .sources import load_splits
from .text_files import local_path

ROWS_PER_READ = 1000


@dataclass(frozen=True)
class LabelledImages:
    """Images that are read one at a time.

    Attributes:
        images: of which `images[index]` is one, in mode L or RGB.
        labels: the number of each image's class; or, in all, the numbers of its classes.
        classes: their names.
    """

    images: Any
    labels: list[Any]
    classes: list[str]

    @property
    def has_several(self) -> bool:
        """Whether an image has several classes, or none."""
        return isinstance(self.labels[0], tuple)

    def part(self, ids: torch.Tensor) -> "LabelledImages":
        """The images of these ids."""
        rows = ids.tolist()
        return LabelledImages(Subset(self.images, rows), [self.labels[row] for row in rows], self.classes)

    def reorder(self, classes: list[str]) -> "LabelledImages":
        """The same images with their classes in this order, perhaps among others."""
        numbers = [classes.index(name) for name in self.classes]
        labels = _regroup(self.labels, [numbers[label] for label in _flat(self.labels)])
        return replace(self, labels=labels, classes=classes)


class TableColumn:
    """A column of a `datasets.Dataset` as its files hold it. A row takes a sixth of the time of the dataset's own way.

    Args:
        table: with the column.
        name: of the column.
    """

    def __init__(self, table: Any, name: str):
        self.table, self.name = table.select_columns(name).with_format("arrow"), name

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, wanted: int | slice) -> Any:
        found = self.table[wanted][self.name].to_pylist()
        return found if isinstance(wanted, slice) else found[0]


class ImageFiles:
    """Images in files, or in a column of a table.

    Args:
        data: the source, for messages.
        files: paths, or what a table has in place of them.
    """

    def __init__(self, data: str, files: Any):
        self.data, self.files, self.opener = data, files, Opener()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Image.Image:
        return self.opener(self.files[index], self.name(index))

    def __iter__(self) -> Iterator[Image.Image]:
        for start in range(0, len(self), ROWS_PER_READ):  # a column reads rows of a table faster together
            for index, file in enumerate(self.files[start : start + ROWS_PER_READ], start):
                yield self.opener(file, self.name(index))

    def name(self, index: int) -> str:
        """The path of an image, or its row."""
        return self.files[index] if isinstance(self.files, list) else f"--data {self.data}: the image in row {index}"


def load_image_splits(data: str, advice: str, max_samples: int | None = None) -> list[LabelledImages]:
    """The images for training and, if the source has some, those for evaluation; both with the same classes.

    Args:
        data: a folder with a sub-folder for each class, perhaps below "train" and "test"; one with parquet files; or a
            Hub id.
        advice: end of a message: what to type instead.
        max_samples: so many images of each part: the first ones of tables, a random choice of files.

    Raises:
        UsageError: no data, no images or no classes.
    """
    path = local_path(data)
    if path.is_file() and path.suffix.lower() != ".parquet":
        raise UsageError(f"--data {data} is a file: {FORM}, or parquet files; {advice}")
    if path.is_dir() and (folders := read_folder(data, path, advice)):
        parts = [_of_folder(data, folder, max_samples) for folder in folders]
    else:
        parts = [_of_table(data, split) for split in load_splits(data, advice, max_samples)]
    if parts[0].has_several != parts[-1].has_several:
        raise UsageError(f"--data {data}: one part has lists of classes, the other has not: use lists in both")
    train, evaluation = parts[0].classes, parts[-1].classes
    classes = train + [name for name in evaluation if name not in train]
    if unseen := [name for name in evaluation if name not in train]:
        say(f"--data {data}: classes of the evaluation that no image for training has: {shorten(unseen)}")
    parts = [part.reorder(classes) for part in parts]
    tasks = ["training", "evaluation"] if len(parts) == 2 else ["training and evaluation"]
    facts = [f"{len(part.labels):,} images for {task}" for part, task in zip(parts, tasks)]
    labels = [label for part in parts for label in _flat(part.labels)]
    several = " (several of an image)" * parts[0].has_several
    say(f"--data {data}: {' and '.join(facts)}, {count_by_class(classes, labels)}{several}")
    return parts


def _of_folder(data: str, files: Labelled, max_samples: int | None) -> LabelledImages:
    if max_samples is not None:  # the first ones would have one class
        chosen = torch.randperm(len(files), generator=torch.Generator().manual_seed(0))[:max_samples]
        files = [files[number] for number in chosen.sort().values.tolist()]
    paths, names = zip(*files)
    labels, classes = _number_classes(names)
    return LabelledImages(ImageFiles(data, list(paths)), labels, classes)


def _of_table(data: str, split: Any) -> LabelledImages:
    """The images and classes of a `datasets.Dataset`. Raises UsageError."""
    import datasets  # not at the top: the import takes seconds

    features = split.features

    def holds_image(feature: Any) -> bool:
        # Parquet files from other tools lack the Image type but have its layout.
        return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and "bytes" in feature)

    image = next((name for name, feature in features.items() if holds_image(feature)), None)
    label = next((name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)), None)
    label = label or next((name for name in LABELS if name in features), None)
    if image is None or label is None:
        raise UsageError(
            f"--data {data} is not an image-classification dataset: expected an image and a label column, found "
            f"{', '.join(features)}"
        )
    images = ImageFiles(data, TableColumn(split, image))
    found = split[label][:]
    kind = getattr(features[label], "feature", features[label])  # of each in a list
    if all(isinstance(name, str) for name in _flat(found)):
        return LabelledImages(images, *_number_classes(found))
    labels = numpy.asarray(_flat(found))
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        raise UsageError(
            f"--data {data}: expected texts, or whole numbers from 0, in column {label}, the class of each image"
        )
    names = getattr(kind, "names", None) or map(str, range(1 + int(labels.max())))
    return LabelledImages(images, _regroup(found, labels.tolist()), list(names))


def _number_classes(names: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """(the number of each sample's class, or of its classes; the classes in order)"""
    flat = _flat(names)
    classes = sorted({*flat})
    numbers = {name: number for number, name in enumerate(classes)}
    return _regroup(names, [numbers[name] for name in flat]), classes


def _flat(labels: Sequence[Any]) -> list[Any]:
    """The class of each image; or those of the first image, then those of the second one, ..."""
    return [one for label in labels for one in (label if isinstance(label, list | tuple) else [label])]


def _regroup(like: Sequence[Any], flat: Sequence[Any]) -> list[Any]:
    """What `_flat` gave, in groups again: tuples where `like` has several for each image."""
    if not any(isinstance(label, list | tuple) for label in like):
        return [*flat]
    values = iter(flat)
    return [tuple(islice(values, len(label) if isinstance(label, list | tuple) else 1)) for label in like]
