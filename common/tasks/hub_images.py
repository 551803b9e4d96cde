"""Images of the Hub, or of a folder in its layout."""

from functools import partial
from typing import Any

import numpy
import psutil
import torch

from ..environment import local_world_size, print_once
from ..errors import UsageError
from .image_sets import (
    ImageDataset,
    Images,
    MappedImageDataset,
    channels_first,
    height_by_width,
    hold_out,
    in_colour,
)
from .sources import load_splits


def load_hub_images(data: str, max_samples: int | None) -> tuple[Images, Images]:
    """Loads a dataset of the Hub, or a folder in the same layout. The arguments are those of `load_images`."""
    advice = "type --data digits for the embedded set, or --data FOLDER for local MNIST IDX or parquet files"
    parts = [_load_split(data, split) for split in load_splits(data, advice, max_samples)]
    if len({part.image_shape for part in parts}) > 1:
        raise UsageError(f"--data {data}: the splits differ in image size: expected one size")
    if any(isinstance(part, MappedImageDataset) for part in parts):
        print_once(
            f"the images of {data} would fill the memory: each is decoded when it is read; --num_workers N lets N more "
            "processes for each decode them"
        )
    if len(parts) == 1:
        return hold_out(parts[0])
    classes = max((part.classes for part in parts), key=len)
    for part in parts:
        part.num_classes, part.classes = len(classes), classes
    train, test = parts
    return train, test


def _load_split(data: str, split: Any) -> Images:
    import datasets

    image_column, label_column = _columns(data, split)
    split = split.cast_column(image_column, datasets.Image())
    first = _pixels(split[0][image_column])
    num_bytes = first.size * len(split) * local_world_size()  # each process would hold all images
    load = _decode if num_bytes <= psutil.virtual_memory().available // 2 else _map
    return load(data, split, image_column, label_column)


def _map(data: str, split: Any, image_column: str, label_column: str) -> MappedImageDataset:
    """The images, to decode when they are read."""
    first = _pixels(split[0][image_column])
    labels = split.with_format("numpy")[label_column][:]
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        raise _no_classes(data, label_column)
    feature = split.features[label_column]
    decoded = split.with_transform(partial(_decoded, image_column, label_column))
    return MappedImageDataset(
        decoded,
        torch.arange(len(split)),
        (1 if first.ndim == 2 else 3, first.shape[0], first.shape[1]),
        getattr(feature, "num_classes", None) or int(labels.max()) + 1,
        getattr(feature, "names", None),
    )


def _decoded(image_column: str, label_column: str, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"image": [_pixels(image) for image in rows[image_column]], "label": rows[label_column]}


def _decode(data: str, split: Any, image_column: str, label_column: str) -> ImageDataset:
    """The images, decoded into memory."""
    images: list[numpy.ndarray] = []
    labels = []
    for row, sample in enumerate(split):
        image = _pixels(sample[image_column])
        if images and image.shape[:2] != images[0].shape[:2]:
            raise UsageError(
                f"--data {data}: image 0 is {height_by_width(images[0])}, image {row} is {height_by_width(image)}: "
                "expected one size; resize them first"
            )
        images.append(image)
        labels.append(sample[label_column])
    if {image.ndim for image in images} == {2, 3}:  # grey and colour mixed: convert all to colour
        images = [in_colour(image) for image in images]
    if not all(isinstance(label, int) and label >= 0 for label in labels):
        raise _no_classes(data, label_column)
    feature = split.features[label_column]
    num_classes = getattr(feature, "num_classes", None) or max(labels) + 1
    pixels = channels_first(numpy.stack(images))
    return ImageDataset(pixels, torch.tensor(labels), num_classes, getattr(feature, "names", None))


def _pixels(image: Any) -> numpy.ndarray:
    """uint8 of shape (height, width) for grey, (height, width, 3) for all others."""
    return numpy.asarray(image if image.mode == "L" else image.convert("RGB"))


def _no_classes(data: str, label_column: str) -> UsageError:
    return UsageError(f"--data {data}: expected whole numbers from 0 in column {label_column}, the class of each image")


def _columns(data: str, split: Any) -> tuple[str, str]:
    import datasets

    if len(split) == 0:
        raise UsageError(f"--data {data}: a split has no samples")
    features = split.features

    def holds_image(feature: Any) -> bool:
        # Parquet files from other tools lack the Image type but have its layout.
        return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and "bytes" in feature)

    image = next((name for name, feature in features.items() if holds_image(feature)), None)
    label = next((name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)), None)
    label = label or next((name for name in ("label", "labels", "fine_label") if name in features), None)
    if image is None or label is None:
        raise UsageError(
            f"--data {data} is not an image-classification dataset: expected an image and a label column, found "
            f"{', '.join(features)}"
        )
    return image, label
