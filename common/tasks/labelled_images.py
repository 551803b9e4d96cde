"""Images with a class each: in folders, in parquet files, or on the Hub."""

from collections.abc import Iterator
from typing import Any

import torch
from PIL import Image

from ..data.facts import count_by_class, say
from ..errors import UsageError
from .image_decoding import Opener
from .image_folders import FORM, LABELS, Files, names_in, read_folder
from .labelled import Labelled, flatten, with_same_classes
from .rows import Table
from .sources import is_saved, load_tables
from .text_files import local_path


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
        for index, file in enumerate(self.files):  # a column reads rows of a table faster together
            yield self.opener(file, self.name(index))

    def name(self, index: int) -> str:
        """The path of an image, or its row."""
        return self.files[index] if isinstance(self.files, list) else f"--data {self.data}: the image in row {index}"


def load_image_splits(data: str, advice: str, max_samples: int | None = None) -> list[Labelled]:
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
    if path.is_dir() and not is_saved(path) and (folders := read_folder(data, path, advice)):
        parts = [_of_folder(data, folder, max_samples) for folder in folders]
    else:
        tables = load_tables(data, advice, max_samples, lambda table: table.has_classes(_label_column(table)))
        parts = [_of_table(data, table) for table in tables]
    if parts[0].has_several != parts[-1].has_several:
        raise UsageError(f"--data {data}: one part has lists of classes, the other has not: use lists in both")
    parts = with_same_classes(data, parts, "image")
    tasks = ["training", "evaluation"] if len(parts) == 2 else ["training and evaluation"]
    facts = [f"{len(part.labels):,} images for {task}" for part, task in zip(parts, tasks)]
    labels = [label for part in parts for label in flatten(part.labels)]
    several = " (several of an image)" * parts[0].has_several
    say(f"--data {data}: {' and '.join(facts)}, {count_by_class(parts[0].classes, labels)}{several}")
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
    if not images or label is None:
        raise UsageError(
            f"--data {data} is not an image-classification dataset: expected an image and a label column, found "
            f"{', '.join(table.column_names)}"
        )
    kind = getattr(table.kinds[label], "feature", table.kinds[label])  # of each in a list
    names = [names_in(cell, kind) for cell in table.values(label)]
    if empty := [row for row, name in enumerate(names, start=1) if {None, ""} & {*flatten([name])}]:
        raise UsageError(
            f"--data {table.name}: row {empty[0]} has no class in column {label}: remove the row or fill it"
        )
    return Labelled.of_names(ImageFiles(data, table.values(images[0])), names, getattr(kind, "names", None))


def _label_column(table: Table) -> str | None:
    typed = [name for name, kind in table.kinds.items() if type(kind).__name__ == "ClassLabel"]
    return next(iter(typed + [name for name in LABELS if name in table.kinds]), None)
