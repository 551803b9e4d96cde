"""Image datasets: embedded, in files, or on the Hub."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy
import psutil
import torch

from ..data.sets import Batch, InMemoryDataset
from ..environment import Environment
from ..errors import UsageError
from ..files import check_is_pulled
from .embedded import sklearn_file
from .labelled_images import load_image_splits
from .sources import check_not_streamed, hold_out
from .text_files import local_path

HELD_OUT = 5  # one image in so many is for evaluation, if the source has no evaluation part
ADVICE = "use --data digits for the embedded set, or --data FOLDER for MNIST's IDX files, images or parquet files"
Shape = tuple[int, int, int]  # channels, height, width


class ImageDataset(InMemoryDataset):
    """Images of one size in memory, each with a class.

    Samples are {"image": float32 of shape (channels, height, width) in [0, 1], "label": int64}.

    Args:
        images: uint8 of shape (n, channels, height, width).
        labels: int64 of shape (n,), 0 to num_classes - 1.
        classes: their names, if they have other names than these numbers.
    """

    def __init__(
        self, images: torch.Tensor, labels: torch.Tensor, num_classes: int, classes: Sequence[str] | None = None
    ):
        self.images, self.labels = images, labels
        self.image_shape: Shape = tuple(images.shape[1:])  # type: ignore[assignment]
        self.num_classes, self.classes = num_classes, list(classes or map(str, range(num_classes)))

    def __len__(self) -> int:
        return len(self.images)

    def part(self, ids: torch.Tensor) -> "ImageDataset":
        """The images of these ids, as a set."""
        return ImageDataset(self.images[ids], self.labels[ids], self.num_classes, self.classes)

    def rows(self, ids: torch.Tensor) -> Batch:
        return {"image": self.images.index_select(0, ids), "label": self.labels.index_select(0, ids)}

    def transform(self, batch: Batch) -> Batch:
        return batch | {"image": batch["image"] / 255}


def load_images(data: str, max_samples: int | None = None) -> tuple[ImageDataset, ImageDataset]:
    """Loads an image-classification dataset.

    All images are decoded at the start, and stay in memory.

    Args:
        data: "digits" (scikit-learn's 1,797 handwritten digits of 8 x 8); a folder with the four
            MNIST IDX files, gzipped or not, or with parquet files in the Hub's layout; or a Hub id,
            for example "ylecun/mnist".
        max_samples: read only so many images of each split, as a stream; see `load_tables`.

    Returns:
        (training set, evaluation set). If the source has only one split, 20 % of it is held out,
        the same samples forevery seed of the run.

    Raises:
        UsageError: no data, damaged files, images of different sizes or more than half of the free memory, or no
            network.
    """
    place = None if data == "digits" else _idx_folder(local_path(data))
    if data == "digits" or place is not None:
        check_not_streamed(data, max_samples)
        return _load_digits() if place is None else _load_idx(place)
    return _load_in_memory(data, max_samples)


def _split(whole: ImageDataset) -> tuple[ImageDataset, ImageDataset]:
    rest, held_out = hold_out(len(whole), HELD_OUT)
    return whole.part(rest), whole.part(held_out)


def _load_digits() -> tuple[ImageDataset, ImageDataset]:
    # The file that sklearn.datasets.load_digits reads. Importing sklearn would take 1.6 s. A row has
    # 64 pixels from 0 to 16, then the digit.
    with gzip.open(sklearn_file("digits.csv.gz"), "rt") as file:
        rows = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype=numpy.float32))
    images = (rows[:, :-1] * (255 / 16)).round().to(torch.uint8).view(-1, 1, 8, 8)
    return _split(ImageDataset(images, rows[:, -1].long(), num_classes=10))


# IDX is the format of the original MNIST files: two zero bytes, a type code, the number of
# dimensions, each dimension as a big-endian int32, then the values. Source: end of the page
# http://yann.lecun.com/exdb/mnist.
_IDX_UINT8 = 8
_IDX_FILES = {"train": ("train-images", "train-labels"), "test": ("t10k-images", "t10k-labels")}


def _idx_folder(folder: Path) -> Path | None:
    return next((place for place in (folder, folder / "MNIST" / "raw") if any(place.glob("*-idx?-ubyte*"))), None)


def _load_idx(place: Path) -> tuple[ImageDataset, ImageDataset]:
    train, test = (_read_idx_pair(place, images, labels) for images, labels in _IDX_FILES.values())
    if train[0].shape[1:] != test[0].shape[1:]:
        sizes = [" x ".join(map(str, images.shape[2:])) for images, _ in (train, test)]
        raise UsageError(f"{place}: training images are {sizes[0]}, test images {sizes[1]}: expected one size")
    num_classes = int(max(train[1].max(), test[1].max())) + 1
    return ImageDataset(*train, num_classes), ImageDataset(*test, num_classes)


def _read_idx_pair(place: Path, images_name: str, labels_name: str) -> tuple[torch.Tensor, torch.Tensor]:
    images = _read_idx(_idx_path(place, images_name, "3"), num_dimensions=3)
    labels = _read_idx(_idx_path(place, labels_name, "1"), num_dimensions=1)
    if len(images) != len(labels):
        raise UsageError(f"{place}: {images_name} has {len(images)} images but {labels_name} has {len(labels)} labels")
    if len(images) == 0:
        raise UsageError(f"{place}: {images_name} has no images")
    return images.unsqueeze(1), labels.long()


def _idx_path(place: Path, name: str, num_dimensions: str) -> Path:
    stem = f"{name}-idx{num_dimensions}-ubyte"
    for path in (place / stem, place / f"{stem}.gz"):
        if path.exists():
            return path
    raise UsageError(f"{place / stem}: no such file, and no {stem}.gz; expected all four MNIST IDX files")


def _read_idx(path: Path, num_dimensions: int) -> torch.Tensor:
    check_is_pulled(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} is truncated or damaged ({error}): download it again") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    header_size = 4 + 4 * num_dimensions
    if len(content) < header_size or content[:4] != bytes([0, 0, _IDX_UINT8, num_dimensions]):
        raise UsageError(f"{path} is not an IDX file of bytes with {num_dimensions} dimensions: download it again")
    shape = [int(length) for length in numpy.frombuffer(content, ">u4", num_dimensions, offset=4)]
    expected = header_size + int(numpy.prod(shape, dtype=numpy.int64))
    if len(content) != expected:
        raise UsageError(f"{path} has {len(content)} bytes, its header says {expected}: download it again")
    return torch.from_numpy(numpy.frombuffer(content, numpy.uint8, offset=header_size).copy()).view(shape)


def _load_in_memory(data: str, max_samples: int | None) -> tuple[ImageDataset, ImageDataset]:
    """Loads images of one size: a dataset of the Hub, a folder in the same layout, or one of classes."""
    parts = load_image_splits(data, ADVICE, max_samples)
    num_images, classes = sum(len(part.labels) for part in parts), parts[0].classes
    if parts[0].has_several:
        raise UsageError(f"--data {data} has images with several classes: use recipes/image_classification.py")
    local_world_size = Environment.read().local_world_size  # each process holds all images
    size = numpy.asarray(parts[0].samples[0]).size * num_images * local_world_size
    if size > psutil.virtual_memory().available // 2:
        raise UsageError(
            f"--data {data}: its {num_images:,} images would fill the memory ({size / 1e9:.2g} GB in all processes): "
            "use --max_samples with a smaller number"
        )
    images = [[numpy.asarray(image) for image in part.samples] for part in parts]
    has_colour = any(image.ndim == 3 for part in images for image in part)
    shape = 3 if has_colour else 1, *images[0][0].shape[:2]
    sets = []
    for part, pixels in zip(parts, images):
        for row, image in enumerate(pixels):
            if image.shape[:2] != shape[1:]:
                raise UsageError(
                    f"{parts[0].samples.name(0)} has {shape[1]} x {shape[2]} pixels, {part.samples.name(row)} "
                    f"{image.shape[0]} x {image.shape[1]}: expected one size; resize them first"
                )
        whole = numpy.stack([numpy.broadcast_to(numpy.atleast_3d(image), (*shape[1:], shape[0])) for image in pixels])
        tensor = torch.from_numpy(whole).permute(0, 3, 1, 2).contiguous()
        sets.append(ImageDataset(tensor, torch.tensor(part.labels), len(classes), classes))
    return _split(sets[0]) if len(sets) == 1 else (sets[0], sets[1])
