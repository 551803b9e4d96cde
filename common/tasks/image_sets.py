"""Sets of images, in memory or in files."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from ..data.batches import Batch, InMemoryDataset, RowDataset
from ..errors import UsageError
from . import sources


class Images(RowDataset):
    """Images of one size, each with a class.

    Samples are {"image": float32 of shape (channels, height, width) in [0, 1], "label": int64}.

    Args:
        image_shape: (channels, height, width)
        num_classes: labels are 0 to num_classes - 1.
        classes: their names, if they have other names than these numbers.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int, classes: Sequence[str] | None = None):
        self.image_shape, self.num_classes = image_shape, num_classes
        self.classes = list(classes or map(str, range(num_classes)))

    @abstractmethod
    def part(self, ids: torch.Tensor) -> "Images":
        """The images of these ids, as a set."""

    def transform(self, batch: Batch) -> Batch:
        return batch | {"image": batch["image"].float().div_(255)}


class ImageDataset(Images, InMemoryDataset):
    """Images in memory: uint8 of shape (n, channels, height, width), and labels, int64 of shape (n,)."""

    def __init__(
        self, images: torch.Tensor, labels: torch.Tensor, num_classes: int, classes: Sequence[str] | None = None
    ):
        _, channels, height, width = images.shape
        super().__init__((channels, height, width), num_classes, classes)
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def part(self, ids: torch.Tensor) -> "ImageDataset":
        return ImageDataset(self.images[ids], self.labels[ids], self.num_classes, self.classes)

    def rows(self, ids: torch.Tensor) -> Batch:
        return {"image": self.images.index_select(0, ids), "label": self.labels[ids]}


class MappedImageDataset(Images):
    """Images in files, decoded when they are read. The samples are those of `ImageDataset`.

    Args:
        split: a `datasets.Dataset` that gives {"image": arrays, "label": classes}.
        ids: the rows that belong to this set, in its order.
        image_shape, num_classes, classes: as above.
    """

    def __init__(
        self,
        split: Any,
        ids: torch.Tensor,
        image_shape: tuple[int, int, int],
        num_classes: int,
        classes: Sequence[str] | None = None,
    ):
        super().__init__(image_shape, num_classes, classes)
        self.split, self.ids = split, ids

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, ids: torch.Tensor) -> "MappedImageDataset":
        return MappedImageDataset(self.split, self.ids[ids], self.image_shape, self.num_classes, self.classes)

    def rows(self, ids: torch.Tensor) -> Batch:
        """Raises UsageError for an image of another size."""
        numbers = self.ids[ids].tolist()
        found = self.split[numbers]
        pixels = [self._checked(row, image) for row, image in zip(numbers, found["image"])]
        return {"image": channels_first(numpy.stack(pixels)), "label": torch.tensor(found["label"])}

    def _checked(self, row: int, image: numpy.ndarray) -> numpy.ndarray:
        channels, height, width = self.image_shape
        if image.shape[:2] != (height, width):
            raise UsageError(
                f"image 0 of the data is {height} x {width}, image {row} is {height_by_width(image)}: expected one "
                "size; resize them first"
            )
        if channels == 1 and image.ndim == 3:
            raise UsageError(
                f"image 0 of the data is grey, image {row} is in colour: convert all to one kind first, as they do not "
                "fit into memory"
            )
        return in_colour(image) if channels == 3 else image


def hold_out(whole: Images) -> tuple[Images, Images]:
    """(the rest, a fifth of the images): the same in each run."""
    rest, held_out = sources.hold_out(len(whole), len(whole) // 5)
    return whole.part(rest), whole.part(held_out)


def in_colour(image: numpy.ndarray) -> numpy.ndarray:
    """Grey as colour: of shape (height, width, 3)."""
    return numpy.repeat(image[..., None], 3, axis=2) if image.ndim == 2 else image


def channels_first(images: numpy.ndarray) -> torch.Tensor:
    """(n, height, width) or (n, height, width, 3) -> (n, channels, height, width)"""
    pixels = torch.from_numpy(images)
    return pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()


def height_by_width(image: numpy.ndarray) -> str:
    """The size of an image, for messages."""
    return f"{image.shape[0]} x {image.shape[1]}"
